"""Copying of frames into a batch, by several threads if asked for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class GatherThreadPool:
    """A pool of threads that share the work of one call. It starts them on first use and never pickles them."""

    def __init__(self, count: int):
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def run(self, function: Callable[[slice], Any], length: int) -> None:
        """Call function(part) for `count` parts that cover 0 .. length."""
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


def gather_frames(frames: np.ndarray, slots: np.ndarray, threads: GatherThreadPool) -> np.ndarray:
    """Return copies of frames[slots], [*slots.shape, *frame].

    numpy's take releases the interpreter lock and copies whole frames. torch's index_select would also wake the
    learner's compute threads.
    """
    taken, flat = np.empty((slots.size, *frames.shape[1:]), frames.dtype), slots.ravel()
    threads.run(lambda part: frames.take(flat[part], axis=0, out=taken[part], mode="clip"), slots.size)
    return taken.reshape(*slots.shape, *frames.shape[1:])
