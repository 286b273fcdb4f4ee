"""Stored actions become those of nested gymnasium spaces, each exactly once, and the rest is refused."""

import itertools

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from core.acting.env_conformance import random_actions
from core.envs.action_parts import ActionConverter
from core.specs import Continuous, Discrete, MultiDiscrete
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


def test_an_invalid_choice_is_named_with_its_stream():
    convert = ActionConverter(spaces.MultiDiscrete([2, 3]))
    for bad, message in (
        ([[0, 0], [0, 3]], r"action 3 of stream 1 \(element \[1\]\) is outside 0 .. 2"),
        ([[-1, 0], [0, 0]], r"action -1 of stream 0 \(element \[0\]\) is outside 0 .. 1"),
        ([0, 1], r"actions are int64 \[2\], expected integers \[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(np.array(bad), 2)


@pytest.mark.parametrize(
    "space, blamed",
    [
        (spaces.Box(0, 3, (2,), np.int64), "neither a Box of floats alone nor"),
        (
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,))}),
            r"Box\(-1.0, 1.0, \(2,\), float32\) bes",
        ),
        (spaces.Tuple([spaces.Box(-1, 1, (2,))]), "beside other parts"),
        (spaces.Text(3), "neither"),
        (spaces.Dict({}), "have no choices"),
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
    assert Continuous(*bounds).description == "in -1 .. 2"
