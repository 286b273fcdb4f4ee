"""The byte arena in which an actor keeps compressed frames: layout, writer and reader."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from core.common.shared_arrays import SharedArrays
from core.specs import ArraySpec
from core.trajectory.counters import first_valid_step
from core.trajectory.frame_compression import USUAL_RATIO, CorruptedBlock, StorageParams, compress, decompressed
from core.trajectory.frame_gather import GatherThreadPool, gathered

UNPACKED_CHUNKS = 4   # of each stream: the newest, the one in the making, and two that a reader may still be busy with


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


class CompressedFrameWriter:
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
        self._evict(chunk, end - self._layout.arena_bytes)
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

    def _evict(self, chunk: int, limit: int) -> None:
        """Readers lose the chunks that have bytes before `limit`."""
        length, chunks = self._layout.chunk_length, self._layout.chunks
        kept = max(-(-int(self._oldest[0]) // length), chunk - chunks + 1)
        while kept < chunk and self._starts[kept % chunks, 0] < limit:
            kept += 1
        if kept * length > self._oldest[0] and kept > chunk - chunks + 1:
            self._oldest[0] = kept * length


class CompressedFrameReader:
    """The readers' side of packed frames."""

    def __init__(self, layout: PackedLayout, arrays: SharedArrays, threads: GatherThreadPool):
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
        oldest = (-(-first_valid_step(arrays, layout.rows, layout.chunk_length) // layout.chunk_length)).clip(0)  # [num_actors] chunks
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
            elif (chunks[number] + 1) * layout.chunk_length > first_valid_step(self._arrays, layout.rows, layout.chunk_length)[actor]:
                raise CorruptedBlock(f"packed frames of chunk {chunks[number]}, stream {envs[number]} of actor {actor} "
                                     f"({size} bytes at {start}) are not what was written")
