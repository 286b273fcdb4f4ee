"""A run of main.py as a process of its own: started, continued where it stopped, interrupted so that it saves."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from core.common.files import folder_lock
from core.common.processes import die_with_parent
from utils import run_registry
from utils.config import command_line
from utils.config.dotted_settings import flatten
from utils.errors import ConfigurationError
from utils.options import PROJECT, Options
from utils.plot.curves import read_curve
from utils.plot.seed_groups import STOPS, differences

OWN = ("config", "seed", "mode", "machine", "timestamp", "resume", "root")  # words that whoever makes runs gives, not its user
PATIENT = ("--ray.place_timeout", "none")                                   # of many runs on a cluster some wait for the room of others
MAIN = Path(PROJECT) / "main.py"


def options_of(config: str, words: Sequence[str], machine: str, root: str) -> Options:
    """What a new run of this row with these words would be told. Raises Refused with every problem."""
    given, _ = command_line.split(words)
    if own := [f"--{name} is not yours to give here" for name in OWN if name in given]:
        raise ConfigurationError(own)
    try:
        options = command_line.read([*words, "--config", config, "--root", root, "--mode", "1", "--resume", "none",
                                     "--machine", machine, "--timestamp", "new.run"])
    except ConfigurationError as refused:
        raise ConfigurationError([f"{config}: {problem}" for problem in refused.problems], refused.code) from None
    if all(getattr(options, name) is None for name in STOPS):
        raise ConfigurationError(
            [f"{config}: nothing says when its runs are done; give --{', --'.join(STOPS)} after --, as -- --steps 100000"])
    return options


class ChildRun:
    """Named by its options' machine and timestamp; `words` are those of the command line beside what its options name. Tables have it
    under `row`, by default the row of CONFIGS.
    """

    def __init__(self, options: Options, words: Sequence[str], output: Path, row: str | None = None):
        self.options, self.output, self._words = options, output, list(words)
        self.row = row or options.config
        self.process: subprocess.Popen[bytes] | None = None
        self._interrupted = 0

    # what there is ------------------------------------------------------------------------------------------------------
    @property
    def exit_code(self) -> int | None:
        """Of the last part, negative for a signal; None while it runs and before it has run."""
        if self.process is not None:
            return self.process.poll()
        saved = run_registry.read(self.options.log_folder)
        return None if saved is None else saved.exit_code

    @property
    def complete(self) -> bool:
        """It met its stop conditions, or has been evaluated at as many agent steps as are wanted."""
        saved, options = run_registry.read(self.options.log_folder), self.options
        if saved is None:
            return False
        same = all(saved.options.get(name) == getattr(options, name) for name in STOPS)
        evaluated = read_curve(options.log_folder / "metrics.jsonl").steps
        return bool((saved.exit_code == 0 and same) or (options.steps and len(evaluated) and evaluated[-1] >= options.steps))

    def check(self) -> None:
        """Raises Refused when this run exists and learnt with other settings."""
        saved, wanted = run_registry.read(self.options.log_folder), run_registry.plain(flatten(self.options))
        different = differences(saved.options, wanted) if saved else []
        if self.options.num_envs_per_actor == 0:  # whatever it found
            different = [name for name in different if name != "num_envs_per_actor"]
        if saved and different:
            listed = ", ".join(f"{name}={saved.options[name]!r} there and {wanted[name]!r} here" for name in different)
            raise ConfigurationError([f"run {self.options.signature} exists with other settings ({listed}): choose another name"])

    @property
    def running(self) -> bool:
        """Some process, of whomever, has its folder claimed."""
        try:
            with folder_lock(self.options.log_folder) as locked:
                return not locked
        except OSError:
            return False

    # what it does -------------------------------------------------------------------------------------------------------
    def start(self, cores: Collection[int]) -> None:
        """Train on these cores from the newest checkpoint; a run that left none is begun again, and the metrics it had are moved to where
        its output is. It saves and ends when this process dies."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        resume = any(self.options.checkpoint_folder.glob("step_*"))
        if not resume and self.options.log_folder.exists():
            os.replace(self.options.log_folder, self.output.with_name(f"{self.output.stem}-begun-again-{time.time_ns()}"))
        command = [sys.executable, str(MAIN), *self._command(resume)]
        before = os.sched_getaffinity(0)
        with self.output.open("a") as output:
            try:
                os.sched_setaffinity(0, cores)  # children inherit it, and engines count it
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                                start_new_session=True, preexec_fn=partial(end_with, os.getpid()))
            finally:
                os.sched_setaffinity(0, before)

    def interrupt(self, times: int = 1) -> None:
        """Have it interrupted so many times in all: once saves and ends it, twice ends it at once."""
        while self._interrupted < times and self.process is not None and self.process.poll() is None:
            self._interrupted += 1
            self.process.send_signal(signal.SIGINT)

    def _command(self, resume: bool) -> list[str]:
        options = self.options
        identity = (["--resume", options.signature, "--model_file", "none"] if resume  # what it began from it has in its checkpoint
                    else ["--resume", "none", "--machine", options.machine, "--timestamp", str(options.timestamp)])
        return ["--config", options.config, "--seed", str(options.seed), "--root", options.root, "--mode", "1",
                *PATIENT, *self._words, *identity]


def named(options: Options, timestamp: str, seed: int) -> Options:
    return dataclasses.replace(options, timestamp=timestamp, seed=seed)


def end_with(parent: int) -> None:
    """In the new process: have the kernel send it SIGTERM when the one that started it dies, however that dies; and let it hear SIGINT,
    which a shell's background jobs ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent, signal.SIGTERM, 128 + signal.SIGTERM)
