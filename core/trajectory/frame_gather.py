"""The readers' side of frames, which lie one after another as they are, or packed (core/trajectory/frame_compression.py).

A reader that was overtaken while it read finds out by `oldest`; a block whose checksum is wrong although nobody overtook the reader is an
error.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from core.common.shared_arrays import SharedArrays
from core.trajectory.frame_compression import CorruptedBlock, PackedLayout, decompressed, touched


class Threads:
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


def gathered(frames: np.ndarray, positions: np.ndarray, threads: Threads) -> np.ndarray:
    """frames[positions], copied. numpy's take moves whole frames, without python's lock, and, unlike torch's index_select, never wakes the
    learner's compute threads."""
    taken, flat = np.empty((positions.size, *frames.shape[1:]), frames.dtype), positions.ravel()
    threads.run(lambda part: frames.take(flat[part], axis=0, out=taken[part], mode="clip"), positions.size)
    return taken.reshape(*positions.shape, *frames.shape[1:])


class RawFrames:
    """Frames as they are, [actors, rows, envs, *frame]."""

    def __init__(self, frames: np.ndarray, threads: Threads):
        self._actors, self._rows, self._envs, *shape = frames.shape
        self._flat, self._threads = frames.reshape(-1, *shape), threads

    def take(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Frames of rows (stream, serial), broadcast together: [..., *frame]."""
        actors, envs = np.divmod(streams, self._envs)
        slots = (actors * self._rows + serials % self._rows) * self._envs + envs
        return gathered(self._flat, slots, self._threads)


class PackedFrames:
    """The readers' side of packed frames."""

    def __init__(self, layout: PackedLayout, arrays: SharedArrays, threads: Threads):
        self._layout, self._arrays, self._threads = layout, arrays, threads
        self._unpacked = arrays["frame"].reshape(-1, *layout.frame.shape)
        self._arenas = [memoryview(arena) for arena in arrays["arena"]]
        self._index = [arrays[name] for name in ("block_start", "block_bytes", "block_check")]
        self._num_streams = layout.num_actors * layout.num_envs

    def take(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Frames of rows (stream, serial), broadcast together: [..., *frame]. Of rows that their writer reached meanwhile, anything;
        Raises CorruptedBlock for one that it did not reach."""
        streams, serials = np.broadcast_arrays(streams, np.maximum(serials, 0))
        recent, newest = self._newest(streams, serials)
        packed = ~recent
        chunks, rows = np.divmod(serials[packed], self._layout.chunk_length)
        blocks, inverse = np.unique(chunks * self._num_streams + streams[packed], return_inverse=True)
        positions = np.zeros(packed.shape, np.int64)
        positions[packed] = inverse * self._layout.chunk_length + rows
        frames = gathered(self._unpack(*np.divmod(blocks, self._num_streams)), positions, self._threads)
        frames[recent] = newest
        return frames

    @staticmethod
    def used_bytes(layout: PackedLayout, arrays: SharedArrays) -> int:
        """Of the arenas by the chunks that readers may read."""
        oldest = (-(-touched(arrays, layout.rows, layout.chunk_length) // layout.chunk_length)).clip(0)  # [num_actors] chunks
        starts = arrays["block_start"][np.arange(layout.num_actors), oldest % layout.chunks, 0]
        return int(np.where(oldest * layout.chunk_length < arrays["written"][:, 0], arrays["packed"][:, 0] - starts, 0).sum())

    def _newest(self, streams: np.ndarray, serials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[...] bool: which of these rows are packed no sooner than the next chunk is published; and their frames [N, *frame]."""
        layout = self._layout
        actors, envs = np.divmod(streams, layout.num_envs)
        while True:  # short: writers do not publish two chunks meanwhile again and again
            written = self._arrays["written"][:, 0].copy()
            recent = serials >= written[actors] - layout.chunk_length
            slots = actors[recent] * layout.unpacked_rows + serials[recent] % layout.unpacked_rows
            frames = self._unpacked.take(slots * layout.num_envs + envs[recent], axis=0)
            if (self._arrays["written"][:, 0] - written <= layout.chunk_length).all():  # the short ring is sound that long
                return recent, frames

    def _unpack(self, chunks: np.ndarray, streams: np.ndarray) -> np.ndarray:
        """Frames [K * chunk_length, *frame] of chunks and streams [K]; of a chunk that is lost anything."""
        layout = self._layout
        unpacked = np.empty((max(len(chunks), 1), layout.block_bytes), np.uint8)
        self._threads.run(lambda part: self._unpack_some(chunks[part], streams[part], unpacked[part]), len(chunks))
        return unpacked.view(layout.frame.dtype).reshape(-1, *layout.frame.shape)

    def _unpack_some(self, chunks: np.ndarray, streams: np.ndarray, unpacked: np.ndarray) -> None:
        layout = self._layout
        actors, envs = np.divmod(streams, layout.num_envs)
        starts, sizes, checks = (column[actors, chunks % layout.chunks, envs] for column in self._index)
        places = zip(actors.tolist(), (starts % layout.arena_bytes).tolist(), sizes.tolist(), checks.tolist())
        for number, (actor, start, size, check) in enumerate(places):
            data = self._arenas[actor][start:start + size]
            if (frames := decompressed(data, check, layout.block_bytes)) is not None:
                unpacked[number] = frames
            elif (chunks[number] + 1) * layout.chunk_length > touched(self._arrays, layout.rows, layout.chunk_length)[actor]:
                raise CorruptedBlock(f"packed frames of chunk {chunks[number]}, stream {envs[number]} of actor {actor} "
                                     f"({size} bytes at {start}) are not what was written")
