"""A gymnasium environment of nested actions, "tests.choices:Choices-v0": name the choices that are shown."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

NVEC = (2, 3, 2, 2)
ACTIONS = spaces.Dict(
    {
        "gear": spaces.Discrete(2, start=-1),
        "hands": spaces.Tuple([spaces.MultiDiscrete([3], start=[5]), spaces.MultiBinary((1, 2))]),
    }
)


class Choices(gym.Env):
    """Show four numbers for five steps each episode; the reward is the share of them that the action names."""

    observation_space = spaces.Box(0, 1, (sum(NVEC),))

    def __init__(self, action_space=ACTIONS):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        return self._show(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        numbers = spaces.flatten(self.action_space, action)
        named = np.concatenate([numbers[:5], *([1 - bit, bit] for bit in numbers[5:])])  # one-hot as it is shown
        reward = float(named @ self.shown) / len(NVEC)
        self.step_number += 1
        return self._show(), reward, self.step_number == 5, False, {}

    def _show(self):
        self.shown = np.concatenate([np.eye(size, dtype=np.float32)[self.np_random.integers(size)] for size in NVEC])
        return self.shown


gym.register("Choices-v0", Choices)
