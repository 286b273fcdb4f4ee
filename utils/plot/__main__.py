"""Draw learning curves of one or many runs, and their human-normalised scores over games.

    python -m utils.plot logs/local_20260101-120000
    python -m utils.plot logs/sweep_* --statistic iqm --x steps time --output docs/results/cartpole --csv
    python -m utils.plot logs/sweep_* --metric learner/loss actor/epsilon --group agent.learning_rate
    python -m utils.plot docs/results/replay-study-breakout.csv
    python -m utils.plot --summary logs/atari_*

Runs are log folders or CSV files written by --csv. Folders that are no run are named and skipped. So are runs without
values of a metric, in its panel. Runs that differ only in their seed (utils/plot/curves.py) make one curve with a
bootstrap band; it ends where the shortest of them ends. The legend says in what groups differ. The summary takes the
mean of each run's evaluations after 80 % of its steps. Needs matplotlib: pip install -e ".[plots]".
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.common.console import log_to_stderr
from core.env import normalized_name
from utils.config.command_line import refusing
from utils.errors import ConfigurationError
from utils.factory import EnvsDict, why_not
from utils.plot.curves import COLUMNS, KEPT, SCORE, Run, alike, grouped, late_score, markdown, usable, write_csv
from utils.plot.figures import (
    AGGREGATES,
    AXES,
    CENTERS,
    Array,
    Statistic,
    Strata,
    bootstrap,
    draw_curves,
    draw_summary,
    interval,
    probability_of_improvement,
    save,
)

FORMATS = ("png", "svg", "pdf")
OF_CURVES = ("metric", "x", "statistic", "each", "csv")  # Options that a summary does not have.


@refusing()
def main(arguments: Sequence[str]) -> int:
    """Draw what the arguments ask for, print the files and return exit code 0; exit with 2 for wrong arguments."""
    options = parser().parse_args(arguments)
    given = [f"--{name}" for name in OF_CURVES if getattr(options, name) != parser().get_default(name)]
    if options.summary and given:
        raise ConfigurationError(f"--summary always draws scores over games: leave out {', '.join(given)}")
    output, formats = files(options)
    figure, runs = _summary(options) if options.summary else _curves(options)
    try:
        written = save(figure, output, formats)
        if options.csv:
            written.append(output.with_name(f"{output.name}.csv"))
            write_csv(written[-1], runs, KEPT)
    except OSError as error:
        raise ConfigurationError(f"--output {output} cannot be written: {error}") from None
    print("\n".join(map(str, written)))
    return 0


def files(options: argparse.Namespace) -> tuple[Path, Sequence[str]]:
    """Return the path of the files without their extension, and the formats. A folder gets files named curves."""
    path = Path(options.output)
    if options.output.endswith("/") or path.is_dir():
        path /= "curves"
    named = path.suffix[1:]
    if named == "csv" and options.csv:
        return path.with_suffix(""), options.formats or ["png", "svg"]
    if named in FORMATS:
        return path.with_suffix(""), list(dict.fromkeys([named, *(options.formats or ())]))
    return path, options.formats or ["png", "svg"]


def _curves(options: argparse.Namespace) -> tuple[Any, list[Run]]:
    """Return the figure, and the runs with the points that a CSV contains."""
    runs = usable(options.runs, options.metric, COLUMNS if options.csv and options.metric == [SCORE] else ())
    drawn = [run._replace(curves={metric: run.curves[metric] for metric in options.metric}) for run in runs]
    groups = grouped(drawn, options.group) if options.group else alike(drawn)
    labels = {run.name: label for label, group in groups.items() for run in group}  # a CSV keeps no options
    runs = [run._replace(settings={**run.settings, "config": labels[run.name]}) for run in runs]
    title = next(iter(groups)) if len(groups) == 1 else ""  # The legend names several groups.
    figure = draw_curves(groups, options.x, options.statistic, options.title or title, options.each)
    return figure, runs


def _summary(options: argparse.Namespace) -> tuple[Any, list[Run]]:
    """Print the table of the summary, and return its figure and runs."""
    runs = usable(options.runs, [SCORE])
    groups = grouped(runs, options.group) if options.group else alike(runs, "method")
    games = {method: by_game(runs) for method, runs in groups.items()}
    _warn_of_unequal(groups, games)
    scores = {method: list(found.values()) for method, found in games.items()}
    figure = draw_summary(scores, options.title or "human-normalised scores, 95 % bootstrap intervals")
    print(summary_table(scores), end="")
    if len(scores) > 1 and len({tuple(found) for found in games.values()}) == 1:
        print(f"\n{improvement_table(scores)}", end="")
    return figure, runs


def _warn_of_unequal(groups: Mapping[str, Sequence[Run]], games: Mapping[str, Mapping[str, Array]]) -> None:
    """Name on stderr the runs that have not made their steps, and the methods whose runs differ in number or steps."""
    runs = [run for same in groups.values() for run in same]
    if short := [run.name for run in runs if run.curves[SCORE].steps[-1] < (run.settings.get("steps") or 0)]:
        log_to_stderr(f"warning: scored by the last fifth of fewer steps than planned: {', '.join(short)}")
    for method, same in groups.items():
        planned = {(normalized_name(str(run.settings["game"])), run.settings.get("steps")) for run in same}
        if len(planned) > len(games[method]):
            log_to_stderr(f"warning: runs of {method} in one game have different numbers of steps")
        if len({len(scores) for scores in games[method].values()}) > 1:
            log_to_stderr(f"warning: {method} has more runs of some games, which weigh more in its IQM")


def by_game(runs: Sequence[Run]) -> Mapping[str, Array]:
    """Return the human-normalised late scores [runs] of each game, whose name may be spelt in any way.

    Raises:
        ConfigurationError: no human score of a game is known, or the run's environment class is not available.
    """
    games: dict[str, list[float]] = {}
    for run in runs:
        env_type, game = run.settings.get("env_type"), run.settings.get("game")
        late = late_score(run.curves[SCORE], run.settings.get("steps"))
        try:
            score = EnvsDict[env_type].human_normalized(game, late) if env_type and game else None
        except Exception as error:  # A module of the user's own can fail in any way.
            raise ConfigurationError(f"{run.name}: {why_not(f'env_type={env_type}', error)}") from None
        if not env_type:
            sources = "a CSV file does not, and a log folder needs run.json"
            raise ConfigurationError(f"{run.name}: nothing says of which game it is: {sources}")
        if score is None:
            raise ConfigurationError(f"{run.name}: no human score is known for game={game} (env_type={env_type})")
        games.setdefault(normalized_name(str(game)), []).append(score)
    return {game: np.array(values) for game, values in sorted(games.items())}


def summary_table(scores: Mapping[str, Strata]) -> str:
    """Return a Markdown table of the aggregates of each method and their 95 % intervals.

    A method with one run only of a game has no intervals.
    """
    lines = [
        [method, str(len(games)), str(sum(map(len, games))), *(_cell(games, each) for each in AGGREGATES.values())]
        for method, games in scores.items()
    ]
    return markdown(["method", "games", "runs", *AGGREGATES], lines)


def improvement_table(scores: Mapping[str, Strata]) -> str:
    """Return a Markdown table of the probability that the method of a line improves on that of a column.

    All methods have the same games. One of the two cells of a pair is filled; the other one is 1 minus it.
    """
    lines = [
        [
            method,
            *(
                _cell([*scores[method], *games], probability_of_improvement) if row < column else ""
                for column, games in enumerate(scores.values())
                if column
            ),
        ]
        for row, method in enumerate([*scores][:-1])
    ]
    return markdown(["probability of improvement on", *[*scores][1:]], lines)


def _cell(strata: Strata, statistic: Statistic) -> str:
    low, high = interval(bootstrap(strata, statistic))
    return f"{statistic(strata):.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m utils.plot", description=__doc__, formatter_class=shape)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="log folders, or CSV files")
    add("--metric", nargs="+", default=[SCORE], help=f"names in metrics.jsonl, a panel each; default {SCORE}")
    add("--x", nargs="+", choices=AXES, default=["steps"], help="x-axes, a panel each")
    add("--statistic", choices=CENTERS, default="mean", help="statistic over the runs of a group")
    add(
        "--group",
        nargs="+",
        help="options that define a group, such as agent.learning_rate, or config, method (the row without its game), "
        "run; default: all but the seed, and with --summary all but seed and game",
    )
    add("--each", action="store_true", help="also draw thin lines of every run")
    add("--summary", action="store_true", help="draw human-normalised scores over games in place of curves")
    add("--title", help="title of the figure")
    add("--output", default="curves", help="path of the files, or a folder; default: curves")
    add("--formats", nargs="+", choices=FORMATS, help="default: the extension of --output, or png and svg")
    add("--csv", action="store_true", help="also write the points: run, config (its curve), seed, step and values")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
