"""Packed frames as their writer leaves them.

The frames of one chunk and stream are one lz4 block, since neighbouring frames resemble each other. Each actor has an arena of
fixed size: blocks follow one another round it, none is split, and before bytes are overwritten the chunks they belong to are taken
from the readers by raising `oldest`, just as `written` gives rows to them. The newest chunk, the one in the making and the row after it lie
unpacked in a short ring.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lz4.block
import numpy as np

from core.common.settings import setting
from core.common.shared_arrays import ArraySpec, SharedArrays

UNPACKED_CHUNKS = 4   # of each stream: the newest, the one in the making, and two that a reader may still be busy with
USUAL_RATIO = 16      # by which frames of Atari shrink at the least
COPIES_RATIO = 8      # the same for whole unrolls that a rule keeps copies of
RAW = "raw"


@dataclass(frozen=True)
class StorageParams:
    codec: str = setting(RAW, choices=(RAW, "lz4"))  # Compression of the frames in the replay.
    bytes: int | None = setting(None, low=1, high=10**15)  # Bytes that frames may take; None is memory.capacity's for raw frames, a
                                                           # sixteenth of it for lz4.
    level: int = setting(0, low=0, high=12)  # Level of lz4: 0 is fast; 1 to 12 are smaller and at least ten times slower.
    threads: int = setting(1, low=1, high=256)  # Threads that gather and unpack the frames of a batch.


class CorruptedBlock(ValueError):
    """Packed frames are not what was written."""

    def __init__(self, problem: str):
        super().__init__(f"{problem}: the replay is damaged. Continue from the last checkpoint; if it happens again the machine's memory "
                         "is not sound")


class PackedLayout(NamedTuple):
    """Sizes of the packed frames of all actors."""

    num_actors: int
    num_envs: int
    rows: int           # rows a stream
    chunk_length: int
    frame: ArraySpec
    arena_bytes: int    # an actor

    @property
    def chunks(self) -> int:
        return self.rows // self.chunk_length

    @property
    def block_bytes(self) -> int:
        """Of an unpacked block."""
        return self.chunk_length * self.frame.nbytes

    @property
    def unpacked_rows(self) -> int:
        return UNPACKED_CHUNKS * self.chunk_length

    def arrays(self) -> dict[str, ArraySpec]:
        """Blocks are [actor, chunk, stream]. `block_start` counts on round and round the arena, as does `packed` its end."""
        blocks = (self.num_actors, self.chunks, self.num_envs)
        return {"frame": ArraySpec((self.num_actors, self.unpacked_rows, self.num_envs, *self.frame.shape), self.frame.dtype),
                "arena": ArraySpec((self.num_actors, self.arena_bytes), "uint8"), "block_start": ArraySpec(blocks, "int64"),
                "block_bytes": ArraySpec(blocks, "int32"), "block_check": ArraySpec(blocks, "uint32"),
                "packed": ArraySpec((self.num_actors, 8), "int64")}

    def lengths(self, chunks: int, ends: np.ndarray | None) -> dict[str, int]:
        """Of each array's second axis, what so many chunks take."""
        arena = min(self.arena_bytes, int(ends[:, 0].max())) if ends is not None else 0
        return {"frame": self.unpacked_rows, "arena": arena, **dict.fromkeys(("block_start", "block_bytes", "block_check"), chunks)}


def arena_bytes(storage: StorageParams, frame: ArraySpec, num_actors: int, num_envs: int, rows: int, chunk_length: int,
                least_rows: int) -> int:
    """Of one actor: its share of storage.bytes, or of what the rows usually need; but at least what `least_rows` rows need however badly
    they compress, so that there is always a window to learn from."""
    usual = num_actors * num_envs * rows * frame.nbytes // USUAL_RATIO
    block = chunk_length * frame.nbytes
    least = (-(-least_rows // chunk_length) + 2) * num_envs * (block + block // 255 + 16)  # lz4's worst case
    return max((storage.bytes or usual) // num_actors, least)


def compress(frames: np.ndarray, level: int) -> tuple[bytes, int]:
    """A block, and its checksum."""
    data = np.ascontiguousarray(frames).data.cast("B")
    mode: dict[str, Any] = {"mode": "high_compression", "compression": level} if level else {}
    block = lz4.block.compress(data, store_size=False, **mode)
    return block, zlib.crc32(block)


def decompressed(data: Any, check: int, size: int) -> np.ndarray | None:
    """[size] uint8; None for what is not a sound block of that size."""
    if zlib.crc32(data) != check:
        return None
    try:
        frames = np.frombuffer(lz4.block.decompress(data, uncompressed_size=size), np.uint8)
    except lz4.block.LZ4BlockError:
        return None
    return frames if len(frames) == size else None


def touched(arrays: SharedArrays, rows: int, chunk_length: int) -> np.ndarray:
    """[num_actors] serial numbers before which rows may have been overwritten until now: by the open chunk and the head that follows
    it, or in the arena, or left out of a snapshot."""
    return np.maximum(arrays["written"][:, 0] - rows + chunk_length + 1, arrays["oldest"][:, 0])


class Packer:
    """The one writer of an actor's arena."""

    def __init__(self, layout: PackedLayout, arrays: SharedArrays, actor_ind: int, level: int):
        self._layout, self._level = layout, level
        self._frames, self._arena = arrays["frame"][actor_ind], arrays["arena"][actor_ind]
        self._starts, self._sizes, self._checks = (arrays[name][actor_ind] for name in ("block_start", "block_bytes", "block_check"))
        self._end, self._oldest = arrays["packed"][actor_ind], arrays["oldest"][actor_ind]

    def pack(self, chunk: int) -> None:
        """The frames of this chunk, which is not published yet and follows the last one packed."""
        length = self._layout.chunk_length
        rows = chunk * length % self._layout.unpacked_rows
        self.store(chunk, [compress(self._frames[rows:rows + length, env], self._level) for env in range(self._layout.num_envs)])

    def store(self, chunk: int, blocks: Sequence[tuple[Any, int]]) -> None:
        """The same for frames that are packed already: a block and its checksum of each stream."""
        sizes = [len(block) for block, _ in blocks]
        starts, end = self._places(sizes)
        self._take_back(chunk, end - self._layout.arena_bytes)
        for start, (block, _) in zip(starts, blocks):
            place = start % self._layout.arena_bytes
            self._arena[place:place + len(block)] = np.frombuffer(block, np.uint8)
        slot = chunk % self._layout.chunks
        self._starts[slot], self._sizes[slot], self._checks[slot] = starts, sizes, [check for _, check in blocks]
        self._end[0] = end

    def _places(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Where blocks of these sizes go, and the end of the last one; none runs over the arena's edge."""
        arena, end, starts = self._layout.arena_bytes, int(self._end[0]), []
        for size in sizes:
            if end % arena + size > arena:
                end += arena - end % arena
            starts.append(end)
            end += size
        return starts, end

    def _take_back(self, chunk: int, limit: int) -> None:
        """Readers lose the chunks that have bytes before `limit`."""
        length, chunks = self._layout.chunk_length, self._layout.chunks
        kept = max(-(-int(self._oldest[0]) // length), chunk - chunks + 1)
        while kept < chunk and self._starts[kept % chunks, 0] < limit:
            kept += 1
        if kept * length > self._oldest[0] and kept > chunk - chunks + 1:
            self._oldest[0] = kept * length
