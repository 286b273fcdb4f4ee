"""Pictures of runs: curves with bands over seeds, and human-normalised scores over games."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.common.console import log_to_stderr
from utils.errors import ConfigurationError
from utils.plot import statistics
from utils.plot.curves import Curve, Run, on_grid
from utils.plot.statistics import Array, Statistic, Strata, bootstrap, interval, performance_profile

CENTRES: dict[str, Statistic] = {"mean": statistics.mean, "iqm": statistics.interquartile_mean}
AGGREGATES: dict[str, Statistic] = {"IQM": statistics.interquartile_mean, "median": statistics.median, "mean": statistics.mean,
                                    "optimality gap": statistics.optimality_gap}
AXES = {"steps": ("steps", 1, "agent steps"), "time": ("seconds", 60, "minutes")}  # field of Curve, how many are one, label
SIZE = (5.2, 3.7)                             # inches a panel
LABELS_INSIDE = 4                             # of a legend that lies among the curves
LETTERS_INSIDE = 40                           # of its longest label
INCHES_A_LETTER = 0.09
THRESHOLDS = 100


class Band:
    """A curve over the runs of one group: `centre` between `low` and `high` at the points `grid`, all [P]."""

    def __init__(self, curves: Sequence[Curve], axis: str, centre: str, generator: np.random.Generator):
        field, unit, _ = AXES[axis]
        points, values = on_grid(curves, field)
        self.grid: Array = points / unit
        self.centre: Array = CENTRES[centre]([values])
        self.low, self.high = interval(bootstrap([values], CENTRES[centre], generator))


def pyplot() -> Any:
    """matplotlib without a display. Raises Refused with the command that installs it."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(['drawing needs matplotlib, which is not installed: pip install -e ".[plots]"']) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(groups: Mapping[str, Sequence[Run]], axes: Sequence[str], centre: str, title: str, each: bool = False) -> Any:
    """A figure with a panel for each metric and axis: the centre of each group of runs and its bootstrap band; `each`: every run too."""
    plots = pyplot()
    metrics = list(next(iter(groups.values()))[0].curves)
    panels = [(metric, axis) for metric in metrics for axis in axes]
    figure, grid = plots.subplots(1, len(panels), figsize=(SIZE[0] * len(panels), SIZE[1]), squeeze=False, layout="constrained")
    several = any(len(runs) > 1 for runs in groups.values())
    what = f"{centre.upper() if centre == 'iqm' else centre} of the runs, 95 % bootstrap bands" if several else ""
    for panel, (metric, axis) in zip(grid[0], panels):
        for label, runs in groups.items():
            _draw_group(panel, [run.curves[metric] for run in runs], axis, centre, label, each)
        _finish(panel, axis, metric, what)
    _explain(figure, grid[0][0], len(panels))
    figure.suptitle(title)
    return figure


def _explain(figure: Any, panel: Any, panels: int) -> None:
    """The legend, in the first panel; that of many groups or long names below all of them, where it covers no curve."""
    lines, labels = panel.get_legend_handles_labels()
    if len(labels) <= LABELS_INSIDE and max(map(len, labels)) <= LETTERS_INSIDE:
        panel.legend(fontsize="small")
        return
    width = SIZE[0] * panels
    labels = [textwrap.fill(label, int((width - 0.6) / INCHES_A_LETTER), break_long_words=False, break_on_hyphens=False)
              for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, int(width / (INCHES_A_LETTER * longest + 0.6)))  # 0.6: a line and what is between two
    rows = -(-len(labels) // columns) * max(label.count("\n") + 1 for label in labels)
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + 0.2 * rows)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, fontsize="small")


def _draw_group(panel: Any, curves: Sequence[Curve], axis: str, centre: str, label: str, each: bool) -> None:
    band = Band(curves, axis, centre, np.random.default_rng(0))
    label = f"{label} ({len(curves)} runs)" if len(curves) > 1 else label
    if not band.grid.size:
        log_to_stderr(f"{label}: no curve against {axis}, as there is no point where all of the runs are")
    line, = panel.plot(band.grid, band.centre, label=label, marker=_marker(band.grid))
    if len(curves) > 1:
        panel.fill_between(band.grid, band.low, band.high, color=line.get_color(), alpha=0.2, linewidth=0)
    for curve in curves if each and len(curves) > 1 else ():
        field, unit, _ = AXES[axis]
        places = getattr(curve, field) / unit
        panel.plot(places, curve.values, color=line.get_color(), alpha=0.35, linewidth=0.7, marker=_marker(places))


def _marker(places: Array) -> str:
    """A single point makes no line."""
    return "o" if len(places) < 2 else ""


def _finish(panel: Any, axis: str, metric: str, what: str) -> None:
    from matplotlib.ticker import EngFormatter

    panel.xaxis.set_major_formatter(EngFormatter() if axis == "steps" else panel.xaxis.get_major_formatter())
    panel.set(xlabel=AXES[axis][2], ylabel=metric)
    panel.set_title(what, fontsize="small")
    panel.grid(alpha=0.3)


def draw_summary(scores: Mapping[str, Strata], title: str) -> Any:
    """A figure of human-normalised scores, method -> [runs] of each game: the aggregates with their intervals, and performance profiles."""
    plots = pyplot()
    figure, grid = plots.subplots(1, len(AGGREGATES) + 1, figsize=(14, 1.6 + 0.5 * len(scores)), layout="constrained",
                                  gridspec_kw={"width_ratios": [*(1 for _ in AGGREGATES), 2]})
    colours = plots.rcParams["axes.prop_cycle"].by_key()["color"]
    for panel, (name, statistic) in zip(grid, AGGREGATES.items()):
        for row, strata in enumerate(scores.values()):
            low, high = interval(bootstrap(strata, statistic, np.random.default_rng(0)))
            colour = colours[row % len(colours)]
            panel.barh(row, high - low, left=low, height=0.5, color=colour, alpha=0.4)
            panel.plot([float(statistic(strata))] * 2, [row - 0.25, row + 0.25], color=colour)
        panel.set(title=name, yticks=range(len(scores)), yticklabels=list(scores) if panel is grid[0] else [])
        panel.invert_yaxis()
        panel.grid(alpha=0.3, axis="x")
    _draw_profiles(grid[-1], scores)
    figure.suptitle(title)
    return figure


def _draw_profiles(panel: Any, scores: Mapping[str, Strata]) -> None:
    every = np.concatenate([values for strata in scores.values() for values in strata])
    thresholds = np.linspace(min(every.min(), 0), every.max(), THRESHOLDS)
    for method, strata in scores.items():
        line, = panel.plot(thresholds, performance_profile(strata, thresholds), label=method)
        drawn = bootstrap(strata, lambda resampled: performance_profile(resampled, thresholds), np.random.default_rng(0))
        low, high = interval(drawn, axis=0)
        panel.fill_between(thresholds, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    panel.set(xlabel="human-normalised score", ylabel="share of runs above", title="performance profile")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def draw_trials(settings: Mapping[str, bool], trials: Sequence[tuple[bool, float, Mapping[str, Any]]], title: str) -> Any:
    """A figure of what was tried and how it scored, a panel for each setting; settings: name -> by factors; trials: whether it went to its
    end, score, values."""
    plots = pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, grid = plots.subplots(1, len(settings), figsize=(3.2 * len(settings), SIZE[1]), sharey=True, squeeze=False,
                                     layout="constrained")
    for panel, (name, by_factors) in zip(grid[0], settings.items()):
        for complete, marker, label in ((True, "o", "complete"), (False, "x", "ended early")):
            points = [(values[name], score) for finished, score, values in trials if finished is complete]
            panel.scatter(*(zip(*points) if points else ([], [])), marker=marker, label=label)
        panel.set(xlabel=name)
        if by_factors:
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    grid[0][0].set(ylabel="score")
    grid[0][0].legend(fontsize="small")
    figure.suptitle(title)
    return figure


def save(figure: Any, path: Path, formats: Sequence[str]) -> list[Path]:
    """path.png, path.svg, ...: without a date, so that the same runs give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in formats:
        written.append(path.with_name(f"{path.name}.{kind}"))
        with pyplot().rc_context({"svg.hashsalt": path.name}):
            figure.savefig(written[-1], dpi=110, metadata={"Date": None} if kind == "svg" else None)
    pyplot().close(figure)
    return written
