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
