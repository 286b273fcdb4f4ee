"""Priorities are computed as in the paper, on numpy arrays and on tensors."""

import numpy as np
import pytest
import torch

from core.memories.prioritized import PrioritizedParams, PriorityRule

LIBRARIES = {"numpy": np.array, "torch": lambda values: torch.tensor(values, dtype=torch.float64)}


def make(name: str, **params):
    array = LIBRARIES[name]
    return PriorityRule(PrioritizedParams(**params), array(1.0)), array


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_invalid_priority_counts_as_the_largest_seen(name):
    rule, array = make(name, alpha=0.6, priority_epsilon=0.01)
    leaves = rule.leaves(array([0.5, np.nan, 3.0, -1.0, np.inf]))
    assert leaves.tolist() == pytest.approx([priority**0.6 for priority in (0.51, 3.01, 3.01, 3.01, 3.01)], rel=1e-12)
    assert float(rule.largest) == 3.0
    assert rule.leaves(array([np.nan, 0.25])).tolist() == pytest.approx([3.01**0.6, 0.26**0.6], rel=1e-12)


@pytest.mark.parametrize("name", LIBRARIES)
def test_weights_are_those_of_the_paper(name):
    rule, array = make(name)
    leaves, count, beta = [0.5, 2.0, 1.25, 8.0], 1_000, 0.7
    raw = [(count * leaf / 345.6) ** -beta for leaf in leaves]  # any sum of all leaves: it cancels out
    assert rule.weights(array(leaves), beta).tolist() == pytest.approx([weight / max(raw) for weight in raw], rel=1e-12)


@pytest.mark.parametrize("name", LIBRARIES)
def test_one_fraction_lies_in_each_equal_part(name):
    rule, array = make(name)
    uniform = np.random.default_rng(0).random(64).tolist()
    fractions = np.array(rule.fractions(array(uniform)).tolist())
    assert np.floor(fractions * 64).tolist() == list(range(64)) and fractions.max() < 1


@pytest.mark.parametrize("name", LIBRARIES)
def test_steps_that_are_no_starts_have_no_leaf(name):
    rule, array = make(name, alpha=1.0, priority_epsilon=0.5)
    assert rule.first_leaves(array([2.0, np.nan, 4.0]), array([0.0, 0.0, 1.0]) > 0).tolist() == [2.5, 4.5, 0.0]


def test_beta_is_annealed_linearly_and_stays_at_its_end():
    rule, _ = make("numpy", beta_start=0.5, beta_end=1.0, beta_updates=4)
    assert [rule.beta(batch) for batch in range(6)] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
