"""Continue an elastic run (supervisor.elastic) with another number of learners when its nodes change."""

import dataclasses
import time

from core.common.console import log_to_stderr
from core.engines.run_end import BAD_OPTIONS, DONE, resume_command_hint
from utils.options import Options


class ElasticRun:
    """The parts of a run, each of which continues the one before with as many learners as nodes have room for."""

    def __init__(self, options: Options):
        self._begin, self._seconds = time.monotonic(), options.seconds
        self._losses: list[float] = []  # monotonic seconds of those in the last supervisor.restart_window
        self._learners = 0  # of the last part that started

    def next_options(self, options: Options, exit_code: int, learners: int | None) -> Options | None:
        """Return the options of the next part, or None if the run has ended.

        Args:
            options: Those of the part that ended.
            exit_code: That of this part.
            learners: Number with which the engine says that the run can go on, or None.
        """
        if learners is None:
            return None
        params, now = options.supervisor, time.monotonic()
        if exit_code != DONE:
            self._losses = [loss for loss in self._losses if now - loss < params.restart_window] + [now]
        if len(self._losses) > params.max_restarts:
            log_to_stderr(
                f"supervisor: learners were lost {len(self._losses)} times within {params.restart_window:g} s "
                "(supervisor.restart_window), more than supervisor.max_restarts; the run ends"
            )
        if len(self._losses) > params.max_restarts or not any(options.checkpoint_folder.glob("step_*")):
            log_to_stderr(f"supervisor: {resume_command_hint(options)}")
            return None
        if exit_code != BAD_OPTIONS:
            self._learners = options.num_learners
        elif options.num_learners > self._learners > 0:
            log_to_stderr("supervisor: the run takes in no more learners (supervisor.elastic)")
            params = dataclasses.replace(params, elastic=self._learners)
        actors = options.num_actors // options.num_learners * learners
        log_to_stderr(f"supervisor: the run goes on with learners={learners} and actors={actors} from its checkpoint")
        return dataclasses.replace(
            options,
            resume=options.signature,
            model_file=None,
            num_learners=learners,
            num_actors=actors,
            supervisor=params,
            seconds=None if self._seconds is None else max(self._seconds - (now - self._begin), 0.001),
        )
