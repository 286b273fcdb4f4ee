"""A task whose answer takes a picture and a number is learnt from both."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tests.test_small_tasks import best_score

VALUES = {
    "config": "dqn-cartpole",
    "model_type": "dqn-minatar",
    "agent.n_step": 1,
    "agent.learning_rate": 1e-3,
    "agent.target_update_period": 50,
    "agent.exploration_epsilon_steps": 500,
    "agent.batch_size": 32,
    "rate_limiter.min_replay_size": 200,
    "rate_limiter.samples_per_insert": 8,
    "evaluator.steps": 500,
    "steps": 3_000,
}
POLICY = {
    "config": "ppo-cartpole",
    "model_type": "minatar-ac",
    "agent.unroll_length": 32,
    "agent.learning_rate": 1e-3,
    "evaluator.steps": 1000,
    "steps": 16_000,
}
COMMON = {
    "env_type": "gym",
    "game": "ExclusiveOr-v0",
    "target_score": 0.95,
    "evaluator.episodes": 100,
    "evaluator.num_envs": 50,
}


class ExclusiveOr(gym.Env):
    """One step, whose reward is 1 for the exclusive or of a bit in the picture and one beside it."""

    observation_space = spaces.Dict(picture=spaces.Box(0, 255, (6, 6), np.uint8), number=spaces.Box(-1, 1, (1,)))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits = self.np_random.integers(0, 2, 2)
        return self.observation(), {}

    def step(self, action):
        return self.observation(), float(action == self.bits[0] ^ self.bits[1]), True, False, {}

    def observation(self):
        picture = np.full((6, 6), 255 * self.bits[0], np.uint8)
        return {"picture": picture, "number": np.array([2 * self.bits[1] - 1], np.float32)}


@pytest.mark.parametrize("options", [VALUES, POLICY], ids=["dqn", "ppo"])
def test_both_parts_solve_the_task(tmp_path, monkeypatch, options):
    """Half of the answers are right by chance, and by either part alone."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("ExclusiveOr-v0", ExclusiveOr)
    words = [f"--{name}={value}" for name, value in (COMMON | options).items()]
    assert best_score(tmp_path, *words) >= 0.95
