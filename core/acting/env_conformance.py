"""Check an environment against the contract of core/env.py by random play, one time step at a time."""

import math

import numpy as np

from core.env import Env
from core.ops.actions import random_legal_actions
from core.specs import ActionSpec, Continuous, Discrete, EnvSpec, Mixed, MultiDiscrete
from core.types import TimeStep


def contract_violations(spec: EnvSpec, num_envs: int, timestep: TimeStep, previous: TimeStep | None) -> list[str]:
    """Return one sentence for each clause of the contract that a step of num_envs environments violates.

    `previous` is the step before, or None after a reset.
    """
    errors = _shape_errors(spec, num_envs, timestep)
    return errors or _value_errors(spec, timestep) + _episode_errors(timestep, previous)


def play_randomly(env: Env, num_envs: int, steps: int, seed: int) -> tuple[list[str], int]:
    """Reset, then take `steps` steps with uniform random actions, or fewer if one violates the contract.

    Returns:
        The violations of the last step, and the number of episodes that ended.
    """
    generator = np.random.default_rng(seed)
    previous, episodes = None, 0
    timestep = env.reset(seed)
    for number in range(steps + 1):
        violations = contract_violations(env.spec, num_envs, timestep, previous)
        if violations:
            return [f"step {number} of random play: {violation}" for violation in violations], episodes
        episodes += int(timestep.last.sum())
        # A copy, because an environment may reuse its arrays.
        previous = TimeStep._make(None if field is None else np.array(field) for field in timestep)
        timestep = env.step(random_actions(env.spec.action, num_envs, generator, timestep.action_mask))
    return [], episodes


def random_actions(
    space: ActionSpec, num_envs: int, generator: np.random.Generator, legal: np.ndarray | None = None
) -> np.ndarray:
    """Draw uniform actions [E, ...] from the action space, those of TimeStep.action_mask if it is given."""
    if isinstance(space, Mixed):
        parts = (MultiDiscrete(space.nvec), legal), (space.continuous, None)
        drawn = [random_actions(part, num_envs, generator, mask) for part, mask in parts]
        return np.concatenate(drawn, 1, dtype=np.float32)
    if legal is not None and not isinstance(space, Continuous):
        return random_legal_actions(legal, space.choices, generator).reshape(num_envs, *space.array.shape)
    if isinstance(space, Discrete):
        return generator.integers(space.num_actions, size=num_envs)
    if not isinstance(space, Continuous):
        return generator.integers(space.nvec, size=(num_envs, len(space.nvec)))
    actions = generator.uniform(space.low, space.high, (num_envs, *space.low.shape)).astype(np.float32)
    return np.clip(actions, space.low, space.high)  # because rounding to float32 can leave the space


def can_act(spec: EnvSpec, timestep: TimeStep) -> np.ndarray:
    """Return the streams that have a legal action of each choice, [E] bool."""
    assert timestep.action_mask is not None and not isinstance(spec.action, Continuous)
    begins = np.cumsum((0, *spec.action.choices[:-1]), dtype=np.int64)
    return np.asarray(np.logical_or.reduceat(timestep.action_mask, begins, axis=1).all(1))


def is_terminated(timestep: TimeStep) -> np.ndarray:
    """Return the streams whose episode has ended by itself, so that no action follows, [E] bool."""
    return np.asarray(timestep.last & (timestep.discount == 0))


def _shape_errors(spec: EnvSpec, num_envs: int, timestep: TimeStep) -> list[str]:
    expected: dict[str, tuple[tuple[int, ...], str]]
    expected = dict.fromkeys(("reward", "discount", "raw_reward"), ((num_envs,), "float32"))
    expected |= dict.fromkeys(("first", "last"), ((num_envs,), "bool"))
    errors = []
    expected["observation"] = (num_envs, *spec.observation_shape), spec.frame.dtype
    if spec.action_mask:
        expected["action_mask"] = (num_envs, *spec.action_mask.shape), spec.action_mask.dtype
    for name, (shape, dtype) in expected.items():
        value = getattr(timestep, name)
        if not isinstance(value, np.ndarray):
            errors.append(f"{name} is a {type(value).__name__}, expected an array {dtype} {list(shape)}")
        elif value.shape != shape or value.dtype != np.dtype(dtype):
            errors.append(f"{name} is {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}")
    return errors


def _value_errors(spec: EnvSpec, timestep: TimeStep) -> list[str]:
    errors = []
    for name, value in timestep._asdict().items():
        if value is not None and value.dtype.kind == "f" and not np.isfinite(value).all():
            not_finite = ~np.isfinite(value).reshape(len(value), -1).all(1)
            errors.append(f"{name} is not finite in streams {_indices(not_finite)}")
    outside = (timestep.discount < 0) | (timestep.discount > 1)
    if outside.any():
        errors.append(f"discount of streams {_indices(outside)} is outside 0 .. 1: {timestep.discount[outside]}")
    if spec.action_mask and (stuck := ~can_act(spec, timestep) & ~is_terminated(timestep)).any():
        errors.append(f"action_mask has no legal action in streams {_indices(stuck)}")
    beside = spec.picture_of_parts  # the bytes after a picture are floats
    pictures = timestep.observation[..., : math.prod(beside)] if beside else timestep.observation
    low, high = pictures.min(), pictures.max()
    if spec.is_image and (low < 0 or high > spec.max_value):
        errors.append(f"observation has values {low} .. {high}, outside 0 .. {spec.max_value:g}")
    return errors


def _episode_errors(timestep: TimeStep, previous: TimeStep | None) -> list[str]:
    """Check next-step autoreset: the step after the end of an episode starts the next one, without a reward."""
    expected_first = np.ones(len(timestep.first), bool) if previous is None else previous.last
    errors = []
    if (timestep.first != expected_first).any():
        rule = (
            "a reset starts an episode in every stream"
            if previous is None
            else "an episode starts exactly where one ended before"
        )
        errors.append(f"first is wrong in streams {_indices(timestep.first != expected_first)}: {rule}")
    if (timestep.first & timestep.last).any():
        errors.append(f"first and last are both true in streams {_indices(timestep.first & timestep.last)}")
    rewarded = timestep.first & ((timestep.reward != 0) | (timestep.raw_reward != 0))
    if rewarded.any():
        errors.append(f"an episode's first observation earned a reward in streams {_indices(rewarded)}")
    discounted = timestep.first & (timestep.discount != 1)
    if discounted.any():
        errors.append(f"an episode's first observation has a discount other than 1 in streams {_indices(discounted)}")
    return errors


def _indices(mask: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(mask).tolist()))
