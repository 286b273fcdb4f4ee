"""Train stable-baselines3's PPO on MinAtar with the options of our rows: python -m benchmarks.ppo_study breakout.

The games are the package's own gymnasium environments; network, rollouts, minibatches and the falling learning rate are
those of the row ppo-minatar-<game>. Values are not clipped, which is stable-baselines3's default: its clip has no
gradient outside, while that of the row takes the larger of two losses. Each run writes its evaluations, mean raw
returns of episodes that sample the policy, as a CSV that `utils.plot` reads. Needs stable-baselines3 (`make bench`
installs it).
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.training import RESULTS
from core.envs.minatar import GAMES
from utils.config.command_line import read_options


def train(game: str, seed: int, steps: int, path: Path) -> None:
    """Train one run and write its evaluations."""
    import torch
    from minatar.gym import register_envs
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from torch import nn

    from benchmarks.sb3_evaluation import Evaluation

    torch.set_num_threads(1)
    register_envs()
    options = read_options(["--config", f"ppo-minatar-{game}"])
    agent, model, num_envs = options.agent, options.model, options.num_envs_per_actor

    class Features(BaseFeaturesExtractor):
        """Convolution and hidden layer of the row's network."""

        def __init__(self, space: Any):
            super().__init__(space, model.hidden)
            channels, planes = space.shape[2], model.planes
            convolution = nn.Sequential(nn.Conv2d(channels, planes, 3), nn.ReLU(), nn.Flatten())
            self.layers = nn.Sequential(convolution, nn.Linear(planes * 8 * 8, model.hidden), nn.ReLU())

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.layers(observation.permute(0, 3, 1, 2))

    game_id = f"MinAtar/{game.title().replace('_', '')}-v1"
    training, evaluation = (
        make_vec_env(game_id, num_envs, seed=first, env_kwargs={"max_episode_steps": options.env.max_steps})
        for first in (1_000 * seed, 1_000_000 + 1_000 * seed)
    )
    steps -= steps % (num_envs * agent.unroll_length)  # whole rollouts, in which the learning rate falls to 0
    callback = Evaluation(
        f"stable-baselines3-{game}-seed{seed}", evaluation, options.evaluator.episodes, steps, deterministic=False
    )
    PPO(
        "CnnPolicy",
        training,
        learning_rate=lambda remaining: agent.learning_rate * remaining,
        n_steps=agent.unroll_length,
        batch_size=num_envs * agent.unroll_length // agent.minibatches,
        n_epochs=agent.epochs,
        gamma=agent.gamma,
        gae_lambda=agent.gae_lambda,
        clip_range=agent.clip_epsilon,
        ent_coef=agent.entropy_cost,
        vf_coef=agent.baseline_cost / 2,  # theirs leaves out the half of the square
        max_grad_norm=agent.clip_norm,
        policy_kwargs={
            "features_extractor_class": Features,
            "net_arch": [],
            "normalize_images": False,
            "optimizer_kwargs": {"eps": agent.optimizer_eps},
        },
        seed=seed,
        device="cpu",
    ).learn(steps, callback=callback)
    callback.write(path)


def main() -> None:
    """Train each seed of a game and write its evaluations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        name = f"stable-baselines3-ppo-minatar-{options.game}-seed{seed}.csv"
        train(options.game, seed, options.steps, options.output / name)


if __name__ == "__main__":
    main()
