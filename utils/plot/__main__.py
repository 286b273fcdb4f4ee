"""Draw learning curves of one or many runs, and their human-normalised scores over games.

    python -m utils.plot logs/local_20260101-120000
    python -m utils.plot logs/sweep_* --statistic iqm --x steps time --output docs/results/cartpole --csv
    python -m utils.plot logs/sweep_* --metric learner/loss actor/epsilon --group agent.learning_rate
    python -m utils.plot docs/results/replay-study-breakout.csv
    python -m utils.plot --summary logs/atari_*

Runs are log folders or CSV files written by --csv. Folders that are no run, and runs without values to draw, are named
and skipped. Runs that differ only in their seed (utils/plot/curves.py) make one curve with a bootstrap band; it
ends where the shortest of them ends. The legend says in what groups differ. The summary takes the mean of each run's
evaluations after 80 % of its steps. Needs matplotlib: pip install -e ".[plots]".
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from core.env import normalized_name
from utils.config.command_line import refuse
from utils.errors import ConfigurationError
from utils.factory import EnvsDict
from utils.plot.curves import COLUMNS, SCORE, Run, alike, grouped, late_score, read, usable, write_csv
from utils.plot.figures import AGGREGATES, AXES, CENTERS, Array, bootstrap, draw_curves, draw_summary, interval, save


def main(arguments: Sequence[str]) -> int:
    """Draw what the arguments ask for, print the files and return exit code 0; exit with 2 for wrong arguments."""
    options = parser().parse_args(arguments)
    try:
        for path in _summary(options) if options.summary else _curves(options):
            print(path)
    except ConfigurationError as refused:
        refuse(refused)
    return 0


def _curves(options: argparse.Namespace) -> list[Path]:
    runs, sources = usable(options.runs, options.metric)
    groups = grouped(runs, options.group) if options.group else alike(runs)
    title = next(iter(groups)) if len(groups) == 1 else ""  # The legend names several groups.
    figure = draw_curves(groups, options.x, options.statistic, options.title or title, options.each)
    written = save(figure, options.output, options.formats)
    if options.csv:
        written.append(options.output.with_name(f"{options.output.name}.csv"))
        write_csv(written[-1], read(sources, list(COLUMNS)) if options.metric == [SCORE] else runs)
    return written


def _summary(options: argparse.Namespace) -> list[Path]:
    runs, _ = usable(options.runs, [SCORE])
    groups = grouped(runs, options.group) if options.group else alike(runs, "method")
    scores = {method: list(by_game(runs).values()) for method, runs in groups.items()}
    figure = draw_summary(scores, options.title or "human-normalised scores, 95 % bootstrap intervals")
    print("\n".join(summary_table(scores)))
    return save(figure, options.output, options.formats)


def by_game(runs: Sequence[Run]) -> Mapping[str, Array]:
    """Return the human-normalised late scores [runs] of each game, whose name may be spelt in any way.

    Raises:
        ConfigurationError: no human score of a game is known.
    """
    games: dict[str, list[float]] = {}
    for run in runs:
        env_type, game = run.settings.get("env_type"), run.settings.get("game")
        late = late_score(run.curves[SCORE], run.settings.get("steps"))
        score = EnvsDict[env_type].human_normalized(game, late) if env_type and game else None
        if score is None:
            raise ConfigurationError(f"{run.name}: no human score is known for game={game} (env_type={env_type})")
        games.setdefault(normalized_name(str(game)), []).append(score)
    return {game: np.array(values) for game, values in sorted(games.items())}


def summary_table(scores: Mapping[str, Sequence[Array]]) -> list[str]:
    """Return Markdown lines with the aggregates of each method and their 95 % intervals."""
    lines = [f"| method | games | runs | {' | '.join(AGGREGATES)} |", "|---" * (len(AGGREGATES) + 3) + "|"]
    for method, games in scores.items():
        cells = []
        for statistic in AGGREGATES.values():
            low, high = interval(bootstrap(games, statistic, np.random.default_rng(0)))
            cells.append(f"{statistic(games):.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {method} | {len(games)} | {sum(map(len, games))} | {' | '.join(cells)} |")
    return lines


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
    add("--output", type=Path, default=Path("curves"), help="path without extension; default: curves")
    add("--formats", nargs="+", choices=("png", "svg", "pdf"), default=["png", "svg"], help="file formats")
    add("--csv", action="store_true", help="also write the points: run, step, seconds and values")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
