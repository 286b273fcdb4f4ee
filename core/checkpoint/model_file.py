"""Weights alone, with a few plain values that say whose: the model files models/<signature>.pth."""

import errno
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.checkpoint import run_checkpoint
from core.checkpoint.tensor_file import CheckpointError, read_torch, storable, sync_folder, write_torch


def save_weights(path: Path, weights: Mapping[str, Tensor], metadata: dict[str, Any]) -> None:
    """Replace the model file at once by one with these weights and plain values. Raises CheckpointError (a full disk), old file intact."""
    content = {"weights": {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()},
               "metadata": storable(metadata, "metadata")}
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_torch(temporary, content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write the model file {path}: {error}") from error


def clear(path: Path) -> None:
    """Remove what a writer of this model file left that was killed."""
    _temporary(path).unlink(missing_ok=True)


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights on the CPU, and metadata, of a model file or of a checkpoint of a run.

    A folder models/<signature>_checkpoints stands for its newest sound checkpoint. Raises CheckpointError saying what is wrong
    with the file; nothing in it is executed.
    """
    if path.is_dir():
        return _of_checkpoint(path)
    try:
        content = _read_model_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"model file {path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"model file {path} cannot be read: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"model file {path} {error}") from error
    weights, metadata = (content.get("weights"), content.get("metadata")) if isinstance(content, dict) else (None, None)
    if not isinstance(weights, dict) or not isinstance(metadata, dict) or not weights \
            or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()):
        raise CheckpointError(f"model file {path} is not a model of this framework: it needs 'weights' (names to tensors) and 'metadata'")
    return weights, metadata


def _of_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = ("agent", "clock")
    if run_checkpoint.STEP_FOLDER.fullmatch(folder.name):
        try:
            state = run_checkpoint.read(folder, names)
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"checkpoint {folder} cannot be used: {error}") from error
    else:
        state, folder = run_checkpoint.load(folder, names)
    try:
        weights, agent_steps = state["agent"]["model"], sum(state["clock"]["agent_steps"])
        if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()):
            raise TypeError("agent.model is no weights")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} holds no model and clock of a run ({type(error).__name__}: {error})") from error
    signature = folder.parent.name.removesuffix("_checkpoints")
    return weights, {"signature": signature, "checkpoint": folder.name, "agent_steps": agent_steps, "score": None}


def test_file(path: Path, ending: str) -> Path:
    """Return where mode 2 writes what it found about this model: beside it, or of a checkpoint beside the folder of checkpoints."""
    if run_checkpoint.STEP_FOLDER.fullmatch(path.name) and path.parent.name.endswith("_checkpoints"):
        return path.parent.with_name(f"{path.parent.name.removesuffix('_checkpoints')}_{path.name}_test.{ending}")
    return path.with_name(f"{path.name if path.is_dir() else path.stem}_test.{ending}")


def try_test_file(path: Path, size: int) -> None:
    """Write so many bytes as a file of mode 2 would be written, and remove them. Raises OSError where that fails."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "there is a folder of this name", str(path))
    if path.exists():  # a video is written in place
        path.open("ab").close()
    trial = _own_temporary(path)
    try:
        trial.write_bytes(bytes(size))
    finally:
        trial.unlink(missing_ok=True)


def load_into(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy the weights into the model.

    Raises CheckpointError naming what differs when they are of another architecture, and the tensor that holds what is no finite
    number; where the model's own, as it was made, has infinities (a mask), the file may have them too.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differences = [f"{name}: {_side(stored, name)} in the file, {_side(own, name)} in the model"
                   for name in sorted(own.keys() | stored.keys()) if own.get(name) != stored.get(name)]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"model file {path} is of another architecture: {'; '.join(differences[:5])}{more}")
    for name, tensor in model.state_dict().items():
        spoilt = ~torch.isfinite(weights[name].to(tensor)) & torch.isfinite(tensor)
        if spoilt.any():
            raise CheckpointError(f"model file {path} holds {int(spoilt.sum())} of {tensor.numel()} values of {name} that are no finite "
                                  f"{str(tensor.dtype).removeprefix('torch.')} numbers: its training went wrong, use an earlier one")
    model.load_state_dict(weights)


def _temporary(path: Path) -> Path:
    return path.with_name(f".temporary_{path.name}")


def _own_temporary(path: Path) -> Path:
    """Return a name that no other process that tests the same model has."""
    return path.with_name(f".temporary_{os.getpid()}_{path.name}")


def _side(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "absent"


def _read_model_file(path: Path) -> Any:
    """The message of a CheckpointError continues "model file <path> ..."."""
    if path.exists() and not path.is_file():
        raise CheckpointError("is no regular file")  # a FIFO would wait for whoever writes to it
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
