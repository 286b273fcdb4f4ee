"""Shared ring buffers of steps, chunks and windows: the one data format between actors and learners.

A step of an environment is written once: its newest frame, `first`, `last`, action, reward, discount, and what the
agent adds. Step t holds the action taken at its observation, and the reward and discount which that action earned. A
`last` step ends an episode: no action was taken there.

- Each actor owns the rings of its E environments, [ring_length, E, ...], and is their only writer. It fills a chunk of
  steps, then raises `written`.
- Readers use steps in [written - ring_length + overwrite margin, written) and check `written` again after reading.
  Nobody locks, so a killed writer leaves nothing locked.
- The step after the newest chunk (the bootstrap step) is partly published: readers may use its observation, `first`,
  `last` and mask of legal actions. A learner can therefore bootstrap a full-chunk unroll without waiting for the next
  chunk.
- Every chunk has a ticket, which tells in what order the chunks of all actors were published: one more than the newest
  ticket that its writer saw. No counter is shared, and only chunks published at the same moment may have equal tickets.
  A checkpoint stores them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from core.common.shared_arrays import CACHE_LINE, SharedArrays, total_bytes
from core.common.system import available_bytes
from core.specs import ArraySpec, EnvSpec, WindowSpec
from core.trajectory.frame_compression import (
    RAW,
    CompressedFrameReader,
    GatherThreadPool,
    PackedLayout,
    StorageParams,
    arena_bytes,
)
from core.types import ACTION_MASK, Window

STORAGE = StorageParams()


@dataclass(frozen=True)
class Layout:
    """Sizes of the ring buffers of all actors."""

    num_actors: int
    num_envs: int  # environments of an actor
    ring_length: int  # steps that the ring of an environment holds, a multiple of chunk_length
    chunk_length: int  # steps published together
    frame_stack: int
    fields: dict[str, ArraySpec]  # of one step of one environment
    extras: tuple[str, ...] = ()  # fields that Window.extras carries
    states: tuple[ArraySpec, ...] = ()  # recurrent state of one environment, stored once a chunk
    storage: StorageParams = STORAGE  # of the frames
    arena_bytes: int = 0  # of an actor's compressed frames; 0 stores raw frames

    @staticmethod
    def of(
        spec: EnvSpec,
        extras: dict[str, ArraySpec],
        *,
        capacity: int,
        num_actors: int,
        num_envs: int,
        chunk_length: int,
        with_priority: bool,
        states: tuple[ArraySpec, ...] = (),
        storage: StorageParams = STORAGE,
        kept_steps_per_env: int = 1,
    ) -> "Layout":
        """Return the layout that holds `capacity` agent steps, rounded up to whole chunks, plus the overwrite margin.

        Args:
            spec: The environment.
            extras: Fields that the agent adds to a step. Masks of legal actions join them if the environment has any.
            capacity: Agent steps of all actors. With raw frames, `replay.max_frame_bytes` may lower the number.
            num_actors: Number of actors.
            num_envs: Environments of each actor.
            chunk_length: Steps that are published together.
            with_priority: True if actors write initial priorities.
            states: Recurrent state of one environment.
            storage: Compression of frames.
            kept_steps_per_env: Steps of each environment whose frames always fit, whatever the limit.

        Raises:
            ValueError: an extra has the name of another field, whose values it would replace.
        """
        flag, number = ArraySpec((), "bool"), ArraySpec((), "float32")
        if spec.action_mask:
            extras = {**extras, ACTION_MASK: spec.action_mask}
        fields = {"frame": spec.frame, "first": flag, "last": flag, "action": spec.action.array}
        fields |= {"reward": number, "discount": number}
        chunk_steps, margin = num_actors * num_envs * chunk_length, 2 + -(-spec.frame_stack // chunk_length)
        chunks = -(-capacity // chunk_steps) + margin
        if storage.frame_compression == RAW and storage.max_frame_bytes is not None:
            min_chunks = kept_steps_per_env // chunk_length + 1 + margin  # more steps than those kept, to start at one
            chunks = min(chunks, max(storage.max_frame_bytes // (chunk_steps * spec.frame.nbytes), min_chunks))
        sizes, arena = (num_actors, num_envs, chunks * chunk_length, chunk_length), 0
        if storage.frame_compression != RAW:
            min_steps = 2 * chunk_length + spec.frame_stack + kept_steps_per_env
            arena = arena_bytes(storage, PackedLayout(*sizes, spec.frame, 0), min_steps)
        layout = Layout(*sizes, spec.frame_stack, fields, tuple(extras), states, storage, arena)
        if taken := extras.keys() & {*layout.arrays(), "priority"}:
            raise ValueError(f"Agent.extras declares {', '.join(sorted(taken))}, a name that is taken: choose another")
        return replace(layout, fields={**fields, **extras, **({"priority": number} if with_priority else {})})

    @property
    def total_envs(self) -> int:
        """Return the number of environments of all actors."""
        return self.num_actors * self.num_envs

    @property
    def num_slots(self) -> int:
        """Return the number of steps that all rings hold."""
        return self.total_envs * self.ring_length

    @property
    def overwrite_margin(self) -> int:
        """Return how many of the oldest steps readers leave alone.

        The writer is overwriting the first chunk of them. The second keeps a slow reader from being overtaken often.
        """
        return 2 * self.chunk_length

    @property
    def state_fields(self) -> dict[str, ArraySpec]:
        """Return the recurrent states by the names of their arrays."""
        return {f"state {number}": spec for number, spec in enumerate(self.states)}

    @property
    def packed(self) -> PackedLayout | None:
        """Return the layout of compressed frames; if frames are raw, return None."""
        sizes = self.num_actors, self.num_envs, self.ring_length, self.chunk_length
        return PackedLayout(*sizes, self.fields["frame"], self.arena_bytes) if self.arena_bytes else None

    def arrays(self) -> dict[str, ArraySpec]:
        """Return every array that is allocated, by name."""
        steps = (self.num_actors, self.ring_length, self.num_envs)
        chunks = (self.num_actors, self.ring_length // self.chunk_length, self.num_envs)
        specs = {name: ArraySpec((*steps, *spec.shape), spec.dtype) for name, spec in self.fields.items()}
        specs |= {name: ArraySpec((*chunks, *spec.shape), spec.dtype) for name, spec in self.state_fields.items()}
        if packed := self.packed:
            specs |= packed.arrays()
        counters = ArraySpec((self.num_actors, CACHE_LINE), "int64")  # one line for each actor; column 0 counts
        return {**specs, "tickets": ArraySpec(chunks[:2], "int64"), "written": counters, "oldest": counters}

    @property
    def nbytes(self) -> int:
        """Return the bytes that Trajectories(self) allocates."""
        return total_bytes(self.arrays())


Array = TypeVar("Array", np.ndarray, Tensor)


class WindowGatherer(ABC, Generic[Array]):
    """A reader of windows from rings whose fields are numpy arrays or tensors of one device, [num_slots, ...].

    The shared rings use numpy, because torch's operators cost more on arrays as small as a batch's indices: sampling
    through tensors ran at 0.71 to 0.98 of the speed (batches of 32 and 256 on one core). Shapes are fixed and Python
    reads no value, so that CUDA graphs can capture the gathering from tensors.
    """

    library: Any  # the module numpy or torch
    device: Any  # of the arrays
    layout: Layout

    @abstractmethod
    def _take(self, name: str, slots: Array) -> Array:
        """Return copies of a field's entries at flat indices."""

    @abstractmethod
    def take_frames(self, env_ids: Array, step_ids: Array, slots: Array) -> Array:
        """Return copies of the frames of steps, whose flat indices are `slots`, [*slots.shape, *frame]."""

    @abstractmethod
    def _clear(self, frames: Array, mask: Array) -> None:
        """Set the frames [P, B, S, *frame] to zero for which mask [P, B, S] is True."""

    @cached_property
    def _first_slots(self) -> Array:
        """Return the flat index of each environment's step 0, [total_envs] int64."""
        actors, envs = np.divmod(np.arange(self.layout.total_envs), self.layout.num_envs)
        slots = actors * self.layout.ring_length * self.layout.num_envs + envs
        first_slots: Array = self.library.asarray(slots, device=self.device)
        return first_slots

    @cached_property
    def _ages(self) -> Array:
        """Return how many steps each frame of a stack is older than the newest one, [S] int64, oldest first."""
        ages: Array = self.library.asarray(np.arange(self.layout.frame_stack - 1, -1, -1), device=self.device)
        return ages

    @cached_property
    def _offsets(self) -> dict[WindowSpec, tuple[Array, Array]]:
        """Return the positions of steps, [T + 1, 1], and of observations, [P, 1], of the windows gathered so far."""
        return {}

    def slots(self, env_ids: Array, step_ids: Array) -> Array:
        """Return the flat indices of steps; env_ids and step_ids are broadcast together."""
        slots: Array = self._first_slots[env_ids] + step_ids % self.layout.ring_length * self.layout.num_envs
        return slots

    def gather(self, env_ids: Array, step_ids: Array, spec: WindowSpec) -> Window:
        """Return the windows that start at steps (env_ids [B], step_ids [B]), both int64."""
        if spec not in self._offsets:
            steps, observed = np.arange(spec.length + 1), np.array(spec.observations, np.int64)
            self._offsets[spec] = tuple(
                self.library.asarray(each[:, None], device=self.device) for each in (steps, observed)
            )
        offsets, positions = self._offsets[spec]
        slots = self.slots(env_ids, step_ids + offsets)  # [T + 1, B]
        lasts, library = self._take("last", slots), self.library
        if not spec.stride:
            episode_end = library.amin(library.where(lasts, offsets, spec.length), 0)  # [B]
            positions = library.minimum(positions, episode_end)  # [P, B]
        observations = self._observations(env_ids, step_ids + positions)
        names = ("first", "action", "reward", "discount", *self.layout.extras)
        first, action, reward, discount, *extras = (torch.asarray(self._take(name, slots)) for name in names)
        fields = first, torch.asarray(lasts), action, reward, discount
        named = dict(zip(self.layout.extras, extras))
        return Window(torch.asarray(observations), *fields, named, self.states(slots[0]))

    def states(self, slots: Array) -> tuple[Tensor, ...]:
        """Return the recurrent states, each [B, ...], stored with the chunks of steps at flat indices [B]."""
        if not self.layout.states:
            return ()
        num_envs = self.layout.num_envs
        chunks = slots // (num_envs * self.layout.chunk_length) * num_envs + slots % num_envs
        return tuple(torch.asarray(self._take(name, chunks)) for name in self.layout.state_fields)

    def _observations(self, env_ids: Array, step_ids: Array) -> Array:
        """Return the observations of steps [P, B], with zeros for frames before the start of their episode."""
        if not self.layout.frame_stack:
            return self.take_frames(env_ids, step_ids, self.slots(env_ids, step_ids))
        env_ids, step_ids = env_ids[:, None], step_ids[..., None] - self._ages  # [B, 1] and [P, B, S]
        slots = self.slots(env_ids, step_ids)
        frames = self.take_frames(env_ids, step_ids, slots)
        ages_of_firsts = self.library.where(self._take("first", slots), self._ages, len(self._ages))
        self._clear(frames, self._ages > self.library.amin(ages_of_firsts, -1)[..., None])
        return frames


class Trajectories(WindowGatherer[np.ndarray]):
    """The ring buffers of all actors in shared memory."""

    library, device = np, "cpu"

    def __init__(self, layout: Layout):
        self.layout = layout
        self.arrays = SharedArrays(layout.arrays())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made on first use."""
        made = ("frames", "_threads", "_first_slots", "_ages", "_offsets")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    @cached_property
    def _threads(self) -> GatherThreadPool:
        return GatherThreadPool(self.layout.storage.gather_threads)

    @cached_property
    def frames(self) -> CompressedFrameReader | None:
        """Return the reader of compressed frames; if frames are raw, return None."""
        if (packed := self.layout.packed) is None:
            return None
        return CompressedFrameReader(packed, self.arrays, self._threads, self.first_valid_steps)

    def written(self) -> np.ndarray:
        """Return how many steps an environment of each actor has published, [num_actors] int64; never falls."""
        return self.arrays["written"][:, 0].copy()

    def starts(self, window_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the step ids [low, high) from which a whole window can be read, both [num_actors]."""
        written = self.written()
        low = np.maximum(written - self.layout.ring_length + self.layout.overwrite_margin, 0)
        low = np.maximum(low, self.arrays["oldest"][:, 0])
        low = np.where(low > 0, low + max(self.layout.frame_stack - 1, 0), 0)
        return low, np.maximum(written - window_length, low)

    def size(self) -> int:
        """Return the number of readable steps."""
        low, high = self.starts(0)
        return int((high - low).sum()) * self.layout.num_envs

    def still_valid(self, env_ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        """Return which windows no writer has overwritten until now, [B] bool.

        The older frames of a window's first stack belong to the window.
        """
        oldest_read: np.ndarray = np.maximum(step_ids - max(self.layout.frame_stack - 1, 0), 0)
        valid: np.ndarray = oldest_read >= self.first_valid_steps()[env_ids // self.layout.num_envs]
        return valid

    def first_valid_steps(self) -> np.ndarray:
        """Return the oldest step id of each actor that cannot have been overwritten until now, [num_actors] int64.

        The chunk being written, its bootstrap step and the frame arena may overwrite older steps. A checkpoint may have
        left them out.
        """
        overwritten = self.arrays["written"][:, 0] - self.layout.ring_length + self.layout.chunk_length + 1
        first: np.ndarray = np.maximum(overwritten, self.arrays["oldest"][:, 0])
        return first

    def flat(self, name: str) -> np.ndarray:
        """Return a view of a field as [num_slots, ...]."""
        array = self.arrays[name]
        return array.reshape(-1, *array.shape[3:])

    def take_frames(self, env_ids: np.ndarray, step_ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        if self.frames is None:
            return self._threads.gather(self.flat("frame"), slots)
        return self.frames.take(env_ids, step_ids)

    def _take(self, name: str, slots: np.ndarray) -> np.ndarray:
        return self.flat(name).take(slots, axis=0)

    def _clear(self, frames: np.ndarray, mask: np.ndarray) -> None:
        frames[mask] = 0

    def statistics(self) -> dict[str, float]:
        """Return replay_mb, the frames' size in 1e6 bytes, and for compressed frames their compression ratio."""
        raw = float(self.size() * self.layout.fields["frame"].nbytes)
        if self.frames is None or not raw:
            return {"replay_mb": raw / 1e6}
        used = self.frames.used_bytes()
        return {"replay_mb": used / 1e6, "compression": raw / max(used, 1)}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the steps in use.

        Writers may go on meanwhile: steps that they overwrite during the copy are excluded by `oldest`. Raises
        MemoryError when the machine has no space for the copies.
        """
        state = self._copy_counters()
        lengths = self._lengths(state["written"], state.get("packed"))
        used = {name: self.arrays[name][:, :length] for name, length in lengths.items() if name not in state}
        needed, free = sum(array.nbytes for array in used.values()), available_bytes()
        if needed > free:
            raise MemoryError(
                f"{needed:,} bytes are needed to copy the replay and {free:,} are free. Set a smaller memory.capacity, "
                "or learner.checkpoint_replay false."
            )
        state |= {name: array.copy() for name, array in used.items()}
        # after the copy, so that everything overwritten meanwhile is excluded
        state["oldest"] = self.arrays["oldest"].copy()
        state["oldest"][:, 0] = self.first_valid_steps()
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def _copy_counters(self) -> dict[str, np.ndarray]:
        """Copy `written` and, for compressed frames, the short ring of raw ones and the arenas' ends at that time."""
        while True:
            state = {"written": self.arrays["written"].copy()}
            if self.layout.packed is None:
                return state
            state |= {name: self.arrays[name].copy() for name in ("frame", "packed")}
            if (self.arrays["written"] - state["written"] <= self.layout.chunk_length).all():
                return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; nobody may write meanwhile.

        Raises ValueError for a field whose shape or dtype differs.
        """
        written, ends = (state[name].numpy() if name in state else None for name in ("written", "packed"))
        lengths = self._lengths(written, ends)
        for name, spec in self.layout.arrays().items():
            shape = (spec.shape[0], lengths[name], *spec.shape[2:]) if name in lengths else spec.shape
            stored = state[name].numpy() if name in state else None
            if stored is None or stored.shape != shape or stored.dtype != spec.dtype:
                present = "absent" if stored is None else f"{stored.dtype} {stored.shape}"
                raise ValueError(
                    f"stored replay does not fit: field {name} is {present}, this run needs {spec.dtype} {shape}"
                )
        for name in self.layout.arrays():
            stored = state[name].numpy()
            self.arrays[name][:, : stored.shape[1]] = stored

    def _lengths(self, written: np.ndarray | None, ends: np.ndarray | None) -> dict[str, int]:
        """Return how much of each array's second axis holds data.

        Args:
            written: Published steps. The bootstrap step after them is stored too.
            ends: Ends of the arenas of compressed frames.
        """
        layout = self.layout
        used = 0 if written is None else min(layout.ring_length, int(written.max()) + 1)
        chunks = -(-used // layout.chunk_length)
        lengths = dict.fromkeys(layout.fields, used) | dict.fromkeys((*layout.state_fields, "tickets"), chunks)
        return lengths | layout.packed.lengths(chunks, ends) if layout.packed else lengths
