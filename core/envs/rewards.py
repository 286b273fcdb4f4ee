"""What training sees of a reward; the score is always the sum of raw rewards."""

from collections.abc import Callable
from typing import Literal

import numpy as np


def soft_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 5 * (0.3 * min(tanh(r / 5), 0) + max(tanh(r / 5), 0)), as IMPALA's published code clips rewards (scalable_agent).

    The paper's own formula is `optimistic_asymmetric`, which turns flat at rewards of about 2 in place of about 10.
    """
    squeezed = np.tanh(reward / 5.0)
    return 5.0 * np.where(reward < 0, 0.3 * squeezed, squeezed)


def optimistic_asymmetric(reward: np.ndarray) -> np.ndarray:
    """Return 0.3 * min(tanh(r), 0) + 5 * max(tanh(r), 0), the optimistic asymmetric clipping of IMPALA (1802.01561, figure D.1)."""
    squeezed = np.tanh(reward)
    return 0.3 * np.minimum(squeezed, 0.0) + 5.0 * np.maximum(squeezed, 0.0)


Clipping = Literal["none", "sign", "clamp", "soft_asymmetric", "optimistic_asymmetric"]

CLIPPINGS: dict[Clipping, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda reward: reward,
    "sign": np.sign,                                  # DQN (Nature 2015): all positive rewards 1, all negative -1
    "clamp": lambda reward: np.clip(reward, -1, 1),   # fractions survive
    "soft_asymmetric": soft_asymmetric,               # IMPALA's published code
    "optimistic_asymmetric": optimistic_asymmetric,   # IMPALA's figure D.1
}


def clipped(reward: np.ndarray, clipping: Clipping) -> np.ndarray:
    """float32 rewards [E] under one of CLIPPINGS, in an array of their own."""
    return CLIPPINGS[clipping](reward).astype(np.float32)
