"""docs/observability.md names every metric that runs write, and no other."""

import json
import re
from pathlib import Path

import pytest

from tests.reliability.test_inline import RUNS, metrics, train
from tests.selection import slow_except

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


@pytest.mark.parametrize("name", slow_except(("prioritized", "impala with replay"), RUNS))
def test_every_metric_of_a_run_is_documented(name, tmp_path):
    often = ("--logger.period", "0.01")
    context = train(tmp_path, *RUNS[name], "--steps", "400", *often)
    written = {re.sub(r"_\d+$", "", metric) for values in metrics(context) for metric in values}
    assert written and written <= documented()
    options = context.options
    members = json.loads(getattr(options.memory, "replay_parameters", "[]"))
    names = {options.agent_type, options.memory_type, *(member["type"] for member in members)}
    columns = reporters()
    assert [metric for metric in written & columns.keys() if not is_reporter(names, columns[metric])] == []
