"""Replay strategies that compare the features of a state today with its features when it was acted in.

Elite replay (the first of the replaced systems) measures the distance d that the features of an unroll's states have
moved.

- Sampling draws lambda * n candidates without replacement and keeps n of them. strategy1 keeps the n nearest.
  strategy2 keeps the nearest of each of n groups of the sorted candidates. strategy3 keeps the least often drawn,
  nearer ones first. strategy4 keeps the least often drawn of each group.
- Insertion into full slots compares `elite_batch_size` random slots and overwrites the one that has moved most. Every
  arriving unroll has its own candidates, whether it arrives alone or with others; the forward passes are shared.

Attentive replay (Sun et al., AAAI 2020) keeps the n candidates most similar to the newest state. d is the distance of
an unroll's states to it, both seen by today's network.

lambda falls to 1 within `alfa_annealing_factor` times `lambda_batches` batches.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.memories.unrolls.uniform_unrolls import FifoIndex, ReplayParams, replayed, uniform
from core.memories.unrolls.unroll_memory import DrawnUnrolls, ReplayStrategy, ids_of
from core.memories.unrolls.unroll_slots import UnrollStore
from core.ops.distances import DISTANCES
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds

Insertion = Literal["newest", "elite_insertion"]
Sampling = Literal["uniform", "elite_sampling", "attentive_sampling"]
MAX_COMPARED = 128  # unrolls in one forward pass, which bounds the memory that it takes


@frozen_dataclass
class CustomParams(ReplayParams):
    """Names, defaults and spelling are those of the replaced system's replay list."""

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
    """Candidates fall to one for each unroll within lambda_batches batches times this factor."""
    lambda_batches: int = Field(default=100_000, ge=1, le=10**12)
    """Batches over which candidates are annealed (lr_scheduler_steps in the replaced system)."""
    elite_sampling_strategy: Literal["strategy1", "strategy2", "strategy3", "strategy4"] = "strategy3"
    """Candidates that elite sampling keeps: nearest (1), nearest of each group (2), least drawn (3) or both (4)."""
    elite_batch_size: int = Field(default=20, ge=1, le=10_000)
    """Random slots that elite insertion compares."""


class FeatureDistanceStrategy(ReplayStrategy):
    """A strategy that keeps unrolls by the distance between features.

    Unrolls have slots 0 .. len - 1. They are the newest ones of the rings, or with elite insertion copies.
    """

    Params = CustomParams
    params: CustomParams

    def __init__(self, params: CustomParams, memory: Any):
        super().__init__(params, memory)
        self._in_rings, length = FifoIndex(params.capacity), memory.window.length
        self._copies = UnrollStore(memory.trajectories, params.capacity, length) if self.slots(params) else None
        self._filled = 0  # slots of copies
        self._draw_counts = np.zeros(params.capacity, np.int64)  # of the unroll in each slot
        self._batches = 0
        self._newest: SampleIds | None = None

    # requirements -----------------------------------------------------------------------------------------------------
    @classmethod
    def ring_unrolls(cls, params: CustomParams, batch_size: int, num_actors: int) -> int:
        return super().ring_unrolls(params, batch_size, num_actors) if cls.slots(params) else params.capacity

    @classmethod
    def slots(cls, params: CustomParams) -> int:
        return params.capacity if params.insert_strategy == "elite_insertion" else 0

    @classmethod
    def needs_features(cls, params: CustomParams) -> bool:
        return params.insert_strategy != "newest" or params.sample_strategy != "uniform"

    # slots ------------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._filled if self._copies else len(self._in_rings)

    def keys(self, slots: np.ndarray) -> SampleIds:
        """Return the unrolls in these slots."""
        return self._copies.keys(slots) if self._copies else self._in_rings.keys(slots)

    # insertion --------------------------------------------------------------------------------------------------------
    def insert(self, keys: SampleIds) -> None:
        self._newest = keys.select(slice(-1, None))
        if not self._copies:
            self._draw_counts[self._in_rings.insert(keys)] = 0
            return
        done = 0
        while done < len(keys.env_ids) and self._filled < self._copies.capacity:  # which may fall, see UnrollStore
            self._filled += self._put(np.array([self._filled]), keys.select(slice(done, done + 1)))
            done += 1
        if done < len(keys.env_ids) and self._filled:
            self._overwrite(keys.select(slice(done, None)))

    def _overwrite(self, keys: SampleIds) -> None:
        """Let each unroll overwrite, of elite_batch_size random slots, the one whose features have moved most."""
        size, generator = min(self.params.elite_batch_size, len(self)), self.memory.generator
        candidates = [generator.choice(len(self), size, replace=False) for _ in keys.env_ids]
        compared = np.unique(np.concatenate(candidates))
        distances, written = np.zeros(len(self)), dict[int, int]()
        distances[compared] = self._distances(self.store, self.keys(compared))
        arriving = self._distances(self.memory.trajectories, keys)
        for number, slots in enumerate(candidates):
            slot = int(slots[distances[slots].argmax()])
            distances[slot], written[slot] = arriving[number], number
        # an unroll that a later one overwrites is not copied
        self._put(np.array([*written]), keys.select([*written.values()]))

    def _put(self, slots: np.ndarray, keys: SampleIds) -> int:
        """Copy unrolls into slots; return how many were still there to be copied."""
        assert self._copies is not None
        stored = self._copies.put(slots, keys)
        self._draw_counts[slots[stored]] = 0
        return int(stored.sum())

    # sampling ---------------------------------------------------------------------------------------------------------
    @property
    def multiplier(self) -> float:
        """Return lambda, the candidates for each unroll that is kept."""
        params = self.params
        annealing_batches = params.alfa_annealing_factor * params.lambda_batches
        fallen = (params.lambda_batch_multiplier - 1) * self._batches / annealing_batches
        return max(1.0, params.lambda_batch_multiplier - fallen)

    def draw(self, count: int) -> DrawnUnrolls | None:
        generator, size = self.memory.generator, len(self)
        if self.params.sample_strategy == "uniform" or not size:
            return uniform(self.keys, size, generator, count)
        wanted = min(round(self.multiplier * count), size)
        slots = generator.choice(size, wanted, replace=False)
        if not self._copies:
            slots = slots[self._readable(slots)]
            if len(slots) < wanted:  # badly compressed frames or replay.max_frame_bytes leave fewer in the rings
                readable = np.flatnonzero(self._readable(np.arange(size)))
                slots = generator.choice(readable, min(wanted, len(readable)), replace=False)
        if len(slots) > count:
            slots = slots[self._keep(slots, count)]
        self._draw_counts[slots] += 1
        return replayed(self.keys(slots))

    def _readable(self, slots: np.ndarray) -> np.ndarray:
        """Return which of these slots' unrolls the rings still hold, [K] bool."""
        readable: np.ndarray = self.memory.trajectories.still_valid(*self.keys(slots))
        return readable

    def on_batch_complete(self) -> None:
        self._batches += 1

    def _keep(self, candidates: np.ndarray, count: int) -> np.ndarray:
        """Return the positions of the `count` candidates that are kept."""
        keys = self.keys(candidates)
        if self.params.sample_strategy == "attentive_sampling":
            assert self._newest is not None
            newest = self.memory.features_of(self.memory.trajectories.gather(*self._newest, self.memory.window))[-1:]
            return np.argsort(self._distances(self.store, keys, newest), kind="stable")[:count]
        strategy = STRATEGIES[self.params.elite_sampling_strategy]
        return strategy(self._distances(self.store, keys), self._draw_counts[candidates], count)

    # distances --------------------------------------------------------------------------------------------------------
    def _distances(self, store: Trajectories, keys: SampleIds, newest: Tensor | None = None) -> np.ndarray:
        """Return the distances of unrolls as today's network sees them, [N].

        They are measured to the features [1, 1, F] of the newest state if given. If not, they are measured to those
        that the unroll's own states had when they were acted in.
        """
        distances, distance = [], DISTANCES[self.params.dist_function]
        for start in range(0, len(keys.env_ids), MAX_COMPARED):
            window = store.gather(*keys.select(slice(start, start + MAX_COMPARED)), self.memory.window)
            new = self.memory.features_of(window)
            old = window.extras["features"][:-1].float().to(new.device) if newest is None else newest.expand_as(new)
            distances.append(distance(new, old, self.params.p).cpu().numpy())
        return np.concatenate(distances)

    def statistics(self) -> dict[str, float]:
        return {"feature_replay_size": float(len(self)), "candidate_multiplier": self.multiplier}

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        newest = None if self._newest is None else [*map(np.ndarray.tolist, self._newest)]
        return {
            "batches": self._batches,
            "places": self._in_rings.state_dict(),
            "filled": self._filled,
            "times": self._draw_counts.tolist(),
            "newest": newest,
            **({"copies": self._copies.state_dict()} if self._copies else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches, newest = state["batches"], state["newest"]
        self._in_rings.load_state_dict(state["places"])
        self._filled, self._draw_counts[:] = state["filled"], state["times"]
        self._newest = None if newest is None else ids_of(newest)
        if self._copies:
            self._copies.load_state_dict(state["copies"])

    def continue_at(self, updates: int) -> None:
        self._batches = updates


# Strategies return the positions of the `count` <= N candidates to keep. Their arguments are the distances that the
# candidates have moved and how often they were drawn, both [N].
def nearest(distances: np.ndarray, draw_counts: np.ndarray, count: int) -> np.ndarray:
    """Keep the nearest."""
    return np.argsort(distances, kind="stable")[:count]


def nearest_of_groups(distances: np.ndarray, draw_counts: np.ndarray, count: int) -> np.ndarray:
    """Keep the nearest of each of `count` groups of the sorted candidates, whose sizes differ by at most 1."""
    chosen: np.ndarray = np.argsort(distances, kind="stable")[_group_starts(len(distances), count)]
    return chosen


def nearest_of_least_drawn(distances: np.ndarray, draw_counts: np.ndarray, count: int) -> np.ndarray:
    """Keep the least often drawn, nearer ones first."""
    order: np.ndarray = np.lexsort((distances, draw_counts))
    return order[:count]


def least_drawn_of_groups(distances: np.ndarray, draw_counts: np.ndarray, count: int) -> np.ndarray:
    """Keep the least often drawn of each group, the nearer one of equals."""
    order, starts = np.argsort(distances, kind="stable"), _group_starts(len(distances), count)
    groups = np.searchsorted(starts, np.arange(len(order)), side="right")
    by_group = np.lexsort((np.arange(len(order)), draw_counts[order], groups))
    closest: np.ndarray = order[by_group[starts]]
    return closest


def _group_starts(size: int, count: int) -> np.ndarray:
    starts: np.ndarray = np.arange(count) * size // count
    return starts


STRATEGIES: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "strategy1": nearest,
    "strategy2": nearest_of_groups,
    "strategy3": nearest_of_least_drawn,
    "strategy4": least_drawn_of_groups,
}
