"""Statistics over seeds and games, as Agarwal et al. (2108.13264) recommend them.

Scores come as strata: one array [..., runs] a game, whose last axis is resampled. All of one game is one stratum. Numbers of runs may
differ between games; where they do not, every function gives what the authors' rliable gives.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Strata = Sequence[Array]                 # one [..., runs] a game
Statistic = Callable[[Strata], Array]    # reduces runs and games: [...]

REPETITIONS, CONFIDENCE = 2_000, 0.95    # of a bootstrap


def mean(strata: Strata) -> Array:
    """The mean over games of the mean over runs."""
    return _game_means(strata).mean(-1)


def median(strata: Strata) -> Array:
    """The median over games of the mean over runs."""
    return np.median(_game_means(strata), -1)


def interquartile_mean(strata: Strata) -> Array:
    """The mean of the middle half of all runs of all games; of fewer than four runs the mean."""
    scores = np.sort(np.concatenate(strata, -1), -1)
    cut = scores.shape[-1] // 4
    return scores[..., cut:scores.shape[-1] - cut].mean(-1)


def optimality_gap(strata: Strata) -> Array:
    """By how much runs fall short of a score of 1, in the mean; what is above 1 counts as 1."""
    return 1 - mean([np.minimum(scores, 1) for scores in strata])


def performance_profile(strata: Strata, thresholds: Array) -> Array:
    """The share of runs whose score is above each threshold, in the mean over games: [..., thresholds]."""
    return np.mean([(scores[..., None, :] > thresholds[:, None]).mean(-1) for scores in strata], 0)


def bootstrap(strata: Strata, statistic: Statistic, generator: np.random.Generator, repetitions: int = REPETITIONS) -> Array:
    """The statistic of strata whose runs were drawn anew with replacement, each game apart: [..., repetitions], or with what axes the
    statistic adds after those."""
    drawn = [scores[..., generator.integers(scores.shape[-1], size=(repetitions, scores.shape[-1]))] for scores in strata]
    return statistic(drawn)


def interval(resampled: Array, axis: int = -1, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Percentile interval over the repetitions: lower and upper bound."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail), axis=axis)
    return low, high


def _game_means(strata: Strata) -> Array:
    return np.stack([scores.mean(-1) for scores in strata], -1)  # [..., games]
