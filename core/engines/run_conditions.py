"""The conditions that end a run, and the times at which a checkpoint is due."""

import time
from typing import Any

from core.runtime.context import Context
from core.runtime.schedule import Schedule


class Conditions:
    """Checks of one run, which its engine makes several times a second or after every round."""

    def __init__(self, context: Context):
        self._context, self._options, self._started = context, context.options, time.monotonic()
        learner, agent_steps = self._options.learner, context.counters.agent_steps
        self._schedules = []
        if learner.checkpoint_steps:
            self._schedules.append(Schedule(0.0, learner.checkpoint_steps, agent_steps))
        if self._options.engine != "inline":  # its checkpoints change what actors do, and one seed must give one run
            self._schedules.append(Schedule(learner.checkpoint_period, 0, agent_steps))

    def check(self) -> None:
        """Stop the run if it is done, and request a checkpoint if one is due."""
        run_state, agent_steps = self._context.run_state, self._context.counters.agent_steps
        if not run_state.stopped and self._done():
            run_state.stop()
        if not run_state.checkpoint_due and any(schedule.due(agent_steps) for schedule in self._schedules):
            for schedule in self._schedules:
                schedule.start(agent_steps)
            run_state.request_checkpoint()

    def _done(self) -> bool:
        options, counters, scores = self._options, self._context.counters, self._context.counters.scores
        limits: list[tuple[Any, float]] = [
            (options.steps, counters.agent_steps),
            (options.updates, counters.updates),
            (options.seconds, time.monotonic() - self._started),
            (options.target_score, scores[0] if scores else float("-inf")),
        ]
        return any(limit is not None and value >= limit for limit, value in limits)
