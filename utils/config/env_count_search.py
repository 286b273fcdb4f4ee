"""num_envs_per_actor=0: how many environments an actor plays is tried out on this machine, before any process starts."""

import dataclasses
from collections.abc import Iterable

from core.common.rounding import next_multiple
from utils.options import Options

COUNTS = tuple(2**exponent for exponent in range(2, 10))  # 4 .. 512
GAIN = 1.1    # times as many agent steps a second, that a larger count must bring
PATIENCE = 2  # larger counts in a row without it, after which no more are tried


def counts(options: Options) -> list[int]:
    """What is tried, smallest first: every group has equally many."""
    groups = options.actor.groups
    return list(dict.fromkeys(next_multiple(count, groups) for count in COUNTS))


def with_count(options: Options, count: int) -> Options:
    return dataclasses.replace(options, num_envs_per_actor=count)


def choose(rates: Iterable[tuple[int, float]]) -> tuple[int, dict[int, float]]:
    """The count that larger ones hardly beat, and what was seen of each; `rates` are taken one by one, no more than are needed."""
    seen: dict[int, float] = {}
    best, vain = 0, 0
    for count, rate in rates:
        seen[count] = rate
        better = not best or rate >= GAIN * seen[best]
        best, vain = (count, 0) if better else (best, vain + 1)
        if vain == PATIENCE:
            break
    return best, seen
