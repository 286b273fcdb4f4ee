"""Measure what a part of an algorithm is worth: rows x seeds on one MinAtar game, with one plot and one table.

    python -m benchmarks.study replay --steps 500000 --seeds 1 2 3             what replay does for V-trace
    python -m benchmarks.study rainbow --steps 500000 --seeds 1 2 3            Rainbow against DQN
    python -m benchmarks.study ablations --steps 500000 --seeds 1              Rainbow without each of its parts

A complete run is not repeated, so that the study can be stopped and continued. Needs matplotlib.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.training import ROOT
from utils.config.command_line import refuse
from utils.errors import ConfigurationError
from utils.plot import curves, figures
from utils.sweep.__main__ import tabulate
from utils.sweep.scheduler import Runner
from utils.sweep.subprocess_run import ChildRun, named, options_of

RESULTS = ROOT / "docs" / "results"
STUDIES = {  # Title, and rows without -minatar-breakout.
    "replay": ("V-trace with replay", ("impala", "replay", "clear", "laser", "attentive", "elite1", "elite3")),
    "rainbow": ("DQN, Rainbow, R2D2", ("dqn", "rainbow", "rainbow-quantile", "r2d2")),
    "ablations": (
        "Rainbow without each of its parts",
        (
            "rainbow",
            *(
                f"rainbow-no-{part}"
                for part in ("double", "dueling", "noisy", "prioritized", "n_step", "distributional")
            ),
        ),
    ),
}


def runs_of(row: str, options: argparse.Namespace) -> list[ChildRun]:
    """Return the runs of a row, one per seed."""
    words = ["--game", options.game, "--steps", str(options.steps), "--evaluator.steps", str(options.steps // 20)]
    template = options_of(f"{row}-minatar-breakout", words, "study", options.root)
    names = {seed: f"{options.game}-{row}-seed{seed}" for seed in options.seeds}
    return [
        ChildRun(named(template, name, seed), words, Path(options.root) / "logs" / "study" / f"{name}.txt")
        for seed, name in names.items()
    ]


def main() -> int:
    """Train what is missing, draw the plot and write the tables; return 0 if all runs are complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--game", default="breakout")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", help="only these rows of the study")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--root", default=str(ROOT), help="folder of models/ and logs/")
    options = parser.parse_args()
    title, rows = STUDIES[options.study]
    try:
        figures.pyplot()  # Fail before hours of training rather than after.
        runs = [run for row in options.rows or rows for run in runs_of(row, options)]
        if (exit_code := Runner(runs, options.jobs).run()) or not all(run.complete for run in runs):
            return exit_code or 1
        found = curves.read([run.options.log_folder for run in runs], list(curves.COLUMNS))
    except ConfigurationError as refused:
        refuse(refused)
    path = options.output / f"{options.study}-study-{options.game}"
    curves.write_csv(path.with_name(f"{path.name}.csv"), found)
    scores = [
        run._replace(curves={curves.SCORE: curves.until(run.curves[curves.SCORE], options.steps)}) for run in found
    ]
    figure = figures.draw_curves(
        curves.grouped(scores, ["method"]), ["steps"], "mean", f"{title}: MinAtar {options.game}"
    )
    figures.save(figure, path, ["png"])
    print(tabulate(runs, path.with_name(f"{path.name}-table")), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
