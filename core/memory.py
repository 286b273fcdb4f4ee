"""The memory contract: actors write rows, the learner samples windows; the rule between them is one file in core/memories."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.specs import WindowSpec
from core.trajectory.layout import Layout
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Batch, SampleIds, Window


@frozen_dataclass
class MemoryParams:
    """Options of every memory. `Memory.Params` of each memory is a subclass."""


def batch_state(batch: Batch) -> dict[str, Any]:
    """Return tensors and plain values that `batch_of` makes the batch of again."""
    window = batch.window
    return {"window": [*window[:6]], "extras": window.extras, "states": [*window.states], "weights": batch.weights, "fresh": batch.fresh,
            "keys": [torch.from_numpy(column) for column in batch.keys]}


def batch_of(state: dict[str, Any]) -> Batch:
    """Return the batch of a `batch_state`, in memory of its own."""
    window = Window._make([*state["window"], state["extras"], tuple(state["states"])]).map(Tensor.clone)
    keys = SampleIds(*(column.numpy().copy() for column in state["keys"]))
    return Batch(window, keys, state["weights"].clone(), None if state["fresh"] is None else state["fresh"].clone())


class Memory(ABC):
    """Rows of all actors in shared memory, and a rule that samples windows of them.

    Built by main with its shared memory; its learner-side state (trees, random generator) is made on the first `sample`.
    Raises ValueError when the rows of a stream can never hold a whole window.
    """

    Params: ClassVar[type[MemoryParams]] = MemoryParams
    Resident: ClassVar[Any] = None  # the same rule with rows, draws and priorities on the learner's device: a core.memory.DeviceMemory
    with_priority: ClassVar[bool] = False  # rows carry the actor's initial priority: Layout.of wants to know
    batches_per_sample: int = 1            # that the learner makes of what `sample` returns: schedules count batches
    features_of: Callable[[Window], Tensor] | None = None  # today's features [T, B, F] of windows; the learner sets it if they are wanted

    def __init__(self, params: Any, layout: Layout, window: WindowSpec, seed: int):
        least = layout.overwrite_margin + max(layout.frame_stack - 1, 0) + window.length + (not window.stride)
        if window.length < 1 or layout.rows < least:
            raise ValueError(f"{layout.rows} rows a stream are too few for windows of length {window.length}: at least {least} "
                             "rows and length 1 are needed; raise the capacity or lower the number of streams")
        self.params, self.layout, self.window, self.seed = params, layout, window, seed
        self.trajectories = Trajectories(layout)

    # what it asks for, before it is made -------------------------------------------------------------------------------
    @classmethod
    def ring_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        """Agent steps that the rings of all actors must hold for batches of windows of this length."""
        return params.capacity

    @classmethod
    def kept_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        """Of those, the newest ones that must not be lost however badly frames compress."""
        return 0

    @classmethod
    def own_bytes(cls, params: Any, layout: Layout, length: int) -> int:
        """Bytes of rows that the rule keeps outside the rings."""
        return 0

    @classmethod
    def is_rate_limited(cls, params: Any) -> bool:
        """The rule itself says how often rows are learnt from, so that clock.samples_per_insert must not."""
        return False

    @classmethod
    def samples_per_step(cls, params: Any) -> float:
        """How many that is, where it paces."""
        return 1.0

    @classmethod
    def feature_dtype(cls, params: Any) -> str | None:
        """As what rows must carry the agent's feature vectors; None: they need not."""
        return None

    @classmethod
    def problems(cls, params: Any, batch_size: int) -> list[str]:
        """What is wrong with settings that are each within their bounds, one sentence each."""
        return []

    # sides ------------------------------------------------------------------------------------------------------------
    def writer(self, actor_ind: int, priorities: Callable[[Window], np.ndarray | None] | None = None) -> ChunkWriter:
        """The one writer of this actor's ring. `priorities` as in ChunkWriter; rules without priorities ignore it."""
        return ChunkWriter(self.trajectories, actor_ind, self.window, priorities if self.with_priority else None)

    @cached_property
    def generator(self) -> np.random.Generator:
        """Randomness of sampling; only the learner's process uses it."""
        return np.random.default_rng([self.seed, 0])

    def size(self) -> int:
        """Rows that can be read now."""
        return self.trajectories.size()

    @abstractmethod
    def sample(self, batch_size: int) -> Batch | None:
        """batch_size windows; None while no legal start exists. Raises ValueError for a batch size below 1."""

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Set |td| priorities [B]; rows overwritten since are dropped. Rules without priorities ignore it."""

    @property
    def takes_priorities(self) -> bool:
        """Whether this rule does anything with them."""
        return type(self).update_priorities is not Memory.update_priorities

    def statistics(self) -> dict[str, float]:
        """What the learner logs of this memory."""
        return {"memory_size": float(self.size()), **self.trajectories.statistics()}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that continue sampling as if nothing had happened, rows among them."""
        return {"generator": json.dumps(self.generator.bit_generator.state),  # 128-bit integers
                "trajectories": self.trajectories.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""
        self.generator.bit_generator.state = json.loads(state["generator"])
        self.trajectories.load_state_dict(state["trajectories"])

    def continue_at(self, updates: int) -> None:
        """In place of load_state_dict, in a run that is continued without its rows after so many updates: what goes by them goes on."""


class DeviceMemory(ABC):
    """The learner's side of a memory on its device. Made of the memory that actors write to, and that device."""

    @property
    @abstractmethod
    def generators(self) -> tuple[torch.Generator, ...]:
        """That `sample` draws from."""

    @abstractmethod
    def refresh(self) -> bool:
        """Take in what actors have written; False while no legal start exists."""

    @abstractmethod
    def plan(self, count: int) -> None:
        """Before `count` calls of `sample`: what changes from one to the next and is known ahead."""

    @abstractmethod
    def sample(self, batch_size: int) -> tuple[Batch, Tensor]:
        """Windows on the device, and the places [B] of their starts; python looks at no value."""

    @abstractmethod
    def update_priorities(self, places: Tensor, priorities: Tensor) -> None:
        """Of starts sampled since the last `refresh`. Priorities that are not finite change nothing."""

    @abstractmethod
    def statistics(self) -> dict[str, float]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def continue_at(self, updates: int) -> None:
        """As Memory.continue_at."""
