"""Runs of `python main.py` whose speed is read from their own metrics files."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NO_EVALUATION = ("--evaluator.period", "1e9", "--evaluator.episodes", "1", "--evaluator.max_steps", "1")


def train(seconds: float, *words: str) -> list[dict]:
    """Train for so long without evaluations; returns the lines of the metrics file."""
    timestamp = f"bench{time.time_ns()}"
    subprocess.run([sys.executable, "main.py", "--machine", "bench", "--timestamp", timestamp, "--seconds", str(seconds), *NO_EVALUATION,
                    *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (ROOT / "logs" / f"bench_{timestamp}" / "metrics.jsonl").read_text().splitlines()]


def rate(rows: list[dict], name: str | None = None) -> float:
    """Agent steps, or what else is counted by this name, per second between the first and the last of these lines; the very last ones are
    written while the run ends."""
    (start, first), (end, last) = ((row["time"], row["values"][name] if name else row["step"]) for row in (rows[0], rows[-3]))
    return (last - first) / (end - start)


def after_start(rows: list[dict], seconds: float) -> list[dict]:
    """Lines from `seconds` after the first agent step was reported."""
    began = next(row["time"] for row in rows if row["step"] > 0)
    return [row for row in rows if row["time"] >= began + seconds]


def stable_baselines3_rate(agent: Any, start: int, seconds: float) -> float:
    """Agent steps per second that an agent of stable-baselines3 makes in so many seconds of `learn` after step `start`."""
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
