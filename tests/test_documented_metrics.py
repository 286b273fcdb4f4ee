"""docs/observability.md names no metric that the code does not report; test_inline.py proves that it names all."""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGE = (PROJECT / "docs" / "observability.md").read_text()
SOURCE = "".join(path.read_text() for path in (PROJECT / "core").rglob("*.py"))
STATISTICS = ("_mean", "_std", "_median")  # of episodes, which the logger adds


def documented():
    """Return the metrics of the page's tables, as "namespace/name"."""
    names, namespace = set(), ""
    for line in PAGE[PAGE.index("## Metrics") : PAGE.index("## Files")].splitlines():
        if heading := re.match(r"\| `(\w+)/`", line):
            namespace = heading[1]
        elif line.startswith("| `"):
            stem = ""
            for name in re.findall(r"`(\w+)`", line.split(" | ")[0]):
                stem = stem if name in STATISTICS else name.removesuffix("_mean")
                names.add(f"{namespace}/{stem + name if name in STATISTICS else name}")
    return names


def reporters():
    """Return the column "reported by" of each row of learner/, by "learner/name"."""
    rows = PAGE[PAGE.index("| `learner/`") : PAGE.index("## Files")].splitlines()[2:]
    columns = [row.strip("| ").split(" | ") for row in rows if row.startswith("| `")]
    return {f"learner/{name}": column[1] for column in columns for name in re.findall(r"`(\w+)`", column[0])}


def is_reporter(names, column):
    """Return True if the column names one of these agents, memories and members of a replay list."""
    named = {*re.findall(r"`([\w.]+)`", column)}
    return not names & named if column.startswith("all") else bool(names & named)


def test_no_metric_is_documented_that_the_code_does_not_report():
    for name in documented():
        stem = re.sub(r"(_per_second|_mean|_std|_median)$", "", name.partition("/")[2])
        assert re.search(rf"[\"/]{stem}(_\w+)?\"", SOURCE), name
