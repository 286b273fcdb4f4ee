"""docs/options.md says what the dataclasses say."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.settings import setting
from utils.describe_options import RUN, comments, page, table
from utils.options import CONFIGS
from utils.rows import from_row
from utils.settings_tree import annotations

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "options.md"


@dataclass(frozen=True)
class Parent:
    speed: float = setting(1.0, above=0)  # metres a second
    name: str = "a # is no comment"
    limit: int | None = setting(None, low=0, high=9)  # # of <things>, | apart
    # a reason of its own is no meaning


@dataclass(frozen=True)
class Child(Parent):
    speed: float = setting(2.0, above=0)  # knots
    loss: str = setting("huber", choices=("huber", "squared"))


def without_edited_defaults(text):
    """The lines of Run are there to be edited: what they say today may differ from the page."""
    before, heading, rest = text.partition(f"## {RUN}\n")
    lines, end, after = rest.partition("\n## ")
    return before + heading + re.sub(r"(?m)^(\| `\w+` \| (?:[^|\\]|\\.)+\| )[^|]+\|", r"\1|", lines) + end + after


def test_the_page_is_what_the_dataclasses_say():
    expected = without_edited_defaults(page())
    assert without_edited_defaults(DOCUMENT.read_text()) == expected, "run: python -m utils.describe_options > docs/options.md"


def test_only_the_defaults_of_the_lines_to_edit_may_differ():
    text = page()
    assert without_edited_defaults(text.replace("| `seed` | int | `1` |", "| `seed` | int | `7` |")) == without_edited_defaults(text)
    for there, other in (("of all randomness", "of the actors"), ("| `0.99` |", "| `0.9` |"), ("| `timestamp` |", "| `time` |")):
        assert there in text and without_edited_defaults(text.replace(there, other)) != without_edited_defaults(text)


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_every_option_of_every_row_stands_on_the_page(row):
    options, _ = from_row(row)
    described = set(re.findall(r"(?m)^\| `([\w.]+)` \|", DOCUMENT.read_text()))
    assert annotations(options).keys() <= described


def test_a_meaning_is_the_comment_at_the_end_of_the_fields_line():
    assert comments(Parent) == {"speed": "metres a second", "limit": "of <things>, | apart"}


def test_a_subclass_replaces_meanings_and_keeps_the_others():
    assert comments(Child) == {"speed": "knots", "limit": "of <things>, | apart"}


def test_a_line_shows_type_default_bounds_and_meaning():
    assert table(Child, "car.") == (
        "| `car.speed` | float | `2.0` | > 0 | knots |\n"
        "| `car.name` | str | `a # is no comment` |  |  |\n"
        "| `car.limit` | int \\| None | `None` | ≥ 0, ≤ 9 | of &lt;things>, \\| apart |\n"
        "| `car.loss` | str | `huber` | `huber`, `squared` |  |\n")


def test_the_page_names_no_folder_of_this_machine():
    assert str(DOCUMENT.parents[1]) not in page()
