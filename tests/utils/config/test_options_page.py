"""docs/options.md agrees with the dataclasses."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.common.settings import setting
from core.memories.unrolls.mixed import STRATEGIES
from utils.config.dotted_settings import annotations
from utils.config.options_page import RUN, comments, fixed_groups, page, table
from utils.config.rows import GROUPS, from_row
from utils.options import CONFIGS, Options, Run

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "options.md"


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


@dataclass(frozen=True)
class Long:
    speed: float = setting(1.0, above=0)  # Metres a second,
                                          # measured on
                                          # a straight road.
    name: str = ""  # Name.

    # a reason of its own is no meaning


DANGLING = r"(And|Or|Of|That|Those|As|With|Whether|What|How|Until|In|On|By|For|From|To|At|It|Its|Their|They|Which|Where|When)\b"


def without_edited_defaults(text):
    """Remove the defaults of Run, because users edit them."""
    before, heading, rest = text.partition(f"## {RUN}\n")
    lines, end, after = rest.partition("\n## ")
    return before + heading + re.sub(r"(?m)^(\| `\w+` \| (?:[^|\\]|\\.)+\| )[^|]+\|", r"\1|", lines) + end + after


def test_the_page_agrees_with_the_dataclasses():
    expected = without_edited_defaults(page())
    assert without_edited_defaults(DOCUMENT.read_text()) == expected, "run: python -m utils.config.options_page > docs/options.md"


def test_only_the_defaults_of_run_may_differ():
    text = page()
    assert without_edited_defaults(text.replace("| `seed` | int | `1` |", "| `seed` | int | `7` |")) == without_edited_defaults(text)
    for there, other in (("Seed of all random", "Seed of the"), ("| `0.99` |", "| `0.9` |"), ("| `timestamp` |", "| `time` |")):
        assert there in text and without_edited_defaults(text.replace(there, other)) != without_edited_defaults(text)


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_every_option_of_every_config_is_on_the_page(row):
    options, _ = from_row(row)
    described = set(re.findall(r"(?m)^\| `([\w.]+)` \|", DOCUMENT.read_text()))
    assert annotations(options).keys() <= described


def test_a_meaning_is_the_comment_at_the_end_of_the_fields_line():
    assert comments(Parent) == {"speed": "metres a second", "limit": "of <things>, | apart"}


def test_a_meaning_continues_in_the_column_below_it():
    assert comments(Long) == {"speed": "Metres a second, measured on a straight road.", "name": "Name."}


def every_setting():
    """Yield the dotted name, field and meaning of each option of every Params in the framework."""
    params = [("", Run), ("", Options), *((f"{group}.", each) for group, each in fixed_groups())]
    params += [(f"{group}.", factory[name].Params) for group, (_, factory) in GROUPS.items() for name in factory]
    params += [("rule.", each) for _, each in STRATEGIES.values()]
    for prefix, each in params:
        meanings, types = comments(each), annotations(each())
        for field in dataclasses.fields(each):
            if types.get(field.name, Any) is not Any:
                yield f"{each.__name__}: {prefix}{field.name}", types[field.name], field, meanings.get(field.name, "")


def test_every_option_has_a_sentence_that_stands_alone():
    fragments = [f"{name}: {meaning!r}" for name, _, _, meaning in every_setting()
                 if not re.fullmatch(r"[A-Z`].*[.]", meaning) or re.match(DANGLING, meaning)]
    assert not fragments, "\n".join(fragments)


def test_every_number_has_bounds():
    def is_bounded(field):
        low, high, above = (field.metadata.get(name) for name in ("low", "high", "above"))
        return field.metadata.get("choices") or (high is not None and (low is not None or above is not None))
    kinds = int, float, int | None, float | None, tuple[int, ...]
    assert not [name for name, kind, field, _ in every_setting() if kind in kinds and not is_bounded(field)]


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
