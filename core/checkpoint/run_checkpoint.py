"""Full checkpoints of a run, one folder each.

One is written to a temporary folder, fsynced, described by a manifest of sizes and SHA-256 sums, and renamed into place, so that whatever
kills the writer the newest complete one loads.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.checkpoint.tensor_file import CheckpointError, digest_of, read_torch, storable, sync_folder, write, write_atomically, write_torch

STEP_FOLDER = re.compile(r"step_(\d{12})(?:\.(\d+))?")
STORED_FILE = re.compile(r"\w+\.pt")
TEMPORARY = ".temporary_"  # folders not, or no longer, part of the record
PART = ".part_"            # files of the checkpoint that is written next, and beside each what the manifest will say of it


def save_parts(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what the next `save` takes as the files of these top-level keys: another process's share. Raises as `save` does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in state.items():
            path = folder / f"{PART}{name}"
            entry = write_torch(path.with_suffix(".pt"), storable(value, name))
            write(path.with_suffix(".json"), json.dumps(entry).encode())
    except OSError as error:
        for name in state:
            for path in folder.glob(f"{PART}{name}.*"):
                path.unlink()
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
        sync_folder(folder)
        write_atomically(folder / "latest", f"{final.name}\n".encode())
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
            state = read(candidate, names)
        except (OSError, CheckpointError) as error:
            damages.append(f"{candidate.name}: {error}")
            print(f"warning: damaged checkpoint {candidate.name}: {error}", file=sys.stderr)
            continue
        if damages:
            print(f"warning: falling back to checkpoint {candidate.name}", file=sys.stderr)
        return state, candidate
    raise CheckpointError(f"every checkpoint in {folder} is damaged ({'; '.join(damages)})")


def clear(folder: Path) -> None:
    """Remove what writers left that were killed, and a folder in which nothing could be written."""
    _remove([*folder.glob(f"{TEMPORARY}*"), *folder.glob(f"{PART}*")])
    with suppress(OSError):  # it is not empty
        folder.rmdir()


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
        files[f"{name}.pt"] = write_torch(folder / f"{name}.pt", storable(value, name))
    manifest = {"step": step, "files": files, "versions": {"torch": str(torch.__version__), "numpy": np.__version__}}
    write(folder / "manifest.json", json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1).encode())
    sync_folder(folder)


def read(folder: Path, names: Collection[str] | None) -> dict[str, Any]:
    """Return one checkpoint's files of these names, or all. Every file is checked before the first is opened.

    Raises CheckpointError saying what is wrong, OSError for a folder that has gone.
    """
    _require_file(folder / "manifest.json")
    files = _manifest_files(folder)
    for name, (expected, digest) in files.items():
        _require_file(folder / name)
        if (size := (folder / name).stat().st_size) != expected:
            raise CheckpointError(f"{name} has {size} bytes instead of {expected}")
        if digest_of(folder / name) != digest:
            raise CheckpointError(f"{name} does not have the SHA-256 that was written")
    state = {}
    for name in [name for name in files if names is None or name.removesuffix(".pt") in names]:
        try:
            state[name.removesuffix(".pt")] = read_torch(folder / name)
        except CheckpointError as error:
            raise CheckpointError(f"{name} {error}") from error
    return state


def _require_file(path: Path) -> None:
    """Raise CheckpointError for a FIFO, which would wait for whoever writes to it, and whatever else is there but no file."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name} is no regular file")


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
    """The newest of its step: numbers that were pruned do not come again."""
    name = f"step_{step:012d}"
    taken = [int(match[2] or 0) for path in folder.glob(f"{name}*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return folder / (f"{name}.{max(taken) + 1}" if taken else name)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Renamed first: a kill half-way leaves no half checkpoint."""
    checkpoints = _checkpoints(folder)
    position = checkpoints.index(newest)
    for path in [*checkpoints[:max(position + 1 - keep, 0)], *checkpoints[position + 1:]]:
        os.replace(path, doomed := folder / f"{TEMPORARY}{path.name}")
        _remove([doomed])


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
