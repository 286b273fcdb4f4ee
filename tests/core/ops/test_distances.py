"""Distances of features equal numbers by hand and plain loops in float64."""

from math import log, sqrt

import numpy as np
import pytest
import torch

from core.ops.distances import DISTANCES, cos_dist, kl_div, ln_norm


def unrolls(*of_each):
    """Return [T, N, F] features of N unrolls, each a list of T feature vectors."""
    return torch.tensor(of_each, dtype=torch.float64).transpose(0, 1)


@pytest.mark.parametrize(
    "p, expected", [(1, [10, 0]), (2, [sqrt(30), 0]), (3, [100 ** (1 / 3), 0]), (float("inf"), [4, 0])]
)
def test_ln_norm_is_the_p_norm_over_time_and_features(p, expected):
    old = unrolls([[0, 0], [0, 5]], [[1, 2], [3, 4]])
    new = unrolls([[1, -2], [3, 1]], [[1, 2], [3, 4]])  # the first unroll moved by 1, -2, 3, -4
    assert ln_norm(new, old, p).tolist() == pytest.approx(expected)


def test_cos_dist_is_over_flattened_vectors():
    # Flattened: the same direction, opposite, orthogonal although each step is not, and 3 4 . 4 3 / 25.
    old = unrolls([[1, 2], [3, 4]], [[1, 2], [3, 4]], [[1, 0], [1, 0]], [[3, 0], [0, 4]])
    new = unrolls([[2, 4], [6, 8]], [[-1, -2], [-3, -4]], [[1, 0], [-1, 0]], [[4, 0], [0, 3]])
    assert cos_dist(new, old, 2).tolist() == pytest.approx([0, 2, 1, 1 - 24 / 25], abs=1e-12)


def test_a_zero_vector_has_distance_one_except_to_itself():
    zero, some = [[0, 0], [0, 0]], [[1, 2], [0, 0]]
    assert cos_dist(unrolls(zero, some, zero, some), unrolls(some, zero, zero, some), 2).tolist() == pytest.approx(
        [1, 1, 0, 0]
    )


def test_cos_dist_is_never_negative():
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 500, 7)).astype(np.float32))
    distances = cos_dist(features, features, 2)
    assert float(distances.min()) >= 0 and float(distances.max()) < 1e-6


def test_kl_div_sums_the_kl_from_new_to_old_over_time():
    old = unrolls([[0.5, 0.5], [0.9, 0.1]]).log() + 1.5
    new = unrolls([[0.9, 0.1], [0.9, 0.1]]).log() - 4.0
    assert kl_div(new, old, 2).tolist() == pytest.approx([0.9 * log(1.8) + 0.1 * log(0.2)])
    assert kl_div(old, new, 2).tolist() == pytest.approx([0.5 * log(5 / 9) + 0.5 * log(5)])


@pytest.mark.parametrize("p", [1, 2, 3])
def test_distances_equal_plain_loops(p):
    generator = np.random.default_rng(p)
    new, old = generator.normal(size=(4, 6, 3)), generator.normal(size=(4, 6, 3))
    distances = {
        name: distance(torch.from_numpy(new), torch.from_numpy(old), p) for name, distance in DISTANCES.items()
    }
    for n in range(6):
        a, b = new[:, n].flatten(), old[:, n].flatten()
        divergence = 0.0
        for t in range(4):
            q, r = (np.exp(x[t, n]) / np.exp(x[t, n]).sum() for x in (new, old))
            divergence += sum(q[f] * log(q[f] / r[f]) for f in range(3))
        assert float(distances["ln_norm"][n]) == pytest.approx(sum(abs(x - y) ** p for x, y in zip(a, b)) ** (1 / p))
        assert float(distances["cos_dist"][n]) == pytest.approx(1 - a @ b / sqrt((a @ a) * (b @ b)))
        assert float(distances["kl_div"][n]) == pytest.approx(divergence)


@pytest.mark.parametrize("name", ["ln_norm", "cos_dist", "kl_div"])
def test_distances_have_no_gradient_and_refuse_other_shapes(name):
    features = torch.ones(2, 3, 4, requires_grad=True)
    distances = DISTANCES[name](features, features * 2, 2)
    assert distances.shape == (3,) and not distances.requires_grad
    with pytest.raises(ValueError, match=r"\[T, N, F\] of one shape, not \[\(2, 1, 4\), \(2, 3, 4\)\]"):
        DISTANCES[name](features, features[:, :1], 2)
