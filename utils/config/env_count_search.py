"""The search for num_envs_per_actor=0: numbers of environments are tried out before any process starts."""

import dataclasses
from collections.abc import Iterable

from core.common.shared_arrays import next_multiple
from utils.options import Options

COUNTS = tuple(2**exponent for exponent in range(2, 10))  # 4 .. 512
GAIN = 1.1  # factor of agent steps a second that a larger count must bring
PATIENCE = 2  # larger counts in a row without that gain, after which the search ends


def counts(options: Options) -> list[int]:
    """Return the counts to try, smallest first, rounded up so that every group has equally many."""
    groups = options.actor.num_env_splits
    return list(dict.fromkeys(next_multiple(count, groups) for count in COUNTS))


def with_count(options: Options, count: int) -> Options:
    """Return the options with this number of environments."""
    return dataclasses.replace(options, num_envs_per_actor=count)


def choose(rates: Iterable[tuple[int, float]]) -> tuple[int, dict[int, float]]:
    """Return the smallest count that larger ones hardly beat, and all measured rates by count.

    Args:
        rates: counts and agent steps a second, taken one by one until the search ends.
    """
    measured: dict[int, float] = {}
    best, without_gain = 0, 0
    for count, rate in rates:
        measured[count] = rate
        better = not best or rate >= GAIN * measured[best]
        best, without_gain = (count, 0) if better else (best, without_gain + 1)
        if without_gain == PATIENCE:
            break
    return best, measured
