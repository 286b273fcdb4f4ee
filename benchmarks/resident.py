"""Resident memory of runs, one line a minute, as docs/results shows it: python -m benchmarks.resident logs/local_a logs/local_b"""

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def minutes(folder: Path) -> Iterator[dict[str, float | str]]:
    """The first report of each minute of a run."""
    seen = -1
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        minute, megabytes = int(row["seconds"] // 60), row["values"].get("global/resident_memory_mb")
        if megabytes is not None and minute > seen:
            seen = minute
            yield {"run": folder.name, "minute": minute, "step": row["step"], "resident_memory_mb": round(megabytes, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="log folders of the runs")
    with (RESULTS / "resident-memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "minute", "step", "resident_memory_mb"])
        writer.writeheader()
        for folder in parser.parse_args().folders:
            writer.writerows(minutes(folder))


if __name__ == "__main__":
    main()
