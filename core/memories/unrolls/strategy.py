"""The contract of a rule: one way to keep and to choose unrolls. A memory of unrolls (unrolls.py) has one or more of them."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds

NONE = SampleIds(np.zeros(0, np.int64), np.zeros(0, np.int64))


class DrawnUnrolls(NamedTuple):
    keys: SampleIds         # of rows in Rule.store
    fresh: np.ndarray  # [B] bool: for the first time


EMPTY_DRAW = DrawnUnrolls(NONE, np.zeros(0, bool))


class ReplayStrategy(ABC):
    """All its state lives on the learner's side, in the thread that samples. `memory` is the UnrollMemory it belongs to: its
    trajectories, window, layout, generator and features_of are what a rule works with."""

    Params: ClassVar[type]  # frozen dataclass: its settings in a replay list
    packs: ClassVar[bool] = True  # copies that it keeps may have their frames packed, and be fewer when those do not fit

    def __init__(self, params: Any, memory: Any):
        self.params, self.memory = params, memory

    # what it asks for -------------------------------------------------------------------------------------------------
    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        """Unrolls that the rings of all actors together must hold for it; at least what arrives while a batch is made."""
        return 2 * batch_size * num_actors

    @classmethod
    def slots(cls, params: Any) -> int:
        """Unrolls that it keeps copies of."""
        return 0

    @classmethod
    def is_rate_limited(cls, params: Any) -> bool:
        return False

    @classmethod
    def times(cls, params: Any) -> int:
        """How often at most it gives an unroll, where it paces."""
        return 1

    @classmethod
    def needs_features(cls, params: Any) -> bool:
        return False

    @classmethod
    def problems(cls, params: Any, share: int) -> list[str]:
        """What is wrong with these settings for batches of which it gives `share` unrolls."""
        return []

    # what it does -----------------------------------------------------------------------------------------------------
    @property
    def store(self) -> Trajectories:
        """Where the keys it draws point to."""
        return self.memory.trajectories

    def room(self) -> bool:
        """Whether an actor may begin a chunk. Called in the actors' processes: shared memory only."""
        return True

    def skipped(self, count: int) -> None:
        """So many unrolls were overwritten before any rule saw them."""

    @abstractmethod
    def insert(self, keys: SampleIds) -> None:
        """Unrolls that have just arrived in the rings."""

    @abstractmethod
    def draw(self, count: int) -> DrawnUnrolls | None:
        """One to `count` unrolls; None while there is none."""

    def lost(self, count: int) -> None:
        """So many unrolls that it drew for the first time were overwritten before they were read."""

    def release(self) -> None:
        """All that was drawn has been read: a batch is made."""

    def statistics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""

    def continue_at(self, updates: int) -> None:
        """As Memory.continue_at."""


class Part(NamedTuple):
    """A rule and its share of every batch."""

    rule: type[ReplayStrategy]
    params: Any
    ratio: float
