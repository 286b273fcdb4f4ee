"""The actors' side of the rows: filling a chunk, publishing it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from core.specs import WindowSpec
from core.trajectory.chunk_codec import Chunk
from core.trajectory.frame_arena import CompressedFrameWriter
from core.trajectory.ring_buffer import Trajectories
from core.types import TimeStep, Window


class ChunkWriter:
    """Writes the rows of one actor. A writer that takes over from a dead one ends its predecessor's open episodes as truncated."""

    def __init__(self, trajectories: Trajectories, actor_ind: int, window: WindowSpec,
                 priorities: Callable[[Window], np.ndarray | None] | None = None, room: Callable[[], bool] | None = None):
        """`priorities` turns windows [T + 1, B] without observations into initial priorities [B], just before their starts
        can be sampled. None: the memory uses the largest priority it has seen. `room` says whether a new chunk may be begun."""
        self._trajectories, self._actor_ind, self._priorities = trajectories, actor_ind, priorities
        self._layout = trajectories.layout
        self._window = dataclasses.replace(window, observations=())
        self._rows = {name: trajectories.arrays[name][actor_ind] for name in (*self._layout.fields, *self._layout.state_fields)}
        self._written, self._tickets = trajectories.arrays["written"], trajectories.arrays["tickets"]
        self._counter = self._written[actor_ind]
        self._filled, self._room = 0, room
        packed = self._layout.packed
        self._packer = CompressedFrameWriter(packed, trajectories.arrays, actor_ind, self._layout.storage.level) if packed else None
        if self._counter[0]:
            self._rows["last"][(self._counter[0] - 1) % self._layout.rows] = True

    def has_room(self) -> bool:
        """False while the memory wants no new chunk; one that was begun may always be finished."""
        return self._filled > 0 or self._room is None or self._room()

    @property
    def short(self) -> bool:
        """Not two windows have been published."""
        return bool(self._counter[0] < self._window.length + 2)

    def append(self, before: TimeStep, action: np.ndarray, after: TimeStep, extras: Mapping[str, np.ndarray],
               state: Sequence[Tensor] = ()) -> int:
        """One row of each stream: what was seen in `before`, the action, and what `after` says it earned.

        `extras` must have what the layout declares; `state` is the recurrent state that the action was chosen with. Returns the
        agent steps this call published: 0 until a chunk is full; rows that end an episode are no steps.
        """
        slot = self._observe(before, self._filled)
        rows = self._rows
        rows["action"][slot] = action
        rows["reward"][slot], rows["discount"][slot] = after.reward, after.discount
        for name in self._layout.extras:
            rows[name][slot] = extras[name]
        if not self._filled:
            for name, tensor in zip(self._layout.state_fields, state, strict=True):
                rows[name][slot // self._layout.chunk_length] = tensor.cpu().numpy()
        self._filled += 1
        return self._publish(after) if self._filled == self._layout.chunk_length else 0

    def store(self, chunk: Chunk) -> int:
        """A whole chunk that a writer elsewhere has filled, of the same fields. Returns the agent steps published."""
        length, rows, frames = self._layout.chunk_length, self._rows, self._rows["frame"]
        start = int(self._counter[0])
        slots, head = slice(start % self._layout.rows, start % self._layout.rows + length), (start + length) % self._layout.rows
        for name in self._layout.fields.keys() - {"frame", "priority"}:
            rows[name][slots] = chunk.fields[name][:length]
        for name in ("first", "last"):
            rows[name][head] = chunk.fields[name][length]
        for name, values in zip(self._layout.state_fields, chunk.states, strict=True):
            rows[name][slots.start // length] = values
        frames[start % len(frames):start % len(frames) + length] = chunk.fields["frame"][:length]
        frames[(start + length) % len(frames)] = chunk.fields["frame"][length]
        if "priority" in rows:
            starts = np.arange(start, start + length) - self._window.length
            rows["priority"][starts[starts >= 0] % self._layout.rows] = chunk.fields["priority"][starts >= 0]
        if self._packer:
            self._packer.store(start // length, chunk.blocks)
        return self._count(length)

    def _observe(self, timestep: TimeStep, ahead: int) -> int:
        """What is seen goes into the row `ahead` of the published ones; returns its slot."""
        slot = (int(self._counter[0]) + ahead) % self._layout.rows
        rows, frames = self._rows, self._rows["frame"]
        row = (int(self._counter[0]) + ahead) % len(frames)
        frames[row] = timestep.observation[:, -1] if self._layout.frame_stack else timestep.observation
        rows["first"][slot], rows["last"][slot] = timestep.first, timestep.last
        return slot

    def _publish(self, head: TimeStep) -> int:
        self._observe(head, self._filled)
        start, end = int(self._counter[0]), int(self._counter[0]) + self._filled
        if "priority" in self._rows:
            self._write_priorities(max(start - self._window.length, 0), end - self._window.length)
        if self._packer:
            self._packer.pack(start // self._layout.chunk_length)
        return self._count(self._filled)

    def _count(self, length: int) -> int:
        """Show these rows to the readers, with the next ticket."""
        start = int(self._counter[0])
        self._tickets[self._actor_ind, start // self._layout.chunk_length % self._tickets.shape[1]] = self._next_ticket()
        self._counter[0], self._filled = start + length, 0
        return int((~self._rows["last"][np.arange(start, start + length) % self._layout.rows]).sum())

    def _next_ticket(self) -> int:
        """Return one more than the newest ticket of any actor's published chunks."""
        newest = self._written[:, 0] // self._layout.chunk_length - 1
        return int(self._tickets[np.arange(len(newest)), newest % self._tickets.shape[1]].max()) + 1

    def _write_priorities(self, low: int, high: int) -> None:
        """Of the rows that this chunk makes starts. NaN says: none supplied; a row that ends an episode is no start of a short window."""
        starts = np.arange(low, high)
        starts = starts[starts % (self._window.stride or 1) == 0]
        rows, num_envs = starts % self._layout.rows, self._layout.num_envs
        self._rows["priority"][rows] = np.nan
        if self._priorities is None or not len(rows):
            return
        streams = np.tile(np.arange(num_envs), len(starts)) + self._actor_ind * num_envs
        window = self._trajectories.gather(streams, np.repeat(starts, num_envs), self._window)
        supplied = self._priorities(window)
        if supplied is None:
            return
        priorities = supplied if self._window.stride else np.where(window.lasts[0].numpy(), 0.0, supplied)
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError(f"initial priorities must be finite and not negative: actor {self._actor_ind} computed {priorities}")
        self._rows["priority"][rows] = priorities.reshape(-1, num_envs)
