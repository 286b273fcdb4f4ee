"""Convert stored actions to those of a gymnasium space, for all environments at once.

- Discrete stays one number, a Box of floats stays one array.
- MultiDiscrete, MultiBinary, and nested Dicts and Tuples of these and Discrete become the choices of one MultiDiscrete,
  in the order of gymnasium's `flatten`. Numbers that spaces start from are added here.
"""

from typing import Any

import numpy as np
from gymnasium import spaces

from core.envs.argument_checks import checked_continuous, checked_discrete
from core.specs import ActionSpec, Continuous, Discrete, MultiDiscrete

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
        if isinstance(self.spec, Continuous):
            assert isinstance(self._space, spaces.Box)
            action = checked_continuous(action, num_envs, self.spec)
            # float32 bounds may be rounded to values outside the float64 bounds
            return np.clip(action.astype(self._space.dtype), self._space.low, self._space.high)
        action = checked_discrete(action, num_envs, self.spec)
        if isinstance(self._space, spaces.Discrete):
            return action + self._space.start
        return _of_space(self._space, iter(action.reshape(num_envs, -1).T))


def _of_space(space: Space, choices: Any) -> Any:
    """Take the choices of a space, each [E], from an iterator, and return the space's actions of E environments."""
    if isinstance(space, spaces.Dict):
        return {name: _of_space(part, choices) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_of_space(part, choices) for part in space.spaces)
    if isinstance(space, spaces.Discrete):
        return (next(choices) + space.start).astype(space.dtype)
    columns = np.stack([next(choices) for _ in _choices(space)], 1)  # [E, choices]
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    return (columns.reshape(-1, *space.shape) + start).astype(space.dtype)  # type: ignore[misc]


def _choices(space: Space) -> list[int]:
    """Return the sizes of a space's choices. Raises ValueError for a space of anything else."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [size for part in parts for size in _choices(part)]
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
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return _continuous(space)
    try:
        nvec = _choices(space)
    except ValueError as error:
        nested = f", and {error} beside other parts is neither" if isinstance(space, spaces.Dict | spaces.Tuple) else ""
        raise ValueError(
            f"actions of {space} are neither a Box of floats alone nor Discrete, MultiDiscrete, MultiBinary or nested "
            f"Dicts and Tuples of these{nested}"
        ) from None
    if not nvec:
        raise ValueError(f"actions of {space} have no choices")
    return MultiDiscrete(tuple(nvec))


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
