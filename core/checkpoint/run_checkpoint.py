"""Save and load the checkpoints of a run: a folder each, with one file of tensors and plain values per top-level key.

- A checkpoint is written to a temporary folder, synced to disk, listed in a manifest with sizes and SHA-256 sums, and
  renamed into place. The newest complete checkpoint therefore survives a writer that is killed at any time.
- `load` verifies every file of a checkpoint before it reads the first, and takes the one before a damaged checkpoint.
- A start verifies once: main calls `load`, and the learners `read` their files of the same folder as verified.
- Files are read with `weights_only=True`: nothing in a file is executed.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.console import log_to_stderr
from core.common.exit_codes import BAD_CHECKPOINT
from core.common.files import TEMPORARY, sync_folder, write_durably

STEP_FOLDER = re.compile(r"step_(\d{12})(?:\.(\d+))?")
STORED_FILE = re.compile(r"\w+\.pt")
PART = ".part_"  # prefix of other processes' files of the next checkpoint, and of their manifest entries (.json)
PLAIN_TYPES = (bool, int, float, str, type(None))
MAPPED_BYTES = 1 << 28  # size from which a file is memory-mapped, so that a replay is not held in memory twice


class CheckpointError(Exception):
    """An error that names a checkpoint or model file that cannot be written or used, and the reason."""

    exit_code = BAD_CHECKPOINT  # of the process that it ends


# save -----------------------------------------------------------------------------------------------------------------
def save(folder: Path, state: dict[str, Any], step: int, keep: int, parts: Sequence[str] = ()) -> Path:
    """Write `state` as the checkpoint folder/step_<12 digits>, and delete all but the newest `keep` checkpoints.

    A second checkpoint of a step gets a numbered suffix. Checkpoints of later steps are deleted, because the run did
    not continue from them. Only one process may write to a folder.

    Args:
        folder: The folder of the run's checkpoints.
        state: Top-level key -> nested dicts, lists and tuples of tensors and plain values; each key becomes a file.
        step: Agent steps of the run.
        keep: Number of checkpoints that are kept.
        parts: Names of the files that other processes have written with `save_parts`.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: The disk is full, for instance; at least the newest intact one of the old checkpoints stays.
        TypeError: A value could not be loaded again.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(f"{TEMPORARY}*"))
        temporary = folder / f"{TEMPORARY}{os.getpid()}"
        try:
            temporary.mkdir()
            files = _move_parts(folder, temporary, parts)
            for name, value in state.items():
                files[f"{name}.pt"] = write_torch(temporary / f"{name}.pt", storable(value, name))
            manifest = {
                "step": step,
                "files": files,
                "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
            }
            signed = {**manifest, "sha256": _manifest_sha256(manifest)}
            write_durably(temporary / "manifest.json", json.dumps(signed, indent=1).encode())
            sync_folder(temporary)
            checkpoint = _unused_name(folder, step)
            os.replace(temporary, checkpoint)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(folder)
        _prune(folder, checkpoint, keep)
    except OSError as error:
        if error.errno == errno.ENOSPC and not parts and (dispensable := _dispensable(folder)):
            _delete(dispensable)  # the disk has room for fewer than `keep` and the new one
            return save(folder, state, step, keep)
        raise CheckpointError(f"cannot write a checkpoint of step {step} in {folder}: {error}") from error
    return checkpoint


def save_parts(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    """Write files of the next checkpoint from a process other than the one that calls `save`. Return their paths.

    Arguments and errors are those of `save`.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in state.items():
            path = folder / f"{PART}{name}"
            entry = write_torch(path.with_suffix(".pt"), storable(value, name))
            write_durably(path.with_suffix(".json"), json.dumps(entry).encode())
            paths += [path.with_suffix(".pt"), path.with_suffix(".json")]
    except OSError as error:
        for name in state:
            _remove(folder.glob(f"{PART}{name}.*"))
        raise CheckpointError(f"cannot write {', '.join(state)} of a checkpoint in {folder}: {error}") from error
    return paths


def clear(folder: Path) -> None:
    """Remove the files of killed writers, and the folder itself if it is empty."""
    _remove([*folder.glob(f"{TEMPORARY}*"), *folder.glob(f"{PART}*")])
    with suppress(OSError):  # the folder is not empty
        folder.rmdir()


def storable(value: Any, name: str) -> Any:
    """Return the value with every view of a larger tensor copied, because a stored view includes the whole storage.

    Raises:
        TypeError: The value holds something else than tensors and plain values, which `weights_only` would refuse. The
            message tells where, starting from `name`.
    """
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in PLAIN_TYPES:
                raise TypeError(f"{name} has a key of type {type(key).__name__}: only plain values can be stored")
        return {key: storable(item, f"{name}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(storable(item, f"{name}[{position}]") for position, item in enumerate(value))
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if type(value) not in PLAIN_TYPES:
        raise TypeError(f"{name} is a {type(value).__name__}: only tensors and plain values can be stored")
    return value


class HashingFile:
    """A file for torch.save that computes SHA-256 while it is written.

    An OSError is stored in `error` instead of raised, because torch's archive writer must be allowed to finish.
    """

    def __init__(self, file: Any):
        self._file, self.sha256 = file, hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.sha256.update(data)
                self._file.write(data)
                self.size += len(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: `write_torch` flushes once."""


def write_torch(path: Path, value: Any) -> dict[str, Any]:
    """Write a storable value without copying its tensors. Return the file's manifest entry: size and SHA-256."""
    with open(path, "wb") as file:
        hashing = HashingFile(file)
        torch.save(value, hashing)  # type: ignore[arg-type]
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.sha256.hexdigest()}


# load -----------------------------------------------------------------------------------------------------------------
def load(folder: Path, names: Collection[str] | None = None) -> tuple[dict[str, Any], Path]:
    """Verify and read the newest checkpoint without damage. A warning on stderr names each damaged checkpoint.

    Args:
        folder: The folder of the run's checkpoints.
        names: Top-level keys to read; None reads all. Every file is verified in either case.

    Returns:
        Top-level key -> value with tensors on the CPU, and the folder of the checkpoint.

    Raises:
        CheckpointError: No checkpoint is usable.
    """
    if not (found := checkpoints(folder)):
        raise CheckpointError(f"there is no checkpoint in {folder}")
    errors: list[str] = []
    for checkpoint in reversed(found):
        try:
            state = _read_files(checkpoint, _verified_files(checkpoint), names)
        except (FileNotFoundError, CheckpointError) as error:
            errors.append(f"{checkpoint.name}: {error}")
            log_to_stderr(f"warning: damaged checkpoint {checkpoint.name}: {error}")
            continue
        except OSError as error:  # the checkpoint may be intact, and the next save would delete it
            raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {error}") from error
        if errors:
            log_to_stderr(f"warning: falling back to checkpoint {checkpoint.name}")
        return state, checkpoint
    raise CheckpointError(f"every checkpoint in {folder} is damaged ({'; '.join(errors)})")


def read(checkpoint: Path, names: Collection[str] | None = None, is_verified: bool = False) -> dict[str, Any]:
    """Read one checkpoint, whose files are all verified before the first is read.

    Args:
        checkpoint: The folder that `load` returned, or any other checkpoint.
        names: Top-level keys, as `load` takes them; those that the checkpoint lacks are left out.
        is_verified: This start has verified the files, so that they are not hashed again.

    Raises:
        CheckpointError: A file is damaged, missing or not readable.
    """
    try:
        files = _manifest_files(checkpoint) if is_verified else _verified_files(checkpoint)
        return _read_files(checkpoint, files, names)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} cannot be used: {error}") from error


def read_torch(path: Path) -> Any:
    """Read dense real-valued tensors, on the CPU, and plain values.

    Raises:
        CheckpointError: The file has any other content.
        MemoryError: The machine lacks the memory.
    """
    try:
        mapped = path.stat().st_size >= MAPPED_BYTES
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        unusable = _unusable_tensor(content)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({match[1]})" if match else ""
        raise CheckpointError(
            f"carries something else than tensors and plain values{what}; refused, nothing in it was executed"
        ) from error
    except Exception as error:  # a crafted archive can fail anywhere in torch's reader
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "can't allocate memory" in text:  # which says nothing about the file
            raise MemoryError(f"{path} needs more memory than this machine has free") from error
        raise CheckpointError(f"cannot be read as tensors and plain values: {text}") from error
    if unusable:
        raise CheckpointError(
            f"{unusable}; only dense tensors of real numbers are used: make them so and save the file again"
        )
    return content


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# parts of both --------------------------------------------------------------------------------------------------------
def _move_parts(folder: Path, temporary: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Move the files of `save_parts` into the new checkpoint and return their manifest entries by file name."""
    entries = {}
    for name in parts:
        path = folder / f"{PART}{name}"
        entries[f"{name}.pt"] = json.loads(path.with_suffix(".json").read_text())
        os.replace(path.with_suffix(".pt"), temporary / f"{name}.pt")
    _remove(folder.glob(f"{PART}*"))
    return entries


def _read_files(checkpoint: Path, files: Iterable[str], names: Collection[str] | None) -> dict[str, Any]:
    """Return top-level key -> content of the files with these names, or of all if `names` is None."""
    state = {}
    for file in files:
        name = file.removesuffix(".pt")
        if names is None or name in names:
            try:
                state[name] = read_torch(checkpoint / file)
            except CheckpointError as error:
                raise CheckpointError(f"{file} {error}") from error
    return state


def _verified_files(checkpoint: Path) -> list[str]:
    """Return the names of a checkpoint's files. Raises CheckpointError or OSError if one is damaged or missing."""
    files = _manifest_files(checkpoint)
    for name, (size, sha256) in files.items():
        path = checkpoint / name
        _require_regular_file(path)
        if path.stat().st_size != size:
            raise CheckpointError(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if file_sha256(path) != sha256:
            raise CheckpointError(f"{name} does not have the SHA-256 that was written")
    return list(files)


def _require_regular_file(path: Path) -> None:
    """Raise CheckpointError if the path is not a regular file; reading a FIFO, for instance, would block."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name} is no regular file")


def _manifest_files(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Return file name -> (size in bytes, SHA-256) from the manifest, whose own SHA-256 is verified."""
    path = checkpoint / "manifest.json"
    _require_regular_file(path)
    try:
        manifest = json.loads(path.read_bytes())
        intact = manifest.pop("sha256") == _manifest_sha256(manifest)
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError("manifest.json is not readable") from error
    if not intact:
        raise CheckpointError("manifest.json does not have the SHA-256 that was written")
    if foreign := [name for name in files if not STORED_FILE.fullmatch(name)]:
        raise CheckpointError(f"manifest.json lists {foreign[0]!r}, which is no file of a checkpoint")
    return files


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    matches = [match for path in folder.glob("step_*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2] or 0)))]


def _unused_name(folder: Path, step: int) -> Path:
    """Return the folder of a new checkpoint. Its suffix is larger than that of every checkpoint of the same step."""
    name = f"step_{step:012d}"
    suffixes = [int(match[2] or 0) for path in folder.glob(f"{name}*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return folder / (f"{name}.{max(suffixes) + 1}" if suffixes else name)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Delete checkpoints that are too old, and those after `newest`."""
    found = checkpoints(folder)
    position = found.index(newest)
    _delete([*found[: max(position + 1 - keep, 0)], *found[position + 1 :]])


def _dispensable(folder: Path) -> list[Path]:
    """Return all checkpoints but the newest intact one."""
    found = checkpoints(folder)
    for kept in reversed(found):
        with suppress(OSError, CheckpointError):
            _verified_files(kept)
            return [path for path in found if path != kept]
    return []


def _delete(folders: Iterable[Path]) -> None:
    for path in folders:
        renamed = path.with_name(f"{TEMPORARY}{path.name}")
        os.replace(path, renamed)  # because a process killed while it deletes would leave half a checkpoint
        _remove([renamed])


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _unusable_tensor(content: Any) -> str:
    """Return a sentence about the first tensor, at any depth, that is not dense and real-valued; "" without one."""
    stack, visited = [("", content)], set[int]()
    while stack:
        name, value = stack.pop()
        if id(value) in visited:  # a crafted list can contain itself
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            kinds = {
                "nested": value.is_nested,
                "sparse": value.layout is not torch.strided,
                "quantised": value.is_quantized,
                "without values (meta)": value.is_meta,
                "complex": value.is_complex(),
            }
            if kind := next((kind for kind, applies in kinds.items() if applies), None):
                return f"holds {name.lstrip('.') or 'a tensor'}, which is {kind}"
        elif isinstance(value, dict):
            stack += [(f"{name}.{key}", item) for key, item in reversed(value.items())]
        elif isinstance(value, list | tuple):
            stack += [(f"{name}[{position}]", item) for position, item in reversed(list(enumerate(value)))]
    return ""
