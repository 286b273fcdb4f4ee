"""Masks of legal actions come from infos or observations of gymnasium environments, and faults name the environment."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from core.acting.validated_env import ValidatedEnv, play_randomly, random_actions
from core.envs.gym import GymEnv, GymParams
from core.envs.gym_spaces import InvalidPartError, MaskReader
from core.specs import ArraySpec, Continuous, Discrete, Mixed, MultiDiscrete


class Legal(gym.Env):
    """Return the masks that it is given, one a step, in infos and observations; an episode has as many steps."""

    def __init__(self, masks, action_space=None):
        self.masks, self.action_space = masks, spaces.Discrete(3) if action_space is None else action_space
        shown = {"action_mask": spaces.MultiBinary(3), "numbers": spaces.Box(-1, 1, (2,))}
        self.observation_space = spaces.Dict({"inner": spaces.Dict(shown)})

    def _result(self):
        mask = self.masks[self.steps]
        shown = np.asarray([1, 1, 1] if mask is None or isinstance(mask, tuple) else mask, np.int8)
        return {"inner": {"action_mask": shown, "numbers": np.zeros(2, np.float32)}}, {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._result()

    def step(self, action):
        self.steps += 1
        observation, info = self._result()
        return observation, 0.0, self.steps == len(self.masks) - 1, False, info


@pytest.fixture
def legal():
    def make(masks, where="info", action_space=None, **params):
        gym.registry.pop("Legal-v0", None)
        gym.register("Legal-v0", Legal, kwargs={"masks": masks, "action_space": action_space})
        env = GymEnv(GymParams(action_mask=where, **params), "Legal-v0", 2)
        return ValidatedEnv(env, 2)

    yield make
    gym.registry.pop("Legal-v0", None)


STAY = np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("where", "keys", "warning"),
    [
        (None, (), "agents take illegal actions too, unless env.action_mask is inner.action_mask"),
        (None, ("inner.numbers",), "agents take illegal actions too, unless env.action_mask is inner.action_mask"),
        ("info", (), ""),
        ("inner.action_mask", (), ""),
    ],
)
def test_a_mask_that_agents_would_not_heed_is_a_warning(legal, where, keys, warning):
    assert legal([[1, 1, 1]] * 2, where, observation_keys=keys).spec.warning == warning


@pytest.mark.parametrize("where", ["info", "inner.action_mask"])
def test_masks_follow_the_steps_of_each_episode(legal, where):
    masks = [np.array([1, 0, 1], np.int8), np.array([0, 1, 0], np.int8), np.array([0, 0, 0], np.int8)]
    env = legal(masks, where)
    assert env.spec.has_action_mask and env.spec.action == Discrete(3)
    steps = [env.reset(1), *(env.step(STAY) for _ in range(4))]
    for number, mask in ((0, masks[0]), (1, masks[1]), (3, masks[0]), (4, masks[1])):  # step 2 ends the episode
        assert steps[number].action_mask.dtype == bool
        np.testing.assert_array_equal(steps[number].action_mask, [mask, mask])
    assert steps[2].last.all() and steps[2].action_mask.any(1).all()


def test_anything_may_be_returned_where_an_episode_terminates(legal):
    env = legal([[1, 0, 1], [0, 1, 0], None])
    steps = [env.reset(1), *(env.step(STAY) for _ in range(3))]
    assert steps[2].last.all() and steps[2].action_mask.any(1).all()
    assert steps[3].action_mask.tolist() == [[True, False, True]] * 2


def test_masks_of_several_choices_may_be_one_for_each(legal):
    mask = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    env = legal([mask] * 3, "info", spaces.MultiDiscrete([2, 3]))
    assert env.spec.action == MultiDiscrete((2, 3))
    assert env.reset(1).action_mask.tolist() == [[True, False, False, True, True]] * 2


def test_masks_of_mixed_actions_are_of_their_choices(legal):
    space = spaces.Dict({"arm": spaces.Box(-1, 1, (2,)), "tool": spaces.MultiDiscrete([2, 3])})
    mask = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    env = legal([mask] * 3, "info", space)
    assert isinstance(env.spec.action, Mixed) and env.spec.action_mask == ArraySpec((5,), "bool")
    assert env.reset(1).action_mask.tolist() == [[True, False, False, True, True]] * 2
    drawn = random_actions(env.spec.action, 200, np.random.default_rng(1), np.tile(env.reset(1).action_mask, (100, 1)))
    assert set(drawn[:, 0]) == {0} and set(drawn[:, 1]) == {1, 2} and np.unique(drawn[:, 2]).size > 100
    assert play_randomly(env, 2, 20, 1)[0] == []


@pytest.mark.parametrize(
    "mask, message",
    [
        (None, "action_mask of environment 0 at step 1 is None, expected 3 zeros and ones"),
        ([1, 0], r"action_mask of environment 0 at step 1 is \[1, 0\], expected 3 zeros and ones"),
        ([1, 2, 0], "expected 3 zeros and ones"),
        (np.array([0.5, 1, 0]), "expected 3 zeros and ones"),
        ([], "expected 3 zeros and ones"),
        ([0, 0, 0], "action_mask of environment 0 of Legal-v0 at step 1 has no legal action, expected at least one"),
    ],
)
def test_a_faulty_mask_names_its_environment(legal, mask, message):
    env = legal([[1, 1, 1], mask, [1, 1, 1], [1, 1, 1]])
    env.reset(1)
    with pytest.raises(ValueError, match=message):
        env.step(STAY)


def test_environments_without_legal_actions_are_numbered_within_their_actor(legal):
    env = legal([[1, 1, 1], [0, 0, 0], [1, 1, 1]])
    env._env._envs[0].env.unwrapped.masks = [[1, 1, 1]] * 3
    env.reset(1)
    env.set_activity_marker(np.zeros(1), 8)
    with pytest.raises(ValueError, match="action_mask of environment 9 of Legal-v0"):
        env.step(STAY)


def test_a_truncated_episode_needs_a_legal_action(legal):
    env = legal([[1, 1, 1], [0, 0, 0], [1, 1, 1]], max_steps=1)
    env.reset(1)
    with pytest.raises(ValueError, match="no legal action"):
        env.step(STAY)


@pytest.mark.parametrize(
    "where, action_space, params, message",
    [
        ("info", spaces.Box(-1, 1, (2,)), {}, "env.action_mask=info needs choices"),
        ("mask", None, {}, "env.action_mask=mask is neither info nor a part of Dict observations"),
        ("inner.mask", None, {}, "env.action_mask=inner.mask is neither"),
        ("info", None, {"action_repeat": 2}, "env.action_mask=info needs env.action_repeat=1"),
    ],
)
def test_impossible_masks_are_refused_when_made(legal, where, action_space, params, message):
    with pytest.raises(ValueError, match=message):
        legal([[1, 1, 1]] * 3, where, action_space, **params)


def test_taxis_masks_allow_what_moves():
    env = GymEnv(GymParams(action_mask="info"), "Taxi-v4", 4)
    assert play_randomly(env, 4, 300, 1)[0] == []
    before = env.reset(1)
    for _ in range(30):
        action = before.action_mask.argmax(1)
        after = env.step(action)
        running = ~before.last & ~after.last
        assert (
            (after.observation[running] != before.observation[running]).any(1).all()
        )  # legal actions change the state
        before = after
    assert not GymEnv(GymParams(), "Taxi-v4", 4).spec.has_action_mask
    assert GymEnv(GymParams(), "Taxi-v4", 4).reset(1).action_mask is None


def test_a_reader_reads_lists_and_refuses_other_things():
    reader = MaskReader("info", Discrete(3), spaces.Discrete(2))
    assert reader(0, {"action_mask": [1, 0, 1]}).tolist() == [True, False, True]
    for info in ({}, None, {"action_mask": "101"}, {"action_mask": [[1, [0]], 1]}):
        with pytest.raises(InvalidPartError):
            reader(0, info)
    with pytest.raises(ValueError, match="needs choices"):
        MaskReader("info", Continuous(np.zeros(1), np.ones(1)), spaces.Discrete(2))
