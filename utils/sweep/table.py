"""Summarise many runs, one line per run and one per row over its seeds, as CSV and Markdown."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from utils.plot.curves import late_score, read_curve, read_lines, until
from utils.sweep.subprocess_run import ChildRun


@dataclass(frozen=True)
class Result:
    """The outcome of one run. Scores are means of evaluation episodes; nan if there was no evaluation."""

    row: str  # Row of CONFIGS, followed by the varied options.
    seed: int
    complete: bool  # The run has made all its steps.
    exit_code: int | None  # Exit code of the last start. If None, the run was killed or never started.
    steps: int  # Agent steps.
    minutes: float  # Wall time.
    final: float  # Score of the last evaluation.
    best: float  # Score of the best evaluation.
    late: float  # Mean of the evaluations after 80 % of the steps.


@dataclass(frozen=True)
class Summary:
    """The outcome of one row: means over the seeds that were evaluated."""

    row: str
    seeds: str  # Number of evaluated seeds, and of all.
    late: float
    late_of_each: str
    final: float
    best: float
    steps: int
    minutes: float  # Wall time of a run.
    incomplete: str  # Seeds that did not complete, and how they ended.


def result(run: ChildRun) -> Result:
    """Return the outcome of a run from its files."""
    folder = run.options.log_folder
    curve, lines = until(read_curve(folder / "metrics.jsonl"), run.options.steps), read_lines(folder / "metrics.jsonl")
    final, best = (float(curve.values[-1]), float(curve.values.max())) if len(curve.values) else (math.nan, math.nan)
    steps, seconds = max(((int(line["step"]), float(line["seconds"])) for line in lines), default=(0, 0.0))
    late = late_score(curve, run.options.steps)
    return Result(run.row, run.options.seed, run.complete, run.exit_code, steps, seconds / 60, final, best, late)


def summaries(results: Sequence[Result]) -> list[Summary]:
    """Return one summary per row, in the order of the results."""
    rows = dict.fromkeys(result.row for result in results)
    return [_summary(row, [result for result in results if result.row == row]) for row in rows]


def _summary(row: str, results: Sequence[Result]) -> Summary:
    evaluated = [result for result in results if not math.isnan(result.late)]
    late, final, best, minutes = (
        float(np.mean([getattr(result, name) for result in evaluated])) if evaluated else math.nan
        for name in ("late", "final", "best", "minutes")
    )
    incomplete = [
        f"seed {result.seed}: {'killed or not begun' if result.exit_code is None else f'exit code {result.exit_code}'}"
        for result in results
        if not result.complete
    ]
    return Summary(
        row,
        f"{len(evaluated)} of {len(results)}",
        late,
        " ".join(f"{result.late:.2f}" for result in evaluated),
        final,
        best,
        max((result.steps for result in results), default=0),
        minutes,
        ", ".join(incomplete),
    )


def write_csv(path: Path, lines: Sequence[Result] | Sequence[Summary]) -> None:
    """Write a column per field and a line per result or summary."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(lines[0])])
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in asdict(line).items()} for line in lines)


def markdown(lines: Iterable[Summary]) -> str:
    """Return the summaries as a Markdown table."""
    header = [field.name.replace("_", " ") for field in fields(Summary)]
    rows = [header, ["---"] * len(header), *([_text(value) for value in asdict(line).values()] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
