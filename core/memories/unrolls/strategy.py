"""The contract of a replay strategy, which decides what unrolls to keep and to sample."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds

EMPTY_IDS = SampleIds(np.zeros(0, np.int64), np.zeros(0, np.int64))


class DrawnUnrolls(NamedTuple):
    """B unrolls that a strategy has chosen."""

    keys: SampleIds  # of their first steps in ReplayStrategy.store
    fresh: np.ndarray  # [B] bool, drawn for the first time


EMPTY_DRAW = DrawnUnrolls(EMPTY_IDS, np.zeros(0, bool))


class ReplayStrategy(ABC):
    """A way to keep and to sample unrolls. An UnrollMemory (unroll_memory.py) has one or more strategies.

    All state lives on the learner's side, in the thread that samples. A strategy works with the trajectories, window,
    layout, generator and features_of of `memory`, the UnrollMemory that it belongs to.
    """

    Params: ClassVar[type]  # frozen dataclass: settings of the strategy in a replay list
    # True if frames of copies may be compressed; then fewer copies are kept when their frames do not fit.
    packs: ClassVar[bool] = True

    def __init__(self, params: Any, memory: Any):
        self.params, self.memory = params, memory

    # requirements -----------------------------------------------------------------------------------------------------
    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        """Return the unrolls that the rings of all actors must hold, at least those that arrive during a batch."""
        return 2 * batch_size * num_actors

    @classmethod
    def slots(cls, params: Any) -> int:
        """Return the number of unrolls of which the strategy keeps copies."""
        return 0

    @classmethod
    def is_rate_limited(cls, params: Any) -> bool:
        """Return True if the strategy limits samples per insert itself."""
        return False

    @classmethod
    def max_reuse(cls, params: Any) -> int:
        """Return how often at most an unroll is sampled, if the strategy is rate limited."""
        return 1

    @classmethod
    def needs_features(cls, params: Any) -> bool:
        """Return True if the strategy compares features of unrolls."""
        return False

    @classmethod
    def problems(cls, params: Any, share: int) -> list[str]:
        """Return what is wrong with these settings if the strategy gives `share` unrolls of each batch."""
        return []

    # sampling ---------------------------------------------------------------------------------------------------------
    @property
    def store(self) -> Trajectories:
        """Return where the unrolls lie that `draw` returns."""
        trajectories: Trajectories = self.memory.trajectories
        return trajectories

    def has_capacity(self) -> bool:
        """Return True if an actor may begin a chunk.

        Actors call this in their own processes, so it may read shared memory only.
        """
        return True

    def on_missed(self, count: int) -> None:
        """Note that `count` unrolls were overwritten before any strategy saw them."""

    @abstractmethod
    def insert(self, keys: SampleIds) -> None:
        """Take in unrolls that have just arrived in the rings."""

    @abstractmethod
    def draw(self, count: int) -> DrawnUnrolls | None:
        """Return 1 to `count` unrolls; if there is none, return None."""

    def on_overwritten(self, count: int) -> None:
        """Note that `count` unrolls drawn for the first time were overwritten before they were read."""

    def on_batch_complete(self) -> None:
        """Note that everything drawn has been read into a batch."""

    def statistics(self) -> dict[str, float]:
        """Return what the learner logs of this strategy."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""

    def continue_at(self, updates: int) -> None:
        """Advance schedules to this number of updates, as in Memory.continue_at."""


class MixtureComponent(NamedTuple):
    """A strategy and its share of every batch."""

    strategy: type[ReplayStrategy]
    params: Any
    ratio: float
