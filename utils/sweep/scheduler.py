"""Many runs, a number of them at a time, on this machine's cores."""

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

INTERRUPTED = 128  # plus the signal's number
POLL = 0.2         # seconds
GRACE = 60.0       # seconds that what an earlier, killed runner left running has to save and end


class SignalForwarder:
    """While it is entered, SIGINT and SIGTERM are noted, and every run in `runs` is told to save and end, at the second signal to end."""

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
        return INTERRUPTED + self._numbers[0] if self._numbers else 0

    def tell(self) -> None:
        """Every run, also one that was started while a signal came."""
        for run in self.runs:
            run.interrupt(len(self._numbers))

    def _note(self, number: int, frame: object) -> None:
        self._numbers.append(number)
        self.tell()


class Runner:
    """Runs that are complete are not repeated, interrupted ones are continued, one that fails stops no other. Each of `jobs` at a time has
    its share of the cores. SIGINT and SIGTERM make every run save and end.

    Raises Refused for more jobs than cores and for runs that exist with other settings.
    """

    def __init__(self, runs: Sequence[ChildRun], jobs: int):
        cores = sorted(os.sched_getaffinity(0))
        if not 1 <= jobs <= len(cores):
            raise ConfigurationError([f"--jobs {jobs} must be 1 to {len(cores)}: each run needs a core of its own"])
        for run in runs:
            run.check()
        self._runs, self._shares = runs, [cores[share::jobs] for share in range(jobs)]
        self._interrupts = SignalForwarder(runs)

    def run(self) -> int:
        """To the end of all. Returns 0, or 128 and the signal that ended it."""
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
                if not self._left_alone(run):
                    free.insert(0, share)
                    continue
                self._say(run, "runs")
                run.start(self._shares[share])
                active[share] = run
                self._interrupts.tell()
            time.sleep(POLL)
            for share in [share for share, run in active.items() if run.exit_code is not None]:
                free.append(share)
                self._say(run := active.pop(share), self._outcome(run))

    def _left_alone(self, run: ChildRun) -> bool:
        """Whether nobody trains this run any more, after a while."""
        if wait_until_left(run, self._interrupts):
            return True
        self._say(run, "is being trained by somebody else and passed over")
        return False

    @staticmethod
    def _outcome(run: ChildRun) -> str:
        if run.exit_code:
            return f"ended with exit code {run.exit_code}: see {run.output}"
        curve = read_curve(run.options.log_folder / "metrics.jsonl")
        return f"done, late score {late_score(curve, run.options.steps):.2f}"

    def _say(self, run: ChildRun, what: str) -> None:
        print(f"[{self._runs.index(run) + 1}/{len(self._runs)}] {run.options.signature} {what}", flush=True)


def wait_until_left(run: ChildRun, interrupts: SignalForwarder) -> bool:
    """Whether no process trains this run any more; what a killed runner left has a while to save and end."""
    deadline = time.monotonic() + GRACE
    while run.running and time.monotonic() < deadline and not interrupts:
        time.sleep(POLL)
    return not run.running


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Whoever makes the runs of this folder does so alone. Raises Refused when another does."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder) as locked:
        if not locked:
            raise ConfigurationError([f"{folder} is being worked on by another process: wait for it, or choose another name"])
        yield
