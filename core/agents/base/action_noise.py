"""Exploration of continuous actions by Gaussian or, correlated over time, Ornstein-Uhlenbeck noise.

The unit of noise is half the range of an action.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from core.common.settings import frozen_dataclass
from core.ops.actions import linear, ornstein_uhlenbeck


@frozen_dataclass
class ActionNoiseParams:
    noise: Literal["gaussian", "ornstein-uhlenbeck", "none"] = "gaussian"
    """Noise that is added to the policy's action."""
    noise_scale: float = Field(default=0.1, ge=0, le=1_000)
    """Standard deviation of the noise, as a share of the range's half width (TD3: 0.1, D4PG: 0.3, DDPG's OU: 0.2)."""
    noise_end: float = Field(default=1.0, ge=0, le=1_000)
    """Factor of noise_scale that annealing ends at; 1 is no annealing."""
    noise_steps: int = Field(default=1_000_000, ge=1, le=10**12)
    """Agent steps of the whole run in which the factor goes from 1 to noise_end."""
    noise_ladder: float = Field(default=1.0, gt=0, le=1e6)
    """Scale of the last environment over that of the first; the others lie between in equal ratios."""
    ou_theta: float = Field(default=0.15, ge=0, le=2)
    """Pull of Ornstein-Uhlenbeck noise towards 0 (DDPG: 0.15)."""
    ou_dt: float = Field(default=0.01, gt=0, le=1)
    """Time of Ornstein-Uhlenbeck noise that an agent step takes."""
    random_exploration_steps: int = Field(default=0, ge=0, le=10**12)
    """Agent steps of the run with uniformly random actions at the start."""


class ActionNoise:
    """Exploration of E environments with actions of A numbers. OU noise starts at 0 in every episode."""

    def __init__(self, params: ActionNoiseParams, scales: np.ndarray, num_actions: int, generator: np.random.Generator):
        self._params, self._scales, self._generator = params, scales, generator  # scales [E] before annealing
        self._state = np.zeros((len(scales), num_actions))  # of OU noise
        self.update(0)

    def update(self, agent_steps: int, learning_steps: int = 0) -> None:
        params = self._params
        self._random = agent_steps < params.random_exploration_steps
        self.scale: np.ndarray = self._scales * linear(agent_steps, 1.0, params.noise_end, params.noise_steps)  # [E]

    def explore(self, action: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Return actions within -1 .. 1 with noise, or random ones.

        Args:
            action: [E, A] in -1 .. 1.
            first: [E] bool, an episode starts.
        """
        if self._random:
            return self._generator.uniform(-1, 1, action.shape).astype(np.float32)
        if self._params.noise == "none":
            return action
        normal, scale = self._generator.standard_normal(self._state.shape), self.scale[:, None]
        if self._params.noise == "gaussian":
            noise: np.ndarray = scale * normal
        else:
            self._state[first] = 0
            noise = ornstein_uhlenbeck(self._state, self._params.ou_theta, scale, self._params.ou_dt, normal)
            self._state = noise
        noisy: np.ndarray = (action + noise).clip(-1, 1)
        return noisy.astype(np.float32)

    def statistics(self) -> dict[str, float]:
        return {"noise_scale": 0.0 if self._params.noise == "none" else float(self.scale.mean())}
