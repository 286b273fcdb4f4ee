"""docs/options.md agrees with the dataclasses."""

import re
import typing
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import CLIPPINGS
from core.envs.atari import PROTOCOLS
from core.memories.unrolls.mixed import STRATEGIES
from core.ops.distances import DISTANCES
from utils.config.options_page import DOCUMENT, LINES, descriptions, fixed_sections, page, table
from utils.config.rows import SECTIONS, declared, from_row
from utils.options import CONFIGS, RUN, Options


@frozen_dataclass
class Parent:
    """No field's."""

    speed: float = Field(default=1.0, gt=0)
    """Metres a second."""
    name: str = "a"
    limit: int | None = Field(default=None, ge=0, le=9)
    """# of <things>, | apart."""
    sizes: tuple[Annotated[int, Field(ge=1, le=1_000)], ...] = Field(default=(1,), strict=False)
    """Sizes, of which
    there are some."""


@frozen_dataclass
class Child(Parent):
    speed: float = Field(default=2.0, gt=0)
    """Knots."""
    limit: int | None = Field(default=None, ge=0, le=8)
    loss: Literal["huber", "squared"] = "huber"


DANGLING = (
    r"(And|Or|Of|That|Those|As|With|Whether|What|How|Until|In|On|By|For|From|To|At|It|Its|Their|They|Which|"
    r"Where|When)\b"
)


def without_edited_defaults(text):
    """Remove the defaults of the lines of RUN, because users edit them."""
    before, heading, rest = text.partition(f"## {LINES}\n")
    lines, end, after = rest.partition("\n## ")
    return before + heading + re.sub(r"(?m)^(\| `\w+` \| (?:[^|\\]|\\.)+\| )[^|]+\|", r"\1|", lines) + end + after


def test_the_page_agrees_with_the_dataclasses():
    expected = without_edited_defaults(page())
    assert without_edited_defaults(DOCUMENT.read_text()) == expected, "run: python -m utils.config.options_page"


def test_only_the_defaults_of_run_may_differ():
    text = page()
    assert without_edited_defaults(
        text.replace("| `seed` | int | `1` |", "| `seed` | int | `7` |")
    ) == without_edited_defaults(text)
    for there, other in (
        ("Seed of all random", "Seed of the"),
        ("| `0.99` |", "| `0.9` |"),
        ("| `timestamp` |", "| `time` |"),
    ):
        assert there in text and without_edited_defaults(text.replace(there, other)) != without_edited_defaults(text)


def test_every_option_of_every_config_is_on_the_page():
    described = set(re.findall(r"(?m)^\| `([\w.]+)` \|", DOCUMENT.read_text()))
    assert {name for row in CONFIGS for name in declared(from_row(row)[0])} <= described


def test_a_description_is_the_string_below_the_field():
    assert descriptions(Parent) == {
        "speed": "Metres a second.",
        "limit": "# of <things>, | apart.",
        "sizes": "Sizes, of which there are some.",
    }


def every_option():
    """Each option of every Params that the framework has: dotted name, declaration and description."""
    params = [("", Options), *((f"{section}.", each) for section, each in fixed_sections())]
    params += [(f"{section}.", factory[name].Params) for section, (_, factory) in SECTIONS.items() for name in factory]
    params += [("rule.", each) for _, each in STRATEGIES.values()]
    for prefix, each in params:
        for name, field in declared(each()).items():
            if "." not in name:
                yield f"{each.__name__}: {prefix}{name}", field, descriptions(each).get(name, "")


def test_every_option_has_a_sentence_that_stands_alone():
    fragments = [
        f"{name}: {text!r}"
        for name, _, text in every_option()
        if not re.fullmatch(r"[A-Z`].*[.]", text) or re.match(DANGLING, text)
    ]
    assert not fragments, "\n".join(fragments)


def bounds(field):
    """Return pydantic's bounds of a field, and of the numbers inside its type."""

    def nested(annotation):
        for part in typing.get_args(annotation):
            yield from getattr(part, "metadata", None) or nested(part)

    return {type(bound) for bound in [*field.metadata, *nested(field.annotation)]}


def holds_numbers(annotation):
    if typing.get_origin(annotation) is Literal:
        return False
    return annotation in (int, float) or any(map(holds_numbers, typing.get_args(annotation)))


def test_every_number_has_bounds():
    assert not [
        name
        for name, field, _ in every_option()
        if holds_numbers(field.annotation) and not (Le in bounds(field) and {Ge, Gt} & bounds(field))
    ]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("AtariParams: env.protocol", PROTOCOLS),
        ("GymParams: env.reward_clipping", CLIPPINGS),
        ("CustomParams: rule.dist_function", DISTANCES),
    ],
)
def test_choices_are_the_names_of_what_they_choose(option, names):
    (field,) = {name: field for name, field, _ in every_option() if name == option}.values()
    assert typing.get_args(field.annotation) == tuple(names)


def test_every_line_of_run_is_an_option():
    assert RUN.keys() <= Options.__pydantic_fields__.keys()


def test_a_subclass_replaces_descriptions_and_keeps_the_others():
    assert descriptions(Child) == {**descriptions(Parent), "speed": "Knots."}


def test_a_line_shows_type_default_bounds_and_meaning():
    assert table(Child, "car.") == (
        "| `car.speed` | float | `2.0` | > 0 | Knots. |\n"
        "| `car.name` | str | `a` |  |  |\n"
        "| `car.limit` | int \\| None | `None` | ≥ 0, ≤ 8 | # of &lt;things>, \\| apart. |\n"
        "| `car.sizes` | tuple[int, ...] | `(1,)` | ≥ 1, ≤ 1_000 | Sizes, of which there are some. |\n"
        "| `car.loss` | str | `huber` | `huber`, `squared` |  |\n"
    )


def test_the_page_names_no_folder_of_this_machine():
    assert str(DOCUMENT.parents[1]) not in page()
