"""Run `python main.py` and read the speed of the run from its metrics file."""

import os
import subprocess
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from utils.plot.curves import METRICS, read_lines
from utils.sweep.subprocess_run import end_with

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
NO_EVALUATION = "--evaluator.period 1e9 --evaluator.episodes 1 --evaluator.max_steps 1"


def train(seconds: float, *words: str, checkout: Path = ROOT) -> list[dict[str, Any]]:
    """Train for `seconds` without evaluations and return the lines of the metrics file.

    The run ends if this process is killed. Its files are in a temporary folder, besides those of the compiler.

    Args:
        seconds: Duration of the run, with its start.
        words: Words of the command line; a text that begins with "--" can hold several.
        checkout: Folder of the program.
    """
    with TemporaryDirectory(prefix="bench_", ignore_cleanup_errors=True) as root:
        (checkout / ".cache").mkdir(exist_ok=True)
        Path(root, ".cache").symlink_to(checkout / ".cache")
        identity = f"--root {root} --machine bench --timestamp run --seconds {seconds}"
        texts = (text.split() if text.startswith("--") else [text] for text in (identity, NO_EVALUATION, *words))
        subprocess.run(
            [sys.executable, "main.py", *chain(*texts)],
            cwd=checkout,
            check=True,
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(end_with, os.getpid()),
        )
        return read_lines(Path(root, "logs", "bench_run", METRICS))


def rate(lines: list[dict[str, Any]], name: str | None = None) -> float:
    """Return the agent steps per second between the first and the third-last line; the last two are of the run's end.

    Args:
        lines: Lines of a metrics file.
        name: Metric to count in place of agent steps.
    """
    (start, first), (end, last) = (
        (float(line["time"]), float(line["values"][name] if name else line["step"])) for line in (lines[0], lines[-3])
    )
    return (last - first) / (end - start)


def after_start(lines: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the lines from `seconds` after the first reported agent step."""
    started = next(line["time"] for line in lines if line["step"] > 0)
    return [line for line in lines if line["time"] >= started + seconds]


def stable_baselines3_rate(agent: Any, start: int, seconds: float) -> float:
    """Return the agent steps per second of a stable-baselines3 agent, measured for `seconds` after step `start`."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Stopwatch(BaseCallback):
        started, first, rate = 0.0, 0, 0.0

        def _on_step(self) -> bool:
            if self.num_timesteps > start and not self.started:
                self.started, self.first = time.perf_counter(), self.num_timesteps
            elapsed = time.perf_counter() - self.started
            if self.started and elapsed > 1:
                self.rate = (self.num_timesteps - self.first) / elapsed
            return not self.started or elapsed < seconds

    stopwatch = Stopwatch()
    agent.learn(10_000_000, callback=stopwatch)
    return stopwatch.rate
