"""Files of checkpoints, sent in pieces between home and nodes that do not see the run's folder."""

import os
from pathlib import Path
from typing import Any

import ray

from core.checkpoint.run_checkpoint import CheckpointError
from core.common.files import TEMPORARY, sync_folder

PIECE_BYTES = 8 << 20  # sent at once, so that neither side holds a replay twice


class CheckpointFiles:
    """The folder of the run's checkpoints at home, and the checkpoint that the run continues from."""

    def __init__(self, folder: Path, resume_from: Path | None):
        self._folder, self._resume_from = folder, resume_from

    def write(self, name: str, offset: int, piece: bytes) -> None:
        """Write a piece of a file, or of the file of a folder (folder/file), under a temporary name."""
        path = self._folder / f"{TEMPORARY}{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def adopt(self, name: str) -> None:
        """Give a file or folder its name. A checkpoint that is there already stays."""
        target = self._folder / name
        if not target.is_dir():
            os.replace(self._folder / f"{TEMPORARY}{name}", target)
            sync_folder(self._folder)

    def read(self, name: str, offset: int) -> bytes:
        """Return the piece of a file of the checkpoint that begins at `offset`; empty if there is none."""
        assert self._resume_from is not None
        try:
            with open(self._resume_from / name, "rb") as file:
                file.seek(offset)
                return file.read(PIECE_BYTES)
        except FileNotFoundError:  # a run of another number of learners has no such file
            return b""


class SendHome:
    """Move files and folders of this node's checkpoint folder to that at home."""

    def __init__(self, server: Any):
        self._server = server

    def __call__(self, path: Path) -> None:
        """Send a file or folder, piece by piece, and remove it here. Raises CheckpointError."""
        try:
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                self._send(file, str(file.relative_to(path.parent)))
                file.unlink()
            ray.get(self._server.adopt.remote(path.name))
            if path.is_dir():
                path.rmdir()
        except (OSError, ray.exceptions.RayError) as error:
            raise CheckpointError(f"cannot send {path.name} to the node of main: {error}") from error

    def _send(self, file: Path, name: str) -> None:
        offset = 0
        with file.open("rb") as content:
            while (piece := content.read(PIECE_BYTES)) or not offset:
                ray.get(self._server.write_piece.remote(name, offset, piece))
                offset += len(piece) or 1


def fetch_file(server: Any, name: str, target: Path) -> None:
    """Copy a file of the checkpoint at home to `target`, piece by piece. Do nothing if home has none.

    Must not be called on the event loop of an asynchronous actor.
    """
    offset = 0
    # not by ray.get, which warns in every thread of an asynchronous actor
    while piece := server.read_piece.remote(name, offset).future().result():
        with open(target, "ab") as file:
            file.write(piece)
        offset += len(piece)
