"""Curves of runs: a metric against agent steps and wall seconds, from a run's metrics.jsonl or from a CSV such as those of docs/results."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.common.console import log_to_stderr
from utils import run_registry
from utils.errors import ConfigurationError
from utils.factory import suggestion

SCORE = "evaluator/episodic_return_mean"  # what results are read from
COLUMNS = {f"evaluator/episodic_return_{name}": name for name in ("mean", "std", "median")}  # short names in a CSV
POINT = ("run", "step", "seconds")        # the columns of a CSV that are no metrics
METRICS = "metrics.jsonl"                 # in the log folder of a run
PERIOD = "global/agent_steps"             # the line of a period has it
LATE = 0.8         # evaluations after this share of a run's steps make its late score
OVERSHOOT = 1.02   # times its steps: up to where evaluations still count as of these
GRID_POINTS = 200  # at most, of a curve over several runs
TOLD = 5           # problems at most, where none of many sources can be read


class Curve(NamedTuple):
    """N points, steps rising."""

    steps: NDArray[np.float64]     # agent steps [N]
    seconds: NDArray[np.float64]   # of wall time since the run began [N]
    values: NDArray[np.float64]    # [N]


class Run(NamedTuple):
    name: str                      # signature, or what a CSV calls it
    settings: Mapping[str, Any]    # dotted, as it was started, and what groups it: run, config, method
    curves: dict[str, Curve]       # by metric


class NoCurves(ConfigurationError):
    """A source has not the curves that are asked for: a sentence, and in a few words what is missing."""

    def __init__(self, problem: str, missing: str):
        super().__init__([problem])
        self.missing = missing


# reading --------------------------------------------------------------------------------------------------------------
def read(sources: Iterable[Path], metrics: Sequence[str]) -> list[Run]:
    """The runs of these log folders and CSV files. Raises Refused for a source or a metric that is not there."""
    found = [run for source in sources for run in (_of_csv(source, metrics) if source.suffix == ".csv" else [_of_folder(source, metrics)])]
    if not found:
        raise ConfigurationError(["there are no runs to read: name log folders or CSV files"])
    return found


def usable(sources: Sequence[Path], metrics: Sequence[str]) -> tuple[list[Run], list[Path]]:
    """Return the runs that have points of every metric, and their sources. Others are passed over, and stderr says why.

    Raises Refused for a source that does not exist, and where no run is left.
    """
    if absent := [f"{source} does not exist: name log folders or CSV files" for source in sources if not source.exists()]:
        raise ConfigurationError(absent)
    found, used, problems, passed_over = list[Run](), list[Path](), list[str](), dict[str, list[str]]()
    for source in sources:
        try:
            there = read([source], metrics)
            empty = {run.name: name for run in there
                     for name, curve in reversed(run.curves.items()) if not curve.steps.size}
            found += [run for run in there if run.name not in empty]
            used += [source] if len(empty) < len(there) else []
        except ConfigurationError as refused:
            problems += refused.problems
            missing = refused.missing if isinstance(refused, NoCurves) else refused.problems[0]
            passed_over.setdefault(missing, []).append(str(source))
            continue
        for run_name, metric in empty.items():
            problems.append(f"{run_name} has no values of {metric}")
            passed_over.setdefault(f"no values of {metric}", []).append(run_name)
    if not found:
        raise ConfigurationError([*problems[:TOLD],
                                  *([f"{len(problems) - TOLD} others cannot be drawn either"] if problems[TOLD:] else [])])
    for missing, names in passed_over.items():
        log_to_stderr(f"passed over ({missing}): {', '.join(names)}")
    return found, used


def read_curve(path: Path, metric: str = SCORE) -> Curve:
    """One metric of a metrics.jsonl, which may be being written; no points while there are none."""
    return _curve(read_lines(path), metric)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl: what a writer is just appending is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def reached(path: Path) -> int:
    """Return the agent steps of a run by its metrics.jsonl, which lags behind the run by a period of the logger at most."""
    steps = [line["step"] for line in read_lines(path) if PERIOD in line["values"]]
    return int(steps[-1]) if steps else 0


def until(curve: Curve, steps: float | None) -> Curve:
    """The part of a curve that belongs to so many steps, which the first evaluation after them does too; all of it for None."""
    if not steps or curve.steps.size == 0:
        return curve
    end = max(OVERSHOOT * steps, min(curve.steps[curve.steps >= steps], default=0))
    return Curve(*(column[curve.steps <= end] for column in curve))


def late_score(curve: Curve, steps: float | None = None) -> float:
    """The mean of the values after LATE of the steps that the run was to make (for None, or before it got there: has made), and of none
    beyond them; nan without any."""
    curve = until(curve, steps)
    if not len(curve.steps):
        return float("nan")
    return float(curve.values[curve.steps >= LATE * min(steps or np.inf, curve.steps[-1])].mean())


def _of_folder(folder: Path, metrics: Sequence[str]) -> Run:
    if not (folder / METRICS).is_file():
        raise NoCurves(f"{folder} is no log folder of a run: it has no {METRICS}", "no log folder of a run")
    name, saved = folder.resolve().name, run_registry.read(folder)
    settings = {**saved.options, **_names(name, saved.config, saved.file.get("game"))} if saved else _names(name)
    try:
        lines = read_lines(folder / METRICS)
        known = {metric for line in lines for metric in line["values"]}
        return Run(name, settings, {metric: _curve(lines, _known(metric, known, folder)) for metric in metrics})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{folder / METRICS} is not what a run writes ({type(error).__name__}: {error})"
        raise NoCurves(problem, "no log folder of a run") from None


def _of_csv(path: Path, metrics: Sequence[str]) -> list[Run]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in POINT if name not in (reader.fieldnames or ())]:
                raise NoCurves(f"{path} holds no curves, it has no column {' or '.join(missing)}: name log folders, or CSV files of --csv",
                               "no curves")
            lines = [(row["run"], _csv_line(row)) for row in reader]
    except OSError as error:
        raise ConfigurationError([f"{path} cannot be read: {error.strerror}"]) from None
    except (ValueError, TypeError, csv.Error) as error:  # TypeError: a line with more or fewer columns
        raise ConfigurationError([f"{path} cannot be read: line {reader.line_num}: {error}"]) from None
    by_run: dict[str, list[dict[str, Any]]] = {}
    for name, line in lines:
        by_run.setdefault(name, []).append(line)
    known = {metric for lines in by_run.values() for line in lines for metric in line["values"]}
    return [Run(name, _names(name, re.sub(r"[-_ ]?seed[-_ ]?\d+$", "", name) or path.stem),
                {metric: _curve(lines, _known(metric, known, path)) for metric in metrics}) for name, lines in by_run.items()]


def _csv_line(row: Mapping[str, str]) -> dict[str, Any]:
    """What a metrics.jsonl has for it."""
    full = {short: metric for metric, short in COLUMNS.items()}
    values = {full.get(name, name): float(text) for name, text in row.items() if name not in POINT and text}
    return {"step": int(row["step"]), "seconds": float(row["seconds"]), "values": values}


def _names(run: str, config: str | None = None, game: str | None = None) -> dict[str, Any]:
    """What runs can be grouped by beside their settings; a method is a row without its game."""
    config = config or run
    return {"run": run, "config": config, "method": config.replace(f"-{game}", "") if game else config}


def _known(metric: str, known: set[str], source: Path) -> str:
    if metric in known:
        return metric
    listed = ", ".join(sorted(known)) or "none yet"
    raise NoCurves(f"{source} has no values of {metric}{suggestion(metric, known)}; there are {listed}", f"no values of {metric}")


def _curve(lines: Iterable[dict[str, Any]], metric: str) -> Curve:
    """A run continued from an earlier checkpoint supersedes what it had written beyond that: its periods, whose steps otherwise rise,
    tell that it went back."""
    points: list[tuple[float, float, float]] = []
    reached = 0
    for line in lines:
        if PERIOD in line["values"]:
            while line["step"] < reached and points and points[-1][0] > line["step"]:
                points.pop()
            reached = line["step"]
        if (value := line["values"].get(metric)) is not None:
            while points and points[-1][0] >= line["step"]:
                points.pop()
            points.append((line["step"], line["seconds"], value))
    return Curve(*np.array(points, float).reshape(-1, 3).T)


# together -------------------------------------------------------------------------------------------------------------
def grouped(found: Iterable[Run], keys: Sequence[str]) -> dict[str, list[Run]]:
    """Runs by the values of these settings, in the order they come; numbers are told with the setting's name. Raises Refused for a setting
    that a run does not have."""
    groups: dict[str, list[Run]] = {}
    for run in found:
        if lacking := [key for key in keys if key not in run.settings]:
            raise ConfigurationError([f"{run.name} has no setting {lacking[0]}{suggestion(lacking[0], run.settings)}"])
        groups.setdefault(", ".join(_label(key, run.settings[key]) for key in keys), []).append(run)
    return groups


def _label(key: str, value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{key.rpartition('.')[2]} {value}"


def on_grid(curves: Sequence[Curve], axis: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of `axis` (steps or seconds) that lie within every curve [P], and the curves there [P, runs], linear between their points.

    The points are those of the curves themselves while they are few.
    """
    places = [getattr(curve, axis) for curve in curves]
    start, end = max(place[0] for place in places), min(place[-1] for place in places)
    grid = np.unique(np.concatenate(places))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > GRID_POINTS:
        grid = np.linspace(start, end, GRID_POINTS)
    return grid, np.stack([np.interp(grid, place, curve.values) for place, curve in zip(places, curves)], -1)


def write_csv(path: Path, found: Iterable[Run]) -> None:
    """One line for each point of the metrics that were read: run, step, seconds and a column for each of them."""
    found = list(found)
    metrics = list(found[0].curves)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*POINT, *(COLUMNS.get(metric, metric) for metric in metrics)])
        for run in found:
            points: dict[tuple[float, float], dict[str, float]] = {}
            for metric, curve in run.curves.items():
                for step, seconds, value in zip(*curve):
                    points.setdefault((step, seconds), {})[metric] = float(value)
            for (step, seconds), values in sorted(points.items()):
                writer.writerow([run.name, int(step), round(seconds, 1), *(values.get(metric, "") for metric in metrics)])
