"""docs/reliability.md: every row of the fault table is there, and names the files whose tests hold it."""

import ast
import re
from pathlib import Path

from tests.reliability.program import PROJECT

ROWS = [f"F{number:02}" for number in range(1, 71)]
HERE = Path(__file__).parent


def held() -> dict[str, set[str]]:
    """row -> files with a test that says so in its name: test_f09_f32_..."""
    found: dict[str, set[str]] = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test((?:_f\d\d)+)_", node.name)):
                for row in match[1].upper().split("_")[1:]:
                    found.setdefault(row, set()).add(path.stem)
    return found


def test_every_row_of_the_fault_table_has_a_test():
    assert held().keys() == set(ROWS)


def test_the_page_has_every_row_once_with_the_files_that_hold_it():
    lines = re.findall(r"(?m)^\| (F\d\d) \|.*\| ([^|]*) \|$", (PROJECT / "docs" / "reliability.md").read_text())
    assert [row for row, _ in lines] == ROWS
    for row, files in lines:
        assert set(re.findall(r"`(test_\w+)`", files)) == held()[row], row
