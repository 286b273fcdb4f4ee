"""The memory contract: actors write steps into rings, and the learner samples windows by a rule of core/memories."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.common.shared_arrays import next_multiple
from core.specs import WindowKind, WindowSpec
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Batch, SampleIds, Window, tree_map


@frozen_dataclass
class MemoryParams:
    """Options of every memory. `Memory.Params` of each memory is a subclass."""


def batch_state(batch: Batch) -> dict[str, Any]:
    """Return a batch as tensors and plain values, from which `batch_of` makes it again."""
    keys = [torch.from_numpy(column) for column in batch.keys]
    return {**batch._asdict(), "window": [*batch.window], "keys": keys, "precomputed": None}


def batch_of(state: dict[str, Any]) -> Batch:
    """Return the batch of a `batch_state`, as copies."""
    stored = Window._make(state["window"]), state["keys"], state["weights"], state["fresh"]
    window, keys, weights, fresh = tree_map(Tensor.clone, stored)
    return Batch(window, SampleIds(*map(Tensor.numpy, keys)), weights, fresh, state["on_policy"])


class Memory(ABC):
    """A memory: the steps of all actors in shared memory, and a rule that samples windows of them.

    Main builds it with its shared memory. State that only the learner needs (trees, random generator) is made by the
    first `sample`.
    """

    Params: ClassVar[type[MemoryParams]] = MemoryParams
    # Kinds of windows that this memory holds; an agent must learn from one of them.
    window_kinds: ClassVar[tuple[WindowKind, ...]] = ("transitions", "sequences")
    # The same rule with steps, draws and priorities on the learner's device, a DeviceMemory; None if there is none. A
    # subclass does not inherit it, because its rule would then not hold there.
    device_class: ClassVar[Any] = None
    # True if actors wait for the newest parameters before every chunk, until `release_actors`.
    on_policy: ClassVar[bool] = False
    with_priority: ClassVar[bool] = False  # True if steps carry the actor's initial priority; Layout.of needs it
    # Batches that the learner makes of one `sample`, each of every batches_per_sample-th window: schedules and the
    # largest importance weight are those of batches.
    batches_per_sample: int = 1
    # Returns the features [T, B, F] that today's network computes of windows. The learner sets it if they are needed.
    features_of: Callable[[Window], Tensor] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.device_class = vars(cls).get("device_class")

    def __init__(self, params: Any, layout: Layout, window: WindowSpec, seed: int):
        """Allocate the rings; raise ValueError if the ring of an environment can never hold a whole window."""
        stack = next_multiple(max(layout.frame_stack - 1, 0), window.stride or 1)
        min_length = layout.overwrite_margin + stack + window.length + (window.stride != window.length)
        if window.length < 1 or layout.ring_length < min_length:
            raise ValueError(
                f"{layout.ring_length} steps an environment are too few for windows of length "
                f"{window.length}: at least {min_length} steps and length 1 are needed; raise the "
                "capacity or lower the number of environments"
            )
        self.params, self.layout, self.window, self.seed = params, layout, window, seed
        self.trajectories = Trajectories(layout)

    # requirements, known before the memory is made --------------------------------------------------------------------
    @classmethod
    def ring_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        """Return the agent steps that the rings of all actors must hold for batches of windows of this length."""
        return int(params.capacity)

    @classmethod
    def kept_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        """Return how many of the newest agent steps must not be lost, however badly frames compress."""
        return 0

    @classmethod
    def own_bytes(cls, params: Any, layout: Layout, window: WindowSpec) -> int:
        """Return the most bytes that the rule keeps outside the rings."""
        return 0

    @classmethod
    def samples_per_step(cls, params: Any) -> float | None:
        """Return the samples per agent step of a memory that limits its own rate; None if it does not.

        rate_limiter.samples_per_insert must be None if the memory limits its own rate.
        """
        return None

    @classmethod
    def feature_dtype(cls, params: Any) -> str | None:
        """Return the dtype in which feature vectors are stored with each step. If None, they are not stored."""
        return None

    @classmethod
    def problems(cls, params: Any, batch_size: int) -> list[str]:
        """Return what is wrong with settings that are each within their bounds, one sentence each."""
        return []

    # actors and learner -----------------------------------------------------------------------------------------------
    def writer(self, actor_ind: int, priorities: Callable[[Window], np.ndarray | None] | None = None) -> ChunkWriter:
        """Return the only writer of this actor's rings.

        Args:
            actor_ind: The actor.
            priorities: Initial priorities, as in ChunkWriter. Rules without priorities ignore them.
        """
        return ChunkWriter(self.trajectories, actor_ind, self.window, priorities, partial(self.has_room, actor_ind))

    def has_room(self, actor_ind: int) -> bool:
        """Return True if this actor may begin a chunk.

        Actors call this in their own processes, so it may read shared memory only.
        """
        return True

    @cached_property
    def generator(self) -> np.random.Generator:
        """Return the random generator of sampling, which only the learner's process uses."""
        return np.random.default_rng([self.seed, 0])

    def size(self) -> int:
        """Return the number of steps that can be read now."""
        return self.trajectories.size()

    @abstractmethod
    def sample(self, batch_size: int) -> Batch | None:
        """Return batch_size windows; if there is no valid start yet, return None."""

    def release_actors(self) -> None:
        """Let actors go on, because the parameters learnt from the last batch are published. Only learners call it."""

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Set |td| priorities [B]; those of overwritten steps are dropped. Rules without priorities do nothing."""

    @property
    def takes_priorities(self) -> bool:
        """Return True if this rule uses priorities."""
        return type(self).update_priorities is not Memory.update_priorities

    def statistics(self) -> dict[str, float]:
        """Return what the learner logs of this memory."""
        return {"replay_steps": float(self.size()), **self.trajectories.statistics()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, steps included, as tensors and plain values; sampling continues from it exactly."""
        return {
            "generator": json.dumps(self.generator.bit_generator.state),  # JSON, because its integers have 128 bits
            "trajectories": self.trajectories.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""
        self.generator.bit_generator.state = json.loads(state["generator"])
        self.trajectories.load_state_dict(state["trajectories"])

    def continue_at(self, updates: int) -> None:
        """Advance schedules to this number of updates, in a run that continues without the steps of its memory."""


class DeviceMemory(ABC):
    """The learner's side of a memory on its device, made of the memory that actors write to."""

    generator: torch.Generator  # that `sample` draws from

    @abstractmethod
    def refresh(self) -> bool:
        """Copy what actors have written; return False while there is no valid start."""

    def plan(self, count: int) -> None:
        """Compute the scheduled values of the next `count` calls of `sample`. Rules without schedules do nothing."""

    @abstractmethod
    def sample(self, batch_size: int) -> tuple[Batch, Tensor]:
        """Return windows on the device and the leaf indices [B] of their starts; Python reads no value of a tensor."""

    def update_priorities(self, leaf_indices: Tensor, priorities: Tensor) -> None:
        """Set |td| priorities [B] of starts sampled since the last `refresh`, except those that are not finite.

        Rules without priorities do nothing.
        """

    @property
    def takes_priorities(self) -> bool:
        """Return True if the class uses priorities."""
        return type(self).update_priorities is not DeviceMemory.update_priorities

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Return what the learner logs of this memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""

    def continue_at(self, updates: int) -> None:
        """Advance schedules to this number of updates, as in Memory.continue_at."""
