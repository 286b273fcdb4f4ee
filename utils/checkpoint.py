"""Checkpoints: full ones of a run, one folder each, and weights alone, one file.

A full checkpoint is written to a temporary folder, fsynced, described by a manifest of sizes and SHA-256 sums, and renamed into
place, so that whatever kills the writer the newest complete one loads. Only tensors and plain values are stored and everything is
read with weights_only=True: nothing in a file is ever executed.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STEP_FOLDER = re.compile(r"step_(\d{12})(?:\.(\d+))?")
STORED_FILE = re.compile(r"\w+\.pt")
TEMPORARY = ".temporary_"  # folders not, or no longer, part of the record
PART = ".part_"            # files of the checkpoint that is written next, and beside each what the manifest will say of it
PLAIN = (bool, int, float, str, type(None))
MAPPED_BYTES = 1 << 28     # files from this size on are mapped instead of read: a replay is copied once, not held twice
BLOCK = 1 << 24            # bytes


class CheckpointError(Exception):
    """A checkpoint or model file that cannot be written, or that cannot be used; the message says which and why."""

    exit_code = 3  # of the process that it ends


# full checkpoints -----------------------------------------------------------------------------------------------------
def save_parts(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what the next `save` takes as the files of these top-level keys: another process's share. Raises as `save` does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in state.items():
            path = folder / f"{PART}{name}"
            entry = _write_torch(path.with_suffix(".pt"), _storable(value, name))
            _write(path.with_suffix(".json"), json.dumps(entry).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {', '.join(state)} of a checkpoint in {folder}: {error}") from error


def save(folder: Path, state: dict[str, Any], step: int, keep: int, parts: Sequence[str] = ()) -> Path:
    """Write `state` as folder/step_<12 digits>, one file a top-level key, and keep the newest `keep` checkpoints.

    state: nested dicts, lists and tuples of tensors and plain values. A top-level value may be a function without arguments: it is
    called when its file's turn comes, after those before it have been written. `parts` names what others have written by `save_parts`. A
    second checkpoint of one step gets a suffix; those of later steps belong to a future that was given up, and go. One writer a folder.
    Raises CheckpointError (a full disk) with the old ones intact, TypeError for a value that could not be loaded again.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(f"{TEMPORARY}*"))
        temporary = folder / f"{TEMPORARY}{os.getpid()}"
        try:
            temporary.mkdir()
            _write_all(temporary, state, step, _taken(folder, temporary, parts))
            final = _free_name(folder, step)
            os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(folder)
        _write_atomically(folder / "latest", f"{final.name}\n".encode())
        _prune(folder, final, keep)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint of step {step} in {folder}: {error}") from error
    return final


def load(folder: Path, names: Collection[str] | None = None) -> tuple[dict[str, Any], Path]:
    """The newest checkpoint whose files are all intact, tensors on the CPU, and its folder. Of its files those of these names, or all.

    A damaged one is named on stderr and the one before it is taken. Raises CheckpointError when none is left.
    """
    candidates = list(reversed(_checkpoints(folder)))
    if not candidates:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    damages: list[str] = []
    for candidate in candidates:
        try:
            state = _read_all(candidate, names)
        except (OSError, CheckpointError) as error:
            damages.append(f"{candidate.name}: {error}")
            print(f"warning: damaged checkpoint {candidate.name}: {error}", file=sys.stderr)
            continue
        if damages:
            print(f"warning: falling back to checkpoint {candidate.name}", file=sys.stderr)
        return state, candidate
    raise CheckpointError(f"every checkpoint in {folder} is damaged ({'; '.join(damages)})")


def _taken(folder: Path, temporary: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Moves the parts into the checkpoint in the making; returns what its manifest says of them."""
    entries = {}
    for name in parts:
        path = folder / f"{PART}{name}"
        entries[f"{name}.pt"] = json.loads(path.with_suffix(".json").read_text())
        os.replace(path.with_suffix(".pt"), temporary / f"{name}.pt")
    for path in folder.glob(f"{PART}*"):
        path.unlink()
    return entries


def _write_all(folder: Path, state: Mapping[str, Any], step: int, files: dict[str, Any]) -> None:
    """Beside `files`, which are there already."""
    for name, value in state.items():
        value = value() if callable(value) else value
        files[f"{name}.pt"] = _write_torch(folder / f"{name}.pt", _storable(value, name))
    manifest = {"step": step, "files": files, "versions": {"torch": str(torch.__version__), "numpy": np.__version__}}
    _write(folder / "manifest.json", json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode())
    _sync_folder(folder)


def _read_all(folder: Path, names: Collection[str] | None) -> dict[str, Any]:
    """Every file is checked before the first is opened."""
    files = _manifest_files(folder)
    for name, (expected, digest) in files.items():
        if (size := (folder / name).stat().st_size) != expected:
            raise CheckpointError(f"{name} has {size} bytes instead of {expected}")
        if _file_digest(folder / name) != digest:
            raise CheckpointError(f"{name} does not have the SHA-256 that was written")
    found = [name.removesuffix(".pt") for name in files]
    return {name: _read_torch(folder / f"{name}.pt") for name in found if names is None or name in names}


def _manifest_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        intact = manifest.pop("sha256") == _digest(manifest)
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError("manifest.json is not readable") from error
    if not intact:
        raise CheckpointError("manifest.json does not have the SHA-256 that was written")
    if strange := [name for name in files if not STORED_FILE.fullmatch(name)]:
        raise CheckpointError(f"manifest.json lists {strange[0]!r}, which is no file of a checkpoint")
    return files


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    found = []
    for path in folder.glob("step_*"):
        if match := STEP_FOLDER.fullmatch(path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def _free_name(folder: Path, step: int) -> Path:
    name, number = folder / f"step_{step:012d}", 0
    while name.exists():
        number += 1
        name = folder / f"step_{step:012d}.{number}"
    return name


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Renamed first: a kill half-way leaves no half checkpoint."""
    checkpoints = _checkpoints(folder)
    position = checkpoints.index(newest)
    for path in [*checkpoints[:max(position + 1 - keep, 0)], *checkpoints[position + 1:]]:
        os.replace(path, doomed := folder / f"{TEMPORARY}{path.name}")
        _remove([doomed])


def _remove(folders: Iterable[Path]) -> None:
    for path in list(folders):
        shutil.rmtree(path, ignore_errors=True)


# weights alone --------------------------------------------------------------------------------------------------------
def save_weights(path: Path, weights: Mapping[str, Tensor], metadata: dict[str, Any]) -> None:
    """Replace the model file at once by one with these weights and plain values. Raises CheckpointError (a full disk), old file intact."""
    content = {"weights": {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()},
               "metadata": _storable(metadata, "metadata")}
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_torch(temporary, content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write the model file {path}: {error}") from error


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
    return _read_torch(path)


# files ----------------------------------------------------------------------------------------------------------------
def _storable(value: Any, where: str) -> Any:
    """The value with tensors that own no more than they show; TypeError naming the place of anything weights_only would refuse."""
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in PLAIN:
                raise TypeError(f"{where} has a key of type {type(key).__name__}: only plain values can be stored")
        return {key: _storable(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_storable(item, f"{where}[{position}]") for position, item in enumerate(value))
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value  # a view would store all it looks into
    if type(value) not in PLAIN:
        raise TypeError(f"{where} is a {type(value).__name__}: only tensors and plain values can be stored")
    return value


class _HashingFile:
    """What torch.save writes to: hashes on the way. An OSError is kept for later, as torch's archive writer must be let finish."""

    def __init__(self, descriptor: Any):
        self._descriptor, self._digest = descriptor, hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._digest.update(data)
                self._descriptor.write(data)
                self.size += len(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Done once, by fsync."""

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _write_torch(path: Path, value: Any) -> dict[str, Any]:
    """Streams tensors to the file without a copy; returns its size and SHA-256."""
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        torch.save(value, hashing)  # type: ignore[arg-type]
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.hexdigest()}


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=path.stat().st_size >= MAPPED_BYTES)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise CheckpointError(f"carries something else than tensors and plain values{what}; refused, nothing in it was executed") from error
    except Exception as error:  # a crafted archive can fail anywhere in torch's reader
        raise CheckpointError(f"cannot be read as tensors and plain values: {error}") from error


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.new")
    _write(temporary, data)
    os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
