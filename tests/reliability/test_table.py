"""The fault table of docs/reliability.md is complete and names the test files of each fault."""

import ast
import re
from pathlib import Path

from tests.reliability.program import PROJECT

ROWS = [f"F{number:02}" for number in range(1, 74)]
HERE = Path(__file__).parent


def held() -> dict[str, set[str]]:
    """Return for each fault the files with a test that has its number in its name, such as test_f09_f32_name."""
    found: dict[str, set[str]] = {}
    for path in HERE.parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test((?:_f\d\d)+)_", node.name)):
                for row in match[1].upper().split("_")[1:]:
                    found.setdefault(row, set()).add(path.stem)
    return found


def test_every_fault_of_the_table_has_a_test():
    assert held().keys() == set(ROWS)


def test_the_page_lists_every_fault_once_with_its_test_files():
    lines = re.findall(r"(?m)^\| (F\d\d) \|.*\| ([^|]*) \|$", (PROJECT / "docs" / "reliability.md").read_text())
    assert [row for row, _ in lines] == ROWS
    found = held()
    for row, files in lines:
        assert set(re.findall(r"`(test_\w+)`", files)) == found[row], row
