"""End a run: its conditions, exit codes and last messages, and the times at which a checkpoint is due."""

import shlex
import signal
import sys
import time

from core.checkpoint.run_checkpoint import checkpoints
from core.common.exit_codes import BAD_OPTIONS, TRAINING_FAILED
from core.runtime.context import Context
from core.runtime.options import RunOptions
from core.runtime.run_state import Schedule


class Conditions:
    """Checks of one training, which its engine makes several times a second or after every round.

    None of them applies to a test (mode 2), which ends with its last episode.
    """

    def __init__(self, context: Context):
        self._context, self._options, self._started = context, context.options, time.monotonic()
        learner, agent_steps = self._options.learner, context.counters.agent_steps
        self._schedules, self._is_saving = [], False
        if learner.checkpoint_steps:
            self._schedules.append(Schedule(0.0, learner.checkpoint_steps, agent_steps))
        if self._options.engine != "inline":  # its checkpoints change what actors do, and one seed must give one run
            self._schedules.append(Schedule(learner.checkpoint_period, 0, agent_steps))

    def check(self) -> None:
        """Stop the run if it is done, and request a checkpoint if one is due. A run that stops makes its last one."""
        run_state, agent_steps = self._context.run_state, self._context.counters.agent_steps
        if run_state.stopped or self._options.mode == 2:
            return
        if self._is_saving and not run_state.checkpoint_due:  # the period is the time between two saves
            for schedule in self._schedules:
                schedule.start_period()
        self._is_saving = run_state.checkpoint_due
        seconds = self._options.seconds
        is_late = seconds is not None and time.monotonic() - self._started >= seconds
        if is_late or self._context.reached_limits():
            run_state.request_checkpoint()
            run_state.stop()
        elif not run_state.checkpoint_due and any(schedule.due(agent_steps) for schedule in self._schedules):
            for schedule in self._schedules:
                schedule.start(agent_steps)
            run_state.request_checkpoint()


def interrupt_signals() -> list[signal.Signals]:
    """Return the signals at which a run saves and ends. SIGHUP is missing if it is ignored, as it is under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def exit_code_of(error: BaseException, has_begun: bool) -> int:
    """Return the exit code of a run that ended with this exception.

    A package that is missing before the work `has_begun` counts as bad options. Other exceptions may carry an
    `exit_code`: a damaged checkpoint has 3. An environment's may carry 0, but the run has failed.
    """
    if isinstance(error, ImportError):
        return TRAINING_FAILED if has_begun else BAD_OPTIONS
    exit_code: int = getattr(error, "exit_code", 0) or TRAINING_FAILED
    return exit_code


def unsaved(context: Context) -> str:
    """Name the processes whose last write failed, because their run is not done. Return "" if there are none."""
    names = [" ".join(map(str, context.roles[process_ind])) for process_ind in context.run_state.failed_writers]
    return f"the last write of {', '.join(names)} failed: not all that this run made is on disk" if names else ""


def best_model_hint(options: RunOptions) -> str:
    """Return the best model's file and the command that tests it."""
    names = {"machine": options.machine, "timestamp": options.timestamp}
    words = [f"--{name} {value}" for name, value in names.items() if value != getattr(type(options), name)]
    return f"best model: {options.model_path}; test it with: {_command(options, '--mode 2', *words)}"


def resume_command_hint(options: RunOptions) -> str:
    """Return the command that continues the run, if the run has a checkpoint."""
    if checkpoints(options.checkpoint_folder):
        return f"continue this run with: {_command(options, '--resume', options.signature)}"
    learner = options.learner
    times = []
    if learner.checkpoint_steps:
        times.append(f"every {learner.checkpoint_steps:,} agent steps, learner.checkpoint_steps")
    if options.engine != "inline":
        times.append(f"every {learner.checkpoint_period:g} s, learner.checkpoint_period")
    due = "; ".join([*times, "at the end"])
    return f"this run has no checkpoint (one is due {due}) and cannot be continued: start a new one"


def _command(options: RunOptions, *words: str) -> str:
    """Return the command line of main.py with these words, for the row and root of a run."""
    python = shlex.quote(sys.orig_argv[0])  # as the user wrote it
    root = [] if options.root == type(options).root else ["--root", shlex.quote(options.root)]
    return " ".join([python, "main.py", "--config", shlex.quote(options.config), *words, *root])
