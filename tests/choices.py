"""Gymnasium environments of nested actions.

- "tests.choices:Choices-v0": name the choices that are shown.
- "tests.choices:ChooseAndAim-v0": name the choice and hit the number that are shown.
"""

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


class ChooseAndAim(gym.Env):
    """Show a choice and a number for five steps each episode; the reward is 1 if the action has both."""

    observation_space = spaces.Box(-1, 1, (4,))
    action_space = spaces.Dict({"aim": spaces.Box(-2, 2, (1,)), "gear": spaces.Discrete(3, start=1)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        return self._show(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        is_near = abs(float(action["aim"][0]) - 2 * self.number) < 0.6
        reward = float(is_near and action["gear"] == 1 + self.gear)
        self.step_number += 1
        return self._show(), reward, self.step_number == 5, False, {}

    def _show(self):
        self.gear, self.number = int(self.np_random.integers(3)), float(self.np_random.uniform(-0.8, 0.8))
        return np.array([*np.eye(3)[self.gear], self.number], np.float32)


gym.register("ChooseAndAim-v0", ChooseAndAim)
