"""Write the resident memory of runs, one line per minute: python -m benchmarks.resident logs/local_a logs/local_b.

Lines of other runs in the file are kept.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.training import RESULTS
from utils.plot.curves import METRICS, read_lines

COLUMNS = ("run", "minute", "step", "resident_memory_mb")


def minutes(folder: Path) -> Iterator[dict[str, float | str]]:
    """Yield the first report of each minute of a run."""
    last_minute, name = -1, folder.resolve().name
    for line in read_lines(folder / METRICS):
        minute, megabytes = int(line["seconds"] // 60), line["values"].get("global/rss_mb")
        if megabytes is not None and minute > last_minute:
            last_minute = minute
            yield dict(zip(COLUMNS, (name, minute, line["step"], round(megabytes, 1))))


def main() -> None:
    """Write the lines of these runs as CSV, in place of earlier ones of the same names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="log folders of the runs")
    parser.add_argument("--output", type=Path, default=RESULTS / "resident-memory.csv")
    options = parser.parse_args()
    new = [line for folder in options.folders for line in minutes(folder)]
    known = options.output.read_text().splitlines()[1:] if options.output.exists() else []
    measured = {line["run"] for line in new}
    others = [line for line in csv.DictReader(known, COLUMNS) if line["run"] not in measured]
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([*others, *new])


if __name__ == "__main__":
    main()
