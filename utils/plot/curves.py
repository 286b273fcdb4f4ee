"""Read curves of runs, a metric against agent steps and seconds, and group the runs that are seeds of one experiment.

Curves are in metrics.jsonl or CSV files (docs/results). Runs are alike if they differ, besides the seed, in no option
that changes what is learned or how it is measured. A difference counts unless the option only

- names the run or its folder (machine, timestamp, root),
- belongs to one start of the run (device, engine, resume, profile, ...), so that a resumed run may change it,
- says when the run ends (steps, updates, seconds, target_score), so that one curve is longer; steps and updates count
  where the learning rate falls with the share of the run that is over,
- configures what does not affect learning (evaluator, logger, supervisor, ray, video); evaluator.max_steps counts.

A run of an older version that lacks an option is alike if the runs that have the option agree.
"""

import csv
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.common.console import log_to_stderr
from core.common.settings import dotted
from core.metrics import file_writers
from utils import run_registry
from utils.config.command_line import NOT_OF_LEARNING, OF_THIS_START
from utils.config.rows import CHOICES, SECTIONS
from utils.errors import ConfigurationError
from utils.factory import suggestion

SCORE = "evaluator/episodic_return_mean"  # The metric from which results are read.
COLUMNS = {f"evaluator/episodic_return_{name}": name for name in ("mean", "std", "median")}  # Short names in a CSV.
POINT = ("run", "step", "seconds")  # Columns of every CSV that are no metrics.
KEPT = ("config", "seed")  # Settings that `write_csv` can add as columns, between the run and the step.
METRICS = file_writers.METRICS  # File in the log folder of a run.
FIRST_OPTIONS = "options.json"  # File with the options of its first start.
PERIOD = "global/agent_steps"  # Metric that only the lines of a log period and of a new start contain.
LATE = 0.8  # Share of a run's steps after which evaluations count for its late score.
OVERSHOOT = 1.02  # Factor on a run's steps up to which evaluations still belong to the run.
MAX_GRID_POINTS = 200  # Points of a curve over several runs.
MAX_LISTED = 5  # Errors that are listed if no source can be read.
SCHEDULED = ("steps", "updates")  # Options that the share of a run that is over is counted by.
STOPS = (*SCHEDULED, "seconds", "target_score")
COUNTS = ("config", "model_file", "evaluator.max_steps")  # Exceptions, which count despite the rules above.
NAMES = ("run", "config", "method", "seed")  # Settings of a Run that a CSV gives, too.


class Curve(NamedTuple):
    """N points of one metric, in the order of rising steps."""

    steps: NDArray[np.float64]  # [N] agent steps.
    seconds: NDArray[np.float64]  # [N] seconds since the run began.
    values: NDArray[np.float64]  # [N].


class Run(NamedTuple):
    """The curves of one run and the settings by which runs are grouped."""

    name: str  # Signature, or the name that a CSV gives the run.
    settings: Mapping[str, Any]  # Options by dotted name as the run was started, and the names run, config and method.
    curves: dict[str, Curve]  # By metric; empty if the run has no values of it.
    known: Collection[str] = ()  # All metrics of the folder or file.


class NoCurves(ConfigurationError):
    """A source lacks the requested curves. `missing` names what is missing in a few words."""

    def __init__(self, problem: str, missing: str):
        super().__init__([problem])
        self.missing = missing


# reading --------------------------------------------------------------------------------------------------------------
def read(sources: Iterable[Path], metrics: Sequence[str]) -> list[Run]:
    """Return the runs of these log folders and CSV files.

    Raises:
        ConfigurationError: a source does not exist, or lacks one of the metrics.
    """
    runs = [run for source in sources for run in _read(source, metrics)]
    if not runs:
        raise ConfigurationError("there are no runs to read: name log folders or CSV files")
    if lacking := [_why_empty(run, metric) for run in runs for metric in metrics if metric not in run.known]:
        raise ConfigurationError(lacking[0])
    return runs


def usable(sources: Sequence[Path], metrics: Sequence[str], optional: Iterable[str] = ()) -> list[Run]:
    """Return the runs that have points of any of the metrics, under distinct names.

    Other runs are skipped. stderr names the runs without points of a metric, whose curve of it is empty. A source that
    is given twice is read once. The `optional` metrics are read too, and may be missing.

    Raises:
        ConfigurationError: a source does not exist, or no run has points of one of the metrics.
    """
    if absent := [
        f"{source} does not exist: name log folders or CSV files" for source in sources if not os.path.exists(source)
    ]:
        raise ConfigurationError(absent)
    sources = list({source.resolve(): source for source in sources}.values())
    kept, errors, skipped = list[tuple[Path, Run]](), list[str](), dict[str, list[str]]()
    for source in sources:
        try:
            kept += [(source, run) for run in _read(source, [*metrics, *optional])]
        except ConfigurationError as refused:
            errors += refused.problems
            missing = refused.missing if isinstance(refused, NoCurves) else refused.problems[0]
            skipped.setdefault(missing, []).append(str(source))
    for metric in metrics:
        without = [run for _, run in kept if not run.curves[metric].steps.size]
        if without:
            skipped[f"no values of {metric}"] = [run.name for run in without]
        if len(without) == len(kept):
            errors += [_why_empty(run, metric) for run in without[:1]]  # which lists the metrics that there are
            errors += [f"{run.name} has no values of {metric}" for run in without[1:]]
            others = [f"{len(errors) - MAX_LISTED} more cannot be drawn either"] if errors[MAX_LISTED:] else []
            raise ConfigurationError([*errors[:MAX_LISTED], *others])
    for missing, names in skipped.items():
        log_to_stderr(f"passed over ({missing}): {', '.join(names)}")
    return _distinct([(source, run) for source, run in kept if any(run.curves[name].steps.size for name in metrics)])


def _why_empty(run: Run, metric: str) -> str:
    """Return why a run has no points of a metric."""
    others = f"{suggestion(metric, run.known)}; there are {', '.join(sorted(run.known)) or 'none yet'}"
    return f"{run.name} has no values of {metric}{'' if metric in run.known else others}"


def _distinct(runs: Sequence[tuple[Path, Run]]) -> list[Run]:
    """Return the runs of these sources. A name that several sources have is preceded by what their paths differ in."""
    by_name: dict[str, list[Path]] = {}
    for source, run in runs:
        by_name.setdefault(run.name, []).append(source.resolve())
    renamed = []
    for source, run in runs:
        if len(same := by_name[run.name]) > 1:
            place = source.resolve().relative_to(os.path.commonpath([each.parent for each in same]))
            name = f"{place.with_suffix('')}-{run.name}" if source.suffix == ".csv" else str(place)
            run = run._replace(name=name, settings={**run.settings, "run": name})
        renamed.append(run)
    return renamed


def read_curve(path: Path, metric: str = SCORE) -> Curve:
    """Return one metric of a metrics.jsonl, which a run may still be writing; an empty curve if there are no points."""
    return curve_of(read_lines(path), metric)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without a last line that a run is still writing.

    Lines that no run writes are skipped and reported on stderr.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        lines = [file_writers.parse_line(text) for text in file if text.endswith(b"\n")]
    if None in lines:
        _report_skipped(path, lines.count(None))
    return [line for line in lines if line is not None]


@functools.cache  # A sweep reads the file of a run again and again.
def _report_skipped(path: Path, count: int) -> None:
    log_to_stderr(f"warning: skipped {count} {'line' if count == 1 else 'lines'} of {path} that no run writes")


def until(curve: Curve, steps: float | None) -> Curve:
    """Return the points up to `steps`, including the first evaluation after them. If None, return all points."""
    if not steps or curve.steps.size == 0:
        return curve
    end = max(OVERSHOOT * steps, min(curve.steps[curve.steps >= steps], default=0))
    return Curve(*(column[curve.steps <= end] for column in curve))


def late_score(curve: Curve, steps: float | None = None) -> float:
    """Return the mean of the values from LATE of `steps` on and not beyond `steps`; nan without values.

    If `steps` is None, or if the run has made fewer, the steps that it has made count.
    """
    curve = until(curve, steps)
    if not len(curve.steps):
        return float("nan")
    return float(curve.values[curve.steps >= LATE * min(steps or np.inf, curve.steps[-1])].mean())


def _read(source: Path, metrics: Sequence[str]) -> list[Run]:
    return _read_csv(source, metrics) if source.suffix == ".csv" else [_read_folder(source, metrics)]


def _read_folder(folder: Path, metrics: Sequence[str]) -> Run:
    if not (folder / METRICS).is_file():
        raise NoCurves(f"{folder} is no log folder of a run: it has no {METRICS}", "no log folder of a run")
    name, saved = folder.resolve().name, run_registry.read(folder)
    first: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a run that was killed at once, or one of an older version
        first = dotted(json.loads((folder / FIRST_OPTIONS).read_text()))
    if saved:
        settings = {**saved.options, **_names(name, saved.config, saved.file.get("game"))}
        if changed := differences(first, settings):
            log_to_stderr(f"warning: {name} was resumed with other options, by which it is named: {', '.join(changed)}")
    else:
        settings = {**first, **_names(name, first.get("config"), first.get("game"))}
    try:
        lines = read_lines(folder / METRICS)
        known = {metric for line in lines for metric in line["values"]}
        return Run(name, settings, {metric: curve_of(lines, metric) for metric in metrics}, known)
    except (OSError, ValueError, TypeError) as error:
        problem = f"{folder / METRICS} is not what a run writes ({type(error).__name__}: {error})"
        raise NoCurves(problem, "no log folder of a run") from None


def _read_csv(path: Path, metrics: Sequence[str]) -> list[Run]:
    by_run: dict[str, list[dict[str, Any]]] = {}
    kept: dict[str, dict[str, str]] = {}
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in POINT if name not in (reader.fieldnames or ())]:
                problem = f"{path} holds no curves, it has no column {' or '.join(missing)}"
                raise NoCurves(f"{problem}: name log folders, or CSV files of --csv", "no curves")
            for row in reader:
                by_run.setdefault(row["run"], []).append(_csv_line(row))
                kept[row["run"]] = {name: row[name] for name in KEPT if row.get(name)}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, csv.Error) as error:  # A line with more or fewer columns raises TypeError.
        raise ConfigurationError(f"{path} cannot be read: line {reader.line_num}: {error}") from None
    known = {metric for lines in by_run.values() for line in lines for metric in line["values"]}
    runs = []
    for name, lines in by_run.items():
        config = kept[name].get("config") or re.sub(r"[-_ ]?seed[-_ ]?\d+$", "", name) or path.stem
        settings = {**_names(name, config), **kept[name]}
        runs.append(Run(name, settings, {metric: curve_of(lines, metric) for metric in metrics}, known))
    return runs


def _csv_line(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the line of a metrics.jsonl that this row of a CSV stands for."""
    full = {short: metric for metric, short in COLUMNS.items()}
    values = {full.get(name, name): float(text) for name, text in row.items() if name not in POINT + KEPT and text}
    return {"step": int(row["step"]), "seconds": float(row["seconds"]), "values": values}


def _names(run: str, config: str | None = None, game: str | None = None) -> dict[str, Any]:
    """Return the names by which runs can be grouped; a method is a row without its game."""
    config = config or run
    return {"run": run, "config": config, "method": config.replace(f"-{game}", "") if game else config}


def curve_of(lines: Iterable[dict[str, Any]], metric: str = SCORE) -> Curve:
    """Return the curve of a metric in lines of a metrics.jsonl, without points that a resumed run has superseded.

    A run resumed from an earlier checkpoint writes again the steps after that checkpoint. Its first line is that of a
    log period at the checkpoint's steps. Other lines of log periods are never at fewer steps than evaluations before.
    """
    points: list[tuple[float, float, float]] = []
    for line in lines:
        if PERIOD in line["values"]:
            while points and points[-1][0] > line["step"]:
                points.pop()
        if (value := line["values"].get(metric)) is not None:
            while points and points[-1][0] >= line["step"]:
                points.pop()
            points.append((line["step"], line["seconds"], value))
    return Curve(*np.array(points, float).reshape(-1, 3).T)


# together -------------------------------------------------------------------------------------------------------------
def grouped(runs: Iterable[Run], keys: Sequence[str]) -> dict[str, list[Run]]:
    """Return runs grouped by the values of these settings, in the order of the runs. Labels name a number's setting.

    Raises:
        ConfigurationError: a run lacks a setting.
    """

    def label(run: Run) -> str:
        if lacking := [key for key in keys if key not in run.settings]:
            raise ConfigurationError(f"{run.name} has no setting {lacking[0]}{suggestion(lacking[0], run.settings)}")
        values = [(key.rpartition(".")[2], run.settings[key]) for key in keys]
        return ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in values)

    return _split(runs, label)


def counts(setting: str) -> bool:
    """Return True if runs that differ in this option are different experiments."""
    section = setting.partition(".")[0]
    return setting in COUNTS or not (setting in (*OF_THIS_START, *STOPS, "engine") or section in NOT_OF_LEARNING)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the options, including the seed, that both runs have and that make them different experiments."""
    return [name for name in other if name in one and counts(name) and one[name] != other[name]]


def alike(runs: Iterable[Run], title: str = "config") -> dict[str, list[Run]]:
    """Return groups of runs that are alike, by labels that say in what a group differs from others of the same title.

    Labels begin with the row (title "config") or with the row without its game ("method"). With "method" a group may
    contain several games, and only differences between runs of one row divide groups.
    """
    groups: dict[str, list[Run]] = {}
    for name, same_title in _split(runs, lambda run: run.settings[title]).items():
        known = [run for run in same_title if _has_options(run)]
        same_rows, ignored = _split(known, lambda run: run.settings["config"]), ("game",) if title == "method" else ()
        names = dict.fromkeys(setting for same in same_rows.values() for setting in _differing(same, ignored))
        for run in same_title:
            parts = [f"{setting} {run.settings[setting]}" for setting in names if setting in run.settings]
            if known and not _has_options(run):
                parts = ["settings unknown"]
            groups.setdefault(", ".join([name, *parts]), []).append(run)
    return groups


def _has_options(run: Run) -> bool:
    """Return True unless the run is from a CSV, which holds no options."""
    return bool(run.settings.keys() - {*NAMES})


def _differing(runs: Sequence[Run], ignored: Sequence[str]) -> list[str]:
    """Return the options in which these runs differ, classes and game first.

    Options of a class are compared between runs of that class only.
    """
    choices = [name for name in ("game", *CHOICES) if name not in ignored]
    of_classes = _split(runs, lambda run: json.dumps([run.settings.get(name) for name in choices])).values()
    names = [name for name in choices if len({run.settings.get(name) for run in runs}) > 1]
    for same, classes in ((runs, False), *((same, True) for same in of_classes)):
        names += [
            name
            for name in dict.fromkeys(name for run in same for name in run.settings)
            if (counts(name) or (name in SCHEDULED and any(is_scheduled(run.settings) for run in same)))
            and name not in (*NAMES, *CHOICES)
            and (classes or name.partition(".")[0] not in SECTIONS)
            and len({json.dumps(run.settings[name]) for run in same if name in run.settings}) > 1
        ]
    return list(dict.fromkeys(names))


def is_scheduled(settings: Mapping[str, Any]) -> bool:
    """Return True if the learning rate follows the share of the run that is over (core/learning/optimizer.py)."""
    schedule = settings.get("agent.lr_schedule", "constant")
    return schedule != "constant" and settings.get("agent.lr_schedule_updates", 0) is None


def _split(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    parts: dict[str, list[Run]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    return parts


def on_grid(curves: Sequence[Curve], axis: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points of `axis` (steps or seconds) that lie within every curve [P], and the curves there [P, runs].

    Curves are linear between their points. Up to MAX_GRID_POINTS, the grid is the union of the curves' own points.
    """
    points = [getattr(curve, axis) for curve in curves]
    start, end = max(each[0] for each in points), min(each[-1] for each in points)
    grid = np.unique(np.concatenate(points))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > MAX_GRID_POINTS:
        grid = np.linspace(start, end, MAX_GRID_POINTS)
    return grid, np.stack([np.interp(grid, each, curve.values) for each, curve in zip(points, curves)], -1)


def write_csv(path: Path, runs: Sequence[Run], settings: Sequence[str] = ()) -> None:
    """Write one line per point: run, these of KEPT's settings, step, seconds and each metric that a run has."""
    metrics = list(dict.fromkeys(metric for run in runs for metric, curve in run.curves.items() if curve.steps.size))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", *settings, *POINT[1:], *(COLUMNS.get(metric, metric) for metric in metrics)])
        for run in runs:
            points: dict[tuple[float, float], dict[str, float]] = {}
            named = [run.name, *(run.settings.get(name, "") for name in settings)]
            for metric, curve in run.curves.items():
                for step, seconds, value in zip(*curve):
                    points.setdefault((step, seconds), {})[metric] = float(value)
            for (step, seconds), values in sorted(points.items()):
                cells = [values.get(metric, "") for metric in metrics]
                writer.writerow([*named, int(step), round(seconds, 1), *cells])


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, each line of which ends with a newline."""
    header, *rows = (f"| {' | '.join(cells)} |\n" for cells in (columns, *lines))
    return "".join([header, "|---" * len(columns), "|\n", *rows])
