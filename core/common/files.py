"""Replace files atomically, write them to disk durably, and lock folders between processes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".temporary_"  # prefix of files that are still being written; a killed writer may leave one


@contextmanager
def replace_atomically(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename that file to `path` when the block ends.

    If the block raises, the old file stays as it was and the temporary file is removed. If several processes may
    replace the file at once, each names itself as `writer`.
    """
    temporary = path.with_name(f"{TEMPORARY}{writer}{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes, writer: str = "") -> None:
    """Replace the file's content by `data`. Raises OSError (a full disk) with the old file intact."""
    with replace_atomically(path, writer) as temporary:
        write_durably(temporary, data)


def write_durably(path: Path, data: bytes) -> None:
    """Write the file and wait until the disk has the data."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's list of files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder. Return False if another open descriptor holds the lock; closing this one unlocks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Try to lock a folder for the duration of the block. Yield True if this process holds the lock, else False."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)
