"""Save and load model files `models/<signature>.pth`: weights, and metadata as plain values.

A checkpoint of a run can be loaded as a model too.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.checkpoint import run_checkpoint
from core.checkpoint.run_checkpoint import STEP_FOLDER, CheckpointError, read_torch, storable, write_torch
from core.common.files import TEMPORARY, replace_atomically, sync_folder

CHECKPOINT_FILES = ("agent", "metadata")  # what a checkpoint's model and metadata are read from
MAX_DIFFERENCES = 5  # that a message about another architecture lists


def save_weights(path: Path, weights: Mapping[str, Tensor], metadata: dict[str, Any]) -> None:
    """Replace the model file atomically. Raises CheckpointError (a full disk) with the old file intact."""
    content = {
        "weights": {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()},
        "metadata": storable(metadata, "metadata"),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            write_torch(temporary, content)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write the model file {path}: {error}") from error


def clear(path: Path) -> None:
    """Remove the temporary file of a writer of this model file that was killed."""
    path.with_name(f"{TEMPORARY}{path.name}").unlink(missing_ok=True)


def load_weights(path: Path, is_verified: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify and read a model file, a checkpoint, or the newest undamaged checkpoint of a run.

    Args:
        path: `models/<signature>.pth`, a checkpoint, or the folder `models/<signature>_checkpoints`.
        is_verified: This start has verified a checkpoint, whose files are not hashed again.

    Returns:
        Name -> weight on the CPU, and the metadata. For a checkpoint, metadata["checkpoint"] names its folder.

    Raises:
        CheckpointError: The file is unusable; the message tells why. Nothing in the file has been executed.
    """
    if not path.is_dir():
        return _read_model_file(path)
    if not STEP_FOLDER.fullmatch(path.name):
        return _checkpoint_weights(*run_checkpoint.load(path, CHECKPOINT_FILES))
    return _checkpoint_weights(run_checkpoint.read(path, CHECKPOINT_FILES, is_verified), path)


def load_into(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy the weights of the file `path` into the model.

    Raises:
        CheckpointError: The shapes or names differ, or a weight is not finite. A weight may be infinite where the
            model's own is, as in a mask.
    """
    own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: list(tensor.shape) for name, tensor in weights.items()}
    differences = [
        f"{name}: {stored.get(name, 'absent')} in the file, {own.get(name, 'absent')} in the model"
        for name in sorted(own.keys() | stored.keys())
        if own.get(name) != stored.get(name)
    ]
    if differences:
        hidden = len(differences) - MAX_DIFFERENCES
        more = f" and {hidden} more" if hidden > 0 else ""
        raise CheckpointError(
            f"model file {path} is of another architecture: {'; '.join(differences[:MAX_DIFFERENCES])}{more}"
        )
    for name, tensor in model.state_dict().items():
        invalid = ~torch.isfinite(weights[name].to(tensor)) & torch.isfinite(tensor)
        if invalid.any():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"model file {path} holds {int(invalid.sum())} of {tensor.numel()} values of {name} that are no finite "
                f"{dtype} numbers: its training went wrong, use an earlier one"
            )
    model.load_state_dict(weights)


def file_beside(path: Path, ending: str) -> Path:
    """Return the file that is named after a model or checkpoint, beside the model file or the folder of checkpoints."""
    folder = path.absolute().parent
    if STEP_FOLDER.fullmatch(path.name) and folder.name.endswith("_checkpoints"):
        return folder.with_name(f"{folder.name.removesuffix('_checkpoints')}_{path.name}{ending}")
    return path.with_name(f"{path.name if path.is_dir() else path.stem}{ending}")


def _read_model_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        content = _read_archive(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"model file {path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"model file {path} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"model file {path} {error}") from error
    fields = content if isinstance(content, dict) else {}
    weights, metadata = fields.get("weights"), fields.get("metadata")
    if not _are_weights(weights) or not weights or not isinstance(metadata, dict):
        raise CheckpointError(
            f"model file {path} is not a model of this framework: it needs 'weights' (names to tensors) and 'metadata'"
        )
    return weights, metadata


def _read_archive(path: Path) -> Any:
    """Verify a file of torch.save and read it. The message of a CheckpointError continues "model file <path> ..."."""
    if path.exists() and not path.is_file():
        raise CheckpointError("is no regular file")  # reading a FIFO would block
    with open(path, "rb") as file:
        start = file.read(4)
    if not start:
        raise CheckpointError("is empty")
    if start[:1] == b"\x80":
        raise CheckpointError("is a bare pickle, which can carry code; refused, nothing in it was executed")
    if start != b"PK\x03\x04":
        raise CheckpointError("is not a model file (it does not begin as a PyTorch archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError("is truncated or damaged") from error
    if damaged:
        raise CheckpointError(f"is damaged: {damaged} fails its checksum")
    return read_torch(path)


def _checkpoint_weights(state: dict[str, Any], checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the model and the metadata of a checkpoint that has been read."""
    try:
        weights, metadata = state["agent"]["model"], {**state["metadata"], "checkpoint": checkpoint.name}
        if not _are_weights(weights):
            raise TypeError("agent.model is no weights")
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} holds no model and metadata of a run ({type(error).__name__}: {error})"
        ) from error
    return weights, metadata


def _are_weights(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )
