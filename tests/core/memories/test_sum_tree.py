import numpy as np
import pytest
import torch

from core.memories.sum_tree import CumulativeLeaves, SumTree
from tests.core.devices import DEVICES
from tests.core.memories.trees import check_tree


@pytest.mark.parametrize("capacity", [1, 7, 2048, 2049, 30_000])
def test_the_tree_equals_a_plain_list_after_random_operations(capacity):
    generator = np.random.default_rng(capacity)
    tree, plain, operations = SumTree(capacity), [0.0] * capacity, 0
    while operations < 100_000:
        count = int(generator.integers(0, 1500))
        indices = generator.integers(capacity, size=count)  # includes duplicates
        values = np.where(
            generator.random(count) < 0.3, 0.0, generator.random(count) ** 8 * 10.0 ** generator.integers(-6, 6)
        )
        tree.set(indices, values)
        for index, value in zip(indices.tolist(), values.tolist()):
            plain[index] = value
        operations += count
        assert tree.leaves.tolist() == plain
        assert tree.total == pytest.approx(sum(plain), rel=1e-12)
    check_tree(tree)
    ends = np.cumsum(np.array(plain))
    prefix_sums = generator.random(2000) * tree.total
    found = tree.find(prefix_sums)
    slack = 1e-9 * ends[-1]
    assert (tree.leaves[found] > 0).all()
    assert (ends[found] >= prefix_sums - slack).all() and (
        ends[found] - tree.leaves[found] <= prefix_sums + slack
    ).all()


def test_the_last_of_equal_indices_counts():
    tree = SumTree(5)
    tree.set(np.array([3, 3, 1, 3]), np.array([1.0, 2.0, 5.0, 4.0]))
    assert tree.leaves.tolist() == [0, 5, 0, 4, 0] and tree.total == 9
    check_tree(tree)


@pytest.mark.parametrize("capacity", [1, 2048, 2049, 30_000])
def test_a_filled_tree_equals_one_whose_leaves_were_set(capacity):
    values, trees = np.random.default_rng(0).random(capacity), (SumTree(capacity), SumTree(capacity))
    trees[0].fill(values)
    trees[1].set(np.arange(capacity), values)
    for filled, expected in zip(*(tree._levels for tree in trees)):
        assert (filled == expected).all()
    check_tree(trees[0])


@pytest.mark.parametrize("capacity", [6, 5000])
def test_leaves_are_found_in_proportion_to_their_values(capacity):
    generator = np.random.default_rng(0)
    tree, draws = SumTree(capacity), 400_000
    places = generator.choice(capacity, size=5, replace=False)
    values = np.array([0.001, 0.5, 1.0, 2.5, 6.0])
    tree.set(places, values)
    counts = np.bincount(tree.find(generator.random(draws) * tree.total), minlength=capacity)
    shares = values / values.sum()
    deviation = np.sqrt(draws * shares * (1 - shares))
    assert (np.abs(counts[places] - draws * shares) < 5 * deviation).all() and counts[places].sum() == draws


def test_evenly_spaced_sums_find_each_leaf_by_its_value():
    tree = SumTree(4)
    tree.set(np.arange(4), np.array([1.0, 0.0, 2.0, 5.0]))
    assert tree.find(np.arange(8) + 0.5).tolist() == [0, 2, 2, 3, 3, 3, 3, 3]
    assert tree.find(np.arange(8.0)).tolist() == [0, 2, 2, 3, 3, 3, 3, 3]  # a leaf begins at the sum before it


@pytest.mark.parametrize("value", [5e-324, 1e-300, 0.1, 1e300])
def test_sums_beyond_the_total_find_the_last_positive_leaf(value):
    tree = SumTree(10_000)
    tree.set(np.array([17, 4321]), np.array([value, value]))
    assert set(tree.find(np.array([0.0, tree.total, np.nextafter(tree.total, 0), tree.total * 1.1])).tolist()) <= {
        17,
        4321,
    }
    assert tree.find(np.array([tree.total]))[0] == 4321


def test_zero_leaves_are_never_found_despite_rounding():
    generator = np.random.default_rng(1)
    for _ in range(40):
        tree = SumTree(2048 * 64)  # trees of six levels below the roots
        places = generator.choice(2000, size=600, replace=False)
        tree.set(places, 10.0 ** generator.uniform(-17, 3, size=600))
        ends = tree.leaves[:2000].cumsum()
        sums = np.concatenate(
            [ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), generator.random(1000) * tree.total]
        )
        assert (tree.leaves[tree.find(sums)] > 0).all()


def test_check_detects_a_parent_that_is_not_its_childrens_sum():
    tree = SumTree(5000)
    tree.set(np.array([3]), np.array([1.0]))
    tree._levels[-1][3] = 2.0
    with pytest.raises(AssertionError):
        check_tree(tree)


@pytest.mark.parametrize("device", DEVICES)
def test_a_running_sum_finds_no_leaf_of_zero_at_either_end(device):
    """The rule of priorities may round its largest fraction to 1."""
    leaves = CumulativeLeaves(5, torch.device(device))
    leaves.set(np.arange(5), np.array([0.0, 1.0, 0.0, 3.0, 0.0]))
    fractions = torch.tensor([0.0, 0.2, 0.25, 0.9, 1.0], dtype=torch.float64, device=device)
    assert leaves.find(fractions).tolist() == [1, 1, 3, 3, 3]
    leaves.fill(np.zeros(5))
    assert leaves.find(fractions).max() < 5
