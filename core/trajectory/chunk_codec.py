"""Encoding of a published chunk as one buffer, which an actor on another machine sends to the ring of its steps."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from core.specs import ArraySpec
from core.trajectory.frame_compression import StorageParams, arena_bytes, compress, decompressed
from core.trajectory.ring_buffer import Layout, Trajectories
from core.types import ACTION_MASK

BOOTSTRAP_FIELDS = ("frame", "first", "last", ACTION_MASK)  # fields that the bootstrap step after a chunk has too
SIZES, CHECKS = "block sizes", "block checks"


class DamagedChunk(ValueError):
    """An error that is raised for a chunk that is not what was sent."""


class Chunk(NamedTuple):
    """L steps of E environments and the bootstrap step; arrays may be views of the received buffer."""

    # Each [L, E, ...], those in BOOTSTRAP_FIELDS [L + 1, E, ...]; `priority` is that of the steps that became starts.
    fields: dict[str, np.ndarray]
    states: list[np.ndarray]  # recurrent states, each [E, ...]
    blocks: list[tuple[Any, int]]  # of each environment, compressed frames and their checksum; empty for raw frames


class ChunkFormat:
    """Sizes and order of a chunk's parts, equal for all layouts that differ in ring length and actors only."""

    def __init__(self, layout: Layout, window_length: int):
        self._layout, self._window_length = layout, window_length
        length, envs = layout.chunk_length, layout.num_envs
        self._fields = {
            name: ArraySpec((length + (name in BOOTSTRAP_FIELDS), envs, *spec.shape), spec.dtype)
            for name, spec in layout.fields.items()
        }
        self._states = {name: ArraySpec((envs, *spec.shape), spec.dtype) for name, spec in layout.state_fields.items()}
        self._parts = {**self._fields, **self._states}
        if layout.packed:
            del self._parts["frame"]  # stored as one block for each environment, and one for the bootstrap step of all
            self._parts |= {SIZES: ArraySpec((envs + 1,), "int32"), CHECKS: ArraySpec((envs + 1,), "uint32")}

    def pack(self, trajectories: Trajectories) -> np.ndarray:
        """Return the newest chunk as [N] uint8; `trajectories` must have one actor and no other writer."""
        layout = trajectories.layout
        arrays = {name: trajectories.arrays[name][0] for name in layout.arrays()}
        end = int(arrays["written"][0])
        begin = end - layout.chunk_length
        step_ids, chunk = np.arange(begin, end + 1), begin % layout.ring_length // layout.chunk_length
        parts = {
            name: arrays[name].take(step_ids[: spec.shape[0]] % layout.ring_length, axis=0)
            for name, spec in self._fields.items()
            if name not in ("frame", "priority")
        }
        parts |= {name: arrays[name][chunk] for name in self._states}
        if "priority" in self._fields:
            starts = step_ids[:-1] - self._window_length
            stored = arrays["priority"].take(starts % layout.ring_length, axis=0)
            parts["priority"] = np.where(starts[:, None] >= 0, stored, np.nan)
        frames, blocks = arrays["frame"], list[np.ndarray]()
        if packed := layout.packed:
            begins, sizes, checks = (arrays[name][chunk] for name in ("block_start", "block_bytes", "block_check"))
            bootstrap, check = compress(frames[end % len(frames)], layout.storage.compression_level)
            blocks = [
                arrays["arena"][start : start + size]
                for start, size in zip((begins % packed.arena_bytes).tolist(), sizes.tolist())
            ]
            blocks.append(np.frombuffer(bootstrap, np.uint8))
            parts |= {SIZES: np.append(sizes, len(bootstrap)), CHECKS: np.append(checks, np.uint32(check))}
        else:
            parts["frame"] = frames.take(step_ids % len(frames), axis=0)
        contents = [
            np.ascontiguousarray(parts[name], spec.dtype).reshape(-1).view(np.uint8)
            for name, spec in self._parts.items()
        ]
        return np.concatenate([*contents, *blocks])

    def unpack(self, buffer: np.ndarray) -> Chunk:
        """Return the chunk of a buffer that `pack` made.

        Raises DamagedChunk for a buffer of another size, or compressed frames whose checksum is wrong.
        """
        min_bytes = sum(spec.nbytes for spec in self._parts.values())
        if len(buffer) < min_bytes:
            raise DamagedChunk(f"a chunk of {len(buffer):,} bytes arrived; it must have at least {min_bytes:,} bytes")
        parts, offset = {}, 0
        for name, spec in self._parts.items():
            parts[name] = buffer[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            offset += spec.nbytes
        blocks = list[tuple[np.ndarray, int]]()
        for size, check in zip(parts[SIZES].tolist(), parts[CHECKS].tolist()) if self._layout.packed else ():
            blocks.append((buffer[offset : offset + size], check))
            offset += size
        if offset != len(buffer):
            raise DamagedChunk(f"a chunk of {len(buffer):,} bytes arrived; its parts have {offset:,} bytes")
        if blocks:
            length = self._layout.chunk_length
            bootstrap = self._decompressed(*blocks.pop(), self._layout.num_envs)
            steps = np.stack([self._decompressed(*block, length) for block in blocks], axis=1)
            parts["frame"] = np.concatenate([steps, bootstrap[None]])
        return Chunk({name: parts[name] for name in self._fields}, [parts[name] for name in self._states], blocks)

    def _decompressed(self, block: np.ndarray, check: int, count: int) -> np.ndarray:
        """Return the frames of a block, [count, *frame]."""
        frame = self._layout.fields["frame"]
        frames = decompressed(block, check, count * frame.nbytes)
        if frames is None:
            raise DamagedChunk("compressed frames are not what was sent")
        return frames.view(frame.dtype).reshape(count, *frame.shape)


def single_actor_layout(layout: Layout, window_length: int) -> Layout:
    """Return the layout of one actor's own rings, as short as a writer that sends each chunk away at once needs."""
    ring_length, arena = (-(-(window_length + 1) // layout.chunk_length) + 2) * layout.chunk_length, 0
    if layout.packed:
        smallest = StorageParams(layout.storage.frame_compression, max_frame_bytes=1)
        sizes = 1, layout.num_envs, ring_length, layout.chunk_length
        arena = arena_bytes(smallest, layout.fields["frame"], *sizes, min_steps=2 * layout.chunk_length)
    return replace(layout, num_actors=1, ring_length=ring_length, arena_bytes=arena)
