"""Stored actions become those of nested gymnasium spaces, each exactly once, and the rest is refused."""

import itertools

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from core.acting.validated_env import random_actions
from core.envs.gym_spaces import ActionConverter
from core.specs import Continuous, Discrete, Mixed, MultiDiscrete
from tests.choices import ACTIONS, NVEC

SPACES = {
    "multi-discrete": (spaces.MultiDiscrete([2, 3], start=[-1, 4]), (2, 3)),
    "multi-discrete of two axes": (spaces.MultiDiscrete([[2, 3], [1, 2]]), (2, 3, 1, 2)),
    "multi-binary": (spaces.MultiBinary(3), (2, 2, 2)),
    "tuple": (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3, start=7)]), (2, 3)),
    "nested": (ACTIONS, NVEC),
}


@pytest.mark.parametrize("name", SPACES)
def test_every_combination_of_choices_is_one_action_of_the_space(name):
    space, nvec = SPACES[name]
    convert = ActionConverter(space)
    assert convert.spec == MultiDiscrete(nvec)
    stored = np.array(list(itertools.product(*map(range, nvec))))  # [E, choices]
    actions = list(iterate(batch_space(space, len(stored)), convert(stored, len(stored))))
    assert all(space.contains(action) for action in actions)
    flat = [tuple(spaces.flatten(space, action)) for action in actions]
    assert len(set(flat)) == len(stored) == convert.spec.num_joint_actions
    for choices, vector in zip(stored, flat):
        assert _choices_of(space, list(vector)) == list(choices)


def _choices_of(space, vector):
    """Return the choices that a flattened action has: flags of MultiBinary, else the places of ones."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [choice for part in parts for choice in _choices_of(part, vector)]
    if isinstance(space, spaces.MultiBinary):
        return [int(vector.pop(0)) for _ in range(int(np.prod(space.shape)))]
    sizes = [space.n] if isinstance(space, spaces.Discrete) else space.nvec.reshape(-1)
    return [[vector.pop(0) for _ in range(size)].index(1) for size in sizes]


BOX = spaces.Box(np.array([[-1, 0]]), np.array([[2, 0.5]]), dtype=np.float64)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_one_choice_has_the_dtype_of_its_space(dtype):
    space = spaces.Discrete(3, start=5, dtype=np.dtype(dtype).type)
    convert = ActionConverter(space)
    assert convert.spec == Discrete(3)
    actions = list(iterate(batch_space(space, 3), convert(np.array([2, 0, 1]), 3)))
    assert actions == [7, 5, 6] and all(space.contains(action) for action in actions)


MIXED = spaces.Dict(
    {
        "aim": BOX,
        "gear": spaces.Discrete(3, start=-1),
        "hands": spaces.Tuple([spaces.Box(-2, 2, (1,)), spaces.MultiDiscrete([2, 4])]),
    }
)


def test_choices_and_numbers_become_each_part_of_a_nested_space_once():
    convert = ActionConverter(MIXED)
    assert isinstance(convert.spec, Mixed) and convert.spec.nvec == (3, 2, 4)
    assert (convert.spec.low.tolist(), convert.spec.high.tolist()) == ([-1, 0, -2], [2, 0.5, 2])
    assert convert.spec.description == "3 choices at once among 3 x 2 x 4, and 3 numbers in -1 .. 2, 0 .. 0.5, -2 .. 2"
    drawn = random_actions(convert.spec, 200, np.random.default_rng(2))
    assert drawn.shape == (200, 6) and drawn.dtype == convert.spec.array.dtype
    actions = list(iterate(batch_space(MIXED, 200), convert(drawn, 200)))
    assert all(MIXED.contains(action) for action in actions)
    for action, stored in zip(actions, drawn):
        hands = action["hands"]
        found = [action["gear"] + 1, *hands[1], *action["aim"].reshape(-1), *hands[0]]
        np.testing.assert_allclose(found, stored, rtol=1e-6)
    assert {tuple(row[:3]) for row in drawn.tolist()} == set(itertools.product(range(3), range(2), range(4)))


def test_boxes_alone_become_one_box():
    space = spaces.Tuple([BOX, spaces.Dict({"b": spaces.Box(-2, 2, (1,))})])
    convert = ActionConverter(space)
    assert isinstance(convert.spec, Continuous) and convert.spec.low.tolist() == [-1, 0, -2]
    actions = list(iterate(batch_space(space, 1), convert(np.array([[1.5, 0.25, -1]], np.float32), 1)))
    assert space.contains(actions[0]) and actions[0][0].tolist() == [[1.5, 0.25]] and actions[0][1]["b"] == -1


@pytest.mark.parametrize(
    "bad, message",
    [
        ([0, 0, 4, 0, 0, 0], r"action 4 of environment 1 \(element \[2\]\) is outside 0 .. 3"),
        ([0, 0.5, 0, 0, 0, 0], r"choice 0.5 of environment 1 \(element \[1\]\) is no integer"),
        ([0, np.nan, 0, 0, 0, 0], r"choice nan of environment 1"),
        ([0, -np.inf, 0, 0, 0, 0], r"action -1 of environment 1 \(element \[1\]\) is outside 0 .. 1"),
        ([0, 0, 0, 3, 0, 0], r"action 3.0 of environment 1 \(element \[0\]\) is outside -1.0 .. 2.0"),
        ([0, 0, 0, 0, 0], r"actions are float32 \[1, 5\], expected float32 \[2, 6\]"),
    ],
)
def test_an_invalid_mixed_action_is_named_with_its_environment(bad, message):
    rows = [[0] * 6, bad] if len(bad) == 6 else [bad]
    with pytest.raises(ValueError, match=message):
        ActionConverter(MIXED)(np.array(rows, np.float32), 2)


def test_an_invalid_choice_is_named_with_its_environment():
    convert = ActionConverter(spaces.MultiDiscrete([2, 3]))
    for bad, message in (
        ([[0, 0], [0, 3]], r"action 3 of environment 1 \(element \[1\]\) is outside 0 .. 2"),
        ([[-1, 0], [0, 0]], r"action -1 of environment 0 \(element \[0\]\) is outside 0 .. 1"),
        ([0, 1], r"actions are int64 \[2\], expected integers \[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(np.array(bad), 2)


@pytest.mark.parametrize(
    "space, blamed",
    [
        (spaces.Box(0, 3, (2,), np.int64), "neither a Box of floats, Discrete, "),
        (
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 3, (2,), np.int64)}),
            r"Tuples of these, and Box\(0, 3, \(2,\), int64\) is neither",
        ),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-np.inf, 1, (2,))]), "have no bounds"),
        (spaces.Text(3), "neither"),
        (spaces.Dict({}), "have no choices"),
        (spaces.Box(-1, 1, (0,)), "have no choices and no numbers"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (0, 2))]), "a part of them has none"),
        (spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([])]), "a part of them has none"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Tuple([])]), "a part of them has none"),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({})}), "a part of them has none"),
    ],
)
def test_spaces_of_other_parts_are_refused(space, blamed):
    with pytest.raises(ValueError, match=blamed):
        ActionConverter(space)


def test_random_actions_reach_every_choice_and_descriptions_say_them():
    drawn = random_actions(MultiDiscrete((2, 3)), 200, np.random.default_rng(1))
    assert drawn.shape == (200, 2) and {tuple(row) for row in drawn.tolist()} == set(
        itertools.product(range(2), range(3))
    )
    assert Discrete(1200).description == "1,200 actions"
    assert Discrete(6, (2, 3)).description == "6 actions, all combinations of 2 x 3 choices"
    assert MultiDiscrete((2,) * 16).description == "16 choices at once among 2 ^ 16"
    bounds = np.array([-1, 0], np.float32), np.array([0.5, 2], np.float32)
    assert Continuous(*bounds).description == "in -1 .. 0.5, 0 .. 2"
    many = np.arange(5, dtype=np.float32)
    assert Continuous(-many, many).description == "in -4 .. 4, each in its own bounds"
