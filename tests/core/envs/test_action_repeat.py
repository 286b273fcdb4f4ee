"""Action repeat adds up rewards, stops at an episode's end and keeps step limits."""

import gymnasium as gym
import numpy as np
import pytest

from core.envs.gym import GymEnv, GymParams
from tests.core.envs.test_gym import Told


def played(limit=None, length=7, steps=6, **settings):
    gym.registry.pop("Told-v0", None)
    gym.register("Told-v0", Told, kwargs={"length": length}, max_episode_steps=limit)
    try:
        env = GymEnv(GymParams(**settings), "Told-v0", 1)
        env.reset(0)
        return env, [env.step(np.array([1])) for _ in range(steps)]
    finally:
        gym.registry.pop("Told-v0", None)


def column(steps, field):
    return [float(getattr(step, field).reshape(-1)[0]) for step in steps]


def test_action_repeat_adds_rewards_and_shows_the_last_frame():
    env, steps = played(action_repeat=3)  # step t has reward t and shows t; the episode terminates at 7
    assert column(steps, "reward") == [6, 15, 7, 0, 6, 15]
    assert column(steps, "observation") == [3, 6, 7, 0, 3, 6]
    assert column(steps, "last") == [0, 0, 1, 0, 0, 0] and column(steps, "discount") == [1, 1, 0, 1, 1, 1]
    assert env.spec.frames_per_step == 3
    assert env._envs[0].env.unwrapped.actions == [1] * 13  # no step after the end of an episode


@pytest.mark.parametrize(
    ("settings", "limit", "cut_at"), [({"max_steps": 2}, None, 6), ({"max_steps": 2}, 4, 6), ({}, 5, 5)]
)
def test_max_steps_counts_agent_steps_unlike_the_ids_limit(settings, limit, cut_at):
    _, steps = played(limit, length=100, action_repeat=3, **settings)
    assert column(steps, "last")[:3] == [0, 1, 0] and column(steps, "discount") == [1] * 6
    assert column(steps, "observation")[1] == cut_at


def test_without_repeat_each_action_is_one_step():
    assert column(played()[1], "reward") == [1, 2, 3, 4, 5, 6]


def test_dm_control_without_its_package_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "shimmy", None)
    with pytest.raises(ImportError, match=r"dm_control/walker-walk-v0.*dm-control"):
        GymEnv(GymParams(), "dm_control/walker-walk-v0", 1)
