"""Exploration follows the papers' formulas."""

import numpy as np
import pytest

from core.ops.actions import epsilon_greedy, geometric, ladder, linear, ornstein_uhlenbeck


def test_linear_decay_reaches_its_end_and_stays():
    assert [linear(step, 1.0, 0.1, 10) for step in (0, 5, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_the_ladder_is_that_of_ape_x():
    assert ladder(8, 0.4, 7.0) == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)])
    assert ladder(1, 0.4, 7.0) == pytest.approx([0.4])


def test_epsilon_greedy_uses_each_environments_epsilon():
    generator = np.random.default_rng(0)
    epsilon = np.array([0.0, 0.5, 1.0])
    actions = np.array([epsilon_greedy(np.full(3, 2), 4, epsilon, generator) for _ in range(20_000)])
    departed = (actions != 2).mean(0)
    assert departed == pytest.approx(epsilon * 3 / 4, abs=0.02)


def test_a_geometric_ladder_has_equal_ratios():
    assert geometric(4, 0.125) == pytest.approx([1, 0.5, 0.25, 0.125])
    assert geometric(1, 0.1) == pytest.approx([1.0])
    assert geometric(3, 1.0) == pytest.approx([1, 1, 1])


def test_an_ornstein_uhlenbeck_step_follows_its_equation():
    state, sigma, normal = np.array([[1.0, -2.0]]), np.array([[0.3]]), np.array([[0.5, 0.0]])
    after = ornstein_uhlenbeck(state, 0.15, sigma, 0.04, normal)
    assert after[0].tolist() == pytest.approx([1 - 0.15 * 0.04 + 0.3 * 0.2 * 0.5, -2 + 2 * 0.15 * 0.04])
    assert state.tolist() == [[1.0, -2.0]]
