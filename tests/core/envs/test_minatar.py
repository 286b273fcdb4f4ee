import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from core.envs.minatar import GAMES, MinAtarEnv, MinAtarParams

pytestmark = pytest.mark.skipif(importlib.util.find_spec("minatar") is None, reason="MinAtar is not installed")


def play(env, num_steps, seed=0):
    random = np.random.default_rng(seed)
    steps = [env.reset(seed)]
    for _ in range(num_steps):
        steps.append(env.step(random.integers(0, env.spec.action.num_actions, len(steps[0].reward))))
    return steps


@pytest.mark.parametrize("game", GAMES)
def test_every_game_returns_what_its_spec_says(game):
    env = MinAtarEnv(MinAtarParams(), game, 3)
    assert env.spec.is_image and env.spec.max_value == 1 and env.spec.frame.shape[:2] == (10, 10)
    for step in play(env, 100):
        assert step.observation.shape == (3, *env.spec.frame.shape) and step.observation.dtype == np.uint8
        assert step.observation.max() == 1
    assert env.spec.name == f"minatar_{game}"  # never mistaken for the Atari game


@pytest.mark.parametrize("spelling", ["breakout", "Breakout", "MinAtar/Breakout-v1"])
def test_every_spelling_selects_the_game(spelling):
    assert MinAtarEnv(MinAtarParams(), spelling, 1).spec.name == "minatar_breakout"


def test_an_unknown_game_is_refused_with_the_closest():
    with pytest.raises(ValueError, match="did you mean breakout"):
        MinAtarEnv(MinAtarParams(), "brekout", 1)


@pytest.mark.slow
def test_environments_play_as_the_minatar_package_does():
    """Equal actions in the package's own environment give equal planes, rewards and ends."""
    from minatar import Environment

    env = MinAtarEnv(MinAtarParams(sticky_action_prob=0.0, minimal_action_set=False), "breakout", 2)
    start = env.reset(3)
    twins = [Environment("breakout", sticky_action_prob=0.0) for _ in range(2)]
    for twin, game in zip(twins, env._games):
        twin.env.random = np.random.RandomState()
        twin.env.random.set_state(game.random.get_state())
        for name, value in vars(game).items():
            if name != "random":
                setattr(twin.env, name, np.copy(value) if isinstance(value, np.ndarray) else value)
    for twin, observation in zip(twins, start.observation):
        np.testing.assert_array_equal(twin.state(), observation)
    random, ends, last = np.random.default_rng(0), 0, np.zeros(2, bool)
    for _ in range(300):
        action = random.integers(0, 6, 2)
        step = env.step(action)
        for env_ind, twin in enumerate(twins):
            reward, terminated = (0, twin.reset() or False) if last[env_ind] else twin.act(action[env_ind])
            np.testing.assert_array_equal(twin.state(), step.observation[env_ind])
            assert (reward, terminated) == (step.raw_reward[env_ind], step.last[env_ind])
            assert step.discount[env_ind] == (not terminated) and step.first[env_ind] == last[env_ind]
        last, ends = step.last, ends + step.last.sum()
    assert ends > 5


def test_an_episode_is_truncated_at_max_steps_with_discount_one():
    steps = play(MinAtarEnv(MinAtarParams(max_steps=20), "freeway", 2), 43)  # by itself freeway ends after 2,500 steps
    assert [t for t, step in enumerate(steps) if step.last.all()] == [20, 41]
    assert [t for t, step in enumerate(steps) if step.first.any()] == [0, 21, 42]
    assert all(step.discount.all() for step in steps)


def test_sticky_actions_repeat_the_last_action_of_the_episode():
    env = MinAtarEnv(MinAtarParams(sticky_action_prob=1.0), "breakout", 1)
    env.reset(0)
    before = env._games[0].pos
    for _ in range(3):
        env.step(np.array([1]))  # left, but no action was taken before in this episode
    assert env._games[0].pos == before
    free = MinAtarEnv(MinAtarParams(sticky_action_prob=0.0), "breakout", 1)
    free.reset(0)
    free.step(np.array([1]))
    assert free._games[0].pos == before - 1


def test_the_action_set_is_minimal_or_full():
    assert MinAtarEnv(MinAtarParams(), "breakout", 1).spec.action.num_actions == 3
    env = MinAtarEnv(MinAtarParams(minimal_action_set=False), "breakout", 2)
    assert env.spec.action.num_actions == 6
    env.reset(0)
    with pytest.raises(ValueError, match="action 6 of environment 1"):
        env.step(np.array([5, 6]))


def test_environments_differ_and_a_seed_is_repeatable():
    def end(seed):
        return play(MinAtarEnv(MinAtarParams(), "seaquest", 4), 60, seed)[-1].observation

    np.testing.assert_array_equal(end(1), end(1))
    assert len({observation.tobytes() for observation in end(1)}) > 1


def test_render_colors_the_planes():
    env = MinAtarEnv(MinAtarParams(), "breakout", 1, render_mode="rgb_array")
    planes = env.reset(0).observation[0]
    picture = env.render()
    assert picture.shape == (320, 320, 3) and picture.dtype == np.uint8
    cells = picture[::32, ::32].any(axis=2)
    np.testing.assert_array_equal(cells, planes.any(axis=2))  # black where no plane is set
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= 3


def test_bad_options_are_refused_when_the_environment_is_made():
    with pytest.raises(ValueError, match="sticky_action_prob"):
        MinAtarEnv(MinAtarParams(sticky_action_prob=1.5), "breakout", 1)
    with pytest.raises(ValueError, match="no window"):
        MinAtarEnv(MinAtarParams(), "breakout", 1, render_mode="human")


def test_a_missing_package_names_the_pip_command(monkeypatch):
    from core.envs import minatar

    minatar._game_module.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install"):
        MinAtarEnv(MinAtarParams(), "breakout", 1)


@pytest.mark.slow
def test_a_game_is_made_without_importing_pyplot():
    code = (
        "import sys; from core.envs.minatar import MinAtarEnv, MinAtarParams; "
        "MinAtarEnv(MinAtarParams(), 'breakout', 1); "
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
