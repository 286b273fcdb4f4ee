"""Aggregate the records of processes over a period: means, episode statistics and human-normalised scores."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from core.runtime.log_buffers import Record

EPISODIC = "episodic_"  # prefix of the names that actors report once an episode
EVALUATOR = "evaluator/"  # prefix of records that are aggregated over an evaluation's episodes already


def aggregate(records: Iterable[Record]) -> list[Record]:
    """Return one record per name: the mean over the period, at the step and time of the last report.

    Names such as "actor/episodic_return" become _mean, _std (of the population) and _median over the period's episodes.
    Records of the evaluator are returned unchanged, each at its own step.
    """
    evaluations: list[Record] = []
    by_name: dict[str, list[Record]] = {}
    for record in records:
        if record.name.startswith(EVALUATOR):
            evaluations.append(record)
        else:
            by_name.setdefault(record.name, []).append(record)
    return [summary for name, same in by_name.items() for summary in _summaries(name, same)] + evaluations


def human_normalized(env_class: Any, game: str, score: float) -> float | None:
    """Return (score - random) / (human - random), or None if the environment class does not know the game's scores."""
    normalize = getattr(env_class, "human_normalized", None)
    return None if normalize is None else normalize(game, score)


def with_human_normalized(records: list[Record], env_class: Any, game: str) -> list[Record]:
    """Return the records, and <namespace>/human_normalized for each <namespace>/episodic_return_mean if it is known."""
    added: list[Record] = []
    for record in records:
        namespace, _, name = record.name.rpartition("/")
        if name == "episodic_return_mean" and (score := human_normalized(env_class, game, record.value)) is not None:
            added.append(record._replace(name=f"{namespace}/human_normalized", value=score))
    return records + added


def _summaries(name: str, records: list[Record]) -> list[Record]:
    values, last = np.array([record.value for record in records]), records[-1]
    if not name.rpartition("/")[2].startswith(EPISODIC):
        return [last._replace(value=float(values.mean()))]
    statistics = {"mean": values.mean(), "std": values.std(), "median": np.median(values)}
    return [last._replace(name=f"{name}_{kind}", value=float(value)) for kind, value in statistics.items()]
