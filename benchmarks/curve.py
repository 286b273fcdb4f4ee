"""The learning curve of one row as docs/results shows it: evaluations of one or more runs as CSV and PNG.

    python -m benchmarks.curve dqn-cartpole logs/local_seed1 logs/local_seed2 logs/local_seed3

Needs matplotlib: pip install -e ".[plots]". Seconds are those of the run itself, summed over its resumptions.
"""

import argparse
import csv
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SCORE = "evaluator/episodic_return_mean"


def evaluations(folder: Path) -> list[dict[str, float]]:
    """Every evaluation of a run: agent step, wall seconds and the mean, std and median of its raw returns."""
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if SCORE in row["values"]:
            values = {name: row["values"][f"evaluator/episodic_return_{name}"] for name in ("mean", "std", "median")}
            rows.append({"step": row["step"], "seconds": round(row["seconds"], 1), **values})
    return rows


def write_csv(path: Path, runs: dict[str, list[dict[str, float]]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "step", "seconds", "mean", "std", "median"])
        writer.writeheader()
        for run, rows in runs.items():
            writer.writerows({"run": run, **row} for row in rows)


def draw(path: Path, title: str, runs: dict[str, list[dict[str, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (by_steps, by_time) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for run, rows in runs.items():
        means = [row["mean"] for row in rows]
        by_steps.plot([row["step"] for row in rows], means, marker=".", label=run)
        by_time.plot([row["seconds"] / 60 for row in rows], means, marker=".", label=run)
    by_steps.set(xlabel="agent steps", ylabel="mean raw return of an evaluation", title=title)
    by_time.set(xlabel="minutes", title="the same by wall time")
    by_steps.xaxis.set_major_formatter(ticker.EngFormatter())
    for axes in (by_steps, by_time):
        axes.grid(alpha=0.3)
    by_steps.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the row; names the files")
    parser.add_argument("folders", nargs="+", type=Path, help="log folders of its runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = {folder.name: evaluations(folder) for folder in options.folders}
    write_csv(options.output / f"{options.name}.csv", runs)
    draw(options.output / f"{options.name}.png", options.name, runs)


if __name__ == "__main__":
    main()
