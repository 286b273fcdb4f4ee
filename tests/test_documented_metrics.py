"""docs/observability.md names every metric that runs write, and no other."""

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
