"""Run main.py in subprocesses: start, resume and interrupt one, or run many, some at a time, on shares of the cores."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from core.checkpoint.run_checkpoint import checkpoints
from core.common.files import folder_lock
from core.common.processes import Interrupts, die_with_parent
from core.common.settings import dotted
from utils import run_registry
from utils.config import command_line, validation
from utils.config.rows import changed
from utils.errors import ConfigurationError
from utils.options import PROJECT, Options
from utils.plot.curves import METRICS, SCHEDULED, STOPS, curve_of, differences, is_scheduled, late_score, read_lines

# Options that a sweep sets, not its user, and those with which main.py does not train.
RESERVED = ("config", "seed", "mode", "machine", "timestamp", "resume", "root", "check", "help")
PATIENT = ("--ray.placement_timeout", "none")  # On a shared cluster, runs wait for the room that others hold.
MAIN = Path(PROJECT) / "main.py"
POLL = 0.2  # Seconds between two looks at the running processes.
GRACE = 60.0  # Seconds that the runs of an earlier, killed scheduler have to save and end.


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command, and the words behind --, which are options of its runs."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, unknown = parser.parse_known_args(arguments[:end])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; options of the runs stand behind --, at the end")
    return options, list(arguments[end + 1 :])


def options_of(config: str, words: Sequence[str], machine: str, root: str) -> Options:
    """Return the options of a new run of this row with these words of the command line.

    Raises:
        ConfigurationError: the words are wrong, or no option says when the run ends.
    """
    given, _ = command_line.split(words)
    hints = {**dict.fromkeys(("seed", "config", "root"), ": give it before --"), "machine": ": give --name"}
    if reserved := [f"--{name} is not yours to give here{hints.get(name, '')}" for name in RESERVED if name in given]:
        raise ConfigurationError(reserved)
    try:
        new = {"mode": 1, "check": "false", "resume": "none", "machine": machine, "timestamp": "new.run"}
        options = command_line.read([*words, *words_of({"config": config, "root": root, **new})])
    except ConfigurationError as refused:
        raise ConfigurationError([f"{config}: {problem}" for problem in refused.problems], refused.code) from None
    if all(getattr(options, name) is None for name in STOPS):
        raise ConfigurationError(
            f"{config}: nothing says when its runs are done; give --{', --'.join(STOPS)} after --, as -- --steps 100000"
        )
    return options


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Return options by their names as words of the command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def start_main(words: Sequence[str], output: int | IO[str], **options: Any) -> subprocess.Popen[Any]:
    """Start main.py, which saves and ends if this process dies; Ctrl-C of a terminal does not reach it."""
    return subprocess.Popen(
        [sys.executable, str(MAIN), *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(end_with, os.getpid()),
        **options,
    )


def seeded(options: Options, name: str, seeds: Iterable[int]) -> list[Options]:
    """Return the options with each seed, as runs with the timestamp <name>-seed<N>.

    Raises:
        ConfigurationError: a seed is out of bounds, or a name cannot be that of files.
    """
    runs, errors = list[Options](), list[str]()
    for seed in seeds:
        run, refused = changed(options, {"timestamp": f"{name}-seed{seed}", "seed": seed})
        runs.append(run)
        errors += [f"--seeds: {sentence}" for sentence in refused.values()] or validation.names(run)
    if errors:
        raise ConfigurationError(errors)
    return runs


class ChildRun:
    """A run of main.py in a subprocess, named by the signature of its options.

    It has the `words` of the command line and the options of RESERVED, and prints into the file `output`. Tables name
    it by its `row`, by default that of CONFIGS.
    """

    def __init__(self, options: Options, words: Sequence[str], output: Path, row: str | None = None):
        self.options, self.output, self._words = options, output, list(words)
        self.row = row or options.config
        self.process: subprocess.Popen[Any] | None = None
        self._interrupted = 0

    # state ----------------------------------------------------------------------------------------------------------
    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the last start, negative for a signal; None if the run is active or never started."""
        if self.process is not None:
            return self.process.poll()
        saved = run_registry.read(self.options.log_folder)
        return None if saved is None else saved.exit_code

    @property
    def complete(self) -> bool:
        """Return True if the run met its stop conditions, or was killed after the evaluation of its last agent step."""
        saved, options = run_registry.read(self.options.log_folder), self.options
        if saved is None or saved.exit_code not in (0, None):
            return False
        stops = [name for name in STOPS if name != "seconds" or not options.supervisor.elastic]  # of its last part
        same = all(saved.options.get(name) == getattr(options, name) for name in stops)
        evaluated = curve_of(self.lines).steps
        reached = options.steps and len(evaluated) and evaluated[-1] >= options.steps
        return bool((saved.exit_code == 0 and same) or reached)

    def check(self) -> None:
        """Raise ConfigurationError if files of this run exist and were made with other or unknown options."""
        if stale := run_registry.stale_checkpoints(self.options):
            raise ConfigurationError(stale)
        saved, current = run_registry.read(self.options.log_folder), dotted(self.options.to_dict())
        different = differences(saved.options, current) if saved else []
        own = ["num_envs_per_actor"] if self.options.num_envs_per_actor == 0 else []  # Numbers that the run chose.
        own += ["num_learners", "num_actors"] if self.options.supervisor.elastic else []
        different = [name for name in different if name not in own]
        if saved and is_scheduled(current):  # A shorter run would have had another schedule; a longer one goes on.
            counts = {name: (saved.options.get(name), current[name]) for name in SCHEDULED}
            different += [name for name, (before, now) in counts.items() if before and now and before > now]
        if saved and different:
            listed = ", ".join(f"{name}={saved.options[name]!r} there and {current[name]!r} here" for name in different)
            raise ConfigurationError(
                f"run {self.options.signature} exists with other settings ({listed}): choose another name"
            )

    @property
    def running(self) -> bool:
        """Return True if any process holds the lock of the run's folder."""
        try:
            with folder_lock(self.options.log_folder) as locked:
                return not locked
        except OSError:
            return False

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the run's metrics, in their order."""
        return read_lines(self.options.log_folder / METRICS)

    # control --------------------------------------------------------------------------------------------------------
    def start(self, cores: Collection[int]) -> None:
        """Train on these cores from the newest checkpoint. The run saves and ends if this process dies.

        A run without a checkpoint starts again without its model; its earlier log folder moves to the folder of
        `output`.
        """
        self.output.parent.mkdir(parents=True, exist_ok=True)
        resume = bool(checkpoints(self.options.checkpoint_folder))
        if not resume and self.options.log_folder.exists():
            aside = self.output.with_name(f"{self.output.stem}-begun-again-{time.time_ns()}")
            os.replace(self.options.log_folder, aside)
            self.options.model_path.unlink(missing_ok=True)
        before = os.sched_getaffinity(0)
        with self.output.open("a") as output:
            try:
                os.sched_setaffinity(0, cores)  # Inherited by the child, whose engine counts its cores.
                self.process = start_main(self._command(resume), output)
            finally:
                os.sched_setaffinity(0, before)

    def interrupt(self, times: int = 1) -> None:
        """Send SIGINT until the run has received `times` in total: one makes it save and end, two end it at once."""
        while self._interrupted < times and self.process is not None and self.process.poll() is None:
            self._interrupted += 1
            self.process.send_signal(signal.SIGINT)

    def _command(self, resume: bool) -> list[str]:
        options = self.options  # A resumed run has its initial weights in its checkpoint and needs no model_file.
        identity = {"resume": "none", "machine": options.machine, "timestamp": options.timestamp}
        if resume:
            identity = {"resume": options.signature, "model_file": "none"}
        run = {"config": options.config, "seed": options.seed, "root": options.root, "mode": 1, "check": "false"}
        return [*words_of(run), *PATIENT, *self._words, *words_of(identity)]


def end_with(parent: int) -> None:
    """Make the kernel send SIGTERM to this new process when its parent dies in any way; call it as a preexec_fn.

    SIGINT gets its default handler, because background jobs of a shell ignore it and their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent, signal.SIGTERM, 128 + signal.SIGTERM)


# many runs ------------------------------------------------------------------------------------------------------------
class SignalForwarder(Interrupts):
    """A context manager that forwards SIGINT and SIGTERM to every run in `runs`.

    The first signal makes the runs save and end, the second one ends them at once. True once a signal has arrived.
    """

    def __init__(self, runs: Sequence[ChildRun]):
        super().__init__()
        self.runs = runs

    def __enter__(self) -> "SignalForwarder":
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def forward(self) -> None:
        """Forward the signals to every run, including one that was started while a signal arrived."""
        for run in self.runs:
            run.interrupt(self.requests)

    def _note(self, number: int, frame: object) -> None:
        self.add(number)
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
        free, active = list(self._shares), dict[ChildRun, list[int]]()
        with self._interrupts:
            waiting = [run for run in self._runs if not run.complete]
            if len(waiting) < len(self._runs):
                print(f"{len(self._runs) - len(waiting)} of {len(self._runs)} runs are complete already", flush=True)
            while active or (waiting and not self._interrupts):
                while waiting and free and not self._interrupts:
                    run = waiting.pop(0)
                    if not wait_until_idle(run, self._interrupts):
                        self._print(run, "is being trained by somebody else and passed over")
                        continue
                    self._print(run, "runs")
                    run.start(free[0])
                    active[run] = free.pop(0)
                    self._interrupts.forward()
                time.sleep(POLL)
                for run in [run for run in active if run.exit_code is not None]:
                    free.append(active.pop(run))
                    late = f"done, late score {late_score(curve_of(run.lines), run.options.steps):.2f}"
                    failed = f"ended with exit code {run.exit_code}: see {run.output}"
                    self._print(run, failed if run.exit_code else late)
        return self._interrupts.exit_code

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
        ConfigurationError: the folder cannot be made, or another process holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = stack.enter_context(folder_lock(folder))
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be made ({error.strerror}): name another place for models and logs with --root"
            ) from None
        if not locked:
            raise ConfigurationError(
                f"{folder} is being worked on by another process: wait for it, or choose another name"
            )
        yield
