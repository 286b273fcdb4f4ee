"""Runs of `python main.py` whose speed is read from their own metrics files."""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_EVALUATION = ("--evaluator.period", "1e9", "--evaluator.episodes", "1", "--evaluator.max_steps", "1")


def train(seconds: float, *words: str) -> list[dict]:
    """Train for so long without evaluations; returns the lines of the metrics file."""
    timestamp = f"bench{time.time_ns()}"
    subprocess.run([sys.executable, "main.py", "--machine", "bench", "--timestamp", timestamp, "--seconds", str(seconds), *NO_EVALUATION,
                    *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (ROOT / "logs" / f"bench_{timestamp}" / "metrics.jsonl").read_text().splitlines()]


def rate(rows: list[dict]) -> float:
    """Agent steps per second between the first and the last of these lines; the very last ones are written while the run ends."""
    (start, first), (end, last) = ((row["time"], row["step"]) for row in (rows[0], rows[-3]))
    return (last - first) / (end - start)


def after_start(rows: list[dict], seconds: float) -> list[dict]:
    """Lines from `seconds` after the first agent step was reported."""
    began = next(row["time"] for row in rows if row["step"] > 0)
    return [row for row in rows if row["time"] >= began + seconds]
