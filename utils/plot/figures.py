"""Draw curves of runs with bands over seeds, and human-normalised scores over games.

The statistics over seeds and games are those that Agarwal et al. (2108.13264) recommend. Scores are strata: one array
[..., runs] per game, whose last axis is resampled. The number of runs may differ between games. If it does not, every
statistic equals that of rliable, the authors' library.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.common.console import log_to_stderr
from utils.errors import import_extra
from utils.plot.curves import Curve, Run, on_grid

Array = NDArray[np.float64]
Strata = Sequence[Array]  # One array [..., runs] per game.
Statistic = Callable[[Strata], Array]  # Reduces runs and games to [...].

AXES = {"steps": ("steps", 1, "agent steps"), "time": ("seconds", 60, "minutes")}  # Field of Curve, divisor, label.
SIZE = (5.2, 3.7)  # Inches of a panel.
MAX_COLUMNS = 3  # Panels beside one another.
MAX_INSIDE_LABELS = 4  # Labels up to which the legend stands inside the first panel.
MAX_INSIDE_LETTERS = 40  # Length of the longest label of such a legend.
INCHES_PER_LETTER = 0.09
LEGEND_MARGIN = 0.6  # Inches of a legend's line sample, and of the space between two columns.
NUM_THRESHOLDS = 100
REPETITIONS = 2_000  # Bootstrap resamples.
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # Metadata by format.
BOUNDS = (0.025, 0.975)  # Quantiles between which an interval lies.


# statistics -----------------------------------------------------------------------------------------------------------
def mean(strata: Strata) -> Array:
    """Return the mean over games of the mean over runs."""
    result: Array = _game_means(strata).mean(-1)
    return result


def median(strata: Strata) -> Array:
    """Return the median over games of the mean over runs."""
    return np.median(_game_means(strata), -1)


def interquartile_mean(strata: Strata) -> Array:
    """Return the mean of the middle half of all runs of all games; of fewer than four runs, the mean."""
    scores = np.sort(np.concatenate(strata, -1), -1)
    cut = scores.shape[-1] // 4
    result: Array = scores[..., cut : scores.shape[-1] - cut].mean(-1)
    return result


def optimality_gap(strata: Strata) -> Array:
    """Return the mean amount by which runs fall short of a score of 1; scores above 1 count as 1."""
    return 1 - mean([np.minimum(scores, 1) for scores in strata])


def performance_profile(strata: Strata, thresholds: Array) -> Array:
    """Return the share of runs with a score above each threshold, averaged over games: [..., thresholds]."""
    result: Array = np.mean([(scores[..., None, :] > thresholds[:, None]).mean(-1) for scores in strata], 0)
    return result


def probability_of_improvement(strata: Strata) -> Array:
    """Return the chance that a run of one method scores above one of another method in the same game, over all games.

    A tie counts half. The first half of the strata is of the one method, the second half of the other.
    """
    games = len(strata) // 2
    signs = [np.sign(one[..., :, None] - other[..., None, :]) for one, other in zip(strata, strata[games:])]
    result: Array = np.mean([(1 + sign.mean((-2, -1))) / 2 for sign in signs], 0)
    return result


def bootstrap(strata: Strata, statistic: Statistic, repetitions: int = REPETITIONS) -> Array:
    """Return the statistic of resampled strata: [..., repetitions], followed by the axes that the statistic adds.

    The runs of each game are resampled with replacement, independently of the other games, and always in the same way.
    The result is nan if a game has one run only, which tells nothing about how far runs scatter.
    """
    generator, sizes = np.random.default_rng(0), [scores.shape[-1] for scores in strata]
    draws = [generator.integers(size, size=(repetitions, size)) for size in sizes]
    resampled = statistic([scores[..., drawn] for scores, drawn in zip(strata, draws)])
    return resampled if min(sizes) > 1 else np.full_like(resampled, np.nan)


def interval(resampled: Array, axis: int = -1) -> tuple[Array, Array]:
    """Return the lower and upper bound of the percentile interval over the repetitions on `axis`."""
    low, high = np.quantile(resampled, BOUNDS, axis=axis)
    return low, high


def _game_means(strata: Strata) -> Array:
    return np.stack([scores.mean(-1) for scores in strata], -1)  # [..., games]


CENTERS: dict[str, Statistic] = {"mean": mean, "iqm": interquartile_mean}
AGGREGATES: dict[str, Statistic] = {"IQM": interquartile_mean, "median": median, "mean": mean}
AGGREGATES["optimality gap"] = optimality_gap


# figures --------------------------------------------------------------------------------------------------------------
def pyplot() -> Any:
    """Return matplotlib.pyplot, set up to work without a display.

    Raises:
        ConfigurationError: matplotlib is not installed; the message names the command that installs it.
    """
    import_extra("drawing", "matplotlib", "plots").use("Agg")
    from matplotlib import pyplot, rcsetup

    pyplot.rcParams["text.parse_math"] = False  # names and titles may hold dollars
    colors = pyplot.get_cmap("tab20")(range(20)).tolist()
    pyplot.rcParams["axes.prop_cycle"] = rcsetup.cycler(color=[*colors[::2], *colors[1::2]])  # the default, then paler
    return pyplot


def draw_curves(
    groups: Mapping[str, Sequence[Run]],
    axes: Sequence[str],
    statistic: str,
    title: str,
    each: bool = False,
    dashed: Sequence[Run] = (),
) -> Any:
    """Return a figure with a panel for each metric and axis, at most MAX_COLUMNS of them in a row.

    The runs of a group become one curve with a bootstrap band, by a statistic of CENTERS against axes of AXES. With
    `each`, every run is a thin line, too. Curves of the `dashed` runs of others are added where they are of the metric,
    against agent steps.
    """
    plots = pyplot()
    from matplotlib.ticker import EngFormatter

    metrics = list(next(iter(groups.values()))[0].curves)
    panels = [(metric, axis) for metric in metrics for axis in axes]
    columns = min(len(panels), MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    size = SIZE[0] * columns, SIZE[1] * rows
    figure, grid = plots.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    several = any(len(runs) > 1 for runs in groups.values())
    name = statistic.upper() if statistic == "iqm" else statistic
    subtitle = f"{name} of the runs, 95 % bootstrap bands" if several else ""
    for unused in grid.flat[len(panels) :]:
        unused.remove()
    for panel, (metric, axis) in zip(grid.flat, panels):
        for label, runs in groups.items():
            curves = [run.curves[metric] for run in runs if run.curves[metric].steps.size]
            _draw_group(panel, curves, axis, statistic, label, each)
        for other in dashed:
            if metric in other.curves and axis == "steps":
                panel.plot(other.curves[metric].steps, other.curves[metric].values, "--", label=other.name)
        if axis == "steps":
            panel.xaxis.set_major_formatter(EngFormatter())
        panel.set(xlabel=AXES[axis][2], ylabel=metric)
        panel.set_title(subtitle, fontsize="small")
        panel.grid(alpha=0.3)
    _draw_legend(figure, grid[0][0], columns)
    figure.suptitle(title)
    return figure


def _draw_legend(figure: Any, panel: Any, num_columns: int) -> None:
    """Draw the legend in the first panel, or below all panels if many or long labels would cover curves."""
    lines, labels = panel.get_legend_handles_labels()
    if len(labels) <= MAX_INSIDE_LABELS and max(map(len, labels)) <= MAX_INSIDE_LETTERS:
        panel.legend(fontsize="small")
        return
    width = SIZE[0] * num_columns
    letters = int((width - LEGEND_MARGIN) / INCHES_PER_LETTER)
    labels = [textwrap.fill(label, letters, break_long_words=False, break_on_hyphens=False) for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, int(width / (INCHES_PER_LETTER * longest + LEGEND_MARGIN)))
    num_lines = -(-len(labels) // columns) * max(label.count("\n") + 1 for label in labels)
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + 0.2 * num_lines)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, fontsize="small")


def _draw_group(panel: Any, curves: Sequence[Curve], axis: str, statistic: str, label: str, each: bool) -> None:
    field, unit, _ = AXES[axis]
    if not curves:  # An empty line gives the group the same colour in all panels, and its place in the legend.
        panel.plot([], [], label=label)
        return
    points, values = on_grid(curves, field)
    if len(curves) > 1:
        label = f"{label} ({len(curves)} runs)"
    if not points.size:
        log_to_stderr(f"{label}: no curve against {axis}, because no point lies within all runs")
    center = CENTERS[statistic]
    (line,) = panel.plot(points / unit, center([values]), label=label, marker=_marker(points))
    if len(curves) == 1:
        return
    low, high = interval(bootstrap([values], center))
    panel.fill_between(points / unit, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    for curve in curves if each else ():
        points = getattr(curve, field) / unit
        panel.plot(points, curve.values, color=line.get_color(), alpha=0.35, linewidth=0.7, marker=_marker(points))


def _marker(points: Array) -> str:
    """Return a dot for a single point, which would make no line."""
    return "o" if len(points) < 2 else ""


def draw_summary(scores: Mapping[str, Strata], title: str, unit: str = "human-normalised score") -> Any:
    """Return a figure of each method's scores: aggregates with their intervals, and performance profiles."""
    plots = pyplot()
    widths, size = [*(1 for _ in AGGREGATES), 2], (14, 1.6 + 0.5 * len(scores))
    figure, grid = plots.subplots(1, len(widths), figsize=size, layout="constrained", width_ratios=widths)
    colors = plots.rcParams["axes.prop_cycle"].by_key()["color"]
    for panel, (name, statistic) in zip(grid, AGGREGATES.items()):
        for row, strata in enumerate(scores.values()):
            low, high = interval(bootstrap(strata, statistic))
            color = colors[row % len(colors)]
            panel.barh(row, high - low, left=low, height=0.5, color=color, alpha=0.4)
            panel.plot([float(statistic(strata))] * 2, [row - 0.25, row + 0.25], color=color)
        panel.set(title=name, yticks=range(len(scores)), yticklabels=list(scores) if panel is grid[0] else [])
        panel.invert_yaxis()
        panel.grid(alpha=0.3, axis="x")
    _draw_profiles(grid[-1], scores, unit)
    figure.suptitle(title)
    return figure


def _draw_profiles(panel: Any, scores: Mapping[str, Strata], unit: str) -> None:
    all_scores = np.concatenate([values for strata in scores.values() for values in strata])
    thresholds = np.linspace(min(all_scores.min(), 0), all_scores.max(), NUM_THRESHOLDS)
    for method, strata in scores.items():
        profile = partial(performance_profile, thresholds=thresholds)
        (line,) = panel.plot(thresholds, profile(strata), label=method)
        low, high = interval(bootstrap(strata, profile), axis=0)
        panel.fill_between(thresholds, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    panel.set(xlabel=unit, ylabel="share of runs above", title="performance profile")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def draw_trials(settings: Mapping[str, bool], trials: Sequence[Any], title: str) -> Any:
    """Return a figure of the scores of complete and pruned trials of optuna, with a panel for each option.

    An option is True in `settings` if its axis is logarithmic.
    """
    plots = pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, grid = plots.subplots(
        1, len(settings), figsize=(3.2 * len(settings), SIZE[1]), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (name, logarithmic) in zip(grid[0], settings.items()):
        numeric = all(isinstance(trial.params[name], int | float) for trial in trials)
        for state, marker, label in (("COMPLETE", "o", "complete"), ("PRUNED", "x", "ended early")):
            drawn = [trial for trial in trials if trial.state.name == state]
            values = [trial.params[name] if numeric else str(trial.params[name]) for trial in drawn]
            panel.scatter(values, [trial.value for trial in drawn], marker=marker, label=label)
        panel.set(xlabel=name)
        if logarithmic:
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
    """Write the figure as path.png, path.svg, ... and return the files.

    The files contain no date, so that the same runs give the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in formats:
        written.append(path.with_name(f"{path.name}.{kind}"))
        with pyplot().rc_context({"svg.hashsalt": path.name}):
            figure.savefig(written[-1], dpi=110, metadata=NO_DATE.get(kind))
    pyplot().close(figure)
    return written
