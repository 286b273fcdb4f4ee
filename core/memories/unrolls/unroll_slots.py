"""Unrolls copied out of the rings, each into its own slot, for strategies that decide themselves what to overwrite."""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np
import torch

from core.specs import ArraySpec
from core.trajectory.frame_compression import RAW, CorruptedBlock, compress, decompressed, max_block_bytes
from core.trajectory.ring_buffer import STORAGE, Layout, Trajectories
from core.types import SampleIds

COPIES_RATIO = 8  # compression assumed for the frames of whole unrolls


def slots_layout(ring: Layout, slots: int, length: int, packs: bool) -> tuple[Layout, int]:
    """Return the layout of copies, one environment a slot, and the most bytes that compressed frames may take.

    A slot holds the steps of an unroll, its bootstrap step, and earlier frames that its first frame stack needs. If
    frames are compressed, the layout is without them, and one unroll always fits into the bytes. If they stay raw, the
    number of bytes is 0.
    """
    steps = max(ring.frame_stack - 1, 0) + length + 1
    layout = dataclasses.replace(
        ring, num_actors=slots, num_envs=1, ring_length=steps, chunk_length=steps, storage=STORAGE, arena_bytes=0
    )
    if ring.storage.frame_compression == RAW or not packs:
        return layout, 0
    fields = {name: spec for name, spec in ring.fields.items() if name != "frame"}
    unroll_bytes = steps * ring.fields["frame"].nbytes
    max_bytes = max(slots * unroll_bytes // COPIES_RATIO, max_block_bytes(unroll_bytes))
    return dataclasses.replace(layout, fields=fields), max_bytes


def slots_bytes(ring: Layout, slots: int, length: int, packs: bool) -> int:
    """Return the bytes that an UnrollStore takes at most."""
    layout, max_bytes = slots_layout(ring, slots, length, packs)
    return layout.nbytes + max_bytes


class CompressedFrames:
    """Compressed frames of copies: one lz4 block for each slot, together at most `max_bytes` bytes."""

    def __init__(self, steps: int, frame: ArraySpec, max_bytes: int, level: int):
        self._steps, self._frame, self._max_bytes, self._level = steps, frame, max_bytes, level
        self._blocks: dict[int, tuple[bytes, int]] = {}  # block and checksum, by slot
        self.used = 0

    def put(self, slot: int, frames: np.ndarray) -> bool:
        """Store frames [steps, *frame] in a slot; if they do not fit, leave the slot as it is and return False."""
        block = compress(frames, self._level)
        used = self.used + len(block[0]) - len(self._blocks.get(slot, (b"", 0))[0])
        if used > self._max_bytes:
            return False
        self._blocks[slot], self.used = block, used
        return True

    def drop(self, slot: int) -> None:
        """Free the bytes of a slot."""
        self.used -= len(self._blocks.pop(slot)[0])

    def __contains__(self, slot: int) -> bool:
        return slot in self._blocks

    def take(self, slots: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        """Return the frames of these slots and steps, [..., *frame]; the arguments are broadcast together.

        Raises CorruptedBlock for a damaged block.
        """
        slots, step_ids = np.broadcast_arrays(slots, step_ids)
        needed, inverse = np.unique(slots, return_inverse=True)
        size = self._steps * self._frame.nbytes
        unpacked = np.empty((len(needed), size), np.uint8)
        for number, slot in enumerate(needed.tolist()):
            block = decompressed(*self._blocks[slot], size)
            if block is None:
                raise CorruptedBlock(f"the compressed frames of slot {slot} are not what was written")
            unpacked[number] = block
        frames: np.ndarray = unpacked.view(self._frame.dtype).reshape(-1, *self._frame.shape)
        taken: np.ndarray = frames.take(inverse.reshape(slots.shape) * self._steps + step_ids % self._steps, axis=0)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the blocks as tensors and plain values."""
        blocks, checks = zip(*self._blocks.values()) if self._blocks else ((), ())
        data = torch.from_numpy(np.frombuffer(bytearray().join(blocks), np.uint8))  # one copy
        return {"slots": list(self._blocks), "sizes": [*map(len, blocks)], "checks": [*checks], "data": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""
        data, ends = state["data"].numpy().tobytes(), np.cumsum([0, *state["sizes"]]).tolist()
        self._blocks = {
            slot: (data[start:end], check)
            for slot, check, start, end in zip(state["slots"], state["checks"], ends[:-1], ends[1:])
        }
        self.used = ends[-1]


class PackedTrajectories(Trajectories):
    """Slots whose frames are compressed."""

    def __init__(self, layout: Layout, max_bytes: int, ring: Layout):
        super().__init__(layout)
        self._max_bytes, self._frame = max_bytes, ring.fields["frame"]
        self._level = ring.storage.compression_level

    @cached_property
    def frames(self) -> CompressedFrames:  # type: ignore[override]
        """Return the compressed frames of the slots."""
        return CompressedFrames(self.layout.ring_length, self._frame, self._max_bytes, self._level)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "frames": self.frames.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.frames.load_state_dict(state["frames"])


class UnrollStore:
    """Copies of unrolls in slots, which only the thread that samples reads and writes.

    `capacity` is the number of slots that can be filled. It falls once the bytes of compressed frames are used up.
    """

    def __init__(self, ring: Trajectories, slots: int, length: int, packs: bool = True):
        """Allocate the slots; if `packs` is False, frames stay raw even if the ring compresses them."""
        self._ring, self._length, self.capacity = ring, length, slots
        self._earlier_steps = max(ring.layout.frame_stack - 1, 0)  # of a slot, before its unroll
        layout, max_bytes = slots_layout(ring.layout, slots, length, packs)
        self.store = PackedTrajectories(layout, max_bytes, ring.layout) if max_bytes else Trajectories(layout)
        self.store.arrays["written"][:, 0] = self.store.layout.ring_length  # a checkpoint stores all slots

    def keys(self, slots: np.ndarray) -> SampleIds:
        """Return the unrolls in these slots, as keys of `store`."""
        return SampleIds(np.asarray(slots, np.int64), np.full(len(slots), self._earlier_steps, np.int64))

    def put(self, slots: np.ndarray, keys: SampleIds) -> np.ndarray:
        """Copy unrolls of the rings into slots [K].

        Returns:
            Which unrolls were copied, [K] bool. An unroll that its writer reached meanwhile, or whose frames do not
            fit, leaves its slot as it was.
        """
        step_ids = keys.step_ids[:, None] + np.arange(-self._earlier_steps, self._length + 1)  # [K, steps of a slot]
        env_ids = keys.env_ids[:, None]
        ring_slots = self._ring.slots(env_ids, step_ids)
        copies = {name: self._ring.flat(name)[ring_slots] for name in self._ring.layout.fields if name != "frame"}
        frames = self._ring.take_frames(env_ids, step_ids, ring_slots)
        states = self._ring.states(ring_slots[:, self._earlier_steps])
        stored = self._ring.still_valid(*keys)
        if isinstance(self.store, PackedTrajectories):
            packed = self.store.frames
            for number in np.flatnonzero(stored):
                slot = int(slots[number])
                stored[number] = packed.put(slot, frames[number])
                if slot not in packed:
                    self.capacity = min(self.capacity, slot)
        else:
            copies["frame"] = frames
        for name, copy in copies.items():
            self.store.arrays[name][slots[stored], :, 0] = copy[stored]
        for name, state in zip(self._ring.layout.state_fields, states):
            self.store.arrays[name][slots[stored], 0, 0] = state.numpy()[stored]
        return stored

    def drop_last(self) -> None:
        """Lower `capacity` by the last slot, which is filled, and free the bytes of its compressed frames."""
        assert isinstance(self.store, PackedTrajectories)
        self.capacity -= 1
        self.store.frames.drop(self.capacity)

    def state_dict(self) -> dict[str, Any]:
        """Return the copies as tensors and plain values."""
        return {**self.store.state_dict(), "capacity": self.capacity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""
        self.capacity = state["capacity"]
        self.store.load_state_dict(state)
