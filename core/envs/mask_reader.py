"""Read the mask of legal actions that a gymnasium environment returns in its infos or observations."""

from typing import Any

import numpy as np
from gymnasium import spaces

from core.specs import ActionSpec, Continuous

IN_INFO = "info"


class MaskReader:
    """Read masks from where `env.action_mask` says.

    Args:
        where: "info" for the entry action_mask of infos, else the path of a part of observations.
        action: The actions that a mask is of.
        space: The observations' space.

    Raises:
        ValueError: Actions have no choices, or observations have no such part.
    """

    def __init__(self, where: str, action: ActionSpec, space: spaces.Space[Any]):
        if isinstance(action, Continuous):
            raise ValueError(f"env.action_mask={where} needs choices, and the environment's actions are continuous")
        self.size, self._path = sum(action.choices), None if where == IN_INFO else where.split(".")
        if self._path:
            part: Any = space
            for name in self._path:
                if not (isinstance(part, spaces.Dict) and name in part.spaces):
                    raise ValueError(f"env.action_mask={where} is neither info nor a part of Dict observations {space}")
                part = part[name]

    def __call__(self, observation: Any, info: Any) -> np.ndarray:
        """Return the legal actions [A] bool. Raises InvalidMaskError for anything else than zeros and ones."""
        value, path = (info, ["action_mask"]) if self._path is None else (observation, self._path)
        try:
            for name in path:
                value = value[name]
            parts = value if isinstance(value, tuple | list) else (value,)  # one mask, or one of each choice
            mask = np.concatenate([np.ravel(part) for part in parts])
        except (KeyError, TypeError, IndexError, ValueError):
            raise InvalidMaskError(value) from None
        if mask.shape != (self.size,) or mask.dtype.kind not in "biu" or not ((mask == 0) | (mask == 1)).all():
            raise InvalidMaskError(value)
        return mask.astype(bool)


class InvalidMaskError(ValueError):
    """A mask that is not of the environment's actions; its only argument is the value."""
