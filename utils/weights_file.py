"""Weights alone, with a few plain values that say whose: the model files models/<signature>.pth."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from utils.tensor_file import CheckpointError, read_torch, storable, sync_folder, write_torch


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
    """Weights on the CPU, and metadata. Raises CheckpointError saying what is wrong with the file; nothing in it is executed."""
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


def load_into(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy the weights into the model. Raises CheckpointError naming what differs when they are of another architecture."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differences = [f"{name}: {_side(stored, name)} in the file, {_side(own, name)} in the model"
                   for name in sorted(own.keys() | stored.keys()) if own.get(name) != stored.get(name)]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(f"model file {path} is of another architecture: {'; '.join(differences[:5])}{more}")
    model.load_state_dict(weights)


def _temporary(path: Path) -> Path:
    return path.with_name(f".temporary_{path.name}")


def _side(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "absent"


def _read_model_file(path: Path) -> Any:
    """The message of a CheckpointError continues "model file <path> ..."."""
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
