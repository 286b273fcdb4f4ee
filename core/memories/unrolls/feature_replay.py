"""Replay that compares what the network makes of a state today with what it made of it when it was acted in.

Elite replay (the first of the replaced systems). Sampling: of lambda n candidates without replacement, n are kept by the distance d that
the features of their states have moved: strategy1 the n nearest; strategy2 the nearest of each of n groups of the sorted candidates;
strategy3 the nearest first among those drawn least often; strategy4 the least often drawn of each group. Insertion: once full, of
`elite_batch_size` random slots the one that has moved most is overwritten; every arriving unroll has a choice of its own, whether it comes
alone or with others, whose forward passes are made together.

Attentive replay (Sun et al., AAAI 2020): the n candidates most similar to the newest state are kept; d is the distance of an unroll's
states to it, both seen by today's network.

lambda falls to 1 within `alfa_annealing_factor` times `lambda_batches` batches.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.memories.unrolls.strategy import DrawnUnrolls, ReplayStrategy
from core.memories.unrolls.uniform_unrolls import FifoIndex, replayed, uniform
from core.memories.unrolls.unroll_slots import UnrollStore
from core.ops.distances import DISTANCES
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds, Window

Insertion = Literal["newest", "elite_insertion"]
Sampling = Literal["uniform", "elite_sampling", "attentive_sampling"]
TOGETHER = 128  # most unrolls that are compared in one forward pass, which bounds the memory that it takes


@frozen_dataclass
class CustomParams:
    """Names, defaults and spelling are those of the replaced system's replay list."""

    capacity: int = Field(default=1_000, ge=1, le=10**7)
    """Unrolls that the rule holds."""
    dist_function: Literal["ln_norm", "cos_dist", "kl_div"] = "ln_norm"
    """Distance between the features of two unrolls."""
    p: float = Field(default=2.0, ge=1, le=1_000)
    """Exponent of the distance ln_norm."""
    insert_strategy: Insertion = "newest"
    """Rule for what an arriving unroll replaces."""
    sample_strategy: Sampling = "uniform"
    """Rule by which unrolls are drawn."""
    lambda_batch_multiplier: float = Field(default=1.0, ge=1, le=10_000)
    """Candidates drawn for each unroll that is kept, at first."""
    alfa_annealing_factor: float = Field(default=1.0, gt=0, le=1e6)
    """Factor of lambda_batches until there is one candidate for each unroll."""
    lambda_batches: int = Field(default=100_000, ge=1, le=10**12)
    """Batches over which candidates are annealed (lr_scheduler_steps in the replaced system)."""
    elite_sampling_strategy: Literal["strategy1", "strategy2", "strategy3", "strategy4"] = "strategy3"
    """Way in which elite sampling keeps candidates."""
    elite_batch_size: int = Field(default=20, ge=1, le=10_000)
    """Random slots that elite insertion compares."""


class FeatureDistanceStrategy(ReplayStrategy):
    """Unrolls stand in places 0 .. len - 1: the newest ones of the rings, or with elite insertion copies in slots of their own."""

    Params = CustomParams

    def __init__(self, params: Any, memory: Any):
        super().__init__(params, memory)
        self._in_rings = FifoIndex(params.capacity)
        self._copies = UnrollStore(memory.trajectories, params.capacity, memory.window.length) if self.slots(params) else None
        self._filled = 0                                   # slots
        self._times = np.zeros(params.capacity, np.int64)  # that each place's unroll was drawn
        self._batches = 0
        self._newest: SampleIds | None = None

    # what it asks for -------------------------------------------------------------------------------------------------
    @classmethod
    def ring_unrolls(cls, params: Any, batch_size: int, num_actors: int) -> int:
        return super().ring_unrolls(params, batch_size, num_actors) if cls.slots(params) else params.capacity

    @classmethod
    def slots(cls, params: Any) -> int:
        return params.capacity if params.insert_strategy == "elite_insertion" else 0

    @classmethod
    def needs_features(cls, params: Any) -> bool:
        return params.insert_strategy != "newest" or params.sample_strategy != "uniform"

    # places -----------------------------------------------------------------------------------------------------------
    @property
    def store(self) -> Trajectories:
        return self._copies.store if self._copies else super().store

    def __len__(self) -> int:
        return self._filled if self._copies else len(self._in_rings)

    def keys(self, places: np.ndarray) -> SampleIds:
        return self._copies.keys(places) if self._copies else self._in_rings.keys(places)

    # insertion --------------------------------------------------------------------------------------------------------
    def insert(self, keys: SampleIds) -> None:
        self._newest = SampleIds(keys.streams[-1:], keys.serials[-1:])
        if not self._copies:
            self._times[self._in_rings.insert(keys)] = 0
            return
        done = 0
        while done < len(keys.streams) and self._filled < self._copies.capacity:  # which falls where packed copies find no room
            self._filled += self._put(np.array([self._filled]), SampleIds(keys.streams[done:done + 1], keys.serials[done:done + 1]))
            done += 1
        if done < len(keys.streams) and self._filled:
            self._overwrite(SampleIds(keys.streams[done:], keys.serials[done:]))

    def _overwrite(self, keys: SampleIds) -> None:
        """Each of these unrolls in turn overwrites, of elite_batch_size random slots, the one whose features moved farthest."""
        size, generator = min(self.params.elite_batch_size, len(self)), self.memory.generator
        candidates = [generator.choice(len(self), size, replace=False) for _ in keys.streams]
        compared, moved, written = np.unique(np.concatenate(candidates)), np.zeros(len(self)), dict[int, int]()
        moved[compared] = self._moved(self.store, self.keys(compared))
        arriving = self._moved(self.memory.trajectories, keys)
        for number, slots in enumerate(candidates):
            slot = int(slots[moved[slots].argmax()])
            moved[slot], written[slot] = arriving[number], number
        numbers = [*written.values()]  # what a later one has overwritten is not copied
        self._put(np.array([*written]), SampleIds(keys.streams[numbers], keys.serials[numbers]))

    def _put(self, places: np.ndarray, keys: SampleIds) -> int:
        """Returns how many were still there to be copied."""
        assert self._copies is not None
        stored = self._copies.put(places, keys)
        self._times[places[stored]] = 0
        return int(stored.sum())

    # sampling ---------------------------------------------------------------------------------------------------------
    @property
    def multiplier(self) -> float:
        """lambda: candidates for each unroll kept."""
        params = self.params
        fallen = (params.lambda_batch_multiplier - 1) * self._batches / (params.alfa_annealing_factor * params.lambda_batches)
        return max(1.0, params.lambda_batch_multiplier - fallen)

    def draw(self, count: int) -> DrawnUnrolls | None:
        generator, size = self.memory.generator, len(self)
        if self.params.sample_strategy == "uniform" or not size:
            return uniform(self, generator, count)
        places = generator.choice(size, min(round(self.multiplier * count), size), replace=False)
        if not self._copies:
            places = places[self.memory.trajectories.still_valid(*self.keys(places))]
        if len(places) > count:
            places = places[self._kept(places, count)]
        self._times[places] += 1
        return replayed(self.keys(places))

    def release(self) -> None:
        self._batches += 1

    def _kept(self, candidates: np.ndarray, count: int) -> np.ndarray:
        """Positions of the `count` candidates that the strategy keeps."""
        if self.params.sample_strategy == "attentive_sampling":
            return np.argsort(self._from_newest(candidates), kind="stable")[:count]
        moved = self._moved(self.store, self.keys(candidates))
        return STRATEGIES[self.params.elite_sampling_strategy](moved, self._times[candidates], count)

    # distances --------------------------------------------------------------------------------------------------------
    def _moved(self, store: Trajectories, keys: SampleIds) -> np.ndarray:
        """[N] between what the network makes of these unrolls' states today and what it made of them then."""
        distances = []
        for start in range(0, len(keys.streams), TOGETHER):
            some = slice(start, start + TOGETHER)
            window = store.gather(keys.streams[some], keys.serials[some], self.memory.window)
            distances.append(self._distance(self._features(window), window.extras["features"][:-1].float()))
        return np.concatenate(distances)

    def _from_newest(self, places: np.ndarray) -> np.ndarray:
        """[N] of these unrolls' states from the newest state, both as the network sees them today."""
        assert self._newest is not None
        newest = self._features(self.memory.trajectories.gather(*self._newest, self.memory.window))[-1:]  # [1, 1, F]
        features = self._features(self.store.gather(*self.keys(places), self.memory.window))
        return self._distance(features, newest.expand_as(features))

    def _features(self, window: Window) -> Tensor:
        if self.memory.features_of is None:
            raise RuntimeError("features_of must be set before unrolls are compared")
        return self.memory.features_of(window)

    def _distance(self, new: Tensor, old: Tensor) -> np.ndarray:
        return DISTANCES[self.params.dist_function](new, old.to(new.device), self.params.p).cpu().numpy()

    def statistics(self) -> dict[str, float]:
        return {"custom_size": float(len(self)), "custom_lambda": self.multiplier}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        newest = None if self._newest is None else [*map(np.ndarray.tolist, self._newest)]
        return {"batches": self._batches, "places": self._in_rings.state_dict(), "filled": self._filled, "times": self._times.tolist(),
                "newest": newest, **({"copies": self._copies.state_dict()} if self._copies else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = state["batches"]
        self._in_rings.load_state_dict(state["places"])
        self._filled, self._times[:] = state["filled"], state["times"]
        self._newest = None if state["newest"] is None else SampleIds(*(np.array(column, np.int64) for column in state["newest"]))
        if self._copies:
            self._copies.load_state_dict(state["copies"])

    def continue_at(self, updates: int) -> None:
        self._batches = updates


# strategies: positions of the `count` <= N candidates to keep, by how far they moved [N] and how often they were drawn [N] ---------------
def nearest(distances: np.ndarray, times: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(distances, kind="stable")[:count]


def nearest_of_groups(distances: np.ndarray, times: np.ndarray, count: int) -> np.ndarray:
    """Of `count` groups of the sorted candidates, as equal as can be; none is empty."""
    return np.argsort(distances, kind="stable")[_group_starts(len(distances), count)]


def nearest_of_least_drawn(distances: np.ndarray, times: np.ndarray, count: int) -> np.ndarray:
    return np.lexsort((distances, times))[:count]


def least_drawn_of_groups(distances: np.ndarray, times: np.ndarray, count: int) -> np.ndarray:
    """The nearer one where two were drawn equally often."""
    order, starts = np.argsort(distances, kind="stable"), _group_starts(len(distances), count)
    groups = np.searchsorted(starts, np.arange(len(order)), side="right")
    by_group = np.lexsort((np.arange(len(order)), times[order], groups))
    return order[by_group[starts]]


def _group_starts(size: int, count: int) -> np.ndarray:
    return np.arange(count) * size // count


STRATEGIES: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "strategy1": nearest, "strategy2": nearest_of_groups, "strategy3": nearest_of_least_drawn, "strategy4": least_drawn_of_groups}
