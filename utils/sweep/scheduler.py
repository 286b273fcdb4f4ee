"""Run many subprocess runs, some at a time, on the cores of this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.common.files import folder_lock
from utils.errors import ConfigurationError
from utils.plot.curves import late_score, read_curve
from utils.sweep.subprocess_run import ChildRun

INTERRUPTED = 128  # Exit code after a signal, minus the signal's number.
POLL = 0.2  # Seconds between two looks at the running processes.
GRACE = 60.0  # Seconds that the runs of an earlier, killed scheduler have to save and end.


class SignalForwarder:
    """A context manager that forwards SIGINT and SIGTERM to every run in `runs`.

    The first signal makes the runs save and end, the second one ends them at once. True once a signal has arrived.
    """

    def __init__(self, runs: Sequence[ChildRun]):
        self.runs, self._numbers = runs, list[int]()

    def __enter__(self) -> "SignalForwarder":
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return bool(self._numbers)

    @property
    def exit_code(self) -> int:
        """Return 128 plus the number of the first signal, or 0 without a signal."""
        return INTERRUPTED + self._numbers[0] if self._numbers else 0

    def forward(self) -> None:
        """Forward the signals to every run, including one that was started while a signal arrived."""
        for run in self.runs:
            run.interrupt(len(self._numbers))

    def _note(self, number: int, frame: object) -> None:
        self._numbers.append(number)
        self.forward()


class Runner:
    """Run all runs, `jobs` at a time, each on its share of the cores.

    Complete runs are not repeated, interrupted ones are resumed, and a run that fails does not stop the others. SIGINT
    and SIGTERM make every run save and end.

    Raises:
        ConfigurationError: there are more jobs than cores, or a run exists with other options.
    """

    def __init__(self, runs: Sequence[ChildRun], jobs: int):
        cores = sorted(os.sched_getaffinity(0))
        if not 1 <= jobs <= len(cores):
            raise ConfigurationError(f"--jobs {jobs} must be 1 to {len(cores)}: each run needs a core of its own")
        for run in runs:
            run.check()
        self._runs, self._shares = runs, [cores[share::jobs] for share in range(jobs)]
        self._interrupts = SignalForwarder(runs)

    def run(self) -> int:
        """Run all to their end; return 0, or 128 plus the number of the signal that ended them."""
        with self._interrupts:
            self._run_all()
        return self._interrupts.exit_code

    def _run_all(self) -> None:
        waiting = [run for run in self._runs if not run.complete]
        if len(waiting) < len(self._runs):
            print(f"{len(self._runs) - len(waiting)} of {len(self._runs)} runs are complete already", flush=True)
        free, active = list(range(len(self._shares))), dict[int, ChildRun]()
        while active or (waiting and not self._interrupts):
            while waiting and free and not self._interrupts:
                share, run = free.pop(0), waiting.pop(0)
                if not wait_until_idle(run, self._interrupts):
                    self._print(run, "is being trained by somebody else and passed over")
                    free.insert(0, share)
                    continue
                self._print(run, "runs")
                run.start(self._shares[share])
                active[share] = run
                self._interrupts.forward()
            time.sleep(POLL)
            for share in [share for share, run in active.items() if run.exit_code is not None]:
                free.append(share)
                self._print(run := active.pop(share), self._outcome(run))

    @staticmethod
    def _outcome(run: ChildRun) -> str:
        if run.exit_code:
            return f"ended with exit code {run.exit_code}: see {run.output}"
        curve = read_curve(run.options.log_folder / "metrics.jsonl")
        return f"done, late score {late_score(curve, run.options.steps):.2f}"

    def _print(self, run: ChildRun, event: str) -> None:
        print(f"[{self._runs.index(run) + 1}/{len(self._runs)}] {run.options.signature} {event}", flush=True)


def wait_until_idle(run: ChildRun, interrupts: SignalForwarder) -> bool:
    """Return True once no process trains this run. A process left by a killed scheduler has GRACE to save and end."""
    deadline = time.monotonic() + GRACE
    while run.running and time.monotonic() < deadline and not interrupts:
        time.sleep(POLL)
    return not run.running


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the lock of this folder, so that one process alone makes its runs.

    Raises:
        ConfigurationError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder) as locked:
        if not locked:
            raise ConfigurationError(
                f"{folder} is being worked on by another process: wait for it, or choose another name"
            )
        yield
