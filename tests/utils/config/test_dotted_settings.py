"""Dotted option names are listed, changed and parsed from text."""

from dataclasses import dataclass

import pytest

from core.common.settings import problems, setting
from utils.config.dotted_settings import annotations, changed, closest, fits, flatten, parse, split_values


@dataclass(frozen=True)
class Inner:
    lr: float = setting(0.1, above=0)
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Outer:
    seed: int = 1
    name: str | None = None
    inner: Inner = Inner()


def test_options_are_listed_by_their_dotted_names():
    assert flatten(Outer()) == {"seed": 1, "name": None, "inner.lr": 0.1, "inner.sizes": (1, 2)}
    assert annotations(Outer())["inner.lr"] is float


def test_a_change_makes_a_copy_and_keeps_the_rest():
    outer = Outer()
    after = changed(outer, {"inner.lr": 1, "seed": 5, "inner.sizes": [3, 4]})
    assert after == Outer(5, None, Inner(1.0, (3, 4)))
    assert isinstance(after.inner.lr, float)
    assert outer == Outer()


@pytest.mark.parametrize(("texts", "annotation", "value"), [
    (["7"], int, 7), (["-7"], int, -7), (["1e6"], int, 1_000_000), (["200_000"], int, 200_000),
    (["12345678901234567891"], int, 12345678901234567891),
    (["1e-4"], float, 1e-4), (["-2"], float, -2.0), (["none"], float | None, None), (["None"], int | None, None), (["3"], int | None, 3),
    (["pong"], str, "pong"), (["a b"], str, "a b"), (["None"], str | None, None), (["84", "96"], tuple[int, int], (84, 96))])
def test_words_are_parsed_as_the_declared_type(texts, annotation, value):
    parsed = parse(texts, annotation)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(("text", "value"), [("False", False), ("false", False), ("0", False), ("no", False),
                                             ("True", True), ("true", True), ("1", True), ("yes", True)])
def test_boolean_words_are_parsed(text, value):
    assert parse([text], bool) is value


def test_a_boolean_without_a_value_is_true():
    assert parse([], bool) is True


@pytest.mark.parametrize(("texts", "annotation"), [(["abc"], float), (["1.5"], int), ([], int), (["1", "2"], int), (["maybe"], bool),
                                                   ([""], bool), (["nan"], int), (["inf"], int), (["--"], int)])
def test_words_of_another_type_are_refused_silently(texts, annotation, capfd):
    with pytest.raises(ValueError, match="is not"):
        parse(texts, annotation)
    assert capfd.readouterr() == ("", "")


def test_values_of_a_config_must_have_the_declared_type():
    assert fits(1, float) and fits(None, int | None) and fits([1, 2], tuple[int, ...]) and fits(True, bool)
    assert fits([1, 2], tuple[int, int]) and not fits([1], tuple[int, int]) and not fits([1, "a"], tuple[int, ...])
    assert not fits("1", float) and not fits(None, int) and not fits(True, int) and not fits(1, bool) and not fits(1.5, int)


@pytest.mark.parametrize(("text", "separator", "values"), [
    ("1,2", ",", ["1", "2"]), ('{"a": 1, "b": 2},{}', ",", ['{"a": 1, "b": 2}', "{}"]), ('["a,]b", 1],3', ",", ['["a,]b", 1]', "3"]),
    ("256 256", " ", ["256", "256"]), ('{"a": [1, 2]}', " ", ['{"a": [1, 2]}']), ("", ",", [""])])
def test_values_are_split_outside_json_only(text, separator, values):
    assert split_values(text, separator) == values


def test_integers_too_large_for_a_float_are_out_of_bounds():
    assert not fits(10**400, float)
    assert problems(changed(Outer(), {"inner.lr": 10**400}))[0].endswith("must be finite and below 1e+300")


def test_a_misspelt_option_finds_the_closest():
    known = ["agent.lr", "agent.batch_size", "memory.capacity", "seed", "num_actors"]
    assert closest("memroy.capacity", known)[0] == "memory.capacity"
    assert closest("lr", known)[0] == "agent.lr"
    assert closest("agent.bach_size", known)[0] == "agent.batch_size"
    assert closest("num_actor", known)[0] == "num_actors"
    assert closest("zzzzzz", known) == []
