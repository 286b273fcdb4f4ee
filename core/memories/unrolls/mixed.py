"""Batches mixed of several rules over one set of rows, by the replay list of the first of the replaced systems, accepted verbatim.

    [{"type": "queue", "capacity": 1, "sample_ratio": 0.5}, {"type": "standard", "capacity": 1000, "sample_ratio": 0.5}]

`elite` and `attentive` are short for `custom` with the strategies of that name; every other key is a setting of the rule's Params. A rule
of your own is named as "package.module:Class".
"""

import dataclasses
import importlib
import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from core.common.settings import JsonText, frozen_dataclass, sentences
from core.memories.unrolls.feature_replay import CustomParams, FeatureDistanceStrategy, Insertion, Sampling
from core.memories.unrolls.queue import QueueParams, QueueRule
from core.memories.unrolls.strategy import Part, ReplayStrategy
from core.memories.unrolls.uniform_unrolls import ReplayParams, ReservoirRule, StandardRule
from core.memories.unrolls.unroll_memory import UnrollMemory, shares
from core.memory import MemoryParams

DEFAULT = '[{"type": "queue", "capacity": 16, "sample_ratio": 0.5}, {"type": "standard", "capacity": 1000, "sample_ratio": 0.5}]'
TOLERANCE = 1e-5  # of the sum of all sample ratios


@frozen_dataclass
class EliteParams(CustomParams):
    """Elite sampling and insertion."""

    insert_strategy: Insertion = "elite_insertion"
    """Rule for what an arriving unroll replaces."""
    sample_strategy: Sampling = "elite_sampling"
    """Rule by which unrolls are drawn."""
    lambda_batch_multiplier: float = Field(default=6.0, ge=1, le=10_000)
    """Candidates drawn for each unroll that is kept, at first."""
    alfa_annealing_factor: float = Field(default=2.0, gt=0, le=1e6)
    """Factor of lambda_batches until there is one candidate for each unroll."""


@frozen_dataclass
class AttentiveParams(CustomParams):
    sample_strategy: Sampling = "attentive_sampling"
    """Rule by which unrolls are drawn."""
    lambda_batch_multiplier: float = Field(default=4.0, ge=1, le=10_000)
    """Candidates drawn for each unroll that is kept, at first."""


RULES: dict[str, tuple[type[ReplayStrategy], type]] = {
    "queue": (QueueRule, QueueParams), "standard": (StandardRule, ReplayParams), "reservoir": (ReservoirRule, ReplayParams),
    "attentive": (FeatureDistanceStrategy, AttentiveParams), "elite": (FeatureDistanceStrategy, EliteParams),
     "custom": (FeatureDistanceStrategy, CustomParams)}


@frozen_dataclass
class MixedParams(MemoryParams):
    replay_parameters: JsonText = DEFAULT
    """JSON list of rules with their sample ratios; a row of `CONFIGS` may also have a Python list."""
    feature_dtype: Literal["float32", "float16"] = "float32"
    """Type of stored features where a rule compares them; float16 takes half the memory."""


class MixedMemory(UnrollMemory):
    Params = MixedParams

    @classmethod
    def parts(cls, params: Any) -> list[Part]:
        """Raises ValueError for a list that `problems` complains of."""
        parts, found = _read(params.replay_parameters)
        if found:
            raise ValueError("; ".join(found))
        return parts

    @classmethod
    def problems(cls, params: Any, batch_size: int) -> list[str]:
        found = _read(params.replay_parameters)[1]
        if not found:
            parts = cls._ordered(params)
            found = [f"a sample_ratio of {part.ratio:g} is no unroll of a batch of {batch_size}"
                     for part, count in zip(parts, shares([part.ratio for part in parts], batch_size)) if not count]
            found += super().problems(params, batch_size)
        return [f"memory.replay_parameters: {problem}" for problem in found]


def _read(text: str) -> tuple[list[Part], list[str]]:
    """The parts of a replay list, and everything that is wrong with it."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [], [f"not a JSON list: {error}"]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        return [], ['must be a JSON list of one or more objects such as {"type": "queue", "capacity": 1, "sample_ratio": 1.0}']
    found = [f"item {number}: {problem}" for number, item in enumerate(items, 1) for problem in _problems(item)]
    ratios = [item.get("sample_ratio") for item in items]
    if all(map(_is_number, ratios)) and abs(sum(ratios) - 1) > TOLERANCE:
        found.append(f"sample ratios must sum to 1, not {sum(ratios):g}")
    if sum(item.get("type") == "queue" for item in items) > 1:
        found.append("there can be one queue only: an unroll is learnt from once as a fresh one")
    return ([], found) if found else ([_part(item) for item in items], [])


def _part(item: dict[str, Any]) -> Part:
    rule, params = _rule(item["type"])
    return Part(rule, params(**_settings(item)), float(item["sample_ratio"]))


def _problems(item: dict[str, Any]) -> list[str]:
    """Of one object of the list."""
    kind, settings, found = item.get("type"), _settings(item), list[str]()
    ratio: Any = item.get("sample_ratio")
    if not _is_number(ratio) or not 0 < ratio <= 1:
        found.append(f"sample_ratio={ratio!r} must be greater than 0 and at most 1")
    try:
        params = _rule(kind)[1]
    except (KeyError, ImportError, AttributeError) as error:
        reason = "" if isinstance(error, KeyError) else f": {error}"
        return [f"type={kind!r} must be one of {', '.join(RULES)} or package.module:Class of your own{reason}", *found]
    known = [field.name for field in dataclasses.fields(params)]
    found += [f"{kind} has no setting {name!r}; it has {', '.join(['sample_ratio', *known])}" for name in settings if name not in known]
    try:
        params(**{name: value for name, value in settings.items() if name in known})
    except ValidationError as error:
        found += sentences(error).values()
    return found


def _rule(kind: Any) -> tuple[type[ReplayStrategy], type]:
    """Raises KeyError for what is no name of a rule, ImportError or AttributeError for a class that is not there."""
    if not isinstance(kind, str) or kind in RULES or ":" not in kind.strip(":"):
        return RULES[str(kind)]
    module, _, name = kind.partition(":")
    rule = getattr(importlib.import_module(module), name)
    return rule, rule.Params


def _settings(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("type", "sample_ratio")}


def _is_number(value: Any) -> bool:
    """Finite, and no integer beyond what arrays count with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63
