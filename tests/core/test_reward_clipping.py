import math

import numpy as np
import pytest

from core.env import CLIPPINGS, clipped

REWARDS = np.array([-40.0, -1.0, -0.25, 0.0, 0.25, 1.0, 3.0, 400.0], np.float32)
TRUTH = {
    "none": lambda r: r,
    "sign": lambda r: (r > 0) - (r < 0),
    "clamp": lambda r: max(-1.0, min(1.0, r)),
    "soft_asymmetric": lambda r: 5.0 * max(math.tanh(r / 5.0), 0.0) + 5.0 * 0.3 * min(math.tanh(r / 5.0), 0.0),
    "optimistic_asymmetric": lambda r: 0.3 * min(math.tanh(r), 0.0) + 5.0 * max(math.tanh(r), 0.0),
}


@pytest.mark.parametrize("name", list(CLIPPINGS))
def test_clipping_follows_its_formula(name):
    result = clipped(REWARDS, name)
    np.testing.assert_allclose(result, [TRUTH[name](float(reward)) for reward in REWARDS], rtol=1e-6)
    assert result.dtype == np.float32


def test_figure_d1_is_cited_by_the_clipping_with_its_formula():
    """Figure D.1 of 1802.01561 runs from -0.3 to 5 with slopes 0.3 and 5 at zero; the published code has 0.3 and 1."""
    named = [clipping for clipping in CLIPPINGS.values() if "figure D.1" in (clipping.__doc__ or "")]
    assert len(named) == 1
    np.testing.assert_allclose(named[0](np.array([-40.0, -1e-6, 1e-6, 40.0])), [-0.3, -0.3e-6, 5e-6, 5.0], rtol=1e-9)


def test_clipping_does_not_change_the_raw_rewards():
    kept = REWARDS.copy()
    for name in CLIPPINGS:
        clipped(REWARDS, name)[:] = 7
    np.testing.assert_array_equal(REWARDS, kept)
