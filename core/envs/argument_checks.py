"""Check the arguments of environments, seed their streams, and build the time step after a reset."""

import numpy as np

from core.specs import Continuous, Discrete, Mixed, MultiDiscrete
from core.types import TimeStep

RENDER_MODES = (None, "human", "rgb_array")


def check_construction(num_envs: int, num_threads: int, render_mode: str | None) -> None:
    """Raise ValueError with every violation in these arguments of an Env."""
    violations = []
    if num_envs < 1:
        violations.append(f"num_envs={num_envs} must be at least 1")
    if num_threads < 1:
        violations.append(f"num_threads={num_threads} must be at least 1")
    if render_mode not in RENDER_MODES:
        violations.append(f"render_mode={render_mode!r} must be one of {', '.join(map(str, RENDER_MODES))}")
    if render_mode is not None and num_envs != 1:
        violations.append(f"render_mode={render_mode!r} draws one stream, num_envs={num_envs}")
    if violations:
        raise ValueError("; ".join(violations))


def checked_discrete(action: np.ndarray, num_envs: int, space: Discrete | MultiDiscrete) -> np.ndarray:
    """Return the actions [E] or [E, choices] as int64.

    Raises:
        ValueError: An action is invalid; the message names its stream and value.
    """
    action = np.asarray(action)
    shape = (num_envs,) if isinstance(space, Discrete) else (num_envs, len(space.nvec))
    if action.shape != shape or action.dtype.kind not in "iu":
        raise ValueError(f"actions are {action.dtype} {list(action.shape)}, expected integers {list(shape)}")
    limit = space.num_actions if isinstance(space, Discrete) else np.array(space.nvec)
    outside = (action < 0) | (action >= limit)
    if outside.any():
        stream, *element = (int(index) for index in np.argwhere(outside)[0])
        largest = np.broadcast_to(limit, shape)[stream, *element] - 1
        where = f" (element {element})" if element else ""
        raise ValueError(f"action {action[stream, *element]} of stream {stream}{where} is outside 0 .. {largest}")
    return action.astype(np.int64, copy=False)


def checked_continuous(action: np.ndarray, num_envs: int, space: Continuous) -> np.ndarray:
    """Return the actions [E, ...] as float32. Raises ValueError that names stream and value of an invalid action.

    NaN is outside every interval.
    """
    action = np.asarray(action)
    if action.shape != (num_envs, *space.low.shape) or action.dtype.kind not in "fiu":
        expected = [num_envs, *space.low.shape]
        raise ValueError(f"actions are {action.dtype} {list(action.shape)}, expected float32 {expected}")
    action = action.astype(np.float32, copy=False)
    inside = (action >= space.low) & (action <= space.high)
    if not inside.all():
        stream, *element = (int(index) for index in np.argwhere(~inside)[0])
        value, low, high = (array[tuple(element)] for array in (action[stream], space.low, space.high))
        raise ValueError(f"action {value} of stream {stream} (element {element}) is outside {low} .. {high}")
    return action


def checked_mixed(action: np.ndarray, num_envs: int, space: Mixed) -> tuple[np.ndarray, np.ndarray]:
    """Return the choices [E, choices] as int64 and the numbers [E, numbers] as float32.

    Raises:
        ValueError: An action is invalid; the message names its stream and value.
    """
    action, shape = np.asarray(action), (num_envs, *space.array.shape)
    if action.shape != shape or action.dtype.kind not in "fiu":
        raise ValueError(f"actions are {action.dtype} {list(action.shape)}, expected float32 {list(shape)}")
    choices, numbers = np.split(action, [len(space.nvec)], 1)
    fractional = ~(np.trunc(choices) == choices)  # also of NaN
    if fractional.any():
        stream, element = (int(index) for index in np.argwhere(fractional)[0])
        raise ValueError(f"choice {choices[stream, element]} of stream {stream} (element [{element}]) is no integer")
    whole = checked_discrete(np.clip(choices, -1, 2**62).astype(np.int64), num_envs, MultiDiscrete(space.nvec))
    return whole, checked_continuous(numbers, num_envs, space.continuous)


def stream_seeds(seed: int, num_envs: int) -> np.ndarray:
    """Return a seed [E] in 0 .. 2**31 - 1 for each stream; neighbouring values of `seed` give distant seeds."""
    first = int(np.random.SeedSequence(seed).generate_state(1)[0]) % (2**31 - num_envs)
    return first + np.arange(num_envs)


def reset_timestep(observation: np.ndarray, legal: np.ndarray | None = None) -> TimeStep:
    """Return the time step of E streams that have been reset: reward 0, discount 1, `first` True and `last` False.

    Args:
        observation: [E, ...].
        legal: [E, A] bool, the legal actions; None if the environment has no masks.
    """
    zeros = np.zeros(len(observation), np.float32)
    first = np.ones(len(observation), bool)
    return TimeStep(observation, zeros, zeros + 1, first, ~first, zeros, legal)
