"""The agreement of several learners before each update: all of them do the same, or the run ends."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.agent import Agent


class LearnersOutOfSyncError(RuntimeError):
    """Learners that should be alike have different update counts or parameters."""


class LearnerStatus(NamedTuple):
    """The status that each learner sends to all others before an update. Every field fits into 64 bits with sign."""

    stopped: int  # the run ends
    checkpoint_due: int
    has_batch: int
    updates: int  # made so far
    digest: int  # of the agent's state, if it is compared before this update; else 0


class SyncChecker:
    """Check that all learners are at the same update and have the same state.

    Update counts are compared before every update, states before the first update and then every `period` updates. If
    `period` is 0, states are never compared.
    """

    def __init__(self, agent: Agent, updates: int, period: int):
        self._agent, self._period, self.updates = agent, period, updates
        self._next_comparison = updates

    def local_status(self) -> tuple[int, int]:
        """Return the fields `updates` and `digest` of this learner's status."""
        return self.updates, state_digest(self._agent.state_dict()) if self._compares_states() else 0

    def merge_statuses(self, rows: list[list[int]]) -> LearnerStatus:
        """Return the status on which all learners act, from the statuses of all.

        Any learner can stop the run. Only the first, which writes the checkpoint, decides that one is due. An update
        needs a batch of every learner.

        Raises:
            LearnersOutOfSyncError: update counts or digests differ.
        """
        if len(rows) == 1:
            return LearnerStatus(*rows[0])
        statuses = [LearnerStatus(*row) for row in rows]
        for name in ("updates", "digest"):
            values = [getattr(status, name) for status in statuses]
            if len(set(values)) > 1:
                raise LearnersOutOfSyncError(
                    f"after {self.updates} updates the learners are not alike any more: {name} of learners 0 to "
                    f"{len(statuses) - 1} are {', '.join(map(str, values))}. The last checkpoint may be sound: "
                    "continue from it; if it is not, remove its folder, and the one before is taken"
                )
        if self._compares_states():
            self._next_comparison = (self.updates // self._period + 1) * self._period
        return LearnerStatus(
            any(status.stopped for status in statuses),
            statuses[0].checkpoint_due,
            all(status.has_batch for status in statuses),
            *statuses[0][3:],
        )

    def _compares_states(self) -> bool:
        return bool(self._period) and self.updates >= self._next_comparison


def state_digest(state: Mapping[str, Any]) -> int:
    """Return a digest of all tensors and plain values of a state: 64 bits with sign."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(state):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
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
