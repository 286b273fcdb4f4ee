"""Files of tensors and plain values, written with their SHA-256, read with weights_only=True: nothing in a file is ever executed."""

import hashlib
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, type(None))
MAPPED_BYTES = 1 << 28     # files from this size on are mapped instead of read: a replay is copied once, not held twice
BLOCK = 1 << 24            # bytes


class CheckpointError(Exception):
    """A checkpoint or model file that cannot be written, or that cannot be used; the message says which and why."""

    exit_code = 3  # of the process that it ends


def storable(value: Any, where: str) -> Any:
    """The value with tensors that own no more than they show; TypeError naming the place of anything weights_only would refuse."""
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in PLAIN:
                raise TypeError(f"{where} has a key of type {type(key).__name__}: only plain values can be stored")
        return {key: storable(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(storable(item, f"{where}[{position}]") for position, item in enumerate(value))
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value  # a view would store all it looks into
    if type(value) not in PLAIN:
        raise TypeError(f"{where} is a {type(value).__name__}: only tensors and plain values can be stored")
    return value


class HashingFile:
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


def write_torch(path: Path, value: Any) -> dict[str, Any]:
    """Streams tensors to the file without a copy; returns its size and SHA-256."""
    with open(path, "wb") as file:
        hashing = HashingFile(file)
        torch.save(value, hashing)  # type: ignore[arg-type]
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    return {"size": hashing.size, "sha256": hashing.hexdigest()}


def read_torch(path: Path) -> Any:
    """Read tensors, dense ones of real numbers on the CPU, and plain values. Raises CheckpointError for anything else."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=path.stat().st_size >= MAPPED_BYTES)
        strange = _strange_tensor(content)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise CheckpointError(f"carries something else than tensors and plain values{what}; refused, nothing in it was executed") from error
    except Exception as error:  # a crafted archive can fail anywhere in torch's reader
        raise CheckpointError(f"cannot be read as tensors and plain values: {' '.join(str(error).split())}") from error
    if strange:
        raise CheckpointError(f"{strange}; only dense tensors of real numbers are used: make them so and save the file again")
    return content


def _strange_tensor(content: Any) -> str:
    """Return what is wrong with the first tensor, at whatever depth, that cannot be copied from as it is; "" if there is none."""
    stack, seen = [("", content)], set[int]()
    while stack:
        name, value = stack.pop()
        if id(value) in seen:  # crafted lists can hold themselves
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            kinds = {"nested": value.is_nested, "sparse": value.layout is not torch.strided, "quantised": value.is_quantized,
                     "without values (meta)": value.is_meta, "complex": value.is_complex()}
            if kind := next((kind for kind, applies in kinds.items() if applies), None):
                return f"holds {name.lstrip('.') or 'a tensor'}, which is {kind}"
        elif isinstance(value, dict):
            stack += [(f"{name}.{key}", item) for key, item in reversed(value.items())]
        elif isinstance(value, list | tuple):
            stack += [(f"{name}[{position}]", item) for position, item in reversed(list(enumerate(value)))]
    return ""


def write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at once. Raises OSError (a full disk) with the old file intact and nothing beside it."""
    temporary = path.with_name(f".temporary_{path.name}")
    try:
        write(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
