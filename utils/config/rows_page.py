"""Write the table of docs/rows.md from CONFIGS: python -m utils.config.rows_page.

Every row of CONFIGS is one line of the table. Measured results come from docs/results/rows.csv.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.options import CONFIGS, PROJECT

DOCUMENT = Path(PROJECT) / "docs" / "rows.md"
# Row, result, page and heading of docs/results.
MEASURED = DOCUMENT.parent / "results" / "rows.csv"


def page() -> str:
    """Return the page with the text above its table as it is, and one line for each present row."""
    text, rule, _ = DOCUMENT.read_text().partition("|---" * 9 + "|\n")
    results = measured()
    return "".join([text, rule, *(_line(row, results.get(row["name"], "")) for row in CONFIGS)])


def measured() -> dict[str, str]:
    """Return the measured results by row, as links to their sections."""
    with MEASURED.open(newline="") as file:
        return {line["row"]: f"[{line['result']}](results/{line['place']})" for line in csv.DictReader(file)}


def _line(row: Mapping[str, Any], result: str) -> str:
    choices = [f"`{row[name]}`" for name in ("name", "agent_type", "env_type", "model_type", "memory_type")]
    choices.insert(3, row["game"])
    steps = f"{row['steps']:,}" if "steps" in row else ""
    return f"| {' | '.join([*choices, _capacity(row), steps, result])} |\n"


def _capacity(row: Mapping[str, Any]) -> str:
    """Return the capacity that the row sets, or that its replay list gives to each member."""
    members = row.get("memory.replay_parameters", ())
    if members:
        return ", ".join(f"{member['type']} {member['capacity']:,}" for member in members)
    return f"{row['memory.capacity']:,}" if "memory.capacity" in row else ""


if __name__ == "__main__":
    DOCUMENT.write_text(page())
