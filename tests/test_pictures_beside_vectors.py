"""A task whose answer takes a picture and a number is learnt from both, and from neither alone."""

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
}
POLICY = {
    "config": "ppo-cartpole",
    "model_type": "minatar-ac",
    "agent.unroll_length": 32,
    "agent.learning_rate": 1e-3,
    "evaluator.steps": 1000,
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


@pytest.fixture
def score(tmp_path, monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("ExclusiveOr-v0", ExclusiveOr)

    def train(options, **more):
        words = [f"--{name}={value}" for name, value in (COMMON | options | more).items()]
        return best_score(tmp_path, *words)

    return train


@pytest.mark.parametrize(("options", "steps"), [(VALUES, 3_000), (POLICY, 16_000)], ids=["dqn", "ppo"])
def test_both_parts_solve_the_task(score, options, steps):
    assert score(options, steps=steps) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("options", [VALUES, POLICY], ids=["dqn", "ppo"])
@pytest.mark.parametrize("part", ["picture", "number"])
def test_one_part_alone_does_not(score, options, part):
    """Half of the answers are right by chance."""
    vector_model = {VALUES["model_type"]: "dqn-mlp", POLICY["model_type"]: "mlp-ac"}[options["model_type"]]
    model = options["model_type"] if part == "picture" else vector_model
    steps = 1_500 if options is VALUES else 4_000
    best = score(options, steps=steps, model_type=model, **{"env.observation_keys": part})
    assert 0.3 < best < 0.8
