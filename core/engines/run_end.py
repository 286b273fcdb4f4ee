"""Exit codes of `python main.py`, and which of them an exception means."""

import shlex
import signal

from core.runtime.context import Context
from core.runtime.options import RunOptions

DONE, BAD_OPTIONS, BAD_CHECKPOINT, TRAINING_FAILED = 0, 2, 3, 4
INTERRUPTED = 128  # plus the signal's number: 129, 130, 143


def interrupting() -> list[signal.Signals]:
    """Return the signals at which a run saves and ends. A hangup is none for who is started by nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def of(error: BaseException) -> int:
    """A missing package is a matter of the set-up; exceptions may carry an `exit_code` of their own (a bad checkpoint: 3)."""
    return BAD_OPTIONS if isinstance(error, ImportError) else getattr(error, "exit_code", TRAINING_FAILED)


def unsaved(context: Context) -> str:
    """Name the processes whose last write failed: then a run is not done, whatever it played. Empty if there are none."""
    places = [" ".join(map(str, context.roles[process_ind])) for process_ind in context.run_state.failed_writers]
    return f"the last write of {', '.join(places)} failed: not all that this run made is on disk" if places else ""


def resume_command_hint(options: RunOptions) -> str:
    """Return the command that continues the run if a checkpoint is there. `options` is a utils.options.Options."""
    if any(options.checkpoint_folder.glob("step_*")):
        root = "" if options.root == type(options).root else f" --root {shlex.quote(options.root)}"
        return f"continue this run with: python main.py --config {options.config} --resume {options.signature}{root}"
    return f"this run has no checkpoint ({_due(options)}) and cannot be continued: start a new one"


def _due(options: RunOptions) -> str:
    """Say when checkpoints are due, as `Conditions` asks for them."""
    learner = options.learner
    times = [f"every {learner.checkpoint_steps:,} agent steps, learner.checkpoint_steps"] if learner.checkpoint_steps else []
    times += [f"every {learner.checkpoint_period:g} s, learner.checkpoint_period"] if options.engine != "inline" else []
    return "one is due " + "; ".join([*times, "at the end"])
