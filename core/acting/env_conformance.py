"""The contract of an environment, clause by clause, for one step at a time: what a check plays for a while to find out."""

import numpy as np

from core.env import Env
from core.specs import Continuous, Discrete, EnvSpec
from core.types import TimeStep


def contract_violations(spec: EnvSpec, num_envs: int, timestep: TimeStep, before: TimeStep | None) -> list[str]:
    """What is wrong with this step of E streams, one sentence each; `before` is the step before, None after a reset."""
    shapes = _shapes(spec, num_envs, timestep)
    return shapes or _values(spec, timestep) + _episodes(timestep, before)


def play_randomly(env: Env, num_envs: int, steps: int, seed: int) -> tuple[list[str], int]:
    """Reset and `steps` steps of all streams by uniform actions, until a clause is broken; returns what is wrong and the episodes ended."""
    generator = np.random.default_rng(seed)
    before, episodes = None, 0
    timestep = env.reset(seed)
    for number in range(steps + 1):
        found = contract_violations(env.spec, num_envs, timestep, before)
        if found:
            return [f"step {number} of random play: {problem}" for problem in found], episodes
        episodes += int(timestep.last.sum())
        before = TimeStep(*(np.array(part) for part in timestep))  # an environment may use its arrays again
        timestep = env.step(random_actions(env.spec.action, num_envs, generator))
    return [], episodes


def random_actions(space: Discrete | Continuous, num_envs: int, generator: np.random.Generator) -> np.ndarray:
    """[E, ...], uniform."""
    if isinstance(space, Discrete):
        return generator.integers(space.num_actions, size=num_envs)
    actions = generator.uniform(space.low, space.high, (num_envs, *space.low.shape)).astype(np.float32)
    return np.clip(actions, space.low, space.high)  # rounding to float32


def _shapes(spec: EnvSpec, num_envs: int, timestep: TimeStep) -> list[str]:
    rows = dict.fromkeys(("reward", "discount", "raw_reward"), ((num_envs,), "float32"))
    rows |= dict.fromkeys(("first", "last"), ((num_envs,), "bool"))
    found = []
    for name, (shape, dtype) in {"observation": ((num_envs, *spec.observation_shape), spec.frame.dtype), **rows}.items():
        value = getattr(timestep, name)
        if not isinstance(value, np.ndarray):
            found.append(f"{name} is a {type(value).__name__}, expected an array {dtype} {list(shape)}")
        elif value.shape != shape or value.dtype != np.dtype(dtype):
            found.append(f"{name} is {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}")
    return found


def _values(spec: EnvSpec, timestep: TimeStep) -> list[str]:
    found = [f"{name} is not finite in streams {_streams(~np.isfinite(value).reshape(len(value), -1).all(1))}"
             for name, value in zip(timestep._fields, timestep) if value.dtype.kind == "f" and not np.isfinite(value).all()]
    outside = (timestep.discount < 0) | (timestep.discount > 1)
    if outside.any():
        found.append(f"discount of streams {_streams(outside)} is outside 0 .. 1: {timestep.discount[outside]}")
    low, high = timestep.observation.min(), timestep.observation.max()
    if spec.is_image and (low < 0 or high > spec.max_value):
        found.append(f"observation has values {low} .. {high}, outside 0 .. {spec.max_value:g}")
    return found


def _episodes(timestep: TimeStep, before: TimeStep | None) -> list[str]:
    """Next-step autoreset: a step that ends an episode is followed by one that starts the next with nothing earned."""
    first = np.ones(len(timestep.first), bool) if before is None else before.last
    found = []
    if (timestep.first != first).any():
        why = "a reset starts an episode in every stream" if before is None else "an episode starts exactly where one ended before"
        found.append(f"first is wrong in streams {_streams(timestep.first != first)}: {why}")
    if (timestep.first & timestep.last).any():
        found.append(f"first and last are both true in streams {_streams(timestep.first & timestep.last)}")
    earned = timestep.first & ((timestep.reward != 0) | (timestep.raw_reward != 0))
    if earned.any():
        found.append(f"an episode's first observation earned a reward in streams {_streams(earned)}")
    lost = timestep.first & (timestep.discount != 1)
    if lost.any():
        found.append(f"an episode's first observation has a discount other than 1 in streams {_streams(lost)}")
    return found


def _streams(mask: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(mask).tolist()))
