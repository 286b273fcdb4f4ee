"""What engines check while a run goes on: stop conditions and the cadence of checkpoints."""

import time
from typing import Any

from core.runtime.context import Context


class Conditions:
    """One for each run; `check` is called a few times a second or after every round."""

    def __init__(self, context: Context):
        self._context, self._options = context, context.options
        self._started = self._saved = time.monotonic()
        period = self._options.learner.checkpoint_steps
        self._next_steps = (context.counters.agent_steps // period + 1) * period if period else 0

    def check(self) -> None:
        """Stop the run when it is done; ask for a checkpoint when one is due."""
        run_state = self._context.run_state
        if not run_state.stopped and self._done():
            run_state.stop()
        if not run_state.checkpoint_due and self._checkpoint_due():
            self._saved = time.monotonic()
            run_state.request_checkpoint()

    def _done(self) -> bool:
        options, counters, scores = self._options, self._context.counters, self._context.counters.scores
        limits: list[tuple[Any, float]] = [
            (options.steps, counters.agent_steps), (options.updates, counters.updates),
            (options.seconds, time.monotonic() - self._started),
            (options.target_score, scores[0] if scores else float("-inf"))]
        return any(limit is not None and value >= limit for limit, value in limits)

    def _checkpoint_due(self) -> bool:
        params, agent_steps = self._options.learner, self._context.counters.agent_steps
        if params.checkpoint_steps and agent_steps >= self._next_steps:
            self._next_steps = (agent_steps // params.checkpoint_steps + 1) * params.checkpoint_steps
            return True
        by_time = self._options.engine != "inline"  # where a checkpoint changes what actors do, and the same seed must give the same run
        return by_time and time.monotonic() - self._saved >= params.checkpoint_period
