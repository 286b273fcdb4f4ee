"""The table of docs/rows.md is generated from CONFIGS."""

import re

from utils.config.rows_page import DOCUMENT, measured, page
from utils.options import CONFIGS


def test_the_table_is_generated_from_configs():
    assert DOCUMENT.read_text() == page(), "run: python -m utils.config.rows_page"


def test_every_row_has_one_line_in_the_order_of_configs():
    table = page().partition("| row | agent |")[2]
    assert re.findall(r"(?m)^\| `([\w-]+)` \|", table) == [row["name"] for row in CONFIGS]


def test_every_measured_result_belongs_to_a_config():
    assert measured().keys() <= {row["name"] for row in CONFIGS}


def test_another_config_changes_the_page(monkeypatch):
    row = {
        "name": "mine",
        "agent_type": "dqn",
        "env_type": "gym",
        "game": "Acrobot-v1",
        "memory_type": "shared",
        "model_type": "dqn-mlp",
        "memory.capacity": 50_000,
        "steps": 1_000,
    }
    monkeypatch.setattr("utils.config.rows_page.CONFIGS", [*CONFIGS, row])
    assert page().endswith("| `mine` | `dqn` | `gym` | Acrobot-v1 | `dqn-mlp` | `shared` | 50,000 | 1,000 |  |\n")
    assert page() != DOCUMENT.read_text()
