"""Batches mixed from several replay strategies, by the replay list of the first of the replaced systems.

    [{"type": "queue", "capacity": 1, "sample_ratio": 0.5}, {"type": "standard", "capacity": 1000, "sample_ratio": 0.5}]

`elite` and `attentive` stand for `custom` with the settings of those names. Every other key is a setting of the
strategy's Params. A strategy of your own is named "package.module:Class".
"""

import dataclasses
import importlib
import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from core.common.foreign_code import described
from core.common.settings import JsonText, frozen_dataclass, sentences
from core.memories.unrolls.feature_replay import CustomParams, FeatureDistanceStrategy, Insertion, Sampling
from core.memories.unrolls.queue import QueueParams, QueueStrategy
from core.memories.unrolls.uniform_unrolls import ReplayParams, ReservoirStrategy, StandardStrategy
from core.memories.unrolls.unroll_memory import MixtureComponent, ReplayStrategy, UnrollMemory
from core.memory import MemoryParams

DEFAULT = (
    '[{"type": "queue", "capacity": 16, "sample_ratio": 0.5}, '
    '{"type": "standard", "capacity": 1000, "sample_ratio": 0.5}]'
)
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
    """Candidates fall to one for each unroll within lambda_batches batches times this factor."""


@frozen_dataclass
class AttentiveParams(CustomParams):
    """Attentive replay. For vectors, the paper compares by the cosine (dist_function cos_dist)."""

    sample_strategy: Sampling = "attentive_sampling"
    """Rule by which unrolls are drawn."""
    lambda_batch_multiplier: float = Field(default=4.0, ge=1, le=10_000)
    """Candidates drawn for each unroll that is kept, at first."""


STRATEGIES: dict[str, tuple[type[ReplayStrategy], type]] = {
    "queue": (QueueStrategy, QueueParams),
    "standard": (StandardStrategy, ReplayParams),
    "reservoir": (ReservoirStrategy, ReplayParams),
    "attentive": (FeatureDistanceStrategy, AttentiveParams),
    "elite": (FeatureDistanceStrategy, EliteParams),
    "custom": (FeatureDistanceStrategy, CustomParams),
}


@frozen_dataclass
class MixedParams(MemoryParams):
    replay_parameters: JsonText = DEFAULT
    """JSON list of replay strategies with their sample ratios; a row of `CONFIGS` may also have a Python list."""
    feature_dtype: Literal["float32", "float16"] = "float32"
    """Type of stored features where a strategy compares them; float16 takes half the memory."""


class MixedMemory(UnrollMemory):
    """A memory whose batches are mixed by a replay list."""

    Params = MixedParams

    @classmethod
    def components(cls, params: MixedParams) -> list[MixtureComponent]:
        """Return the components of the replay list; raise ValueError for a list with `problems`."""
        components, errors = _read(params.replay_parameters)
        if errors:
            raise ValueError("; ".join(errors))
        return components

    @classmethod
    def problems(cls, params: MixedParams, batch_size: int) -> list[str]:
        _, errors = _read(params.replay_parameters)
        return [f"memory.replay_parameters: {error}" for error in errors or super().problems(params, batch_size)]


def _read(text: str) -> tuple[list[MixtureComponent], list[str]]:
    """Return the components of a replay list and everything that is wrong with it."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [], [f"not a JSON list: {error}"]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        example = '{"type": "queue", "capacity": 1, "sample_ratio": 1.0}'
        return [], [f"must be a JSON list of one or more objects such as {example}"]
    read = [_component(item) for item in items]
    errors = [f"item {number}: {error}" for number, (_, found) in enumerate(read, 1) for error in found]
    ratios = [item.get("sample_ratio") for item in items]
    if all(map(_is_number, ratios)) and abs(sum(ratios) - 1) > TOLERANCE:
        errors.append(f"sample ratios must sum to 1, not {sum(ratios):g}")
    if sum(item.get("type") == "queue" for item in items) > 1:
        errors.append("there can be one queue only: an unroll is learnt from once as a fresh one")
    return [] if errors else [component for component, _ in read if component], errors


def _component(item: dict[str, Any]) -> tuple[MixtureComponent | None, list[str]]:
    """Return the component of one object of the list, and everything that is wrong with the object."""
    settings, errors = dict(item), list[str]()
    kind, ratio = settings.pop("type", None), settings.pop("sample_ratio", None)
    if not _is_number(ratio) or not 0 < ratio <= 1:
        errors.append(f"sample_ratio={ratio!r} must be greater than 0 and at most 1")
    try:
        strategy, params = _strategy(kind)
    except Exception as error:  # the code of a strategy of your own can fail in any way
        reason = "" if isinstance(error, KeyError) else f": {described(error)}"
        known_types = ", ".join(STRATEGIES)
        wrong = f"type={kind!r} must be one of {known_types} or package.module:Class of your own{reason}"
        return None, [wrong, *errors]
    known = [field.name for field in dataclasses.fields(params)]
    names = ", ".join(["sample_ratio", *known])
    errors += [f"{kind} has no setting {name!r}; it has {names}" for name in settings if name not in known]
    try:
        chosen = params(**{name: value for name, value in settings.items() if name in known})
        return MixtureComponent(strategy, chosen, ratio), errors
    except ValidationError as error:
        errors += sentences(error).values()
    except Exception as error:
        errors.append(f"the settings of {kind} are refused: {described(error)}")
    return None, errors


def _strategy(kind: Any) -> tuple[type[ReplayStrategy], type]:
    """Return a strategy and its Params by the name in a replay list.

    Raises KeyError for what names no strategy, TypeError for a class that is none, and any error of its module.
    """
    if not isinstance(kind, str) or ":" not in kind.strip(":"):
        return STRATEGIES[str(kind)]
    module, _, name = kind.partition(":")
    strategy = getattr(importlib.import_module(module), name)
    if not issubclass(strategy, ReplayStrategy) or not hasattr(strategy.Params, "__dataclass_fields__"):
        raise TypeError(f"{name} must be a ReplayStrategy, and its Params a dataclass")
    if abstract := sorted(strategy.__abstractmethods__):
        raise TypeError(f"{name} must define {', '.join(abstract)}")
    return strategy, strategy.Params


def _is_number(value: Any) -> bool:
    """Return True for a finite number that is no integer beyond what arrays can count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63
