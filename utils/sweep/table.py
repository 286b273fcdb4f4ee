"""What many runs came to: one line a run, and one a row over its seeds, as CSV and Markdown."""

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
    """Scores are means of evaluation episodes; nan where there was no evaluation."""

    row: str                 # and what varies
    seed: int
    complete: bool           # it did all it was to do
    exit_code: int | None    # of its last part; None: killed, or not begun
    steps: int               # agent steps
    minutes: float           # of wall time
    final: float             # score of the last evaluation
    best: float              # of the best one
    late: float              # mean of those after 80 % of the steps


@dataclass(frozen=True)
class Summary:
    """Of one row, means over the seeds that were evaluated."""

    row: str
    seeds: str               # evaluated of all
    late: float
    late_of_each: str
    final: float
    best: float
    steps: int
    minutes: float           # a run
    incomplete: str          # seeds that did not do all they were to do, and how they ended


def result(run: ChildRun) -> Result:
    folder = run.options.log_folder
    curve, lines = until(read_curve(folder / "metrics.jsonl"), run.options.steps), read_lines(folder / "metrics.jsonl")
    final, best = (float(curve.values[-1]), float(curve.values.max())) if len(curve.values) else (math.nan, math.nan)
    steps, seconds = max(((int(line["step"]), float(line["seconds"])) for line in lines), default=(0, 0.0))
    late = late_score(curve, run.options.steps)
    return Result(run.row, run.options.seed, run.complete, run.exit_code, steps, seconds / 60, final, best, late)


def summaries(results: Sequence[Result]) -> list[Summary]:
    return [_summary(row, [result for result in results if result.row == row]) for row in dict.fromkeys(result.row for result in results)]


def _summary(row: str, results: Sequence[Result]) -> Summary:
    evaluated = [result for result in results if not math.isnan(result.late)]
    late, final, best, minutes = (float(np.mean([getattr(result, name) for result in evaluated])) if evaluated else math.nan
                                  for name in ("late", "final", "best", "minutes"))
    incomplete = [f"seed {result.seed}: {'killed or not begun' if result.exit_code is None else f'exit code {result.exit_code}'}"
                  for result in results if not result.complete]
    return Summary(row, f"{len(evaluated)} of {len(results)}", late, " ".join(f"{result.late:.2f}" for result in evaluated), final, best,
                   max((result.steps for result in results), default=0), minutes, ", ".join(incomplete))


def write_csv(path: Path, lines: Sequence[Result] | Sequence[Summary]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(lines[0])])
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in asdict(line).items()} for line in lines)


def markdown(lines: Iterable[Summary]) -> str:
    header = [field.name.replace("_", " ") for field in fields(Summary)]
    rows = [header, ["---"] * len(header), *([_text(value) for value in asdict(line).values()] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
