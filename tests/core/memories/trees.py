"""The check of a sum tree that tests of memories share."""

import numpy as np


def check_tree(tree):
    """Raise AssertionError unless leaves are finite and not negative, and parents are sums of their children."""
    leaves = tree._levels[-1]
    assert np.isfinite(leaves).all() and (leaves >= 0).all() and not leaves[tree.capacity :].any()
    for parents, children in zip(tree._levels[:-1], tree._levels[1:], strict=True):
        assert (parents == children.reshape(-1, 2).sum(1)).all()
