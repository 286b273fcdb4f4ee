"""Dotted option names are listed, changed and parsed from text."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from core.common.settings import JsonText, frozen_dataclass
from utils.config.rows import (
    ELSEWHERE,
    changed,
    closest,
    declared,
    find_row,
    flatten,
    from_row,
    from_words,
    split_values,
)
from utils.options import CONFIGS

FILE = "utils/options.py"


@frozen_dataclass
class Inner:
    lr: float = Field(default=0.1, gt=0, le=1e9)
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2), strict=False)
    loss: Literal["huber", "squared"] = "huber"
    text: JsonText = "{}"


@frozen_dataclass
class Outer:
    seed: int = Field(default=1, ge=0)
    name: str | None = None
    double: bool = True
    inner: Inner = Inner()


def test_options_are_listed_by_their_dotted_names():
    assert flatten(Outer()) == {
        "seed": 1,
        "name": None,
        "double": True,
        "inner.lr": 0.1,
        "inner.sizes": (1, 2),
        "inner.loss": "huber",
        "inner.text": "{}",
    }
    assert declared(Outer())["inner.lr"].annotation is float and declared(Outer()).keys() == flatten(Outer()).keys()


def test_a_change_makes_a_copy_and_keeps_the_rest():
    outer = Outer()
    after, refused = changed(outer, {"inner.lr": 1, "seed": 5, "inner.sizes": [3, 4], "inner.text": {"a": [1]}})
    assert after == Outer(5, None, True, Inner(1.0, (3, 4), "huber", '{"a": [1]}')) and refused == {}
    assert isinstance(after.inner.lr, float)
    assert outer == Outer()


def test_refused_values_are_left_out_and_told_by_their_dotted_names():
    after, refused = changed(
        Outer(), {"seed": -1, "name": "a", "inner.lr": 0, "inner.sizes": (1, 0), "inner.loss": "l1"}
    )
    assert after == Outer(name="a")
    assert refused == {
        "seed": "seed=-1 must be at least 0",
        "inner.lr": "inner.lr=0 must be greater than 0",
        "inner.sizes": "inner.sizes=0 must be at least 1",
        "inner.loss": "inner.loss='l1' must be one of huber, squared",
    }


def test_names_of_other_libraries_stand_for_options_that_exist():
    known = {name for row in CONFIGS for name in declared(from_row(row)[0])}
    assert ELSEWHERE.keys() <= known
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    assert not elsewhere & {name.rpartition(".")[2] for name in known} - {"alpha", "num_envs"}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("seed", 1.5, "must be a valid integer"),
        ("seed", "1", "must be a valid integer"),
        ("seed", True, "must be a valid integer"),
        ("seed", None, "must be a valid integer"),
        ("double", 1, "must be a valid boolean"),
        ("name", 3, "must be a valid string"),
        ("inner.lr", "1", "must be a valid number"),
        ("inner.lr", float("nan"), "must be finite"),
        ("inner.lr", float("inf"), "must be finite"),
        ("inner.lr", 10**400, "must be a valid number"),
        ("inner.sizes", [1, "a"], "must be a valid integer"),
        ("inner.sizes", 3, "must be a valid tuple"),
        ("inner.text", {1: object()}, "must be a valid string"),
        ("inner.loss", ["huber"], "must be one of huber, squared"),
    ],
)
def test_values_must_be_of_the_declared_type(name, value, reason):
    after, refused = changed(Outer(), {name: value})
    assert after == Outer() and list(refused) == [name] and refused[name].endswith(reason)


@pytest.mark.parametrize(
    ("texts", "annotation", "value"),
    [
        (["7"], int, 7),
        (["-7"], int, -7),
        (["1e6"], int, 1_000_000),
        (["200_000"], int, 200_000),
        (["12345678901234567891"], int, 12345678901234567891),
        (["1.5"], int, 1.5),
        (["1e-4"], float, 1e-4),
        (["-2"], float, -2.0),
        (["none"], float | None, None),
        (["None"], int | None, None),
        (["3"], int | None, 3),
        (["pong"], str, "pong"),
        (["1e6"], str, "1e6"),
        (["a b"], str, "a b"),
        (["None"], str | None, None),
        (["84", "96"], tuple[int, int], (84, 96)),
        (["84"], int | tuple[int, int], 84),
        (["84", "96"], int | tuple[int, int], (84, 96)),
        (["64"], tuple[int, ...], (64,)),
        (["[84, 96]"], int | tuple[int, int], (84, 96)),
        (['["agent", "goal.position"]'], tuple[str, ...], ("agent", "goal.position")),
        (["[agent]"], tuple[str, ...], ("[agent]",)),
        (["2"], Literal[1, 2], 2),
        (["2"], Literal["1", "2"], "2"),
        (["no"], bool | None, False),
        (["none"], bool | None, None),
    ],
)
def test_words_are_parsed_as_the_declared_type(texts, annotation, value):
    read = from_words(texts, annotation)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["False", "false", "0", "no", "True", "true", "1", "yes"])
def test_boolean_words_are_parsed(text):
    assert from_words([text], bool) is (text.lower() in ("true", "1", "yes"))


def test_a_boolean_without_a_value_is_true():
    assert from_words([], bool) is True


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("inner.lr", ["abc"]),
        ("seed", ["1.5"]),
        ("seed", []),
        ("seed", ["1", "2"]),
        ("double", ["maybe"]),
        ("double", [""]),
        ("seed", ["nan"]),
        ("seed", ["inf"]),
        ("seed", ["--"]),
        ("seed", ["9" * 5_000]),
        ("seed", ["true"]),
        ("name", ["a", "b"]),
        ("name", []),
        ("inner.sizes", ["1", "a"]),
    ],
)
def test_words_of_another_type_are_refused(name, texts):
    assert list(changed(Outer(), {name: from_words(texts, declared(Outer())[name].annotation)})[1]) == [name]


@pytest.mark.parametrize(
    ("text", "separator", "values"),
    [
        ("1,2", ",", ["1", "2"]),
        ('{"a": 1, "b": 2},{}', ",", ['{"a": 1, "b": 2}', "{}"]),
        ('["a,]b", 1],3', ",", ['["a,]b", 1]', "3"]),
        ("256 256", " ", ["256", "256"]),
        ('{"a": [1, 2]}', " ", ['{"a": [1, 2]}']),
        ("", ",", [""]),
    ],
)
def test_values_are_split_outside_json_only(text, separator, values):
    assert split_values(text, separator) == values


def test_a_misspelt_option_finds_the_closest():
    known = ["agent.learning_rate", "agent.batch_size", "memory.capacity", "seed", "num_actors"]
    assert closest("memroy.capacity", known)[0] == "memory.capacity"
    assert closest("learning_rte", known)[0] == "agent.learning_rate"
    assert closest("agent.bach_size", known)[0] == "agent.batch_size"
    assert closest("num_actor", known)[0] == "num_actors"
    assert closest("agent.lr", [*known, "agent.lr_end"]) == ["agent.learning_rate", "agent.lr_end"]
    assert closest("zzzzzz", known) == []


@pytest.mark.parametrize(
    ("config", "word", "meant"),
    [
        ("sac-pendulum", "alpha", ["agent.temperature"]),
        ("sac-pendulum", "agent.autotune", ["agent.learn_temperature"]),
        ("sac-pendulum", "policy_lr", ["agent.learning_rate"]),
        ("sac-pendulum", "q_lr", ["agent.critic_learning_rate"]),
        ("sac-pendulum", "gradient_steps", ["rate_limiter.samples_per_insert"]),
        ("sac-pendulum", "net_arch", ["model.hidden"]),
        ("sac-pendulum", "learning_starts", ["rate_limiter.min_replay_size", "agent.random_exploration_steps"]),
        ("dqn-cartpole", "learning_starts", ["rate_limiter.min_replay_size"]),
        ("td3-pendulum", "policy_noise", ["agent.smoothing_scale"]),
        ("td3-pendulum", "target_noise_clip", ["agent.smoothing_clip"]),
        ("td3-pendulum", "exploration_noise", ["agent.noise_scale"]),
        ("ppo-cartpole", "clip_vloss", ["agent.value_clipping"]),
    ],
)
def test_names_of_other_libraries_are_answered_by_ours(config, word, meant):
    row = next(row for row in CONFIGS if row["name"] == config)
    assert closest(word, declared(from_row(row)[0])) == meant


def test_a_value_that_a_replaced_class_refuses_is_left_out():
    row = {**find_row("pqn-cartpole"), "model.hidden": 256}
    options, problems = from_row(row, {"model_type": "sac-mlp"})
    assert not problems and options.model.hidden == (256, 256)
    refused = from_row({**row, "model_type": "sac-mlp"})[1]
    assert "CONFIGS row 'pqn-cartpole': model.hidden=256 must be a valid tuple" in refused


@pytest.mark.parametrize("name", ["timestamp", "resume", "model_file", "mode"])
def test_a_row_may_not_set_which_run_it_is(name):
    _, problems = from_row({**find_row("dqn-cartpole"), name: "old"})
    assert problems == [f"CONFIGS row 'dqn-cartpole': {name} is not a row's to set: edit its line in RUN of {FILE}"]


def test_evaluations_on_atari_leave_a_rally_without_end():
    rows = [row for row in CONFIGS if row["env_type"] == "atari"]
    epsilons = {row["name"]: getattr(from_row(row)[0].agent, "evaluation_epsilon", None) for row in rows}
    assert epsilons["dqn-pong-small"] == 0.001 and 0.0 not in epsilons.values()


@pytest.mark.parametrize(
    ("row", "divisor"),
    [("nature-breakout", 1), ("double-breakout", 1), ("dueling-breakout", 1), ("prioritized-breakout", 16)],
)
def test_rmsprops_epsilon_of_nature_dqn_is_that_of_a_mean(row, divisor):
    """Nature DQN's code adds 0.01 to squares of gradients that are sums over 32 windows, where ours are means."""
    options = from_row(find_row(row))[0]
    assert options.agent.optimizer == "rmsprop" and options.agent.rmsprop_centered and options.agent.rmsprop_eps_in_root
    assert options.agent.optimizer_eps == pytest.approx(0.01 / options.agent.batch_size**2 / divisor)
