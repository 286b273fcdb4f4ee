"""Repeat the learning results of docs/results, one part after another: make results.

    python -m benchmarks.results --list                     the parts in order, with the hours that they take
    python -m benchmarks.results                            train every part
    python -m benchmarks.results minatar --jobs 2           one part, two runs at a time
    python -m benchmarks.results rainbow-study-breakout --rows dqn rainbow --seeds 1
    python -m benchmarks.results minatar --redraw           tables and figures from the data file

Complete runs are not repeated and interrupted ones are resumed: Ctrl-C saves everything, and the same command goes on.
A part writes to docs/results the evaluations of its complete runs (<part>.csv), curves (<part>.png) and a table
(<part>-table.md); a part of several games compares its rows over the games (<part>-summary.png). Curves that others
have published (published.csv) are drawn beside those of the part. Needs matplotlib.
"""

import argparse
import csv
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.training import RESULTS, ROOT
from utils.config.command_line import refusing
from utils.errors import ConfigurationError
from utils.options import CONFIGS
from utils.plot import curves, figures
from utils.plot.__main__ import improvement_table, summary_table
from utils.plot.figures import Array
from utils.sweep.subprocess_run import ChildRun, Runner, claimed, options_of, seeded

MINATAR = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
MUJOCO = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
# Runs of hours are resumed, and must not lose their replay then.
LONG_CONTROL = "--evaluator.steps", "25000", "--learner.checkpoint_replay", "True"
STEPS, RELATIVE = "--steps", "score / score of the best row"


class Part(NamedTuple):
    """Rows of CONFIGS that are trained for one result.

    A row may lack the ending that all rows of the part share, as `dqn` lacks "-minatar-breakout".
    """

    title: str
    rows: tuple[str, ...]
    ending: str = ""
    games: tuple[str, ...] = ()  # in place of the row's game
    seeds: int = 3
    words: tuple[str, ...] = ()  # options of every run
    runs: str = ""  # the part in whose log folder the runs are, if they are also runs of another part

    def label(self, row: str, game: str) -> str:
        """Return the name of a row and a game in files and tables."""
        return "-".join(filter(None, (game, row)))

    def steps(self, row: str) -> int | None:
        """Return the agent steps of a row's runs, None if they end by something else."""
        of_row = next(each.get("steps") for each in CONFIGS if each["name"] == f"{row}{self.ending}")
        steps = dict(zip(self.words[::2], self.words[1::2])).get(STEPS, of_row)
        return None if steps is None else int(steps)

    @property
    def target_score(self) -> float | None:
        """The evaluation at which the runs end, None if they end by their steps."""
        score = dict(zip(self.words[::2], self.words[1::2])).get("--target_score")
        return None if score is None else float(score)


REPLAY = ("impala", "replay", "clear", "laser", "attentive", "elite1", "elite3")
MINATAR_WORDS = (STEPS, "2000000", "--evaluator.steps", "100000")
PARTS = {
    "small": Part("CartPole", ("dqn", "rainbow", "iqn", "r2d2", "impala", "impact", "ppo", "a2c", "pqn"), "-cartpole"),
    "memory": Part("The memory task", ("r2d2-recall", "impala-lstm-recall", "ppo-lstm-recall")),
    "rainbow-study-breakout": Part(
        "DQN and Rainbow: MinAtar breakout",
        ("dqn", "rainbow"),
        "-minatar-breakout",
        words=(STEPS, "200000", "--evaluator.steps", "10000"),
    ),
    "ablations-study-breakout": Part(
        "Rainbow without each of its parts: MinAtar breakout",
        ("rainbow", "rainbow-quantile")
        + tuple(
            f"rainbow-no-{part}" for part in ("double", "dueling", "noisy", "prioritized", "nstep", "distributional")
        ),
        "-minatar-breakout",
        words=(STEPS, "60000", "--evaluator.steps", "3000"),
    ),
    "minatar": Part(
        "MinAtar, five games",
        (*REPLAY, "ppo", "pqn", "dqn", "r2d2", "iqn", "munchausen-iqn", "rainbow", "btr"),
        "-minatar-breakout",
        MINATAR,
        words=MINATAR_WORDS,
    ),
    "minatar-replay": Part(
        "Rules of replay for V-trace, two games of MinAtar that become harder",
        (*REPLAY, "elite2", "elite4", "insertion", "laser50", "laser90"),
        "-minatar-breakout",
        ("asterix", "seaquest"),
        words=MINATAR_WORDS,
        runs="minatar",
    ),
    "minatar-value": Part(
        "Value learning on MinAtar, five games",
        ("dqn", "apex", "iqn", "munchausen-iqn", "rainbow", "btr", "r2d2", "pqn"),
        "-minatar-breakout",
        MINATAR,
        words=(STEPS, "500000", "--evaluator.steps", "25000"),
    ),
    "tictactoe": Part("Tic-tac-toe", ("dqn", "ppo"), "-tictactoe", words=("--evaluator.steps", "20000")),
    "multidiscrete": Part("Hopper with a choice of 7 torques for each joint", ("ppo-hopper-multidiscrete",)),
    "mujoco": Part("MuJoCo", ("ppo", "ddpg", "td3", "sac"), "-halfcheetah", MUJOCO, words=LONG_CONTROL),
    "mujoco-d4pg": Part("D4PG", ("d4pg-hopper", "d4pg-halfcheetah", "d4pg-walker-walk"), seeds=1, words=LONG_CONTROL),
    "pong-small": Part(
        "Pong, 42x42",
        ("dqn", "rainbow", "iqn", "munchausen-dqn", "munchausen-iqn", "btr", "r2d2", "impala", "pqn"),
        "-pong-small",
        words=(STEPS, "10000000", "--target_score", "18"),
    ),
    "pong-small-ppo": Part("PPO on Pong, 42x42", ("ppo",), "-pong-small"),  # its learning rate falls to its last step
    "pong": Part(
        "Pong, 84x84",
        ("dqn", "prior-ddqn", "rainbow", "apex", "r2d2", "iqn", "impala", "clear", "laser", "elite3", "impact", "pqn"),
        "-pong",
        seeds=1,
        words=(STEPS, "25000000", "--target_score", "18", "--evaluator.steps", "100000", "--evaluator.episodes", "30"),
    ),
    "pong-ppo": Part(  # its learning rate, too, falls to its last step
        "PPO on Pong, 84x84",
        ("ppo",),
        "-pong",
        words=("--target_score", "18", "--evaluator.steps", "250000", "--evaluator.episodes", "30"),
    ),
    "breakout": Part(
        "Breakout, 84x84",
        ("dqn", "rainbow"),
        "-breakout",
        seeds=1,
        words=(STEPS, "2000000", "--evaluator.steps", "100000", "--evaluator.episodes", "30"),
    ),
    "breakout-on-policy": Part(
        "On-policy learning of Breakout, 84x84",
        ("impala", "ppo"),
        "-breakout",
        seeds=1,
        words=(STEPS, "10000000", "--evaluator.steps", "250000", "--evaluator.episodes", "10"),
    ),
}
# Agent steps a second on two cores of the rows that begin so: the fastest runs of docs/results.
RATES = {
    "dqn-cartpole": 5_000,
    "r2d2-cartpole": 608,
    "impala-cartpole": 12_900,
    "impact-cartpole": 9_000,
    "ppo-cartpole": 9_600,
    "pqn-cartpole": 2_290,
    "r2d2-recall": 1_150,
    "impala-lstm-recall": 1_560,
    "ppo-lstm-recall": 3_900,
    "dqn-minatar": 1_700,
    "iqn-cartpole": 750,
    "a2c-cartpole": 1_670,
    "rainbow-cartpole": 350,
    "rainbow-minatar": 960,
    "iqn-minatar": 600,
    "rainbow-no-": 320,
    "rainbow-quantile-minatar": 320,
    "btr-minatar": 1_070,
    "r2d2-minatar": 1_300,
    "impala-minatar": 16_700,
    "replay-minatar": 10_800,
    "clear-minatar": 5_700,
    "laser-minatar": 3_800,
    "attentive-minatar": 4_300,
    "elite1-minatar": 4_300,
    "elite2-minatar": 3_200,
    "elite3-minatar": 4_300,
    "elite4-minatar": 1_700,
    "insertion-minatar": 4_400,
    "laser50-minatar": 7_400,
    "laser90-minatar": 1_600,
    "ppo-minatar": 13_300,
    "pqn-minatar": 18_500,
    "ppo-halfcheetah": 1_600,
    "ddpg-h": 209,
    "d4pg-h": 183,
    "dqn-pong-small": 250,
    "impala-pong-small": 1_860,
    "ppo-pong-small": 1_500,
    "rainbow-pong-small": 235,
    "iqn-pong-small": 264,
    "munchausen-dqn-pong-small": 284,
    "munchausen-iqn-pong-small": 137,
    "btr-pong-small": 169,
    "r2d2-pong-small": 261,
    "pqn-pong-small": 959,
    "ppo-pong": 750,
    "dqn-breakout": 145,
    "dqn-pong": 195,
    "prior-ddqn-pong": 148,
    "rainbow-pong": 125,
    "r2d2-pong": 130,
    "apex-pong": 105,
    "impala-pong": 948,
    "clear-pong": 392,
    "impact-pong": 612,
    "laser-pong": 1_100,
    "elite3-pong": 340,
    "pqn-pong": 686,
}


def runs_of(name: str, options: argparse.Namespace) -> list[ChildRun]:
    """Return the runs of a part, one per row, game and seed.

    Raises:
        ConfigurationError: a row or game is not of the part, a row does not fit its game or options, or a seed is
            wrong.
    """
    part, runs = PARTS[name], list[ChildRun]()
    machine = part.runs or name
    if others := [row for row in options.rows or () if row not in part.rows]:
        raise ConfigurationError(f"--rows {' '.join(others)}: {name} has the rows {', '.join(part.rows)}")
    if others := [game for game in options.games or () if game not in part.games]:
        games = f"the games {', '.join(part.games)}" if part.games else "no choice of games"
        raise ConfigurationError(f"--games {' '.join(others)}: {name} has {games}")
    for row in options.rows or part.rows:
        for game in options.games or part.games or ("",):
            words = [*part.words, *(("--game", game) if game else ())]
            template = options_of(f"{row}{part.ending}", words, machine, options.root)
            label = part.label(row, game)
            for run in seeded(template, label, options.seeds or range(1, part.seeds + 1)):
                runs.append(ChildRun(run, words, Path(options.root) / "logs" / machine / f"{run.timestamp}.txt", label))
    return runs


def hours(part: Part) -> tuple[int, float, int]:
    """Return the runs of a part, the hours of those whose speed and steps are known, and the number of the others.

    The hours are those of runs that follow one another and make all their steps.
    """
    repeats = part.seeds * max(len(part.games), 1)
    total, unknown = 0.0, 0
    for row in part.rows:
        rates = [rate for beginning, rate in RATES.items() if f"{row}{part.ending}".startswith(beginning)]
        length = part.steps(row) or 0
        total += repeats * length / rates[0] / 3_600 if rates else 0.0
        unknown += 0 if rates and length else repeats
    return repeats * len(part.rows), total, unknown


def write(name: str, runs: Sequence[ChildRun], output: Path) -> None:
    """Write the evaluations, curves and table of a part: of complete runs and of those that its data file holds.

    A run that was trained again replaces the one in the data file. Runs of that file that are not of the part stay.
    """
    part, path = PARTS[name], output / name
    data = path.with_name(f"{name}.csv")
    earlier = curves.read([data], list(curves.COLUMNS)) if data.exists() else []
    found = {run.name: run for run in earlier}
    read = curves.read([run.options.log_folder for run in runs], list(curves.COLUMNS)) if runs else []
    for run, trained in zip(runs, read):
        label = f"{run.row}-seed{run.options.seed}"
        found[label] = trained._replace(name=label)
    by_label, steps = dict[str, list[curves.Run]](), dict[str, int | None]()
    for game, row in itertools.product(part.games or ("",), part.rows):
        label = part.label(row, game)
        steps[label] = part.steps(row)
        names = sorted(other for other in found if re.fullmatch(f"{re.escape(label)}-seed\\d+", other))
        if names:
            by_label[label] = [_until(found.pop(other), steps[label]) for other in names]
    curves.write_csv(data, [*itertools.chain(*by_label.values()), *found.values()])
    late = {
        label: np.array([curves.late_score(run.curves[curves.SCORE], steps[label]) for run in same])
        for label, same in by_label.items()
    }
    table = table_of(by_label, late) if part.target_score is None else target_table(by_label, part.target_score)
    path.with_name(f"{name}-table.md").write_text(table)
    print(table, end="")
    shown = panels(part, by_label)
    others = published(name, max(run.curves[curves.SCORE].steps[-1] for run in itertools.chain(*by_label.values())))
    figures.save(figures.draw_curves(shown, ["steps"], "mean", part.title, dashed=others), path, ["png"])
    if part.games:
        summary, title = games_table(part, late), f"{part.title}: scores relative to the best row of each game"
        if relative := over_games(part, late):
            drawn = figures.draw_summary(relative, title, RELATIVE)
            figures.save(drawn, path.with_name(f"{name}-summary"), ["png"])
            summary += f"\n{summary_table(relative)}"
            summary += f"\n{improvement_table(relative)}" if len(relative) > 1 else ""
        path.with_name(f"{name}-summary.md").write_text(summary)


def table_of(by_label: Mapping[str, Sequence[curves.Run]], late: Mapping[str, Array]) -> str:
    """Return a Markdown table with a line for each label: late scores, best evaluation, agent steps and minutes."""
    lines = []
    for label, same in by_label.items():
        points = [run.curves[curves.SCORE] for run in same]
        scores, best = " ".join(f"{score:.2f}" for score in late[label]), max(curve.values.max() for curve in points)
        steps, minutes = max(curve.steps[-1] for curve in points), (f"{each.seconds[-1] / 60:.1f}" for each in points)
        lines.append((label, f"{late[label].mean():.2f}", scores, f"{best:.2f}", f"{steps:,.0f}", " ".join(minutes)))
    return curves.markdown(("row", "mean", "of each seed", "best evaluation", "agent steps", "minutes"), lines)


def target_table(by_label: Mapping[str, Sequence[curves.Run]], target: float) -> str:
    """Return a Markdown table with a line for each label: steps to the target score, evaluations, steps and minutes."""
    lines = []
    for label, same in by_label.items():
        points = [run.curves[curves.SCORE] for run in same]
        reached = [curve.steps[curve.values >= target] for curve in points]
        columns = (
            (f"{steps[0]:,.0f}" if steps.size else "not reached" for steps in reached),
            (f"{curve.values[-1]:.2f}" for curve in points),
            (f"{curve.values.max():.2f}" for curve in points),
            (f"{curve.steps[-1]:,.0f}" for curve in points),
            (f"{curve.seconds[-1] / 60:.1f}" for curve in points),
        )
        lines.append((label, *("; ".join(column) for column in columns)))
    names = (f"first evaluation of {target:g}", "last evaluation", "best evaluation", "agent steps", "minutes")
    return curves.markdown(("row", *names), lines)


def games_table(part: Part, late: Mapping[str, Array]) -> str:
    """Return a Markdown table with a line for each row and the late scores of the lowest, mean and highest seed."""

    def span(scores: Array) -> str:
        seeds = f" ({scores.min():.1f} .. {scores.max():.1f})" if scores.size > 1 else ""
        return f"{scores.mean():.1f}{seeds}" if scores.size else ""

    games = {row: [late.get(part.label(row, game), np.zeros(0)) for game in part.games] for row in part.rows}
    lines = [(row, *map(span, scores)) for row, scores in games.items() if any(map(len, scores))]
    return curves.markdown(("row", *part.games), lines)


def panels(part: Part, by_label: Mapping[str, Sequence[curves.Run]]) -> dict[str, list[curves.Run]]:
    """Return runs by row, whose curves are those of the games.

    The games are those of the row that has most of them, and rows that lack one of these are left out.
    """
    if not part.games:
        return {label: [_only(run, curves.SCORE) for run in same] for label, same in by_label.items()}
    rows = dict[str, list[curves.Run]]()
    played = {row: [game for game in part.games if part.label(row, game) in by_label] for row in part.rows}
    shown = max(played.values(), key=len)
    for row in part.rows:
        games = {game: by_label.get(part.label(row, game), ()) for game in shown}
        seeds = min(map(len, games.values()))
        rows[row] = [
            curves.Run(f"{row}-{seed}", {}, {game: runs[seed].curves[curves.SCORE] for game, runs in games.items()})
            for seed in range(seeds)
        ]
    return {row: same for row, same in rows.items() if same}


def published(name: str, steps: float) -> list[curves.Run]:
    """Return the curves up to `steps` agent steps that others have published of a part, by game if it has games."""
    points = dict[str, dict[str, list[tuple[float, float, float]]]]()
    with (RESULTS / "published.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            if line["part"] == name and float(line["step"]) <= steps:
                games = points.setdefault(line["run"], {})
                point = float(line["step"]), np.nan, float(line["mean"])
                games.setdefault(line["game"] or curves.SCORE, []).append(point)
    return [
        curves.Run(run, {}, {game: curves.Curve(*np.array(found).T) for game, found in games.items()})
        for run, games in points.items()
    ]


def _until(run: curves.Run, steps: int | None) -> curves.Run:
    return run._replace(curves={metric: curves.until(curve, steps) for metric, curve in run.curves.items()})


def _only(run: curves.Run, metric: str) -> curves.Run:
    return run._replace(curves={metric: run.curves[metric]})


def over_games(part: Part, late: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Return scores [seeds] in each game by row, divided by the mean of the game's best row.

    Rows that lack a game, or a second seed of one, are left out: one seed has no interval.

    Args:
        part: The part, which has games.
        late: Late scores [seeds] by label.
    """
    games = [{row: late[label] for row in part.rows if (label := part.label(row, game)) in late} for game in part.games]
    complete = [row for row in part.rows if all(len(game.get(row, ())) > 1 for game in games)]
    if not complete:
        return {}
    best = [max(scores.mean() for scores in game.values()) for game in games]
    return {row: [game[row] / most for game, most in zip(games, best)] for row in complete}


def main() -> int:
    """Train what is missing of each part and write its results; return 0 if all of its runs are complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all, in order")
    parser.add_argument("--list", action="store_true", help="print the parts and their hours, and train nothing")
    parser.add_argument(
        "--redraw", action="store_true", help="write tables and figures from the data, and train nothing"
    )
    parser.add_argument("--rows", nargs="+", help="only these rows of a part")
    parser.add_argument("--games", nargs="+", help="only these games of a part")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds in place of the part's")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--root", default=str(ROOT), help="folder of models/ and logs/")
    options = parser.parse_args()
    if options.list:
        for name in options.parts or PARTS:
            runs, known, unknown = hours(PARTS[name])
            others = f", {unknown} runs of unknown speed" if unknown else ""
            limit = "" if PARTS[name].target_score is None else "at most "
            print(f"{name}: {PARTS[name].title}, {runs} runs, {limit}{known:.1f} hours{others}")
        return 0
    with refusing():
        figures.pyplot()  # Fail before hours of training rather than after.
        if options.redraw:
            for name in options.parts or [name for name in PARTS if (options.output / f"{name}.csv").exists()]:
                write(name, [], options.output)
            return 0
        # All runs are checked before the first one starts.
        for name, runs in {name: runs_of(name, options) for name in options.parts or PARTS}.items():
            with claimed(Path(options.root) / "logs" / (PARTS[name].runs or name)):
                code = Runner(runs, options.jobs).run()
            if complete := [run for run in runs if run.complete]:
                write(name, complete, options.output)
            if code or len(complete) < len(runs):
                return code or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
