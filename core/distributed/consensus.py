"""What several learners tell each other before an update, and what they make of it: all do the same, or none goes on."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.agent import Agent


class LearnersOutOfSyncError(RuntimeError):
    """Learners that should be alike are not."""


class News(NamedTuple):
    """What learners tell each other before an update."""

    stopped: int      # the run ends
    due: int          # a checkpoint is
    ready: int        # a batch is there
    updates: int      # done
    fingerprint: int  # of all that the agent has learnt, now and then; else 0


class SyncChecker:
    """Whether all learners are at the same update and, every `period` updates and before the first, have learnt the same. 0: the former."""

    def __init__(self, agent: Agent, updates: int, period: int):
        self._agent, self._period, self.updates = agent, period, updates
        self._next = updates

    def look(self) -> tuple[int, int]:
        """Updates and fingerprint of this learner."""
        due = self._period and self.updates >= self._next
        return self.updates, fingerprint(self._agent.state_dict()) if due else 0

    def check(self, rows: list[list[int]]) -> News:
        """What all do now: a checkpoint is due when the first, who writes it, says so. Raises LearnersOutOfSyncError."""
        if len(rows) == 1:
            return News(*rows[0])
        news = [News(*row) for row in rows]
        for name in ("updates", "fingerprint"):
            found = [getattr(each, name) for each in news]
            if len(set(found)) > 1:
                raise LearnersOutOfSyncError(f"after {self.updates} updates the learners are not alike any more: {name} of learners 0 to "
                                     f"{len(news) - 1} are {', '.join(map(str, found))}. The last checkpoint may be sound: "
                                     "continue from it; if it is not, remove its folder, and the one before is taken")
        if self._period and self.updates >= self._next:
            self._next = (self.updates // self._period + 1) * self._period
        return News(any(each.stopped for each in news), news[0].due, all(each.ready for each in news), *news[0][3:])


def fingerprint(state: Mapping[str, Any]) -> int:
    """64 bits, with sign, of all tensors and plain values."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(state):
        digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if isinstance(leaf, Tensor)
                      else repr(leaf).encode())
    return int.from_bytes(digest.digest(), signed=True)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
