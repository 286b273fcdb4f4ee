"""A chunk as the arrays that an actor on another machine sends to the ring of its steps."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from core.trajectory.frame_compression import StorageParams, arena_bytes, compress, decompressed
from core.trajectory.ring_buffer import Layout, Trajectories
from core.types import ACTION_MASK

BOOTSTRAP_FIELDS = ("frame", "first", "last", ACTION_MASK)  # fields that the bootstrap step after a chunk has too


class DamagedChunk(ValueError):
    """An error that is raised for a chunk that is not what was sent."""


class Chunk(NamedTuple):
    """L steps of E environments and the bootstrap step, in arrays of its own."""

    # Each [L, E, ...], those in BOOTSTRAP_FIELDS [L + 1, E, ...]; `priority` is that of the steps that became starts.
    fields: dict[str, np.ndarray]
    states: list[np.ndarray]  # recurrent states, each [E, ...]
    # Compressed frames and their checksum: a block of each environment's L steps, then one of all environments'
    # bootstrap step. Empty if the fields have the frames.
    blocks: list[tuple[np.ndarray, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [*self.fields.values(), *self.states, *(block for block, _ in self.blocks)]
        return sum(array.nbytes for array in arrays)


def newest_chunk(trajectories: Trajectories, window_length: int) -> Chunk:
    """Return the newest chunk of trajectories that have one actor and no other writer."""
    layout = trajectories.layout
    arrays = {name: trajectories.arrays[name][0] for name in layout.arrays()}
    end = int(arrays["written"][0])
    begin = end - layout.chunk_length
    step_ids, slot = np.arange(begin, end + 1), begin % layout.ring_length // layout.chunk_length
    fields = {}
    for name in layout.fields:
        if name == "priority":
            starts = step_ids[:-1] - window_length
            stored = arrays[name].take(starts % layout.ring_length, axis=0)
            fields[name] = np.where(starts[:, None] >= 0, stored, np.nan).astype(stored.dtype)
        elif name != "frame" or not layout.packed:
            ids = step_ids if name in BOOTSTRAP_FIELDS else step_ids[:-1]
            fields[name] = arrays[name].take(ids % len(arrays[name]), axis=0)
    blocks = list[tuple[np.ndarray, int]]()
    if packed := layout.packed:
        begins, sizes, checks = (arrays[name][slot].tolist() for name in ("block_start", "block_bytes", "block_check"))
        for start, size, check in zip(begins, sizes, checks):
            start %= packed.arena_bytes
            blocks.append((arrays["arena"][start : start + size].copy(), check))
        bootstrap, check = compress(arrays["frame"][end % len(arrays["frame"])], layout.storage.compression_level)
        blocks.append((np.frombuffer(bootstrap, np.uint8), check))
    return Chunk(fields, [arrays[name][slot].copy() for name in layout.state_fields], blocks)


def with_frames(chunk: Chunk, layout: Layout) -> Chunk:
    """Return the chunk with its frames decompressed, beside the blocks.

    Raises DamagedChunk if a checksum is wrong.
    """
    if not chunk.blocks:
        return chunk
    frame = layout.fields["frame"]

    def frames(block: tuple[Any, int], count: int) -> np.ndarray:
        """Return the frames of a block, [count, *frame]."""
        contents = decompressed(*block, count * frame.nbytes)
        if contents is None:
            raise DamagedChunk("compressed frames are not what was sent")
        return contents.view(frame.dtype).reshape(count, *frame.shape)

    *blocks, bootstrap = chunk.blocks
    steps = np.stack([frames(block, layout.chunk_length) for block in blocks], axis=1)
    both = np.concatenate([steps, frames(bootstrap, layout.num_envs)[None]])
    return chunk._replace(fields={**chunk.fields, "frame": both})


def single_actor_layout(layout: Layout, window_length: int) -> Layout:
    """Return the layout of one actor's own rings, as short as a writer that sends each chunk away at once needs."""
    ring_length, arena = (-(-(window_length + 1) // layout.chunk_length) + 2) * layout.chunk_length, 0
    if packed := layout.packed:
        smallest = StorageParams(layout.storage.frame_compression, max_frame_bytes=1)
        arena = arena_bytes(smallest, packed._replace(num_actors=1, ring_length=ring_length), 2 * layout.chunk_length)
    return replace(layout, num_actors=1, ring_length=ring_length, arena_bytes=arena)
