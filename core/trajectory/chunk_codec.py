"""A published chunk as one buffer and back: what an actor on another machine sends to the ring its rows belong into."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from core.specs import ArraySpec
from core.trajectory.frame_arena import arena_bytes
from core.trajectory.frame_compression import StorageParams, compress, decompressed
from core.trajectory.layout import Layout
from core.trajectory.ring_buffer import Trajectories

BOOTSTRAP_FIELDS = ("frame", "first", "last")  # fields that the row after a chunk has too
SIZES, CHECKS = "block sizes", "block checks"


class DamagedChunk(ValueError):
    """What arrived is not what was sent."""


class Chunk(NamedTuple):
    """L rows of E streams and the head; the arrays may be views of the buffer it came in."""

    fields: dict[str, np.ndarray]      # each [L, E, ...], of those in HEADED [L + 1, E, ...]; priority: of the rows that became starts
    states: list[np.ndarray]           # recurrent states, each [E, ...]
    blocks: list[tuple[Any, int]]      # packed frames of each stream and their checksum; empty where frames are raw


class ChunkFormat:
    """Sizes and order of a chunk's parts, the same for all layouts that differ in rows and actors only."""

    def __init__(self, layout: Layout, window_length: int):
        self._layout, self._window_length = layout, window_length
        length, envs = layout.chunk_length, layout.num_envs
        self._fields = {name: ArraySpec((length + (name in BOOTSTRAP_FIELDS), envs, *spec.shape), spec.dtype)
                        for name, spec in layout.fields.items()}
        self._states = {name: ArraySpec((envs, *spec.shape), spec.dtype) for name, spec in layout.state_fields.items()}
        self._parts = {**self._fields, **self._states}
        if layout.packed:
            del self._parts["frame"]  # in blocks: of each stream, and of the head of all
            self._parts |= {SIZES: ArraySpec((envs + 1,), "int32"), CHECKS: ArraySpec((envs + 1,), "uint32")}

    def pack(self, trajectories: Trajectories) -> np.ndarray:
        """[N] uint8: the newest chunk of a writer that has `trajectories` to itself."""
        arrays, layout = trajectories.arrays, trajectories.layout
        end = int(arrays["written"][0, 0])
        serials, slot = np.arange(end - layout.chunk_length, end + 1), (end - layout.chunk_length) % layout.rows
        parts = {name: arrays[name][0].take(serials[:spec.shape[0]] % layout.rows, axis=0) for name, spec in self._fields.items()
                 if name not in ("frame", "priority")}
        parts |= {name: arrays[name][0, slot // layout.chunk_length] for name in self._states}
        if "priority" in self._fields:
            starts = serials[:-1] - self._window_length
            parts["priority"] = np.where(starts[:, None] >= 0, arrays["priority"][0].take(starts % layout.rows, axis=0), np.nan)
        frames, blocks = arrays["frame"][0], list[np.ndarray]()
        if packed := layout.packed:
            place = slot // layout.chunk_length
            begins, sizes, checks = (arrays[name][0, place] for name in ("block_start", "block_bytes", "block_check"))
            head, check = compress(frames[end % len(frames)], layout.storage.level)
            blocks = [arrays["arena"][0, begin:begin + size] for begin, size in zip((begins % packed.arena_bytes).tolist(), sizes.tolist())]
            blocks.append(np.frombuffer(head, np.uint8))
            parts |= {SIZES: np.append(sizes, len(head)), CHECKS: np.append(checks, np.uint32(check))}
        else:
            parts["frame"] = frames.take(serials % len(frames), axis=0)
        pieces = [np.ascontiguousarray(parts[name], spec.dtype).reshape(-1).view(np.uint8) for name, spec in self._parts.items()]
        return np.concatenate([*pieces, *blocks])

    def unpack(self, buffer: np.ndarray) -> Chunk:
        """Raises DamagedChunk for a buffer of another size, or packed frames whose checksum is wrong."""
        least = sum(spec.nbytes for spec in self._parts.values())
        if len(buffer) < least:
            raise DamagedChunk(f"a chunk of {len(buffer):,} bytes arrived where {least:,} are the least")
        parts, offset = {}, 0
        for name, spec in self._parts.items():
            parts[name] = buffer[offset:offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            offset += spec.nbytes
        blocks = list(_blocks(buffer[offset:], parts[SIZES], parts[CHECKS])) if self._layout.packed else []
        if offset + sum(len(block) for block, _ in blocks) != len(buffer):
            raise DamagedChunk(f"a chunk of {len(buffer):,} bytes arrived, its parts have another size")
        if blocks:
            length = self._layout.chunk_length
            head = self._unpacked(*blocks.pop(), self._layout.num_envs)
            parts["frame"] = np.concatenate([np.stack([self._unpacked(*block, length) for block in blocks], axis=1), head[None]])
        return Chunk({name: parts[name] for name in self._fields}, [parts[name] for name in self._states], blocks)

    def _unpacked(self, block: Any, check: int, count: int) -> np.ndarray:
        """[count, ...] frames."""
        frame = self._layout.fields["frame"]
        frames = decompressed(block, check, count * frame.nbytes)
        if frames is None:
            raise DamagedChunk("packed frames are not what was sent")
        return frames.view(frame.dtype).reshape(count, *frame.shape)


def outbox(layout: Layout, window_length: int) -> Layout:
    """The layout of one actor's own rows: as short as a writer can do with that sends each chunk away at once."""
    rows = (-(-(window_length + 1) // layout.chunk_length) + 2) * layout.chunk_length
    arena = 0
    if layout.packed:
        smallest = StorageParams(layout.storage.codec, bytes=1)
        arena = arena_bytes(smallest, layout.fields["frame"], 1, layout.num_envs, rows, layout.chunk_length, 2 * layout.chunk_length)
    return replace(layout, num_actors=1, rows=rows, arena_bytes=arena)


def _blocks(data: np.ndarray, sizes: np.ndarray, checks: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    ends = sizes.astype(np.int64).cumsum()
    for end, size, check in zip(ends.tolist(), sizes.tolist(), checks.tolist()):
        yield data[end - size:end], check
