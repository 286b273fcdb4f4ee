"""Keep samples per insert at a constant ratio by making actors and learners wait for each other."""

from typing import Any

from pydantic import Field

from core.common.settings import frozen_dataclass
from core.runtime.run_counters import RunCounters


@frozen_dataclass
class RateLimiterParams:
    """Options of the pace: the samples per insert, and the step at which learning starts."""

    samples_per_insert: float | None = Field(default=8.0, gt=0, le=1e6)
    """Samples learnt from for each agent step stored (Nature DQN: 32 / 4)."""
    min_replay_size: int = Field(default=20_000, ge=1, le=10**10)
    """Agent steps stored before the first update."""
    error_buffer: int = Field(default=1_000, ge=1, le=10**10)
    """Agent steps that actors may run ahead of samples_per_insert."""


class RateLimiter:
    """Limit the samples that are learned from for each agent step stored, from `min_replay_size` on, as in Reverb.

    Learners wait until a whole batch is due. Actors wait once learners are `error_buffer` agent steps behind. If
    `samples_per_insert` is None, learners wait for `min_replay_size` only and actors never wait.
    """

    def __init__(self, params: RateLimiterParams, counters: RunCounters):
        self._params, self._counters = params, counters

    @property
    def is_warming_up(self) -> bool:
        """Return True while too few agent steps are stored to learn from."""
        return self._counters.inserted < self._params.min_replay_size

    def can_insert(self) -> bool:
        """Return True if actors may store more agent steps."""
        ratio = self._params.samples_per_insert
        return ratio is None or self.is_warming_up or self._deficit(ratio) < self._params.error_buffer * ratio

    def can_sample(self, samples: int) -> bool:
        """Return True if learners may learn from that many samples."""
        ratio = self._params.samples_per_insert
        return not self.is_warming_up and (ratio is None or self._deficit(ratio) >= samples)

    def ratio(self) -> float:
        """Return the samples per insert since `min_replay_size`; 0 before."""
        inserted = self._counters.inserted - self._params.min_replay_size
        return self._counters.sampled / inserted if inserted > 0 else 0.0

    def _deficit(self, ratio: float) -> float:
        """Return the samples that learners are behind; negative if they are ahead."""
        return (self._counters.inserted - self._params.min_replay_size) * ratio - self._counters.sampled

    def state_dict(self) -> dict[str, Any]:
        return {"limiter": [self._params.samples_per_insert, self._params.min_replay_size]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with restored counters. If the checkpoint had other limits, the new ones hold from here on."""
        ratio, own = self._params.samples_per_insert, self.state_dict()["limiter"]
        if ratio is not None and state.get("limiter", own) != own:
            self._counters.reset_sampled(max(int(self._deficit(ratio)) + self._counters.sampled, 0))
