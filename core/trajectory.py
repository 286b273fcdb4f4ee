"""Rows, chunks and windows: the one data format between actors and learners.

A *row* is one step of one environment, written once: the newest frame, first, last, action, reward, discount and what the agent
adds. Each actor owns a ring of rows of its E streams, [rows, E, ...], and is its only writer: it fills a chunk of rows, then
raises `written`. Readers trust rows in [written - rows + guard, written) and check `written` again when they have read, so
nobody locks and a killed writer leaves nothing locked. Row t of a stream holds the action taken at its observation and
the reward and discount which that action earned; a `last` row ends an episode: no action was taken there.

Of the row after the newest chunk, the *head*, observation, first and last are readable too: an unroll of a whole chunk can
bootstrap from what its last action led to without waiting for the next chunk.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.env import EnvSpec, TimeStep
from core.shared import ArraySpec, SharedArrays, available_bytes, total_bytes


@dataclass(frozen=True)
class WindowSpec:
    """What a learner samples: rows t .. t + length, and the stacked observations of some of them.

    With crosses_episodes False a position past the end of the episode means its last row, whose observation a truncated
    episode bootstraps from.
    """

    length: int                       # rows after the first
    observations: tuple[int, ...]     # positions in 0 .. length
    crosses_episodes: bool = False
    stride: int = 0                   # 0: windows start at any row; else at its multiples only, and chunks are that long


class Window(NamedTuple):
    """T + 1 rows of B streams, time-major. P is the number of observation positions asked for."""

    observations: Tensor       # [P, B, *observation_shape] as stored
    firsts: Tensor             # [T + 1, B] bool
    lasts: Tensor              # [T + 1, B] bool
    actions: Tensor            # [T + 1, B, *action shape]
    rewards: Tensor            # [T + 1, B] float32
    discounts: Tensor          # [T + 1, B] float32
    extras: dict[str, Tensor]  # each [T + 1, B, ...]
    states: tuple[Tensor, ...] = ()  # recurrent state before row 0, each [B, ...]; of windows that start with a chunk

    def to(self, device: torch.device) -> "Window":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        extras = {name: moved(tensor) for name, tensor in self.extras.items()}
        return Window._make([*map(moved, self[:6]), extras, tuple(map(moved, self.states))])


@dataclass(frozen=True)
class Layout:
    """Sizes of the shared rows of all actors."""

    num_actors: int
    num_envs: int                     # streams an actor
    rows: int                         # rows a stream, a multiple of chunk_length
    chunk_length: int                 # rows published together
    frame_stack: int
    fields: dict[str, ArraySpec]      # one row of one stream
    extras: tuple[str, ...] = field(default=())  # the fields that Window.extras carries
    states: tuple[ArraySpec, ...] = ()           # recurrent state of one stream, stored once a chunk

    @staticmethod
    def of(spec: EnvSpec, extras: dict[str, ArraySpec], *, capacity: int, num_actors: int, num_envs: int,
           chunk_length: int, with_priority: bool, states: tuple[ArraySpec, ...] = ()) -> "Layout":
        """The layout of `capacity` agent steps of this environment; rounded up to whole chunks, guard rows added."""
        fields = {"frame": spec.frame, "first": ArraySpec((), "bool"), "last": ArraySpec((), "bool"),
                  "action": spec.action.array, "reward": ArraySpec((), "float32"),
                  "discount": ArraySpec((), "float32"), **extras}
        if with_priority:
            fields["priority"] = ArraySpec((), "float32")
        chunks = -(-capacity // (num_actors * num_envs * chunk_length)) + 2 + -(-spec.frame_stack // chunk_length)
        return Layout(num_actors, num_envs, chunks * chunk_length, chunk_length, spec.frame_stack, fields, tuple(extras), states)

    @property
    def num_streams(self) -> int:
        return self.num_actors * self.num_envs

    @property
    def num_slots(self) -> int:
        return self.num_streams * self.rows

    @property
    def guard(self) -> int:
        """Oldest rows that readers leave alone: the chunk being written, and one more so that a reader is rarely lapped."""
        return 2 * self.chunk_length

    @property
    def state_fields(self) -> dict[str, ArraySpec]:
        return {f"state {number}": spec for number, spec in enumerate(self.states)}

    def arrays(self) -> dict[str, ArraySpec]:
        lead = (self.num_actors, self.rows, self.num_envs)
        specs = {name: ArraySpec((*lead, *spec.shape), spec.dtype) for name, spec in self.fields.items()}
        lead = (self.num_actors, self.rows // self.chunk_length, self.num_envs)
        specs |= {name: ArraySpec((*lead, *spec.shape), spec.dtype) for name, spec in self.state_fields.items()}
        counters = ArraySpec((self.num_actors, 8), "int64")  # a cache line each; column 0 counts
        return {**specs, "written": counters, "oldest": counters}

    @property
    def nbytes(self) -> int:
        """Bytes that Trajectories(self) allocates."""
        return total_bytes(self.arrays())


class Trajectories:
    """The shared rows of all actors."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.arrays = SharedArrays(layout.arrays())
        actors, envs = np.divmod(np.arange(layout.num_streams), layout.num_envs)
        self._origins = actors * layout.rows * layout.num_envs + envs  # [num_streams] flat index of a stream's row 0

    def written(self) -> np.ndarray:
        """[num_actors] int64: rows a stream published by each actor so far; never falls."""
        return self.arrays["written"][:, 0].copy()

    def starts(self, window_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Serial numbers [low, high) of each actor's rows from which a whole window can be read, both [num_actors]."""
        written = self.written()
        low = np.maximum(written - self.layout.rows + self.layout.guard, 0)
        low = np.maximum(low, self.arrays["oldest"][:, 0])
        low = np.where(low > 0, low + max(self.layout.frame_stack - 1, 0), 0)
        return low, np.maximum(written - window_length, low)

    def size(self) -> int:
        low, high = self.starts(0)
        return int((high - low).sum()) * self.layout.num_envs

    def intact(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """[B] bool: the rows of these windows (and of their first stack) had not been touched by their writer until now.

        Touched may be the open chunk and the head that follows it, and what a snapshot had to leave out.
        """
        actors = streams // self.layout.num_envs
        oldest_read = serials - max(self.layout.frame_stack - 1, 0)
        safe = self.written() - self.layout.rows + self.layout.chunk_length + 1
        return np.maximum(oldest_read, 0) >= np.maximum(safe, self.arrays["oldest"][:, 0])[actors]

    def slots(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Flat row indices of (stream, serial), broadcast together."""
        return self._origins[streams] + serials % self.layout.rows * self.layout.num_envs

    def flat(self, name: str) -> np.ndarray:
        """A field as [num_slots, ...]."""
        return self.arrays[name].reshape(self.layout.num_slots, *self.layout.fields[name].shape)

    def gather(self, streams: np.ndarray, serials: np.ndarray, spec: WindowSpec) -> Window:
        """The windows that start at rows (streams [B], serials [B])."""
        slots = self.slots(streams, serials + np.arange(spec.length + 1)[:, None])  # [T + 1, B]

        def take(name: str) -> Tensor:
            return torch.from_numpy(self.flat(name).take(slots, axis=0))

        lasts = take("last")
        positions = np.broadcast_to(np.array(spec.observations, np.int64)[:, None], (len(spec.observations), len(serials)))
        if not spec.crosses_episodes:
            ends = lasts.numpy()
            end = np.where(ends.any(0), ends.argmax(0), spec.length)  # [B] position of the episode's last row
            positions = np.minimum(positions, end)
        return Window(self._observations(streams, serials + positions), take("first"), lasts, take("action"),
                      take("reward"), take("discount"), {name: take(name) for name in self.layout.extras},
                      self.states(streams, serials))

    def states(self, streams: np.ndarray, serials: np.ndarray) -> tuple[Tensor, ...]:
        """Recurrent states [B, ...] at the chunks of these rows."""
        actors, envs = np.divmod(streams, self.layout.num_envs)
        chunks = serials // self.layout.chunk_length % (self.layout.rows // self.layout.chunk_length)
        return tuple(torch.from_numpy(self.arrays[name][actors, chunks, envs]) for name in self.layout.state_fields)

    def _observations(self, streams: np.ndarray, rows: np.ndarray) -> Tensor:
        """Stacked observations of rows [P, B], zeros before an episode's start as the environment pads.

        numpy's take copies whole frames and, unlike torch's index_select, never wakes the learner's compute threads.
        """
        frames, stack = self.flat("frame"), self.layout.frame_stack
        if not stack:
            return torch.from_numpy(frames.take(self.slots(streams, rows), axis=0))
        back = np.arange(stack - 1, -1, -1)  # oldest first
        slots = self.slots(streams[:, None], rows[..., None] - back)  # [P, B, S]
        stacked = frames.take(slots, axis=0)
        firsts = self.flat("first")[slots]
        before = np.zeros_like(firsts)  # a later frame of the stack started the episode
        before[..., :-1] = np.logical_or.accumulate(firsts[..., :0:-1], axis=-1)[..., ::-1]
        if before.any():
            stacked[before] = 0
        return torch.from_numpy(stacked)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the rows in use. Writers may go on meanwhile: what they overwrite is left out by `oldest`.

        Raises MemoryError when the machine has no room for the copies.
        """
        if self.layout.nbytes > available_bytes():
            raise MemoryError(f"{self.layout.nbytes:,} bytes are needed to copy the replay and {available_bytes():,} are free")
        written = self.arrays["written"].copy()
        used = self._used(written)
        state = {name: self.arrays[name][:, :length].copy() for name, length in self._lengths(used).items()}
        touched = self.arrays["written"] - self.layout.rows + self.layout.chunk_length + 1  # read after the rows were copied
        state |= {"written": written, "oldest": np.maximum(self.arrays["oldest"], touched)}
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only while nobody writes. Raises ValueError naming the field whose shape or dtype differs."""
        lengths = self._lengths(self._used(state["written"].numpy()) if "written" in state else 0)
        for name, spec in self.layout.arrays().items():
            shape = (spec.shape[0], lengths[name], *spec.shape[2:]) if name in lengths else spec.shape
            stored = state[name].numpy() if name in state else None
            if stored is None or stored.shape != shape or stored.dtype != spec.dtype:
                found = "absent" if stored is None else f"{stored.dtype} {stored.shape}"
                raise ValueError(f"stored replay does not fit: field {name} is {found}, this run needs {spec.dtype} {shape}")
        for name in self.layout.arrays():
            stored = state[name].numpy()
            self.arrays[name][:, :stored.shape[1]] = stored

    def _used(self, written: np.ndarray) -> int:
        """Rows of a stream that hold anything: the published ones and the head."""
        return min(self.layout.rows, int(written.max()) + 1)

    def _lengths(self, used: int) -> dict[str, int]:
        """Of each array's second axis, what rows 0 .. used of a stream take."""
        return {**dict.fromkeys(self.layout.fields, used),
                **dict.fromkeys(self.layout.state_fields, -(-used // self.layout.chunk_length))}


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
        self._counter = trajectories.arrays["written"][actor_ind]
        self._filled, self._room = 0, room
        if self._counter[0]:
            self._rows["last"][(self._counter[0] - 1) % self._layout.rows] = True

    def has_room(self) -> bool:
        """False while the memory wants no new chunk; one that was begun may always be finished."""
        return self._filled > 0 or self._room is None or self._room()

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

    def _observe(self, timestep: TimeStep, ahead: int) -> int:
        """What is seen goes into the row `ahead` of the published ones; returns its slot."""
        slot = (int(self._counter[0]) + ahead) % self._layout.rows
        rows = self._rows
        rows["frame"][slot] = timestep.observation[:, -1] if self._layout.frame_stack else timestep.observation
        rows["first"][slot], rows["last"][slot] = timestep.first, timestep.last
        return slot

    def _publish(self, head: TimeStep) -> int:
        self._observe(head, self._filled)
        start, end = int(self._counter[0]), int(self._counter[0]) + self._filled
        if "priority" in self._rows:
            self._write_priorities(max(start - self._window.length, 0), end - self._window.length)
        chunk = np.arange(start, end) % self._layout.rows
        self._counter[0], self._filled = end, 0
        return int((~self._rows["last"][chunk]).sum())

    def _write_priorities(self, low: int, high: int) -> None:
        """Of the rows that this chunk makes starts. NaN says: none supplied; rows that end an episode have none."""
        starts = np.arange(low, high)
        starts = starts[starts % (self._window.stride or 1) == 0]
        rows = starts % self._layout.rows
        if self._priorities is None or not len(rows):
            self._rows["priority"][rows] = np.nan
            return
        num_envs = self._layout.num_envs
        serials = np.repeat(starts, num_envs)
        streams = np.tile(np.arange(num_envs), len(starts)) + self._actor_ind * num_envs
        window = self._trajectories.gather(streams, serials, self._window)
        supplied = self._priorities(window)
        if supplied is None:
            self._rows["priority"][rows] = np.nan
            return
        priorities = np.where(window.lasts[0].numpy(), 0.0, supplied)
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError(f"initial priorities must be finite and not negative: actor {self._actor_ind} computed {priorities}")
        self._rows["priority"][rows] = priorities.reshape(-1, num_envs)
