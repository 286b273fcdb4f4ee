"""Train stable-baselines3's PPO or DQN on MinAtar with the options of our rows.

    python -m benchmarks.sb3_minatar ppo breakout --steps 2000000
    python -m benchmarks.sb3_minatar dqn asterix --steps 250000 --agent.n_step 3

The games are the package's own gymnasium environments. Options and network are those of the row
`<agent>-minatar-breakout`; an option on the command line replaces one of the row's. Each run writes its evaluations,
mean raw returns, as a CSV that `utils.plot` reads: of episodes that sample the policy of PPO, and of greedy ones of
DQN. Needs stable-baselines3 (`make bench` installs it).

- The values of PPO are not clipped, which is stable-baselines3's default: its clip has no gradient outside, while that
  of the row takes the larger of two losses.
- DQN has no double Q-learning. Its epsilon begins to fall at the first step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.training import RESULTS
from core.envs.minatar import GAMES
from core.runtime.options import RunOptions
from utils.config.command_line import read_options


def ppo(options: RunOptions, env: Any, policy: dict[str, Any], seed: int) -> Any:
    """Make stable-baselines3's PPO."""
    from stable_baselines3 import PPO

    agent: Any = options.agent
    rollout = options.num_envs_per_actor * agent.unroll_length
    return PPO(
        "CnnPolicy",
        env,
        learning_rate=lambda remaining: agent.learning_rate * remaining,
        n_steps=agent.unroll_length,
        batch_size=rollout // agent.minibatches,
        n_epochs=agent.epochs,
        gamma=agent.gamma,
        gae_lambda=agent.gae_lambda,
        clip_range=agent.clip_epsilon,
        ent_coef=agent.entropy_cost,
        vf_coef=agent.baseline_cost / 2,  # theirs leaves out the half of the square
        max_grad_norm=agent.clip_norm,
        policy_kwargs=policy,
        seed=seed,
        device="cpu",
    )


def dqn(options: RunOptions, env: Any, policy: dict[str, Any], seed: int) -> Any:
    """Make stable-baselines3's DQN."""
    from stable_baselines3 import DQN

    agent: Any = options.agent
    samples_per_step: Any = options.rate_limiter.samples_per_insert
    steps_per_update = agent.batch_size / samples_per_step
    return DQN(
        "CnnPolicy",
        env,
        learning_rate=agent.learning_rate,
        buffer_size=options.memory.capacity,
        learning_starts=options.rate_limiter.min_replay_size,
        batch_size=agent.batch_size,
        gamma=agent.gamma,
        train_freq=1,  # step of all environments
        gradient_steps=round(options.num_envs_per_actor / steps_per_update),
        n_steps=agent.n_step,
        target_update_interval=round(agent.target_update_period * steps_per_update),  # agent steps
        exploration_fraction=agent.exploration_epsilon_steps / options.steps,
        exploration_final_eps=agent.exploration_epsilon_end,
        max_grad_norm=agent.clip_norm,
        policy_kwargs=policy,
        seed=seed,
        device="cpu",
    )


AGENTS: dict[str, Callable[[RunOptions, Any, dict[str, Any], int], Any]] = {"ppo": ppo, "dqn": dqn}


def policy_of(options: RunOptions) -> dict[str, Any]:
    """Return what stable-baselines3's `policy_kwargs` needs for the network and the optimiser of a row."""
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    model: Any = options.model
    agent: Any = options.agent

    class Features(BaseFeaturesExtractor):
        """Convolution and hidden layer of the row's network."""

        def __init__(self, space: Any):
            super().__init__(space, model.hidden)
            channels, planes = space.shape[2], model.planes
            convolution = nn.Sequential(nn.Conv2d(channels, planes, 3), nn.ReLU(), nn.Flatten())
            self.layers = nn.Sequential(convolution, nn.Linear(planes * 8 * 8, model.hidden), nn.ReLU())

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.layers(observation.float().permute(0, 3, 1, 2))

    return {
        "features_extractor_class": Features,
        "net_arch": [],
        "normalize_images": False,
        "optimizer_kwargs": {"eps": agent.optimizer_eps},
    }


def environments(game: str, num_envs: int, first_seed: int, max_steps: int) -> Any:
    """Make the package's own gymnasium environments of a game."""
    from minatar.gym import register_envs
    from stable_baselines3.common.env_util import make_vec_env

    register_envs()
    name = f"MinAtar/{game.title().replace('_', '')}-v1"
    return make_vec_env(name, num_envs, seed=first_seed, env_kwargs={"max_episode_steps": max_steps})


def train(name: str, game: str, seed: int, words: list[str], path: Path) -> None:
    """Train one run and write its evaluations."""
    import torch

    from benchmarks.sb3_evaluation import Evaluation

    torch.set_num_threads(1)
    options = read_options(["--config", f"{name}-minatar-breakout", "--game", game, *words])
    num_envs = options.num_envs_per_actor
    training, evaluation = (
        environments(game, num_envs, first, options.env.max_steps) for first in (1_000 * seed, 1_000_000 + 1_000 * seed)
    )
    agent = AGENTS[name](options, training, policy_of(options), seed)
    rollout = num_envs * getattr(options.agent, "unroll_length", 1)
    steps = options.steps - options.steps % rollout  # whole rollouts, in which PPO's learning rate falls to 0
    callback = Evaluation(path.stem, evaluation, options.evaluator.episodes, steps, deterministic=name == "dqn")
    agent.learn(steps, callback=callback)
    callback.write(path)


def main() -> None:
    """Train each seed of a game and write its evaluations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, words = parser.parse_known_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        path = options.output / f"stable-baselines3-{options.agent}-{options.game}-seed{seed}.csv"
        train(options.agent, options.game, seed, words, path)


if __name__ == "__main__":
    main()
