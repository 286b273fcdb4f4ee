"""Memories of whole unrolls: one or more strategies see what arrived, and each gives its share of every batch.

An unroll is a chunk of one environment together with the bootstrap step; actors publish chunks of exactly that length.
Strategies work on keys. The steps stay in the actors' rings, once, unless a strategy decides itself what to overwrite.
Such a strategy keeps copies in slots of its own.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from core.common.shared_arrays import SharedArrays
from core.memories.uniform import ATTEMPTS
from core.memories.unrolls.unroll_slots import UnrollStore, slots_bytes
from core.memory import Memory
from core.specs import ArraySpec, WindowKind, WindowSpec
from core.trajectory.ring_buffer import Layout, Trajectories
from core.types import Batch, SampleIds, Window, tree_map

EMPTY_IDS = SampleIds(np.zeros(0, np.int64), np.zeros(0, np.int64))


def ids_of(columns: list[list[int]]) -> SampleIds:
    """Return the unrolls of a checkpoint: environment and step ids as lists."""
    return SampleIds(*(np.array(column, np.int64) for column in columns))


class DrawnUnrolls(NamedTuple):
    """B unrolls that a strategy has chosen."""

    keys: SampleIds  # of their first steps in ReplayStrategy.store
    fresh: np.ndarray  # [B] bool, drawn for the first time

    def select(self, which: slice | np.ndarray) -> "DrawnUnrolls":
        """Return some of the unrolls."""
        return DrawnUnrolls(self.keys.select(which), self.fresh[which])


EMPTY_DRAW = DrawnUnrolls(EMPTY_IDS, np.zeros(0, bool))


class ReplayStrategy(ABC):
    """A way to keep and to sample unrolls. An UnrollMemory has one or more strategies.

    All state lives on the learner's side, in the thread that samples. A strategy works with the trajectories, window,
    layout, generator and features_of of `memory`, the UnrollMemory that it belongs to.
    """

    Params: ClassVar[type]  # frozen dataclass: settings of the strategy in a replay list
    # True if frames of copies may be compressed; then fewer copies are kept when their frames do not fit.
    packs: ClassVar[bool] = True

    _copies: UnrollStore | None = None  # of a strategy that keeps copies

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
    def max_reuse(cls, params: Any) -> int | None:
        """Return how often at most an unroll is sampled, which limits the rate; None sets no limit."""
        return None

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
        found: Trajectories = self._copies.store if self._copies else self.memory.trajectories
        return found

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
        """Note that `count` unrolls drawn for the first time reached no batch, since most were overwritten before."""

    def on_batch_complete(self) -> None:
        """Note that everything drawn has been read into a batch."""

    def statistics(self) -> dict[str, float]:
        """Return what the learner logs of this strategy."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from state_dict."""

    def continue_at(self, updates: int) -> None:
        """Advance schedules to this number of updates, as in Memory.continue_at."""


class MixtureComponent(NamedTuple):
    """A strategy and its share of every batch."""

    strategy: type[ReplayStrategy]
    params: Any
    ratio: float


def check_whole_chunks(layout: Layout, window: WindowSpec) -> None:
    """Raise ValueError for windows that are not whole chunks."""
    if window.stride != window.length or layout.chunk_length != window.stride:
        raise ValueError(
            f"unrolls are whole chunks: windows of length {window.length} every {window.stride} steps "
            f"do not fit chunks of {layout.chunk_length}"
        )


class UnrollMemory(Memory):
    """A memory of unrolls. Subclasses name its components."""

    window_kinds: ClassVar[tuple[WindowKind, ...]] = ("unrolls",)

    def __init__(self, params: Any, layout: Layout, window: WindowSpec, seed: int):
        check_whole_chunks(layout, window)
        super().__init__(params, layout, window, seed)
        self.shared = SharedArrays({"taken": ArraySpec((1,), "int64")})  # unrolls that have left a queue
        components = self.components(params)
        self.ratios = [component.ratio for component in components]
        self.strategies = [component.strategy(component.params, self) for component in components]
        numbers = range(len(components))
        # rate-limited strategies draw first: the others choose when the rest of the batch is there
        self._draw_order = sorted(numbers, key=lambda number: not _max_reuse(components[number]))
        # in a batch, unrolls in the rings come first, because they are read together
        self._batch_order = sorted(numbers, key=lambda number: self.strategies[number].store is not self.trajectories)
        self._pending = [EMPTY_DRAW for _ in components]  # of the batch that is being gathered
        self._seen = np.zeros(layout.num_actors, np.int64)  # chunks that the strategies have seen

    # requirements -----------------------------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def components(cls, params: Any) -> list[MixtureComponent]:
        """Return the strategies and their shares."""

    @classmethod
    def ring_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        return length * _ring_unrolls(cls.components(params), batch_size, num_actors)

    @classmethod
    def kept_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        """Return the agent steps that queues have not given yet."""
        return length * _ring_unrolls(filter(_max_reuse, cls.components(params)), batch_size, num_actors)

    @classmethod
    def own_bytes(cls, params: Any, layout: Layout, window: WindowSpec) -> int:
        counts = [(strategy.slots(each), strategy.packs) for strategy, each, _ in cls.components(params)]
        return sum(slots_bytes(layout, slots, window.length, packs) for slots, packs in counts if slots)

    @classmethod
    def samples_per_step(cls, params: Any) -> float | None:
        components = cls.components(params)
        fresh = sum(each.ratio / reuse for each in components if (reuse := _max_reuse(each)))
        return 1 / fresh if fresh else None

    @classmethod
    def feature_dtype(cls, params: Any) -> str | None:
        needed = any(strategy.needs_features(each) for strategy, each, _ in cls.components(params))
        return getattr(params, "feature_dtype", "float32") if needed else None

    @classmethod
    def problems(cls, params: Any, batch_size: int) -> list[str]:
        components = cls.components(params)
        counts = shares([component.ratio for component in components], batch_size)
        found = [
            f"a sample_ratio of {ratio:g} is no unroll of a batch of {batch_size}"
            for (_, _, ratio), count in zip(components, counts)
            if not count
        ]
        for (strategy, each, _), count in zip(components, counts):
            found += strategy.problems(each, count)
        return found

    # actors -----------------------------------------------------------------------------------------------------------
    def has_room(self, actor_ind: int) -> bool:
        return all(strategy.has_capacity() for strategy in self.strategies)

    def unread(self) -> int:
        """Return the published unrolls that no queue has given or dropped yet."""
        published = (self.trajectories.written() // self.window.length).sum() * self.layout.num_envs
        return int(published - self.shared["taken"][0])

    # sampling ---------------------------------------------------------------------------------------------------------
    def sample(self, batch_size: int) -> Batch | None:
        """Return batch_size unrolls; if they are not all there yet, return None and keep what was drawn.

        Strategies that are not rate limited draw when the queues have given their share.
        """
        self._ingest()
        counts = shares(self.ratios, batch_size)
        for _ in range(ATTEMPTS):
            if not all(self._complete(number, counts[number]) for number in self._draw_order):
                return None
            windows = self._read()
            if windows is not None:
                return self._batch(windows)
        return None

    def _ingest(self) -> None:
        """Show the strategies every unroll that has arrived, in the order in which the actors published them."""
        length, envs = self.window.length, self.layout.num_envs
        available = self.trajectories.written() // length  # [num_actors] chunks
        oldest = -(-self.trajectories.starts(0)[0] // length)  # [num_actors] chunks that can still be read begin here
        begin = np.maximum(self._seen, np.minimum(oldest, available))
        if missed := int((begin - self._seen).sum()):
            for strategy in self.strategies:
                strategy.on_missed(missed * envs)
        counts = available - begin  # [num_actors] new chunks
        actors = np.repeat(np.arange(len(counts)), counts)  # [N] actor of each new chunk
        # [N] chunks: begin .. available - 1 of one actor after another
        chunks = np.arange(len(actors)) - np.repeat(counts.cumsum() - counts, counts) + begin[actors]
        tickets = self.trajectories.arrays["tickets"]
        order = np.argsort(tickets[actors, chunks % tickets.shape[1]], kind="stable")
        env_ids = (actors[order, None] * envs + np.arange(envs)).ravel()
        keys = SampleIds(env_ids, np.repeat(chunks[order] * length, envs))
        if len(order):
            for strategy in self.strategies:
                strategy.insert(keys)
        self._seen = available

    def _complete(self, number: int, count: int) -> bool:
        """Draw what a strategy's share still lacks; return True if it is complete."""
        strategy, pending = self.strategies[number], self._pending[number]
        if len(pending.fresh) > count:  # batches have become smaller
            strategy.on_overwritten(int(pending.fresh[count:].sum()))
            pending = pending.select(slice(count))
        for _ in range(ATTEMPTS):
            missing = count - len(pending.fresh)
            drawn = strategy.draw(missing) if missing else None
            if drawn is None:
                break
            pending = _concatenate_draws([pending, self._still_valid(strategy, drawn)])
        self._pending[number] = pending
        return len(pending.fresh) == count

    def _read(self) -> list[Window] | None:
        """Return the windows of all pending unrolls, those in the rings together, then those of each store of copies.

        If writers reached some of them meanwhile, drop these and return None.
        """
        pairs = [(self.strategies[number], self._pending[number]) for number in self._batch_order]
        in_rings = [pending for strategy, pending in pairs if strategy.store is self.trajectories]
        windows = []
        if in_rings:
            keys = _concatenate_draws(in_rings).keys
            windows.append(self.trajectories.gather(*keys, self.window))
            if not self.trajectories.still_valid(*keys).all():
                self._pending = [self._still_valid(*pair) for pair in zip(self.strategies, self._pending)]
                return None
        return windows + [
            strategy.store.gather(*pending.keys, self.window)
            for strategy, pending in pairs
            if strategy.store is not self.trajectories
        ]

    def _still_valid(self, strategy: ReplayStrategy, drawn: DrawnUnrolls) -> DrawnUnrolls:
        """Return the unrolls that their writer has not reached."""
        if strategy.store is not self.trajectories:
            return drawn
        valid = self.trajectories.still_valid(*drawn.keys)
        strategy.on_overwritten(int((drawn.fresh & ~valid).sum()))
        return drawn.select(valid)

    def _batch(self, windows: Sequence[Window]) -> Batch:
        """Return the pending unrolls as a batch; afterwards none is pending."""
        keys, fresh = _concatenate_draws([self._pending[number] for number in self._batch_order])
        self._pending = [EMPTY_DRAW for _ in self.strategies]
        for strategy in self.strategies:
            strategy.on_batch_complete()
        return Batch(concatenate_windows(windows), keys, torch.ones(len(fresh)), torch.from_numpy(fresh))

    def statistics(self) -> dict[str, float]:
        """Return replay_steps, the steps in the rings, and the strategies' own statistics.

        Of a name that several strategies share, the second one in the replay list has the suffix _2, and so on.
        """
        statistics = super().statistics()
        uses = Counter(statistics.keys())
        for strategy in self.strategies:
            for name, value in strategy.statistics().items():
                uses[name] += 1
                statistics[name if uses[name] == 1 else f"{name}_{uses[name]}"] = value
        return statistics

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        pending = [[*map(np.ndarray.tolist, (*drawn.keys, drawn.fresh))] for drawn in self._pending]
        unrolls = {"seen": self._seen.tolist(), "taken": int(self.shared["taken"][0]), "held": pending}
        strategies = [strategy.state_dict() for strategy in self.strategies]
        return {**super().state_dict(), "rules": strategies, "unrolls": unrolls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for strategy, stored in zip(self.strategies, state["rules"], strict=True):
            strategy.load_state_dict(stored)
        unrolls = state["unrolls"]
        self._seen[:], self.shared["taken"][0] = unrolls["seen"], unrolls["taken"]
        self._pending = [DrawnUnrolls(ids_of(stored), np.array(fresh, bool)) for *stored, fresh in unrolls["held"]]

    def continue_at(self, updates: int) -> None:
        for strategy in self.strategies:
            strategy.continue_at(updates)


def shares(ratios: Sequence[float], batch_size: int) -> list[int]:
    """Return how many unrolls of a batch each component gives.

    Shares are rounded so that they sum to the batch, largest remainders first.
    """
    exact = np.array(ratios) / sum(ratios) * batch_size
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: batch_size - counts.sum()]] += 1
    return [int(count) for count in counts]


def concatenate_windows(windows: Sequence[Window]) -> Window:
    """Return windows of several stores as one, concatenated along the batch."""
    if len(windows) == 1:
        return windows[0]
    fields = tree_map(lambda *tensors: torch.cat(tensors, 1), *(window[:-1] for window in windows))
    return Window._make([*fields, tuple(map(torch.cat, zip(*(window.states for window in windows))))])


def _max_reuse(component: MixtureComponent) -> int | None:
    return component.strategy.max_reuse(component.params)


def _ring_unrolls(components: Iterable[MixtureComponent], batch_size: int, num_actors: int) -> int:
    return sum(strategy.ring_unrolls(params, batch_size, num_actors) for strategy, params, _ in components)


def _concatenate_draws(draws: Sequence[DrawnUnrolls]) -> DrawnUnrolls:
    keys = SampleIds(*map(np.concatenate, zip(*(drawn.keys for drawn in draws))))
    return DrawnUnrolls(keys, np.concatenate([drawn.fresh for drawn in draws]))
