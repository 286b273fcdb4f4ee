"""The conditions that end a run, and the times at which a checkpoint is due."""

import time
from typing import Any

from core.runtime.context import Context
from core.runtime.schedule import Schedule


class Conditions:
    """Checks of one run, which its engine makes several times a second or after every round."""

    def __init__(self, context: Context):
        self._context, self._options, self._started = context, context.options, time.monotonic()
        learner, agent_steps = self._options.learner, context.clock.agent_steps
        self._schedules = []
        if learner.checkpoint_steps:
            self._schedules.append(Schedule(0.0, learner.checkpoint_steps, agent_steps))
        if self._options.engine != "inline":  # its checkpoints change what actors do, and one seed must give one run
            self._schedules.append(Schedule(learner.checkpoint_period, 0, agent_steps))

    def check(self) -> None:
        """Stop the run if it is done, and request a checkpoint if one is due."""
        clock = self._context.clock
        if not clock.stopped and self._done():
            clock.stop()
        if not clock.checkpoint_due and any(schedule.due(clock.agent_steps) for schedule in self._schedules):
            for schedule in self._schedules:
                schedule.start(clock.agent_steps)
            clock.request_checkpoint()

    def _done(self) -> bool:
        options, clock, scores = self._options, self._context.clock, self._context.clock.scores
        limits: list[tuple[Any, float]] = [
            (options.steps, clock.agent_steps), (options.updates, clock.updates),
            (options.seconds, time.monotonic() - self._started),
            (options.target_score, scores[0] if scores else float("-inf"))]
        return any(limit is not None and value >= limit for limit, value in limits)
