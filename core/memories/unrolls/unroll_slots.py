"""Unrolls copied out of the rings, each into a slot of its own, for rules that decide themselves what to overwrite."""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np
import torch

from core.specs import ArraySpec
from core.trajectory.frame_compression import COPIES_RATIO, RAW, CorruptedBlock, compress, decompressed
from core.trajectory.layout import STORAGE, Layout
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds


def slots_layout(ring: Layout, slots: int, length: int) -> Layout:
    """One stream a slot: the rows of an unroll, its head, and the frames before it that its first stack wants."""
    rows = max(ring.frame_stack - 1, 0) + length + 1
    return dataclasses.replace(ring, num_actors=slots, num_envs=1, rows=rows, chunk_length=rows, storage=STORAGE, arena_bytes=0)


def packed_layout(ring: Layout, slots: int, length: int) -> tuple[Layout, int]:
    """The same without frames, and the bytes that those of all slots may take packed."""
    layout = slots_layout(ring, slots, length)
    fields = {name: spec for name, spec in ring.fields.items() if name != "frame"}
    return dataclasses.replace(layout, fields=fields), layout.num_slots * ring.fields["frame"].nbytes // COPIES_RATIO


def slots_bytes(ring: Layout, slots: int, length: int, packs: bool) -> int:
    """Of Slots, at most."""
    if ring.storage.codec == RAW or not packs:
        return slots_layout(ring, slots, length).nbytes
    layout, most = packed_layout(ring, slots, length)
    return layout.nbytes + most


class CompressedFrames:
    """Frames of the copies: those of a slot are one lz4 block, all of them together at most `most` bytes."""

    def __init__(self, rows: int, frame: ArraySpec, most: int, level: int):
        self._rows, self._frame, self._most, self._level = rows, frame, most, level
        self._blocks: dict[int, tuple[bytes, int]] = {}  # of a slot, with its checksum
        self.used = 0

    def put(self, slot: int, frames: np.ndarray) -> bool:
        """Frames [rows, *frame] into a slot, which stays as it was if there is no room for them."""
        block = compress(frames, self._level)
        used = self.used + len(block[0]) - len(self._blocks.get(slot, (b"", 0))[0])
        if used > self._most:
            return False
        self._blocks[slot], self.used = block, used
        return True

    def holds(self, slot: int) -> bool:
        return slot in self._blocks

    def take(self, slots: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Frames of these slots and rows, broadcast together: [..., *frame]."""
        slots, serials = np.broadcast_arrays(slots, serials)
        wanted, inverse = np.unique(slots, return_inverse=True)
        size = self._rows * self._frame.nbytes
        unpacked = np.empty((len(wanted), size), np.uint8)
        for number, slot in enumerate(wanted.tolist()):
            block = decompressed(*self._blocks[slot], size)
            if block is None:
                raise CorruptedBlock(f"packed frames of slot {slot} are not what was written")
            unpacked[number] = block
        frames = unpacked.view(self._frame.dtype).reshape(-1, *self._frame.shape)
        return frames.take(inverse.reshape(slots.shape) * self._rows + serials % self._rows, axis=0)

    def state_dict(self) -> dict[str, Any]:
        blocks, checks = zip(*self._blocks.values()) if self._blocks else ((), ())
        data = torch.from_numpy(np.frombuffer(b"".join(blocks), np.uint8).copy())
        return {"slots": list(self._blocks), "sizes": [*map(len, blocks)], "checks": [*checks], "data": data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        data, ends = state["data"].numpy().tobytes(), np.cumsum([0, *state["sizes"]]).tolist()
        self._blocks = {slot: (data[start:end], check)
                        for slot, check, start, end in zip(state["slots"], state["checks"], ends[:-1], ends[1:])}
        self.used = ends[-1]


class PackedTrajectories(Trajectories):
    """Of slots whose frames are packed."""

    def __init__(self, ring: Layout, slots: int, length: int):
        layout, self._most = packed_layout(ring, slots, length)
        super().__init__(layout)
        self._frame, self._level = ring.fields["frame"], ring.storage.level

    @cached_property
    def frames(self) -> CompressedFrames:  # type: ignore[override]
        return CompressedFrames(self.layout.rows, self._frame, self._most, self._level)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "frames": self.frames.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.frames.load_state_dict(state["frames"])


class UnrollStore:
    """Only the thread that samples reads and writes them. `capacity`: how many can be filled, fewer than there are once the bytes for
    packed frames are used up. `packs` False: frames stay raw even where the ring packs them."""

    def __init__(self, ring: Trajectories, slots: int, length: int, packs: bool = True):
        self._ring, self._length, self.capacity = ring, length, slots
        self._packed = packs and ring.layout.storage.codec != RAW
        layout = ring.layout
        self.store = PackedTrajectories(layout, slots, length) if self._packed else Trajectories(slots_layout(layout, slots, length))
        self.store.arrays["written"][:, 0] = self.store.layout.rows  # all of them are stored in a checkpoint

    @property
    def _before(self) -> int:
        """Rows of a slot before its unroll."""
        return max(self._ring.layout.frame_stack - 1, 0)

    def keys(self, slots: np.ndarray) -> SampleIds:
        """Of the unrolls in these slots, for the store."""
        return SampleIds(np.asarray(slots, np.int64), np.full(len(slots), self._before, np.int64))

    def put(self, slots: np.ndarray, keys: SampleIds) -> np.ndarray:
        """Copy these unrolls of the rings into slots [K]. Returns [K] bool: False for one that its writer reached meanwhile or that found
        no room, whose slot stays as it was."""
        serials = keys.serials + np.arange(-self._before, self._length + 1)[:, None]
        rows = self._ring.slots(keys.streams, serials).T  # [K, rows of a slot]
        copies = {name: self._ring.flat(name)[rows] for name in self._ring.layout.fields if name != "frame"}
        frames = self._ring.frames.take(keys.streams[:, None], serials.T)
        states = self._ring.states(*keys)
        stored = self._ring.still_valid(*keys)
        if self._packed:
            for number in np.flatnonzero(stored):
                stored[number] = self._pack(int(slots[number]), frames[number])
        else:
            copies["frame"] = frames
        for name, copy in copies.items():
            self.store.arrays[name][slots[stored], :, 0] = copy[stored]
        for name, state in zip(self._ring.layout.state_fields, states):
            self.store.arrays[name][slots[stored], 0, 0] = state.numpy()[stored]
        return stored

    def _pack(self, slot: int, frames: np.ndarray) -> bool:
        copies = self.store.frames
        assert isinstance(copies, CompressedFrames)
        if copies.put(slot, frames):
            return True
        if not copies.holds(slot):
            self.capacity = max(min(self.capacity, slot), 1)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {**self.store.state_dict(), "capacity": self.capacity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.capacity = state["capacity"]
        self.store.load_state_dict(state)
