"""Unrolls copied out of the rings, each into a slot of its own, for rules that decide themselves what to overwrite."""

import dataclasses
from typing import Any

import numpy as np

from core.memory import Keys
from core.trajectory import Layout, Trajectories


def slots_layout(ring: Layout, slots: int, length: int) -> Layout:
    """One stream a slot: the rows of an unroll, its head, and the frames before it that its first stack wants."""
    rows = max(ring.frame_stack - 1, 0) + length + 1
    return dataclasses.replace(ring, num_actors=slots, num_envs=1, rows=rows, chunk_length=rows)


class Slots:
    """Only the thread that samples reads and writes them."""

    def __init__(self, ring: Trajectories, slots: int, length: int):
        self._ring, self._length = ring, length
        self.store = Trajectories(slots_layout(ring.layout, slots, length))
        self.store.arrays["written"][:, 0] = self.store.layout.rows  # all of them are stored in a checkpoint

    @property
    def _before(self) -> int:
        """Rows of a slot before its unroll."""
        return max(self._ring.layout.frame_stack - 1, 0)

    def keys(self, slots: np.ndarray) -> Keys:
        """Of the unrolls in these slots, for the store."""
        return Keys(np.asarray(slots, np.int64), np.full(len(slots), self._before, np.int64))

    def put(self, slots: np.ndarray, keys: Keys) -> np.ndarray:
        """Copy these unrolls of the rings into slots [K]. Returns [K] bool: False for one that its writer reached meanwhile, whose
        slot stays as it was."""
        serials = keys.serials + np.arange(-self._before, self._length + 1)[:, None]
        rows = self._ring.slots(keys.streams, serials).T  # [K, rows of a slot]
        copies = {name: self._ring.flat(name)[rows] for name in self._ring.layout.fields}
        states = self._ring.states(*keys)
        intact = self._ring.intact(*keys)
        for name, copy in copies.items():
            self.store.arrays[name][slots[intact], :, 0] = copy[intact]
        for name, state in zip(self._ring.layout.state_fields, states):
            self.store.arrays[name][slots[intact], 0, 0] = state.numpy()[intact]
        return intact

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state)
