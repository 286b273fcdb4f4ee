"""Convert stored actions to those of a gymnasium space, for all environments at once.

- Discrete stays one number, a Box of floats stays one array.
- MultiDiscrete, MultiBinary, and nested Dicts and Tuples of these and Discrete become the choices of one MultiDiscrete,
  in the order of gymnasium's `flatten`. Numbers that spaces start from are added here.
- Nested Dicts and Tuples with Boxes of floats among these parts become one Mixed space: the choices, then the numbers
  of all Boxes, each in that order. With Boxes alone they become one Continuous space.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from core.envs.argument_checks import checked_continuous, checked_discrete, checked_mixed
from core.specs import ActionSpec, Continuous, Discrete, Mixed, MultiDiscrete

Space = spaces.Space[Any]


class ActionConverter:
    """Convert actions of `spec`, which describes the gymnasium space.

    Raises:
        ValueError: No policy can act in the space; the message names the part that is to blame.
    """

    def __init__(self, space: Space):
        self._space, self.spec = space, _action_spec(space)

    def __call__(self, action: np.ndarray, num_envs: int) -> Any:
        """Return actions [E, ...] as gymnasium's vector environments take them.

        Raises:
            ValueError: An action is invalid; the message names its stream and value.
        """
        choices, numbers = np.zeros((num_envs, 0), np.int64), np.zeros((num_envs, 0), np.float32)
        if isinstance(self.spec, Mixed):
            choices, numbers = checked_mixed(action, num_envs, self.spec)
        elif isinstance(self.spec, Continuous):
            numbers = checked_continuous(action, num_envs, self.spec)
            if isinstance(self._space, spaces.Box):
                return _within(self._space, numbers)
        else:
            choices = checked_discrete(action, num_envs, self.spec)
            if isinstance(self._space, spaces.Discrete):
                return choices + self._space.start
        return _of_space(self._space, iter(choices.reshape(num_envs, -1).T), iter(numbers.T))


def _within(space: spaces.Box, numbers: np.ndarray) -> np.ndarray:
    """Return numbers [E, ...] in the dtype and bounds of a Box; float32 bounds may be rounded to values outside."""
    return np.clip(numbers.astype(space.dtype), space.low, space.high)


def _of_space(space: Space, choices: Iterator[np.ndarray], numbers: Iterator[np.ndarray]) -> Any:
    """Take the choices and numbers of a space, each [E], from iterators, and return its actions of E environments."""
    if isinstance(space, spaces.Dict):
        return {name: _of_space(part, choices, numbers) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_of_space(part, choices, numbers) for part in space.spaces)
    if isinstance(space, spaces.Box):
        columns = np.stack([next(numbers) for _ in range(space.low.size)], 1)  # [E, numbers]
        return _within(space, columns.reshape(-1, *space.shape))
    if isinstance(space, spaces.Discrete):
        return (next(choices) + space.start).astype(space.dtype)
    columns = np.stack([next(choices) for _ in _choices(space)], 1)  # [E, choices]
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return (columns.reshape(-1, *space.shape) + start).astype(space.dtype)  # type: ignore[misc]


def _parts(space: Space) -> Iterator[Space]:
    """Yield the spaces of nested Dicts and Tuples, in the order of gymnasium's `flatten`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            yield from _parts(part)
    else:
        yield space


def _choices(space: Space) -> list[int]:
    """Return the sizes of the choices of a space without parts. Raises ValueError for a space of anything else."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.reshape(-1)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    raise ValueError(str(space))


def _action_spec(space: Space) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    parts = list(_parts(space))
    boxes = [part for part in parts if isinstance(part, spaces.Box) and np.dtype(part.dtype).kind == "f"]
    try:
        nvec = [size for part in parts if part not in boxes for size in _choices(part)]
    except ValueError as error:
        nested = f", and {error} is neither" if isinstance(space, spaces.Dict | spaces.Tuple) else ""
        raise ValueError(
            f"actions of {space} are neither a Box of floats, Discrete, MultiDiscrete, MultiBinary nor nested Dicts "
            f"and Tuples of these{nested}"
        ) from None
    if not boxes and not nvec:
        raise ValueError(f"actions of {space} have no choices")
    if not boxes:
        return MultiDiscrete(tuple(nvec))
    if boxes == [space]:
        return _continuous(boxes[0])
    bounds = [_continuous(box) for box in boxes]
    low, high = (np.concatenate([each.reshape(-1) for each in sides]) for sides in zip(*bounds))
    return Mixed(tuple(nvec), low, high) if nvec else Continuous(low, high)


def _continuous(space: spaces.Box) -> Continuous:
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        bounded = np.isfinite(high - low).all()
    if not bounded:
        raise ValueError(
            f"actions of {space} have no bounds whose distance float32 can hold, and a policy's actions are scaled to "
            "them; give the environment bounds where it is made, with gymnasium.wrappers.TransformAction(env, "
            f"lambda action: action, gymnasium.spaces.Box(-1.0, 1.0, {space.shape}, env.action_space.dtype))"
        )
    return Continuous(low, high)
