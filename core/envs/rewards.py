"""Clip rewards for training. The score is always the sum of raw rewards."""

from collections.abc import Callable
from typing import Literal

import numpy as np


def soft_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 5 * (0.3 * min(tanh(r / 5), 0) + max(tanh(r / 5), 0)), the clipping of IMPALA's code (scalable_agent).

    The paper's own formula is `optimistic_asymmetric`, which saturates at rewards of about 2 instead of about 10.
    """
    bounded = np.tanh(reward / 5.0)
    return 5.0 * np.where(reward < 0, 0.3 * bounded, bounded)


def optimistic_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 0.3 * min(tanh(r), 0) + 5 * max(tanh(r), 0), IMPALA's asymmetric clipping (1802.01561, figure D.1)."""
    bounded = np.tanh(reward)
    return np.asarray(0.3 * np.minimum(bounded, 0.0) + 5.0 * np.maximum(bounded, 0.0))


Clipping = Literal["none", "sign", "clamp", "soft_asymmetric", "optimistic_asymmetric"]

CLIPPINGS: dict[Clipping, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda reward: reward,
    "sign": np.sign,  # DQN (Nature 2015): positive rewards are 1, negative ones -1
    "clamp": lambda reward: np.clip(reward, -1, 1),  # keeps fractions
    "soft_asymmetric": soft_asymmetric,  # IMPALA's published code
    "optimistic_asymmetric": optimistic_asymmetric,  # IMPALA's figure D.1
}


def clipped(reward: np.ndarray, clipping: Clipping) -> np.ndarray:
    """Return a new float32 array of the rewards [E], clipped by an entry of CLIPPINGS."""
    return CLIPPINGS[clipping](reward).astype(np.float32)
