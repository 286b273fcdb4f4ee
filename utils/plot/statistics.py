"""Provide statistics over seeds and games, as Agarwal et al. (2108.13264) recommend them.

Scores are strata: one array [..., runs] per game, whose last axis is resampled. The number of runs may differ between
games. If it does not, every function equals that of rliable, the authors' library.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Strata = Sequence[Array]  # One array [..., runs] per game.
Statistic = Callable[[Strata], Array]  # Reduces runs and games to [...].

REPETITIONS = 2_000  # Bootstrap resamples.
CONFIDENCE = 0.95  # Probability mass of an interval.


def mean(strata: Strata) -> Array:
    """Return the mean over games of the mean over runs."""
    result: Array = _game_means(strata).mean(-1)
    return result


def median(strata: Strata) -> Array:
    """Return the median over games of the mean over runs."""
    return np.median(_game_means(strata), -1)


def interquartile_mean(strata: Strata) -> Array:
    """Return the mean of the middle half of all runs of all games; of fewer than four runs, the mean."""
    scores = np.sort(np.concatenate(strata, -1), -1)
    cut = scores.shape[-1] // 4
    result: Array = scores[..., cut : scores.shape[-1] - cut].mean(-1)
    return result


def optimality_gap(strata: Strata) -> Array:
    """Return the mean amount by which runs fall short of a score of 1; scores above 1 count as 1."""
    return 1 - mean([np.minimum(scores, 1) for scores in strata])


def performance_profile(strata: Strata, thresholds: Array) -> Array:
    """Return the share of runs with a score above each threshold, averaged over games: [..., thresholds]."""
    result: Array = np.mean([(scores[..., None, :] > thresholds[:, None]).mean(-1) for scores in strata], 0)
    return result


def bootstrap(
    strata: Strata, statistic: Statistic, generator: np.random.Generator, repetitions: int = REPETITIONS
) -> Array:
    """Return the statistic of resampled strata: [..., repetitions], followed by the axes that the statistic adds.

    The runs of each game are resampled with replacement, independently of the other games.
    """
    resampled = [
        scores[..., generator.integers(scores.shape[-1], size=(repetitions, scores.shape[-1]))] for scores in strata
    ]
    return statistic(resampled)


def interval(resampled: Array, axis: int = -1, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Return the lower and upper bound of the percentile interval over the repetitions on `axis`."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail), axis=axis)
    return low, high


def _game_means(strata: Strata) -> Array:
    return np.stack([scores.mean(-1) for scores in strata], -1)  # [..., games]
