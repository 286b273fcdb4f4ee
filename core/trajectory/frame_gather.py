"""The readers' side of frames, which lie one after another as they are, or packed (core/trajectory/frame_compression.py).

A reader that was overtaken while it read finds out by `oldest`; a block whose checksum is wrong although nobody overtook the reader is an
error.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class GatherThreadPool:
    """Some threads that work through the parts of one call; made on first use, left behind when sent to another process."""

    def __init__(self, count: int):
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def run(self, function: Callable[[slice], Any], length: int) -> None:
        """function(part) of each of `count` parts of 0 .. length."""
        if self.count == 1 or length < 2 * self.count:
            function(slice(0, length))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="gather")
        bounds = np.linspace(0, length, self.count + 1).astype(int).tolist()
        for _ in self._pool.map(function, map(slice, bounds[:-1], bounds[1:])):
            pass

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "_pool": None}


def gathered(frames: np.ndarray, positions: np.ndarray, threads: GatherThreadPool) -> np.ndarray:
    """frames[positions], copied. numpy's take moves whole frames, without python's lock, and, unlike torch's index_select, never wakes the
    learner's compute threads."""
    taken, flat = np.empty((positions.size, *frames.shape[1:]), frames.dtype), positions.ravel()
    threads.run(lambda part: frames.take(flat[part], axis=0, out=taken[part], mode="clip"), positions.size)
    return taken.reshape(*positions.shape, *frames.shape[1:])


class RawFrames:
    """Frames as they are, [actors, rows, envs, *frame]."""

    def __init__(self, frames: np.ndarray, threads: GatherThreadPool):
        self._actors, self._rows, self._envs, *shape = frames.shape
        self._flat, self._threads = frames.reshape(-1, *shape), threads

    def take(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Frames of rows (stream, serial), broadcast together: [..., *frame]."""
        actors, envs = np.divmod(streams, self._envs)
        slots = (actors * self._rows + serials % self._rows) * self._envs + envs
        return gathered(self._flat, slots, self._threads)
