"""Noise on actions has the right statistics, restarts with episodes, and is scaled over environments and time."""

from types import SimpleNamespace

import numpy as np
import pytest

from core.agents.base.action_noise import ActionNoiseParams
from core.agents.base.continuous_control import ContinuousControl
from core.specs import Continuous

STREAMS, NUMBERS = 4_000, 2
NOBODY, EVERYBODY = np.zeros(STREAMS, bool), np.ones(STREAMS, bool)


def make(num_envs=STREAMS, seed=0, actor_ind=0, num_actors=1, **settings):
    space = Continuous(np.full(NUMBERS, -1.0), np.full(NUMBERS, 1.0))
    agent = SimpleNamespace(params=ActionNoiseParams(**settings), spec=SimpleNamespace(action=space))
    return ContinuousControl.exploration(agent, actor_ind, num_actors, num_envs, np.random.default_rng(seed))


def zeros(num_envs=STREAMS):
    return np.zeros((num_envs, NUMBERS), np.float32)


def test_gaussian_noise_has_its_deviation_and_no_correlation():
    noise = make(noise="gaussian", noise_scale=0.2)
    first, second = noise.explore(zeros(), EVERYBODY), noise.explore(zeros(), NOBODY)
    assert first.dtype == np.float32 and first.shape == (STREAMS, NUMBERS)
    assert first.std() == pytest.approx(0.2, rel=0.05) and abs(first.mean()) < 0.01
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


def test_ornstein_uhlenbeck_noise_has_its_processs_statistics():
    """x_k of the discrete process from 0 has variance v_k = s^2 dt (1 - c^2k) / (1 - c^2).

    The correlation of neighbours is c v_k / sqrt(v_k v_k+1).
    """
    theta, sigma, dt, steps = 0.5, 0.3, 0.2, 12
    noise = make(noise="ornstein-uhlenbeck", noise_scale=sigma, ou_theta=theta, ou_dt=dt)
    taken = [noise.explore(zeros(), EVERYBODY if step == 0 else NOBODY) for step in range(steps)]
    c = 1 - theta * dt
    variances = [sigma**2 * dt * (1 - c ** (2 * k)) / (1 - c**2) for k in range(1, steps + 1)]
    assert [each.var() for each in taken] == pytest.approx(variances, rel=0.08)
    correlation = np.corrcoef(taken[-2].ravel(), taken[-1].ravel())[0, 1]
    assert correlation == pytest.approx(c * np.sqrt(variances[-2] / variances[-1]), abs=0.03)


def test_ornstein_uhlenbeck_noise_restarts_with_each_episode():
    noise = make(noise="ornstein-uhlenbeck", noise_scale=0.1, ou_theta=0.1, ou_dt=1.0)
    for _ in range(30):
        before = noise.explore(zeros(), NOBODY)
    half = np.arange(STREAMS) < STREAMS // 2
    after = noise.explore(zeros(), half)
    assert after[half].std() == pytest.approx(0.1, rel=0.05)  # one step from 0
    assert abs(np.corrcoef(before[half].ravel(), after[half].ravel())[0, 1]) < 0.05
    assert np.corrcoef(before[~half].ravel(), after[~half].ravel())[0, 1] > 0.8


def test_noise_stays_in_range_and_none_adds_nothing():
    action = np.full((STREAMS, NUMBERS), 0.95, np.float32)
    for kind in ("gaussian", "ornstein-uhlenbeck"):
        taken = make(noise=kind, noise_scale=3.0, ou_dt=1.0).explore(action, EVERYBODY)
        assert taken.max() == 1.0 and taken.min() == -1.0
    np.testing.assert_array_equal(make(noise="none").explore(action, EVERYBODY), action)


def test_the_reported_scale_is_that_of_the_noise_that_is_added():
    reported = [
        make(num_envs=2, noise=kind, noise_scale=0.4, noise_ladder=0.5).statistics()
        for kind in ("gaussian", "ornstein-uhlenbeck", "none")
    ]
    assert reported == [{"noise_scale": pytest.approx(0.3)}] * 2 + [{"noise_scale": 0.0}]


def test_the_noise_ladder_covers_all_actors_and_is_annealed():
    actors = [
        make(
            num_envs=3, actor_ind=actor, num_actors=2, noise_scale=0.4, noise_ladder=0.1, noise_end=0.5, noise_steps=100
        )
        for actor in range(2)
    ]
    rungs = 0.4 * 0.1 ** (np.arange(6) / 5)
    for actor, noise in enumerate(actors):
        for agent_steps, factor in ((0, 1.0), (50, 0.75), (100, 0.5), (500, 0.5)):
            noise.update(agent_steps)
            assert noise.scale == pytest.approx(rungs[actor::2] * factor)
            assert noise.statistics()["noise_scale"] == pytest.approx(rungs[actor::2].mean() * factor)
    assert make(num_envs=3, noise_scale=0.2).scale.tolist() == [0.2] * 3
    noisy = make(noise_scale=0.4, noise_ladder=0.1)
    deviations = noisy.explore(zeros(), EVERYBODY).std(1)
    assert deviations[:400].mean() > 5 * deviations[-400:].mean()


def test_the_first_random_steps_have_uniform_actions():
    noise = make(random_exploration_steps=1_000, noise_scale=0.0)
    noise.update(999)
    taken = noise.explore(np.full((STREAMS, NUMBERS), 0.5, np.float32), EVERYBODY)
    assert taken.std() == pytest.approx(1 / np.sqrt(3), rel=0.03) and abs(taken.mean()) < 0.03
    noise.update(1_000)
    assert set(noise.explore(np.full((STREAMS, NUMBERS), 0.5, np.float32), NOBODY).ravel()) == {np.float32(0.5)}


def test_a_seed_determines_the_noise():
    np.testing.assert_array_equal(*(make(seed=3).explore(zeros(), EVERYBODY) for _ in range(2)))
    assert not np.array_equal(make(seed=3).explore(zeros(), EVERYBODY), make(seed=4).explore(zeros(), EVERYBODY))
