"""Memories of whole unrolls: what arrived is shown to one or more rules, and a batch is made of each rule's share.

An unroll is a chunk of one stream together with its head; actors publish chunks exactly as long. The rules work on keys; the rows
stay in the actors' rings, once, unless a rule decides itself what to overwrite: such a rule keeps copies in slots of its own.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from core.common.shared_arrays import SharedArrays
from core.memories.unrolls.strategy import EMPTY_DRAW, DrawnUnrolls, Part, ReplayStrategy
from core.memories.unrolls.unroll_slots import slots_bytes
from core.memories.window_starts import ATTEMPTS, check_batch_size
from core.memory import Memory
from core.specs import ArraySpec, WindowKind, WindowSpec
from core.trajectory.layout import Layout
from core.trajectory.writer import ChunkWriter
from core.types import Batch, SampleIds, Window


class UnrollMemory(Memory):
    """Subclasses say of which parts; `taken` counts the unrolls that have left a queue."""

    window_kinds: ClassVar[tuple[WindowKind, ...]] = ("unrolls",)

    def __init__(self, params: Any, layout: Layout, window: WindowSpec, seed: int):
        if window.stride != window.length or layout.chunk_length != window.stride:
            raise ValueError(f"unrolls are whole chunks: windows of length {window.length} every {window.stride} rows "
                             f"do not fit chunks of {layout.chunk_length}")
        super().__init__(params, layout, window, seed)
        self.shared = SharedArrays({"taken": ArraySpec((1,), "int64")})
        parts = self._ordered(params)
        self.ratios = [part.ratio for part in parts]
        self.rules = [part.rule(part.params, self) for part in parts]
        self._turns = sorted(range(len(parts)), key=lambda number: not parts[number].rule.is_rate_limited(parts[number].params))
        self._held = [EMPTY_DRAW for _ in parts]               # of the batch in the making
        self._seen = np.zeros(layout.num_actors, np.int64)  # chunks that the rules were shown

    # what it asks for -------------------------------------------------------------------------------------------------
    @classmethod
    @abstractmethod
    def parts(cls, params: Any) -> list[Part]:
        """The rules and their shares."""

    @classmethod
    def _ordered(cls, params: Any) -> list[Part]:
        """Those whose unrolls stay in the rings first: they are read together."""
        return sorted(cls.parts(params), key=lambda part: part.rule.slots(part.params) > 0)

    @classmethod
    def ring_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        return length * sum(part.rule.ring_unrolls(part.params, batch_size, num_actors) for part in cls.parts(params))

    @classmethod
    def kept_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        """What a queue has not given yet."""
        pacing = [part for part in cls.parts(params) if part.rule.is_rate_limited(part.params)]
        return length * sum(part.rule.ring_unrolls(part.params, batch_size, num_actors) for part in pacing)

    @classmethod
    def own_bytes(cls, params: Any, layout: Layout, length: int) -> int:
        slots = [(part.rule.slots(part.params), part.rule.packs) for part in cls.parts(params)]
        return sum(slots_bytes(layout, count, length, packs) for count, packs in slots if count)

    @classmethod
    def is_rate_limited(cls, params: Any) -> bool:
        return any(part.rule.is_rate_limited(part.params) for part in cls.parts(params))

    @classmethod
    def samples_per_step(cls, params: Any) -> float:
        fresh = sum(part.ratio / part.rule.times(part.params) for part in cls.parts(params) if part.rule.is_rate_limited(part.params))
        return 1 / fresh if fresh else 1.0

    @classmethod
    def feature_dtype(cls, params: Any) -> str | None:
        wanted = any(part.rule.needs_features(part.params) for part in cls.parts(params))
        return getattr(params, "feature_dtype", "float32") if wanted else None

    @classmethod
    def problems(cls, params: Any, batch_size: int) -> list[str]:
        parts = cls._ordered(params)
        counts = shares([part.ratio for part in parts], batch_size)
        return [problem for part, count in zip(parts, counts) for problem in part.rule.problems(part.params, count)]

    # sides ------------------------------------------------------------------------------------------------------------
    def writer(self, actor_ind: int, priorities: Any = None) -> ChunkWriter:
        return ChunkWriter(self.trajectories, actor_ind, self.window, room=self._room)

    def _room(self) -> bool:
        return all(rule.room() for rule in self.rules)

    def unread(self) -> int:
        """Unrolls published that no queue has given or dropped yet."""
        return int((self.trajectories.written() // self.window.length).sum() * self.layout.num_envs - self.shared["taken"][0])

    # sampling ---------------------------------------------------------------------------------------------------------
    def sample(self, batch_size: int) -> Batch | None:
        """What a queue has given for a batch that is not complete yet is kept for the next call; the others choose when it is."""
        check_batch_size(batch_size)
        self._ingest()
        counts = shares(self.ratios, batch_size)
        for _ in range(ATTEMPTS):
            if not all(self._complete(number, counts[number]) for number in self._turns):
                return None
            parts = self._read()
            if parts is not None:
                return self._batch(parts)
        return None

    def _ingest(self) -> None:
        """Show the rules every unroll that has arrived since the last time, in the order in which all actors published them."""
        length, envs = self.window.length, self.layout.num_envs
        available = self.trajectories.written() // length
        oldest = -(-self.trajectories.starts(0)[0] // length)
        starts = np.maximum(self._seen, np.minimum(oldest, available))
        if missed := int((starts - self._seen).sum()):
            for rule in self.rules:
                rule.skipped(missed * envs)
        counts = available - starts
        actors = np.repeat(np.arange(len(counts)), counts)
        chunks = np.arange(len(actors)) - np.repeat(counts.cumsum() - counts, counts) + starts[actors]
        tickets = self.trajectories.arrays["tickets"]
        order = np.argsort(tickets[actors, chunks % tickets.shape[1]], kind="stable")
        keys = SampleIds((actors[order, None] * envs + np.arange(envs)).ravel(), np.repeat(chunks[order] * length, envs))
        if len(order):
            for rule in self.rules:
                rule.insert(keys)
        self._seen = available

    def _complete(self, number: int, count: int) -> bool:
        """Whether this rule's share is together now."""
        rule, held = self.rules[number], self._held[number]
        if len(held.fresh) > count:  # batches have become smaller
            rule.lost(int(held.fresh[count:].sum()))
            held = _part(held, slice(count))
        for _ in range(ATTEMPTS):
            missing = count - len(held.fresh)
            drawn = rule.draw(missing) if missing else None
            if drawn is None:
                break
            held = _joined(held, self._intact(rule, drawn))
        self._held[number] = held
        return len(held.fresh) == count

    def _read(self) -> list[Window] | None:
        """The windows of all that is held: those in the rings together, then of each rule with slots. None when writers reached
        some of them meanwhile, which are held no longer."""
        ring = [held.keys for rule, held in zip(self.rules, self._held) if rule.store is self.trajectories]
        parts = []
        if ring:
            keys = SampleIds(*map(np.concatenate, zip(*ring)))
            parts.append(self.trajectories.gather(*keys, self.window))
            if not self.trajectories.still_valid(*keys).all():
                self._held = [self._intact(rule, held) for rule, held in zip(self.rules, self._held)]
                return None
        return parts + [rule.store.gather(*held.keys, self.window)
                        for rule, held in zip(self.rules, self._held) if rule.store is not self.trajectories]

    def _intact(self, rule: ReplayStrategy, drawn: DrawnUnrolls) -> DrawnUnrolls:
        """Without those that their writer has reached."""
        if rule.store is not self.trajectories:
            return drawn
        intact = self.trajectories.still_valid(*drawn.keys)
        rule.lost(int((drawn.fresh & ~intact).sum()))
        return _part(drawn, intact)

    def _batch(self, parts: Sequence[Window]) -> Batch:
        """What is held, as a batch; nothing is held any more."""
        keys = SampleIds(*map(np.concatenate, zip(*(held.keys for held in self._held))))
        fresh = torch.from_numpy(np.concatenate([held.fresh for held in self._held]))
        self._held = [EMPTY_DRAW for _ in self.rules]
        for rule in self.rules:
            rule.release()
        return Batch(concatenated(parts), keys, torch.ones(len(fresh)), fresh)

    def statistics(self) -> dict[str, float]:
        """memory_size: rows in the rings; the rest is the rules' own, numbered where two of a list have the same."""
        found = super().statistics()
        for number, rule in enumerate(self.rules):
            found |= {f"{name}_{number + 1}" if name in found else name: value for name, value in rule.statistics().items()}
        return found

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        unrolls = {"seen": self._seen.tolist(), "taken": int(self.shared["taken"][0]),
                   "held": [[*map(np.ndarray.tolist, (*held.keys, held.fresh))] for held in self._held]}
        return {**super().state_dict(), "rules": [rule.state_dict() for rule in self.rules], "unrolls": unrolls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for rule, stored in zip(self.rules, state["rules"], strict=True):
            rule.load_state_dict(stored)
        stored = state["unrolls"]
        self._seen[:], self.shared["taken"][0] = stored["seen"], stored["taken"]
        self._held = [DrawnUnrolls(SampleIds(np.array(streams, np.int64), np.array(serials, np.int64)), np.array(fresh, bool))
                      for streams, serials, fresh in stored["held"]]

    def continue_at(self, updates: int) -> None:
        for rule in self.rules:
            rule.continue_at(updates)


def shares(ratios: Sequence[float], batch_size: int) -> list[int]:
    """How many of a batch each part gives: rounded so that they sum to the batch, largest remainders first."""
    exact = np.array(ratios) / sum(ratios) * batch_size
    counts = np.floor(exact + 1e-9).astype(int)
    for part in np.argsort(counts - exact, kind="stable")[:batch_size - counts.sum()]:
        counts[part] += 1
    return counts.tolist()


def _part(drawn: DrawnUnrolls, which: slice | np.ndarray) -> DrawnUnrolls:
    return DrawnUnrolls(SampleIds(drawn.keys.streams[which], drawn.keys.serials[which]), drawn.fresh[which])


def _joined(first: DrawnUnrolls, second: DrawnUnrolls) -> DrawnUnrolls:
    return DrawnUnrolls(SampleIds(*map(np.concatenate, zip(first.keys, second.keys))), np.concatenate([first.fresh, second.fresh]))


def concatenated(parts: Sequence[Window]) -> Window:
    """Windows of several stores as one, along the batch."""
    if len(parts) == 1:
        return parts[0]

    def joined(tensors: Iterable[Tensor], axis: int) -> Tensor:
        return torch.cat(list(tensors), axis)

    fields = [joined(tensors, 1) for tensors in zip(*(part[:6] for part in parts))]
    extras = {name: joined((part.extras[name] for part in parts), 1) for name in parts[0].extras}
    return Window._make([*fields, extras, tuple(joined(tensors, 0) for tensors in zip(*(part.states for part in parts)))])
