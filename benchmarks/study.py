"""What a part of an algorithm is worth: rows x seeds on one MinAtar game, one plot with bands and one table.

    python -m benchmarks.study replay --steps 500000 --seeds 1 2 3             what replay does for V-trace
    python -m benchmarks.study rainbow --steps 500000 --seeds 1 2 3            Rainbow against DQN
    python -m benchmarks.study ablations --steps 500000 --seeds 1              Rainbow without each of its parts

Runs one after the other; a run that is there already is not repeated, so the study can be stopped and continued. Needs matplotlib.
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.curve import RESULTS, evaluations, write_csv
from benchmarks.training import ROOT

STUDIES = {  # title, rows; each -minatar-breakout
    "replay": ("V-trace with replay", ("impala", "replay", "clear", "laser", "attentive", "elite1", "elite3")),
    "rainbow": ("DQN, Rainbow, R2D2", ("dqn", "rainbow", "rainbow-quantile", "r2d2")),
    "ablations": ("Rainbow without each of its parts", ("rainbow", *(f"rainbow-no-{part}" for part in (
        "double", "dueling", "noisy", "prioritized", "nstep", "distributional"))))}
LATE = 0.8  # evaluations after this share of the steps make the table's score; of a run that went on for longer, only until then


def run(row: str, seed: int, options: argparse.Namespace) -> Path:
    """The log folder of one run, trained unless it is complete."""
    timestamp = f"{options.game}-{row}-seed{seed}"
    folder = ROOT / "logs" / f"study_{timestamp}"
    if folder.exists() and (rows := evaluations(folder)) and rows[-1]["step"] >= options.steps:
        return folder
    resume = ["--resume", f"study_{timestamp}"] if folder.exists() else ["--machine", "study", "--timestamp", timestamp]
    subprocess.run([sys.executable, "main.py", "--config", f"{row}-minatar-breakout", "--game", options.game, "--seed", str(seed),
                    "--steps", str(options.steps), "--evaluator.steps", str(options.steps // 20), *resume],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def late_score(rows: list[dict[str, float]], steps: int) -> float:
    return float(np.mean([row["mean"] for row in rows if LATE * steps <= row["step"] <= 1.02 * steps]))


def draw(path: Path, title: str, curves: dict[str, list[list[dict[str, float]]]], steps: int) -> None:
    """Mean over seeds and the band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    grid = np.linspace(steps / 20, steps, 20)
    for row, seeds in curves.items():
        scores = np.array([np.interp(grid, [row["step"] for row in rows], [row["mean"] for row in rows]) for rows in seeds])
        line, = axes.plot(grid, scores.mean(0), label=row)
        axes.fill_between(grid, scores.min(0), scores.max(0), color=line.get_color(), alpha=0.15)
    axes.xaxis.set_major_formatter(ticker.EngFormatter())
    axes.set(xlabel="agent steps", ylabel="mean raw return of an evaluation", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--game", default="breakout")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", help="only these of the study")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    title, rows = STUDIES[options.study]
    runs = {row: [run(row, seed, options) for seed in options.seeds] for row in options.rows or rows}
    curves = {row: [evaluations(folder) for folder in folders] for row, folders in runs.items()}
    name = f"{options.study}-study-{options.game}"
    write_csv(options.output / f"{name}.csv", {folder.name: evaluations(folder) for folders in runs.values() for folder in folders})
    draw(options.output / f"{name}.png", f"{title}: MinAtar {options.game}", curves, options.steps)
    with (options.output / f"{name}-table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "mean over seeds", *(f"seed {seed}" for seed in options.seeds), "minutes a run"])
        for row, seeds in curves.items():
            scores = [late_score(rows, options.steps) for rows in seeds]
            minutes = np.mean([rows[-1]["seconds"] for rows in seeds]) / 60
            writer.writerow([row, f"{np.mean(scores):.2f}", *(f"{score:.2f}" for score in scores), f"{minutes:.1f}"])
            print(f"{row}: {np.mean(scores):.2f} from {[round(score, 2) for score in scores]}, {minutes:.1f} minutes a run")


if __name__ == "__main__":
    main()
