"""From what processes report to what is written: means over a period, episode statistics, human-normalised scores."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from core.runtime.log_buffers import Record

EPISODIC = "episodic_"           # actors report these once an episode
PASSED_THROUGH = "evaluator/"    # already aggregated, over its own episodes


def aggregate(records: Iterable[Record]) -> list[Record]:
    """One record a name, the mean of the period at the step and time of its last report.

    "actor/episodic_return" and the like become _mean, _std (of the population) and _median over the period's episodes. Records of the
    evaluator stay as they are, each at its own step.
    """
    passed: list[Record] = []
    collected: dict[str, list[Record]] = {}
    for record in records:
        if record.name.startswith(PASSED_THROUGH):
            passed.append(record)
        else:
            collected.setdefault(record.name, []).append(record)
    return [summary for name, group in collected.items() for summary in _summaries(name, group)] + passed


def human_normalized(env_class: Any, game: str, score: float) -> float | None:
    """(score - random) / (human - random) where the environment class knows both for this game."""
    normalize = getattr(env_class, "human_normalized", None)
    return None if normalize is None else normalize(game, score)


def with_human_normalized(records: list[Record], env_class: Any, game: str) -> list[Record]:
    """The records, and group/human_normalized beside each group/episodic_return_mean of a game that has the numbers."""
    added: list[Record] = []
    for record in records:
        group, _, name = record.name.rpartition("/")
        if name == "episodic_return_mean" and (value := human_normalized(env_class, game, record.value)) is not None:
            added.append(record._replace(name=f"{group}/human_normalized", value=value))
    return records + added


def _summaries(name: str, group: list[Record]) -> list[Record]:
    values, last = np.array([record.value for record in group]), group[-1]
    if not name.rpartition("/")[2].startswith(EPISODIC):
        return [last._replace(value=float(values.mean()))]
    statistics = {"mean": values.mean(), "std": values.std(), "median": np.median(values)}
    return [last._replace(name=f"{name}_{kind}", value=float(value)) for kind, value in statistics.items()]
