"""Every agent for continuous actions learns a small task within seconds on the inline engine."""

import math
import shlex

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tests.test_small_tasks import best_score
from utils.config.command_line import read_options


class Aim(gym.Env):
    """Reward actions by their negative distance from twice the observed targets.

    The two targets lie in [0, 1]; an action is in [-1, 3] x [-1, 3]. An episode has four steps and terminates after a
    distance above 2.
    """

    observation_space, action_space = spaces.Box(0, 1, (2, 1)), spaces.Box(-1, 3, (1, 2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.aims = 0
        return self._aim(), {}

    def step(self, action):
        self.aims += 1
        distance = float(np.linalg.norm(np.asarray(action)[0] - 2 * self.targets))
        return self._aim(), -distance, distance > 2, self.aims == 4, {}

    def _aim(self):
        self.targets = self.np_random.random(2)
        return self.targets[:, None].astype(np.float32)


WORDS = shlex.split(
    "--env_type gym --game Aim-v0 --model.hidden 64 --agent.batch_size 64 "
    "--agent.random_exploration_steps 300 --agent.gamma 0.5 --agent.n_step 1 "
    "--agent.learning_rate 2e-3 --agent.critic_learning_rate 5e-3 --rate_limiter.min_replay_size 300 "
    "--rate_limiter.samples_per_insert 64 --memory.capacity 5000 --num_envs_per_actor 4 "
    "--evaluator.steps 400 --evaluator.episodes 20 --evaluator.num_envs 20 --steps 4000 "
    "--target_score -1.0"
)


@pytest.mark.parametrize(
    "agent",
    [
        "ddpg",
        pytest.param("sac", marks=pytest.mark.slow),
        *(pytest.param(agent, marks=pytest.mark.learn) for agent in ("d4pg", "td3")),
    ],
)
def test_every_agent_learns_to_aim(tmp_path, agent):
    """The score of random play is about -6."""
    gym.register("Aim-v0", Aim)
    try:
        atoms = ("--agent.v_min", "-4", "--agent.v_max", "0") if agent == "d4pg" else ()
        assert best_score(tmp_path, "--config", f"{agent}-pendulum", *WORDS, *atoms) >= -1.0
    finally:
        gym.registry.pop("Aim-v0")


def test_d4pgs_atoms_cover_the_discounted_returns_of_its_tasks():
    """Episodes are truncated at a step limit and bootstrap there, so returns are sums without end."""
    rows = {
        name: read_options(["--config", f"d4pg-{name}"]).agent
        for name in ("pendulum", "inverted-pendulum", "halfcheetah")
    }
    pendulum = gym.make("Pendulum-v1").unwrapped
    # the formula of its docstring
    dearest = math.pi**2 + 0.1 * pendulum.max_speed**2 + 0.001 * pendulum.max_torque**2
    assert rows["pendulum"].v_min <= -dearest / (1 - rows["pendulum"].gamma) and rows["pendulum"].v_max >= 0
    assert rows["inverted-pendulum"].v_max >= 1 / (1 - rows["inverted-pendulum"].gamma) - 1e-9
    best_published = 17_000 / 1_000  # REDQ and SAC reach 12,000 to 17,000 in episodes of 1,000 steps
    assert rows["halfcheetah"].v_max >= best_published / (1 - rows["halfcheetah"].gamma)
