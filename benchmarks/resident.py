"""Write the resident memory of runs, one line per minute: python -m benchmarks.resident logs/local_a logs/local_b."""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.training import RESULTS
from utils.plot.curves import METRICS, read_lines


def minutes(folder: Path) -> Iterator[dict[str, float | str]]:
    """Yield the first report of each minute of a run."""
    last_minute = -1
    for line in read_lines(folder / METRICS):
        minute, megabytes = int(line["seconds"] // 60), line["values"].get("global/rss_mb")
        if megabytes is not None and minute > last_minute:
            last_minute = minute
            yield {"run": folder.name, "minute": minute, "step": line["step"], "rss_mb": round(megabytes, 1)}


def main() -> None:
    """Write docs/results/resident-memory.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="log folders of the runs")
    with (RESULTS / "resident-memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "minute", "step", "rss_mb"])
        writer.writeheader()
        for folder in parser.parse_args().folders:
            writer.writerows(minutes(folder))


if __name__ == "__main__":
    main()
