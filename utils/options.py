"""What a run does. Edit the lines of `Run` and the rows of `CONFIGS`, then `python main.py`; the command line overrides both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from core.agent import Agent
from core.common.settings import setting
from core.engines.ray.params import RayParams
from core.engines.supervisor import SupervisorParams
from core.evaluation.video_writer import VideoParams
from core.learning.precision import in_bf16
from core.model import Model
from core.runtime.rate_limiter import ClockParams
from core.single_processes.actor import ActorParams
from core.single_processes.evaluator import EvaluatorParams
from core.single_processes.learner import LearnerParams
from core.single_processes.logger import LoggerParams
from core.specs import EnvSpec
from core.trajectory.frame_compression import StorageParams
from utils.factory import AgentsDict, EnvsDict, MemoriesDict, ModelsDict

PROJECT = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Run:
    """The lines to edit. Those that are None here may be set by a row."""

    config: str = "dqn-pong-small"  # Row of `CONFIGS`, by name or number.
    mode: int = setting(1, choices=(1, 2))  # Mode 1 trains and mode 2 tests.
    machine: str = "local"  # First part of the run's signature, which names logs/<machine>_<timestamp>/.
    timestamp: str | None = None  # Second part of the signature. If None, now; in mode 2 that of the newest run of this row, game, agent
                                  # and model.
    seed: int = setting(1, low=0, high=2**63 - 1)  # Seed of all random numbers.
    engine: str = "local"  # `local` starts processes, `inline` is one reproducible process, `ray` uses a cluster.
    num_actors: int = setting(1, low=1, high=4_096)  # Number of processes that play.
    num_envs_per_actor: int | None = setting(None, low=0, high=65_536)  # Environments that an actor steps together. 0 tries numbers out;
                                                                        # None is the row's, or 8.
    num_learners: int = setting(1, low=1, high=256)  # Number of processes that learn, each with a batch and a memory of its own.
    device: str = "auto"  # Learner's device: cpu, cuda (a GPU for each learner), cuda:1; auto is cuda if there is a GPU.
    resume: str | None = None  # Signature of the run to continue; `newest` is that of this row, game, agent and model.
    model_file: str | None = None  # Path of the weights to start from (mode 1) or to test (mode 2).
    render: bool = False  # Show the games in a window (mode 2).
    record: bool = False  # Write the games to an mp4 file (mode 2); in mode 1 see evaluator.record_every.
    profile: bool = False  # Report where actors and learner spend their time, under profile/ and in a table at the end.
    profile_trace: int = setting(0, low=0, high=10_000)  # Learner updates that torch.profiler records; 0 records none.
    episodes: int = setting(30, low=1, high=1_000_000)  # Number of episodes played (mode 2).
    check: bool = False  # Print what this row is, needs and costs, try a few steps and end (mode 1).
    steps: int | None = setting(None, low=1, high=10**15)  # Agent steps after which the run stops; None sets no limit.
    updates: int | None = setting(None, low=1, high=10**15)  # Learner updates after which the run stops; None sets no limit.
    seconds: float | None = setting(None, above=0, high=1e9)  # Seconds after this start at which the run stops; a continued run does not
                                                              # keep it.
    target_score: float | None = setting(None, low=-1e12, high=1e12)  # Mean return of an evaluation at which the run stops; None sets no
                                                                      # limit.


# A row: its name, five choices, and only the settings in which it differs from the defaults beside the classes.
CONFIGS: list[dict[str, Any]] = [
    # Pong for two CPU cores: pictures of 42x42 and a network of a seventh of the arithmetic
    {"name": "dqn-pong-small",
     "agent_type": "dqn", "env_type": "atari", "game": "pong", "memory_type": "prioritized", "model_type": "dqn-small",
     "env.size": 42, "model.dueling": True, "agent.batch_size": 64, "agent.nstep": 3, "agent.lr": 2e-4, "agent.eps": 1e-8,
     "agent.target_update": 500, "agent.exploration": "linear-ladder", "agent.epsilon_steps": 50_000, "memory.capacity": 150_000,
     "memory.alpha": 0.5, "memory.beta_updates": 200_000, "clock.learn_start": 10_000, "clock.samples_per_insert": 16.0,
     "learner.threads": 1, "evaluator.period": 480.0, "evaluator.episodes": 30},
    {"name": "dqn-pong",
     "agent_type": "dqn", "env_type": "atari", "game": "pong", "memory_type": "prioritized", "model_type": "dqn-cnn",
     "agent.nstep": 5, "agent.lr": 1e-4, "agent.eps": 1e-8, "agent.target_update": 1_000, "agent.exploration": "linear-ladder",
     "agent.epsilon_steps": 50_000, "memory.capacity": 400_000, "memory.alpha": 0.5, "clock.learn_start": 5_000,
     "evaluator.period": 900.0, "evaluator.episodes": 30},
    {"name": "dqn-breakout",
     "agent_type": "dqn", "env_type": "atari", "game": "breakout", "memory_type": "prioritized", "model_type": "dqn-cnn",
     "model.dueling": True, "agent.nstep": 3, "agent.lr": 6.25e-5, "agent.target_update": 8_000, "memory.capacity": 1_000_000},
    {"name": "dqn-cartpole",
     "agent_type": "dqn", "env_type": "gym", "game": "CartPole-v1", "memory_type": "shared", "model_type": "dqn-mlp",
     "agent.lr": 1e-3, "agent.eps": 1e-8, "agent.batch_size": 64, "agent.target_update": 200, "agent.epsilon_steps": 10_000,
     "memory.capacity": 50_000, "clock.learn_start": 1_000, "learner.threads": 1, "evaluator.period": 10.0, "evaluator.episodes": 20,
     "steps": 200_000},
    {"name": "dqn-minatar-breakout",
     "agent_type": "dqn", "env_type": "minatar", "game": "breakout", "memory_type": "shared", "model_type": "dqn-minatar",
     "agent.nstep": 1, "agent.lr": 2.5e-4, "agent.target_update": 1_000, "agent.epsilon_steps": 100_000, "agent.epsilon_end": 0.1,
     "memory.capacity": 100_000, "clock.learn_start": 5_000, "learner.threads": 1, "steps": 1_000_000},
    {"name": "dqn-pong-uniform",  # Nature DQN (Mnih et al. 2015), with Rainbow's Adam in place of its RMSProp
     "agent_type": "dqn", "env_type": "atari", "game": "pong", "memory_type": "shared", "model_type": "dqn-cnn",
     "agent.nstep": 1, "agent.double": False, "agent.lr": 6.25e-5, "agent.target_update": 10_000, "agent.epsilon_end": 0.1,
     "agent.evaluation_epsilon": 0.05, "memory.capacity": 1_000_000, "clock.learn_start": 50_000},
]

# For one GPU and 16 cores: rows, draws and priorities live on the GPU, several updates are one replay of a graph (docs/results/gpu.md)
ON_GPU = {"env_type": "atari", "game": "pong", "num_envs_per_actor": 256, "actor.groups": 2, "actor.device": "auto",
          "actor.env_threads": 14, "actor.refresh_period": 5_120, "learner.precision": "auto", "evaluator.period": 300.0,
          "steps": 50_000_000}
RESIDENT = {"memory_type": "prioritized", "memory.capacity": 1_000_000, "clock.learn_start": 50_000, "learner.memory_device": "learner"}
BATCHES_OF_256 = {"agent.batch_size": 256, "agent.lr": 1.5e-4, "agent.target_update": 1_000, "memory.alpha": 0.5,
                  "memory.beta_updates": 1_562_500, "clock.tolerance": 4_000, "learner.updates_per_replay": 8, "learner.publish_period": 40}
CONFIGS += [{"name": "dqn-pong-gpu", "agent_type": "dqn", "model_type": "dqn-cnn", **ON_GPU, **RESIDENT, **BATCHES_OF_256,
             "agent.nstep": 3, "agent.epsilon_steps": 250_000}]

# Ape-X (1803.00933): 19 updates of 512 samples while its actors insert 12.5 k agent steps, each second
APEX = {"agent_type": "dqn", "env_type": "atari", "memory_type": "prioritized", "model_type": "dqn-cnn",
        "model.dueling": True, "agent.exploration": "ladder", "agent.nstep": 3, "agent.batch_size": 512, "agent.loss": "squared",
        "agent.optimizer": "rmsprop", "agent.lr": 2.5e-4 / 4, "agent.eps": 1.5e-7, "agent.rmsprop_decay": 0.95, "agent.clip_norm": 40.0,
        "agent.target_update": 2_500, "memory.capacity": 2_000_000, "memory.alpha": 0.6, "memory.beta_start": 0.4, "memory.beta_end": 0.4,
        "actor.refresh_period": 100, "clock.learn_start": 50_000, "clock.samples_per_insert": 0.8}
CONFIGS += [{"name": f"apex-{game}", "game": game, **APEX} for game in ("pong", "breakout", "seaquest")]

# Double DQN with GroupNorm on compressed history, as the third of the replaced systems ran it for 200 M agent steps: uniform, prioritised
GROUP_NORM = {"agent_type": "dqn", "env_type": "atari", "memory_type": "shared", "model_type": "dqn-cnn", "model.norm": "group",
              "agent.batch_size": 256, "agent.nstep": 1, "agent.lr": 6.25e-5, "agent.weight_decay": 5e-5, "agent.target_update": 10_000,
              "agent.epsilon_end": 0.1, "agent.epsilon_steps": 4_000_000, "memory.capacity": 1_000_000, "storage.codec": "lz4",
              "clock.learn_start": 100_000, "steps": 200_000_000}
PRIORITIZED = {"memory_type": "prioritized", "memory.alpha": 0.5, "memory.beta_updates": 6_250_000, "agent.lr": 1.5e-5}
CONFIGS += [{**GROUP_NORM, **settings, "name": f"{prefix}-{game}", "game": game} for game in ("zaxxon", "asterix", "wizard_of_wor")
            for prefix, settings in (("ddqn", {}), ("prior-ddqn", PRIORITIZED))]

# Rainbow (1710.02298)
RAINBOW = {"agent_type": "rainbow", "memory_type": "prioritized", "memory.alpha": 0.5}
CONFIGS += [{"name": f"rainbow-{game}", "game": game, **RAINBOW, "env_type": "atari", "model_type": "rainbow-cnn",
             "memory.capacity": 1_000_000, "memory.beta_updates": 12_500_000} for game in ("pong", "breakout")]
CONFIGS += [{"name": "rainbow-cartpole", "game": "CartPole-v1", **RAINBOW, "env_type": "gym", "model_type": "rainbow-mlp",
             "agent.v_min": 0.0, "agent.v_max": 100.0, "agent.batch_size": 64, "agent.lr": 1e-3, "agent.eps": 1e-8,
             "agent.target_update": 200, "memory.capacity": 50_000, "memory.beta_updates": 25_000, "clock.learn_start": 1_000,
             "learner.threads": 1, "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 200_000}]
# and, for 60,000 steps, what each of its six parts is worth, on MinAtar. A brick every dozen steps is worth 9 at gamma .99: atoms from 0
# to 20
ABLATION = {"env_type": "minatar", "game": "breakout", "agent.nstep": 3, "agent.lr": 2.5e-4, "agent.target_update": 1_000,
            "agent.epsilon_start": 0.0, "agent.epsilon_end": 0.0, "memory.capacity": 100_000, "clock.learn_start": 5_000,
            "learner.threads": 1, "evaluator.period": 30.0, "evaluator.episodes": 30, "steps": 200_000}
# beta's way is that of two million steps: in runs of 200,000 and 60,000 it comes to 0.46 and 0.42
BY_PRIORITY = {"memory_type": "prioritized", "memory.alpha": 0.5, "memory.beta_updates": 500_000}
RAINBOW_AGENT = {"agent_type": "rainbow", "model_type": "rainbow-minatar"}
C51 = {**RAINBOW_AGENT, "agent.v_min": 0.0, "agent.v_max": 20.0}
PART_LESS = {**ABLATION, "steps": 60_000}
CONFIGS += [
    {"name": "rainbow-minatar-breakout", **ABLATION, **BY_PRIORITY, **C51},
    {"name": "rainbow-no-double-minatar-breakout", **PART_LESS, **BY_PRIORITY, **C51, "agent.double": False},
    {"name": "rainbow-no-dueling-minatar-breakout", **PART_LESS, **BY_PRIORITY, **C51, "model.dueling": False},
    {"name": "rainbow-no-noisy-minatar-breakout", **PART_LESS, **BY_PRIORITY, **C51, "model.noisy": False,
     "agent.epsilon_start": 1.0, "agent.epsilon_end": 0.01, "agent.epsilon_steps": 100_000},
    {"name": "rainbow-no-prioritized-minatar-breakout", **PART_LESS, **C51, "memory_type": "shared"},
    {"name": "rainbow-no-nstep-minatar-breakout", **PART_LESS, **BY_PRIORITY, **C51, "agent.nstep": 1},
    {"name": "rainbow-no-distributional-minatar-breakout", **PART_LESS, **BY_PRIORITY, "agent_type": "dqn", "model_type": "dqn-minatar",
     "model.dueling": True, "model.noisy": True},
    {"name": "rainbow-quantile-minatar-breakout", **PART_LESS, **BY_PRIORITY, **RAINBOW_AGENT, "agent.distribution": "quantile"},
]

# R2D2 (r1lyTjAqYX): 5 updates of 64 sequences of 80 while its 256 actors make 260 steps each, each second: 0.4 samples an insert, since its
# actors outrun the learner. Those of one machine do not: 4. The paper replays 4 M steps; rewards are raw and a lost life ends nothing.
R2D2 = {"agent_type": "r2d2", "memory_type": "prioritized", "memory.alpha": 0.9, "memory.beta_start": 0.6, "memory.beta_end": 0.6}
R2D2_ATARI = {**R2D2, "env_type": "atari", "model_type": "r2d2-cnn", "env.reward_clipping": "none", "env.life_loss": False,
              "memory.capacity": 1_000_000, "actor.refresh_period": 400, "clock.learn_start": 50_000, "clock.samples_per_insert": 4.0,
              "clock.tolerance": 2_000}
# and for tasks of minutes: shorter sequences and 8 to 16 samples an insert, as actors are the slower side here. An update learns from
# 640 rows, so a run has few of them: the target follows every 50, which is 32,000 samples like dqn-minatar-breakout's 1,000 updates
R2D2_SMALL = {**R2D2, "agent.burn_in": 4, "agent.unroll_length": 20, "agent.stride": 10, "agent.nstep": 3, "agent.batch_size": 32,
              "agent.lr": 1e-3, "agent.eps": 1e-5, "agent.target_update": 50, "memory.capacity": 50_000, "clock.learn_start": 2_000,
              "learner.threads": 1, "evaluator.steps": 10_000, "evaluator.episodes": 20}
CONFIGS += [
    {"name": "r2d2-pong", "game": "pong", **R2D2_ATARI},
    {"name": "r2d2-breakout", "game": "breakout", **R2D2_ATARI},
    # an episode is 10 rows: with a stride of 10 every stored state would be an episode's first
    {"name": "r2d2-recall", "game": "recall", **R2D2_SMALL, "env_type": "recall", "model_type": "r2d2-mlp",
     "agent.stride": 7, "clock.samples_per_insert": 16.0, "evaluator.steps": 5_000, "evaluator.episodes": 50, "steps": 100_000},
    {"name": "r2d2-minatar-breakout", "game": "breakout", **R2D2_SMALL, "env_type": "minatar", "model_type": "r2d2-minatar",
     "agent.burn_in": 10, "memory.capacity": 100_000, "clock.learn_start": 5_000, "evaluator.steps": 15_000, "evaluator.episodes": 30,
     "steps": 300_000},
    {"name": "r2d2-cartpole", "game": "CartPole-v1", **R2D2_SMALL, "env_type": "gym", "model_type": "r2d2-mlp",
     "agent.target_update": 20, "steps": 200_000},
]

# V-trace: a queue gives every unroll once and sets the pace; a mixed memory replays some of them as well. The list of a mixed memory is
# written as the first of the replaced systems wrote it.
def replay(share: float, kind: str, **settings: Any) -> dict[str, Any]:
    """A mixed memory of a queue and this share of replayed unrolls."""
    return {"memory_type": "mixed", "memory.replay_parameters": [
        {"type": "queue", "capacity": 16, "sample_ratio": 1 - share},
        {"type": kind, "capacity": 1_000, "sample_ratio": share, **settings}]}


QUEUE, CIRCULAR = {"memory_type": "queue", "memory.capacity": 16}, {"memory_type": "circular", "memory.capacity": 16}
IMPALA = {"agent_type": "impala", "clock.samples_per_insert": None, "clock.learn_start": 1, "learner.publish_period": 1,
          "num_envs_per_actor": 16}
IMPACT = {**IMPALA, **CIRCULAR, "agent_type": "impact"}
ON_ATARI = {"env_type": "atari", "model_type": "impala-cnn", "agent.lr_schedule": "linear", "agent.lr_updates": 80_000}  # 51 M agent steps
HALF_NEW = {**ON_ATARI, "agent.lr_updates": 160_000}  # the same steps where half of what is learnt from was learnt from before
ADAM = {"agent.optimizer": "adam", "agent.lr": 1e-3, "agent.eps": 1e-5, "agent.batch_size": 16, "learner.threads": 1}
ON_MINATAR = {**ADAM, "env_type": "minatar", "game": "breakout", "model_type": "minatar-ac", "evaluator.period": 30.0,
              "evaluator.episodes": 30, "steps": 500_000}
ON_CARTPOLE = {**ADAM, "env_type": "gym", "game": "CartPole-v1", "model_type": "mlp-ac", "agent.unroll_length": 10,
               "agent.batch_size": 8, "agent.lr_schedule": "linear", "num_envs_per_actor": 8, "evaluator.period": 10.0,
               "evaluator.episodes": 20, "steps": 1_000_000}
CLEAR = {**replay(0.5, "reservoir"), "agent.policy_cloning_cost": 0.01, "agent.value_cloning_cost": 0.005}
LASER = {**replay(0.75, "standard"), "agent.relevance": "kl", "agent.relevance_threshold": 0.3}
ELITE = {"sample_strategy": "elite_sampling", "lambda_batch_multiplier": 6, "alfa_annealing_factor": 2.0, "lambda_batches": 20_000}
CONFIGS += [
    {"name": "impala-pong-small", "game": "pong", **IMPALA, **QUEUE, **ADAM, "env_type": "atari", "model_type": "small-ac", "env.size": 42,
     "num_envs_per_actor": 8, "agent.batch_size": 4, "agent.lr": 5e-4, "evaluator.period": 480.0, "evaluator.episodes": 30},
    {"name": "impala-pong", "game": "pong", **IMPALA, **QUEUE, **ON_ATARI},
    {"name": "impala-breakout", "game": "breakout", **IMPALA, **QUEUE, **ON_ATARI},
    {"name": "impala-breakout-elite", "game": "breakout", **IMPALA, **HALF_NEW, "model_type": "feature-ac",
     **replay(0.5, "custom", **ELITE, insert_strategy="elite_insertion", elite_sampling_strategy="strategy3")},
    {"name": "impala-breakout-attentive", "game": "breakout", **IMPALA, **HALF_NEW, "model_type": "feature-ac", **replay(0.5, "attentive")},
    {"name": "clear-breakout", "game": "breakout", **IMPALA, **HALF_NEW, **CLEAR},
    {"name": "laser-breakout", "game": "breakout", **IMPALA, **ON_ATARI, "model_type": "impala-resnet", **LASER,
     "agent.lr_updates": 320_000},
    {"name": "impact-pong", "game": "pong", **IMPACT, **HALF_NEW},
    {"name": "impact-cartpole", **IMPACT, **ON_CARTPOLE, "agent.lr_updates": 25_000},  # of its steps, each learnt from twice
    {"name": "impala-cartpole", **IMPALA, **QUEUE, **ON_CARTPOLE, "agent.lr_updates": 12_500},
    {"name": "impala-lstm-recall", "game": "recall", **IMPALA, **QUEUE, **ADAM, "env_type": "recall", "model_type": "mlp-ac",
     "model.lstm": 64, "evaluator.steps": 20_000, "evaluator.episodes": 50, "steps": 300_000},
    {"name": "impala-minatar-breakout", **IMPALA, **QUEUE, **ON_MINATAR},
    {"name": "replay-minatar-breakout", **IMPALA, **ON_MINATAR, **replay(0.5, "standard")},
    {"name": "clear-minatar-breakout", **IMPALA, **ON_MINATAR, **CLEAR},
    {"name": "laser-minatar-breakout", **IMPALA, **ON_MINATAR, **LASER},
    {"name": "attentive-minatar-breakout", **IMPALA, **ON_MINATAR, **replay(0.5, "attentive")},
    {"name": "elite1-minatar-breakout", **IMPALA, **ON_MINATAR, **replay(0.5, "custom", **ELITE, elite_sampling_strategy="strategy1")},
    {"name": "elite3-minatar-breakout", **IMPALA, **ON_MINATAR, **replay(0.5, "custom", **ELITE, elite_sampling_strategy="strategy3")},
]

# Continuous control: an update of 256 samples for each agent step, as is usual
CONTROL = {"env_type": "gym", "memory_type": "shared", "num_envs_per_actor": 1, "clock.samples_per_insert": 256.0,
           "clock.learn_start": 1_000, "clock.tolerance": 40, "actor.chunk_length": 8, "actor.refresh_period": 8,
           "learner.publish_period": 8, "learner.batches_per_draw": 16, "agent.random_steps": 1_000}
MUJOCO = {"memory.capacity": 1_000_000, "evaluator.period": 60.0, "evaluator.episodes": 10, "steps": 1_000_000}
TASKS: dict[str, dict[str, Any]] = {
    "pendulum": {"game": "Pendulum-v1", "memory.capacity": 50_000, "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 15_000},
    "inverted-pendulum": {**MUJOCO, "game": "InvertedPendulum-v5", "steps": 30_000},
    "reacher": {**MUJOCO, "game": "Reacher-v5", "steps": 20_000},
    "hopper": {**MUJOCO, "game": "Hopper-v5", "agent.random_steps": 10_000, "clock.learn_start": 10_000},
    "halfcheetah": {**MUJOCO, "game": "HalfCheetah-v5", "agent.random_steps": 10_000, "clock.learn_start": 10_000}}
# D4PG's atoms span the discounted returns: the least and the most that a step earns, times 1 / (1 - gamma) = 100. Pendulum: the worst
# step costs pi^2 + 0.1 8^2 + 0.001 2^2 = 16.3. InvertedPendulum: 1. Reacher: 0.4, which only near-random
# actions exceed. Hopper: 1 for standing and up to 3 for speed. HalfCheetah: the best published returns are below 20 a step.
RANGES = {"pendulum": (-1_628.0, 0.0), "inverted-pendulum": (0.0, 100.0), "reacher": (-40.0, 0.0), "hopper": (-10.0, 400.0),
          "halfcheetah": (-100.0, 2_000.0)}
# Settings of their descendants, the agents' defaults. The papers: DDPG rates of 1e-4 and 1e-3, tau 1e-3 and OU noise; D4PG five steps, a
# rate of 1e-4, noise 0.3, a copy every 100 updates
DDPG = {**CONTROL, "agent_type": "ddpg", "model_type": "ddpg-mlp"}
D4PG = {**CONTROL, "agent_type": "d4pg", "model_type": "d4pg-mlp", "agent.nstep": 3, "agent.lr": 3e-4, "agent.critic_lr": 3e-4,
        "agent.noise_scale": 0.1, "agent.target_update": 0.005}
FAST = {"agent.lr": 1e-3, "agent.critic_lr": 1e-3}
CONFIGS += [{"name": f"ddpg-{task}", **DDPG, **settings} for task, settings in TASKS.items()]
CONFIGS += [{"name": f"{agent}-{task}", **CONTROL, "agent_type": agent, "model_type": f"{agent}-mlp", **TASKS[task],
             **(FAST if task == "pendulum" else {})} for agent in ("td3", "sac") for task in ("pendulum", "halfcheetah")]
CONFIGS += [{"name": f"d4pg-{task}", **D4PG, **(FAST if task == "pendulum" else {}), **settings, "agent.v_min": RANGES[task][0],
             "agent.v_max": RANGES[task][1]} for task, settings in TASKS.items()]
CONFIGS += [{"name": "d4pg-walker-walk", **D4PG, **MUJOCO, "game": "dm_control/walker-walk-v0", "env.action_repeat": 2, "agent.v_min": 0.0,
             "agent.v_max": 200.0},
            {"name": "ddpg-pendulum-legacy", **DDPG, **TASKS["pendulum"], "env.legacy": "v26"}]  # the environment of the old gym

# What else is for one GPU and 16 cores. A chunk of R2D2's is 40 rows of each stream; IMPALA's actor fills one while another waits
CONFIGS += [
    {"name": "rainbow-pong-gpu", **RAINBOW, "model_type": "rainbow-cnn", **ON_GPU, **RESIDENT, **BATCHES_OF_256},
    {"name": "r2d2-pong-gpu", **R2D2_ATARI, **ON_GPU, **RESIDENT, "clock.tolerance": 16_000, "learner.updates_per_replay": 2,
     "learner.publish_period": 4},
    {"name": "impala-pong-gpu", **IMPALA, **QUEUE, **ON_ATARI, **ON_GPU, "model_type": "impala-resnet", "num_envs_per_actor": 128,
     "memory.capacity": 144, "actor.refresh_period": 2_560},
]

# Pictures of a gymnasium environment treated as Atari's are; needs pip install -e ".[box2d]"
CONFIGS += [{"name": "dqn-carracing", "agent_type": "dqn", "env_type": "gym", "game": "CarRacing-v3", "memory_type": "prioritized",
             "model_type": "dqn-cnn", "env.kwargs": {"continuous": False}, "env.action_repeat": 4, "env.size": 84, "env.grayscale": True,
             "env.frame_stack": 4, "model.dueling": True, "agent.nstep": 3, "agent.lr": 1e-4, "agent.target_update": 1_000,
             "agent.epsilon_steps": 50_000, "memory.capacity": 100_000, "memory.alpha": 0.5, "clock.learn_start": 5_000,
             "steps": 500_000}]


@dataclass(frozen=True)
class Options(Run):
    """Everything a run is told: names, numbers and Params only, so that it pickles; classes are looked up on use."""

    agent_type: str = ""  # Agent class: a name of utils/factory.py, or package.module:Class of your own.
    env_type: str = ""  # Environment class: a name of utils/factory.py, or package.module:Class of your own.
    game: str = ""  # Name of the game as the environment class knows it: pong, CartPole-v1.
    memory_type: str = ""  # Memory class: a name of utils/factory.py, or package.module:Class of your own.
    model_type: str = ""  # Model class: a name of utils/factory.py, or package.module:Class of your own.
    root: str = PROJECT  # Folder of models/ and logs/.
    num_envs_per_actor: int = setting(8, low=0, high=65_536)
    agent: Any = None  # Params of the agent class chosen.
    env: Any = None
    memory: Any = None
    model: Any = None
    storage: StorageParams = StorageParams()
    clock: ClockParams = ClockParams()
    actor: ActorParams = ActorParams()
    learner: LearnerParams = LearnerParams()
    evaluator: EvaluatorParams = EvaluatorParams()
    logger: LoggerParams = LoggerParams()
    video: VideoParams = VideoParams()
    supervisor: SupervisorParams = SupervisorParams()
    ray: RayParams = RayParams()

    # classes ----------------------------------------------------------------------------------------------------------
    @property
    def agent_class(self) -> Any:
        return AgentsDict[self.agent_type]

    @property
    def env_class(self) -> Any:
        return EnvsDict[self.env_type]

    @property
    def memory_class(self) -> Any:
        return MemoriesDict[self.memory_type]

    @property
    def model_class(self) -> Any:
        return ModelsDict[self.model_type]

    def make_agent(self, spec: EnvSpec, device: str = "cpu", precision: str = "float32") -> Agent:
        """An agent whose networks, once used, live on this device."""
        make_model: Callable[[], Model] = partial(_make_model, self.model_type, self.model, spec, device, precision)
        return self.agent_class(self.agent, spec, make_model)

    # files ------------------------------------------------------------------------------------------------------------
    @property
    def signature(self) -> str:
        """Names the run everywhere."""
        return f"{self.machine}_{self.timestamp}"

    @property
    def log_folder(self) -> Path:
        return Path(self.root) / "logs" / self.signature

    @property
    def model_path(self) -> Path:
        """The run's best model."""
        return Path(self.root) / "models" / f"{self.signature}.pth"

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.root) / "models" / f"{self.signature}_checkpoints"

    # as data ----------------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Every setting, nested as here, of plain values that JSON can carry."""
        return _plain(dataclasses.asdict(self))


def _make_model(model_type: str, params: Any, spec: EnvSpec, device: str, precision: str) -> Model:
    model = ModelsDict[model_type](params, spec).to(device)
    return in_bf16(model) if precision == "bf16" else model


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
