"""Lossless compression of frames with lz4, the arenas of compressed frames, and the threads that gather frames.

The frames of one chunk and environment form one lz4 block, because neighbouring frames resemble each other. Each actor
keeps compressed frames in a byte arena of fixed size.

- Blocks follow one another round the arena, and no block is split at its end.
- Before the writer overwrites a block it raises `oldest`, which takes the block's chunk from the readers. Publishing a
  chunk raises `written` likewise. There is one writer and no lock.
- The newest chunk, the chunk being written and its bootstrap step lie uncompressed in a short ring.
- A reader that was overtaken while it read learns so from `oldest`. A block whose checksum is wrong although no writer
  overtook the reader is an error.
"""

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, NamedTuple

import lz4.block
import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.common.shared_arrays import CACHE_LINE, SharedArrays
from core.specs import ArraySpec

USUAL_RATIO = 16  # compression of Atari frames at the least
RAW: Final = "raw"


@frozen_dataclass
class StorageParams:
    """Options of how frames are stored in the replay."""

    frame_compression: Literal["raw", "lz4"] = RAW
    """Compression of the frames in the replay."""
    max_frame_bytes: int | None = Field(default=None, ge=1, le=10**15)
    """Bytes that frames may take in the rings of a learner. None: what memory.capacity needs for raw frames, and a
    sixteenth of that for lz4. Copies that reservoir and elite insertion make do not count."""
    compression_level: int = Field(default=0, ge=0, le=12)
    """Level of lz4: 0 is fast; 1 to 12 are smaller and at least ten times slower."""
    gather_threads: int = Field(default=1, ge=1, le=256)
    """Threads that gather and unpack the frames of a batch."""


class CorruptedBlock(ValueError):
    """An error that is raised for a compressed block whose content is not what its writer stored."""

    def __init__(self, problem: str):
        super().__init__(
            f"{problem}: the replay is damaged. Continue from the last checkpoint. If it happens again, "
            "the machine's memory is faulty."
        )


def compress(frames: np.ndarray, level: int) -> tuple[bytes, int]:
    """Return the frames as one block, and its CRC-32 checksum."""
    data = np.ascontiguousarray(frames).data.cast("B")
    mode: dict[str, Any] = {"mode": "high_compression", "compression": level} if level else {}
    block = lz4.block.compress(data, store_size=False, **mode)
    return block, zlib.crc32(block)


def max_block_bytes(size: int) -> int:
    """Return lz4's bound of a block that holds `size` bytes."""
    return size + size // 255 + 16


def decompressed(data: Any, check: int, size: int) -> np.ndarray | None:
    """Return the bytes of a block, [size] uint8; if its checksum or size is wrong, return None."""
    if zlib.crc32(data) != check:
        return None
    try:
        frames = np.frombuffer(lz4.block.decompress(data, uncompressed_size=size), np.uint8)
    except lz4.block.LZ4BlockError:
        return None
    return frames if len(frames) == size else None


# Uncompressed chunks of an environment: the newest, the one being written, and two that a reader may be copying.
UNPACKED_CHUNKS = 4


class PackedLayout(NamedTuple):
    """Sizes of the compressed frames of all actors."""

    num_actors: int
    num_envs: int
    ring_length: int  # steps of an environment
    chunk_length: int
    frame: ArraySpec
    arena_bytes: int  # of one actor

    @property
    def chunks(self) -> int:
        """Return the number of chunks that a ring holds."""
        return self.ring_length // self.chunk_length

    @property
    def block_bytes(self) -> int:
        """Return the bytes of an uncompressed block."""
        return self.chunk_length * self.frame.nbytes

    @property
    def unpacked_steps(self) -> int:
        """Return how many steps the short ring of uncompressed frames holds."""
        return UNPACKED_CHUNKS * self.chunk_length

    def arrays(self) -> dict[str, ArraySpec]:
        """Return the arrays of compressed frames by name.

        Arrays of blocks are [actor, chunk, environment]. `block_start` and `packed`, the end of the newest block, count
        bytes since the start of the run; modulo the arena's size they are positions.
        """
        blocks, steps = (self.num_actors, self.chunks, self.num_envs), (self.num_actors, self.unpacked_steps)
        return {
            "frame": ArraySpec((*steps, self.num_envs, *self.frame.shape), self.frame.dtype),
            "arena": ArraySpec((self.num_actors, self.arena_bytes), "uint8"),
            "block_start": ArraySpec(blocks, "int64"),
            "block_bytes": ArraySpec(blocks, "int32"),
            "block_check": ArraySpec(blocks, "uint32"),
            "packed": ArraySpec((self.num_actors, CACHE_LINE), "int64"),
        }

    def lengths(self, chunks: int, ends: np.ndarray | None) -> dict[str, int]:
        """Return how much of each array's second axis holds data after so many chunks and with these arena ends."""
        arena = min(self.arena_bytes, int(ends[:, 0].max())) if ends is not None else 0
        blocks = dict.fromkeys(("block_start", "block_bytes", "block_check"), chunks)
        return {"frame": self.unpacked_steps, "arena": arena, **blocks}


def arena_bytes(storage: StorageParams, layout: PackedLayout, min_steps: int) -> int:
    """Return the arena bytes of one actor for these sizes, whose own `arena_bytes` do not count.

    The arena is the actor's share of `replay.max_frame_bytes`, or of the usual compressed size of its ring. It always
    fits `min_steps` steps of each environment, however badly they compress, so that a window can always be sampled.
    """
    usual = layout.num_actors * layout.num_envs * layout.ring_length * layout.frame.nbytes // USUAL_RATIO
    min_blocks = (-(-min_steps // layout.chunk_length) + 2) * layout.num_envs
    min_bytes = min_blocks * max_block_bytes(layout.block_bytes)
    return max((storage.max_frame_bytes or usual) // layout.num_actors, min_bytes)


class CompressedFrameWriter:
    """The only writer of an actor's arena."""

    def __init__(self, layout: PackedLayout, arrays: SharedArrays, actor_ind: int, level: int):
        self._layout, self._level = layout, level
        self._frames, self._arena = arrays["frame"][actor_ind], arrays["arena"][actor_ind]
        index = (arrays[name][actor_ind] for name in ("block_start", "block_bytes", "block_check"))
        self._starts, self._sizes, self._checks = index
        self._end, self._oldest = arrays["packed"][actor_ind], arrays["oldest"][actor_ind]

    def pack(self, chunk: int) -> None:
        """Compress the frames of a chunk that is not published yet and that follows the last one compressed."""
        length, num_envs = self._layout.chunk_length, self._layout.num_envs
        begin = chunk * length % self._layout.unpacked_steps
        frames = self._frames[begin : begin + length]
        self.store(chunk, [compress(frames[:, env], self._level) for env in range(num_envs)])

    def store(self, chunk: int, blocks: Sequence[tuple[Any, int]]) -> None:
        """Store a chunk's compressed frames: for each environment, a block and its checksum."""
        layout, sizes = self._layout, [len(block) for block, _ in blocks]
        arena, end, starts = layout.arena_bytes, int(self._end[0]), []
        for size in sizes:
            if end % arena + size > arena:
                end += arena - end % arena
            starts.append(end)
            end += size
        self._evict(chunk, end - arena)
        for start, (block, _) in zip(starts, blocks):
            position = start % arena
            self._arena[position : position + len(block)] = np.frombuffer(block, np.uint8)
        slot = chunk % layout.chunks
        self._starts[slot], self._sizes[slot], self._checks[slot] = starts, sizes, [check for _, check in blocks]
        self._end[0] = end

    def _evict(self, chunk: int, limit: int) -> None:
        """Take from the readers all chunks that have bytes before `limit`."""
        length, chunks = self._layout.chunk_length, self._layout.chunks
        oldest_in_ring = chunk - chunks + 1
        kept = max(-(-int(self._oldest[0]) // length), oldest_in_ring)
        while kept < chunk and self._starts[kept % chunks, 0] < limit:
            kept += 1
        if kept > oldest_in_ring:
            self._oldest[0] = kept * length


class GatherThreadPool:
    """A pool of threads that share the work of one call. They start on first use."""

    def __init__(self, count: int):
        self._count, self._pool = count, ThreadPoolExecutor(count, "gather") if count > 1 else None

    def run(self, function: Callable[[slice], Any], length: int) -> None:
        """Call function(part) for `count` parts that cover 0 .. length."""
        if self._pool is None or length < 2 * self._count:
            function(slice(0, length))
            return
        bounds = np.linspace(0, length, self._count + 1).astype(int).tolist()
        for _ in self._pool.map(function, map(slice, bounds[:-1], bounds[1:])):
            pass

    def gather(self, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return copies of frames[slots], [*slots.shape, *frame].

        numpy's take releases the interpreter lock and copies whole frames. torch's index_select would also wake the
        learner's compute threads.
        """
        taken, flat = np.empty((slots.size, *frames.shape[1:]), frames.dtype), slots.ravel()
        self.run(lambda part: frames.take(flat[part], axis=0, out=taken[part], mode="clip"), slots.size)
        return taken.reshape(*slots.shape, *frames.shape[1:])


class CompressedFrameReader:
    """A reader of the compressed frames of all actors.

    Args:
        layout: Layout of the frames.
        arrays: Arrays of all actors.
        threads: Threads that unpack and gather frames.
        first_valid_steps: `Trajectories.first_valid_steps` of these arrays.
    """

    def __init__(
        self,
        layout: PackedLayout,
        arrays: SharedArrays,
        threads: GatherThreadPool,
        first_valid_steps: Callable[[], np.ndarray],
    ):
        self._layout, self._arrays, self._threads = layout, arrays, threads
        self._first_valid_steps = first_valid_steps
        self._unpacked = arrays["frame"].reshape(-1, *layout.frame.shape)
        self._arenas = [memoryview(arena) for arena in arrays["arena"]]
        self._index = [arrays[name] for name in ("block_start", "block_bytes", "block_check")]
        self._total_envs = layout.num_actors * layout.num_envs

    def take(self, env_ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        """Return the frames of steps, [..., *frame]; the arguments are broadcast together.

        Frames of a step that its writer reached meanwhile are undefined. Raises CorruptedBlock for a damaged block of a
        step that its writer did not reach.
        """
        env_ids, step_ids = np.broadcast_arrays(env_ids, np.maximum(step_ids, 0))
        recent, newest = self._newest(env_ids, step_ids)
        packed = ~recent
        chunks, offsets = np.divmod(step_ids[packed], self._layout.chunk_length)
        blocks, inverse = np.unique(chunks * self._total_envs + env_ids[packed], return_inverse=True)
        slots = np.zeros(packed.shape, np.int64)
        slots[packed] = inverse * self._layout.chunk_length + offsets
        frames = self._threads.gather(self._unpack(*np.divmod(blocks, self._total_envs)), slots)
        frames[recent] = newest
        return frames

    def used_bytes(self) -> int:
        """Return the arena bytes of all readable chunks."""
        layout, arrays = self._layout, self._arrays
        oldest = (-(-self._first_valid_steps() // layout.chunk_length)).clip(0)  # [num_actors] chunks
        starts = arrays["block_start"][np.arange(layout.num_actors), oldest % layout.chunks, 0]
        return int((arrays["packed"][:, 0] - starts).sum())

    def _newest(self, env_ids: np.ndarray, step_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of these steps lie in the short ring, [...] bool, and their frames [N, *frame]."""
        layout = self._layout
        actors, envs = np.divmod(env_ids, layout.num_envs)
        while True:  # ends soon: writers do not publish two chunks during every copy
            written = self._arrays["written"][:, 0].copy()
            recent = step_ids >= written[actors] - layout.chunk_length
            slots = actors[recent] * layout.unpacked_steps + step_ids[recent] % layout.unpacked_steps
            frames = self._unpacked.take(slots * layout.num_envs + envs[recent], axis=0)
            if (self._arrays["written"][:, 0] - written <= layout.chunk_length).all():  # none was overwritten until now
                return recent, frames

    def _unpack(self, chunks: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Return the frames of these blocks, [K * chunk_length, *frame]; those of a lost chunk are undefined."""
        layout = self._layout
        unpacked = np.empty((max(len(chunks), 1), layout.block_bytes), np.uint8)
        self._threads.run(lambda part: self._unpack_some(chunks[part], env_ids[part], unpacked[part]), len(chunks))
        return unpacked.view(layout.frame.dtype).reshape(-1, *layout.frame.shape)

    def _unpack_some(self, chunks: np.ndarray, env_ids: np.ndarray, unpacked: np.ndarray) -> None:
        layout = self._layout
        actors, envs = np.divmod(env_ids, layout.num_envs)
        starts, sizes, checks = (column[actors, chunks % layout.chunks, envs] for column in self._index)
        blocks = zip(actors.tolist(), (starts % layout.arena_bytes).tolist(), sizes.tolist(), checks.tolist())
        for number, (actor, start, size, check) in enumerate(blocks):
            frames = decompressed(self._arenas[actor][start : start + size], check, layout.block_bytes)
            if frames is not None:
                unpacked[number] = frames
            elif (chunks[number] + 1) * layout.chunk_length > self._first_valid_steps()[actor]:
                raise CorruptedBlock(
                    f"the compressed frames of chunk {chunks[number]}, environment {envs[number]} of "
                    f"actor {actor} ({size} bytes at {start}) are not what was written"
                )
