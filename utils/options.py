"""Say what a run does. Edit `RUN` and the rows of `CONFIGS`, then `python main.py`; the command line overrides both.

docs/options.md explains every option, as does `python main.py --help`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from core.agent import Agent
from core.common.settings import frozen_dataclass
from core.env import Env
from core.learning.precision import in_bf16, precision_on
from core.memory import Memory
from core.model import Model, ModelParams
from core.runtime.options import RunOptions
from core.specs import EnvSpec
from utils.factory import AgentsDict, EnvsDict, MemoriesDict, ModelsDict

PROJECT = str(Path(__file__).resolve().parent.parent)

# fmt: off
# The lines to edit. A line that is not None overrides the row, which may set num_envs_per_actor and when to stop.
RUN: dict[str, Any] = {
    "config": "dqn-pong-small",  # row of CONFIGS, by name or number
    "mode": 1,                   # 1 trains and 2 tests
    "machine": "local",          # first part of the run's signature
    "timestamp": None,           # second part; if None, now, or in mode 2 that of the newest run
    "seed": 1,
    "engine": "local",           # local, inline or ray
    "num_actors": 1,
    "num_envs_per_actor": None,  # 0 tries numbers out
    "num_learners": 1,
    "device": "auto",            # of the learner: cpu, cuda, cuda:1, auto
    "resume": None,              # signature of the run to continue, or newest
    "model_file": None,          # weights to start from (mode 1) or to test (mode 2)
    "render": False,             # show the games in a window (mode 2)
    "record": False,             # write the games to an mp4 file (mode 2)
    "profile": False,            # report where actors and learner spend their time
    "profile_trace": 0,          # learner updates that torch.profiler records
    "episodes": 30,              # episodes played (mode 2)
    "check": False,              # print what the row is, needs and costs, try a few steps and end
    "steps": None,               # agent steps after which the run stops
    "updates": None,             # learner updates after which the run stops
    "seconds": None,             # seconds after which the run stops
    "target_score": None,        # mean return of an evaluation at which the run stops
}

# Pong for two CPU cores: pictures of 42x42 and a network that needs a seventh of the arithmetic. Here and in other rows
# of Atari one evaluated action of 1,000 is random, because a greedy rally can last up to the limit of a game.
SMALL_PONG = {"env_type": "atari", "game": "pong", "memory_type": "prioritized", "env.resolution": 42,
              "model.dueling": True, "agent.batch_size": 64, "agent.n_step": 3, "agent.learning_rate": 2e-4,
              "agent.optimizer_eps": 1e-8, "agent.target_update_period": 500, "agent.exploration": "linear-ladder",
              "agent.exploration_epsilon_steps": 50_000, "agent.evaluation_epsilon": 0.001, "memory.capacity": 150_000,
              "memory.alpha": 0.5, "memory.beta_updates": 200_000, "rate_limiter.min_replay_size": 10_000,
              "rate_limiter.samples_per_insert": 16.0, "learner.threads": 1, "evaluator.period": 480.0,
              "evaluator.episodes": 30}
# MinAtar for two CPU cores.
MINATAR = {"env_type": "minatar", "memory_type": "shared", "agent.n_step": 1, "agent.learning_rate": 2.5e-4,
           "agent.optimizer_eps": 1.5e-4, "agent.target_update_period": 1_000,
           "agent.exploration_epsilon_steps": 100_000, "agent.exploration_epsilon_end": 0.1, "memory.capacity": 100_000,
           "rate_limiter.min_replay_size": 5_000, "learner.compile": "auto", "learner.threads": 1,
           "learner.batches_per_sample": 8, "steps": 2_000_000}
DQN_MINATAR = {**MINATAR, "agent_type": "dqn", "model_type": "dqn-minatar"}

# A row has a name, five choices, and only the options in which it differs from the defaults beside the classes.
CONFIGS: list[dict[str, Any]] = [
    {"name": "dqn-pong-small", "agent_type": "dqn", "model_type": "dqn-small", **SMALL_PONG},
    {"name": "dqn-pong",
     "agent_type": "dqn", "env_type": "atari", "game": "pong", "memory_type": "prioritized", "model_type": "dqn-cnn",
     "agent.n_step": 5, "agent.learning_rate": 1e-4, "agent.optimizer_eps": 1e-8, "agent.target_update_period": 1_000,
     "agent.exploration": "linear-ladder", "agent.exploration_epsilon_steps": 50_000,
     "agent.evaluation_epsilon": 0.001, "memory.capacity": 400_000, "memory.alpha": 0.5,
     "rate_limiter.min_replay_size": 5_000, "evaluator.period": 900.0, "evaluator.episodes": 30},
    # Rainbow's settings, also of its target (32 k frames are 2,000 updates), without distribution and noise. Epsilon
    # falls over 250,000 agent steps as in Dopamine; the paper says 250,000 frames.
    {"name": "dqn-breakout",
     "agent_type": "dqn", "env_type": "atari", "game": "breakout", "memory_type": "prioritized",
     "model_type": "dqn-cnn", "model.dueling": True, "agent.n_step": 3, "agent.learning_rate": 6.25e-5,
     "agent.target_update_period": 2_000, "agent.evaluation_epsilon": 0.001, "memory.capacity": 1_000_000,
     "memory.alpha": 0.5, "memory.beta_updates": 12_500_000},
    {"name": "dqn-cartpole",
     "agent_type": "dqn", "env_type": "gym", "game": "CartPole-v1", "memory_type": "shared", "model_type": "dqn-mlp",
     "agent.learning_rate": 1e-3, "agent.optimizer_eps": 1e-8, "agent.batch_size": 64,
     "agent.target_update_period": 200, "agent.exploration_epsilon_steps": 10_000, "memory.capacity": 50_000,
     "rate_limiter.min_replay_size": 1_000, "learner.threads": 1, "learner.batches_per_sample": 8,
     "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 200_000},
    {"name": "dqn-tictactoe",
     "agent_type": "dqn", "env_type": "tictactoe", "game": "tictactoe", "memory_type": "shared",
     "model_type": "dqn-mlp", "agent.learning_rate": 1e-3, "agent.optimizer_eps": 1e-8, "agent.batch_size": 64,
     "agent.target_update_period": 200, "agent.exploration_epsilon_steps": 10_000, "memory.capacity": 50_000,
     "rate_limiter.min_replay_size": 1_000, "learner.threads": 1, "evaluator.period": 30.0, "evaluator.episodes": 500,
     "steps": 100_000},
    {"name": "dqn-minatar-breakout", "game": "breakout", **DQN_MINATAR, "steps": 1_000_000},
    # Nature DQN (Mnih et al. 2015), with Rainbow's Adam in place of its RMSProp. Its table says 10,000 updates, but its
    # code copies the target every 10,000 agent steps, which are 2,500 updates. Epsilon falls over the table's 1 M
    # frames (the code's are agent steps), and gradients are clipped at 10 as in dqn_zoo's Rainbow.
    {"name": "dqn-pong-uniform",
     "agent_type": "dqn", "env_type": "atari", "game": "pong", "memory_type": "shared", "model_type": "dqn-cnn",
     "agent.n_step": 1, "agent.double_q": False, "agent.learning_rate": 6.25e-5, "agent.target_update_period": 2_500,
     "agent.exploration_epsilon_end": 0.1, "agent.evaluation_epsilon": 0.05, "memory.capacity": 1_000_000,
     "rate_limiter.min_replay_size": 50_000},
]

# For one GPU and 16 cores: the replay, sampling and priorities are on the GPU, and one launch of a CUDA graph makes
# several updates (docs/results/gpu.md).
ON_GPU = {"env_type": "atari", "game": "pong", "num_envs_per_actor": 256, "actor.num_env_splits": 2,
          "actor.device": "auto", "actor.env_threads": 14, "actor.parameter_pull_period": 5_120,
          "evaluator.period": 300.0, "steps": 50_000_000}
REPLAY_ON_GPU = {"memory_type": "prioritized", "memory.capacity": 1_000_000, "rate_limiter.min_replay_size": 50_000,
                 "learner.replay_device": "learner"}
BATCHES_OF_256 = {"agent.batch_size": 256, "agent.learning_rate": 1.5e-4, "agent.target_update_period": 1_000,
                  "memory.alpha": 0.5, "memory.beta_updates": 1_562_500, "rate_limiter.error_buffer": 4_000,
                  "learner.updates_per_graph_launch": 8, "learner.publish_period": 40}
CONFIGS += [{"name": "dqn-pong-gpu", "agent_type": "dqn", "model_type": "dqn-cnn", **ON_GPU, **REPLAY_ON_GPU,
             **BATCHES_OF_256, "agent.n_step": 3, "agent.exploration_epsilon_steps": 250_000,
             "agent.evaluation_epsilon": 0.001}]

# Ape-X (1803.00933). Each second it makes 19 updates of 512 samples while its actors insert 12.5 k agent steps. All 18
# actions are offered, as in the paper. Its actors have one environment each, and pull parameters every 100 steps.
APEX = {"agent_type": "dqn", "env_type": "atari", "memory_type": "prioritized", "model_type": "dqn-cnn",
        "model.dueling": True, "agent.exploration": "ladder", "agent.n_step": 3, "agent.batch_size": 512,
        "agent.loss": "squared", "agent.optimizer": "rmsprop", "agent.learning_rate": 2.5e-4 / 4,
        "agent.optimizer_eps": 1.5e-7, "agent.rmsprop_decay": 0.95, "agent.clip_norm": 40.0,
        "agent.target_update_period": 2_500, "agent.evaluation_epsilon": 0.001, "memory.capacity": 2_000_000,
        "memory.alpha": 0.6, "memory.beta_start": 0.4, "memory.beta_end": 0.4, "actor.parameter_pull_period": 100,
        "rate_limiter.min_replay_size": 50_000, "rate_limiter.samples_per_insert": 0.8}
CONFIGS += [
    # For two CPU cores: 0.8 samples an agent step are too few for the agent steps that these make in hours. 16 rungs of
    # the ladder, DQN's 32 samples every four agent steps, and Pong's own 6 actions.
    {"name": "apex-pong", "game": "pong", **APEX, "agent.batch_size": 32, "memory.capacity": 400_000,
     "rate_limiter.min_replay_size": 20_000, "rate_limiter.samples_per_insert": 8.0, "num_envs_per_actor": 16},
    # An update takes 640 agent steps: weights of every tenth would be 3,200 frames of 8 environments old (paper: 400).
    {"name": "apex-breakout", "game": "breakout", **APEX, "env.full_action_space": True, "learner.publish_period": 1},
    {"name": "apex-seaquest", "game": "seaquest", **APEX, "env.full_action_space": True, "learner.publish_period": 1},
]

# Double DQN with GroupNorm and compressed frames, as the third of the replaced systems ran it for 200 M agent steps:
# with uniform and with prioritised replay.
GROUP_NORM = {"agent_type": "dqn", "env_type": "atari", "memory_type": "shared", "model_type": "dqn-cnn",
              "model.norm": "group", "agent.batch_size": 256, "agent.n_step": 1, "agent.learning_rate": 6.25e-5,
              "agent.weight_decay": 5e-5, "agent.target_update_period": 10_000, "agent.exploration_epsilon_end": 0.1,
              "agent.evaluation_epsilon": 0.001, "agent.exploration_epsilon_steps": 4_000_000,
              "memory.capacity": 1_000_000, "replay.frame_compression": "lz4",
              "rate_limiter.min_replay_size": 100_000, "steps": 200_000_000}
PRIORITIZED = {"memory_type": "prioritized", "memory.alpha": 0.5, "memory.beta_updates": 6_250_000,
               "agent.learning_rate": 1.5e-5}
CONFIGS += [
    {"name": "ddqn-zaxxon", "game": "zaxxon", **GROUP_NORM},
    {"name": "prior-ddqn-zaxxon", "game": "zaxxon", **GROUP_NORM, **PRIORITIZED},
    {"name": "ddqn-asterix", "game": "asterix", **GROUP_NORM},
    {"name": "prior-ddqn-asterix", "game": "asterix", **GROUP_NORM, **PRIORITIZED},
    {"name": "ddqn-wizard_of_wor", "game": "wizard_of_wor", **GROUP_NORM},
    {"name": "prior-ddqn-wizard_of_wor", "game": "wizard_of_wor", **GROUP_NORM, **PRIORITIZED},
    # For two CPU cores: batches, learning rate and target of dqn-pong, and periods of a run of a million agent steps.
    {"name": "prior-ddqn-pong", "game": "pong", **GROUP_NORM, **PRIORITIZED, "agent.batch_size": 32,
     "agent.learning_rate": 1e-4, "agent.target_update_period": 1_000, "agent.exploration_epsilon_end": 0.01,
     "agent.exploration_epsilon_steps": 100_000, "memory.capacity": 400_000, "memory.beta_updates": 250_000,
     "rate_limiter.min_replay_size": 10_000, "steps": 5_000_000},
]

# Rainbow (1710.02298). Evaluations have an epsilon of 0.001 on Atari, and no noise. The paper names no limit of the
# gradient's norm; 10 is that of dqn_zoo. The dueling head divides the torso's gradient by the root of 2, as its paper
# says and other code does not. The noise begins at the paper's sigma of 0.5. Its footnote advises 0.1 for noise drawn
# on a CPU, which dqn_zoo, Dopamine's full Rainbow and Kaixhin/Rainbow have everywhere.
RAINBOW = {"agent_type": "rainbow", "memory_type": "prioritized", "memory.alpha": 0.5}
RAINBOW_ATARI = {**RAINBOW, "env_type": "atari", "model_type": "rainbow-cnn", "memory.capacity": 1_000_000,
                 "memory.beta_updates": 12_500_000, "agent.evaluation_epsilon": 0.001}
CONFIGS += [{"name": "rainbow-pong", "game": "pong", **RAINBOW_ATARI},
            {"name": "rainbow-breakout", "game": "breakout", **RAINBOW_ATARI},
            {"name": "rainbow-cartpole", "game": "CartPole-v1", **RAINBOW, "env_type": "gym",
             "model_type": "rainbow-mlp", "agent.v_min": 0.0, "agent.v_max": 100.0, "agent.batch_size": 64,
             "agent.learning_rate": 1e-3, "agent.optimizer_eps": 1e-8, "agent.target_update_period": 200,
             "memory.capacity": 50_000, "memory.beta_updates": 25_000, "rate_limiter.min_replay_size": 1_000,
             "learner.threads": 1, "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 200_000},
            {"name": "rainbow-pong-small", **SMALL_PONG, "agent_type": "rainbow", "model_type": "rainbow-small",
             "agent.exploration": "linear"}]
# What each of Rainbow's six parts is worth, on MinAtar in 60,000 agent steps. The atoms span the paper's -10 to 10.
# Atoms from 0 to 20 begin at a value of 10, from which Rainbow never learnt to dive in Seaquest.
ABLATION = {"env_type": "minatar", "game": "breakout", "agent_type": "rainbow", "model_type": "rainbow-minatar",
            "agent.n_step": 3, "agent.learning_rate": 2.5e-4, "agent.target_update_period": 1_000,
            "agent.exploration_epsilon_start": 0.0, "agent.exploration_epsilon_end": 0.0,
            "memory.capacity": 100_000, "rate_limiter.min_replay_size": 5_000, "learner.compile": "auto",
            "learner.threads": 1, "evaluator.period": 30.0, "evaluator.episodes": 30, "steps": 200_000}
# beta anneals over two million agent steps, so it ends at 0.46 (200,000 steps) or 0.42 (60,000 steps).
BY_PRIORITY = {"memory_type": "prioritized", "memory.alpha": 0.5, "memory.beta_updates": 500_000}
WITHOUT_ONE_PART = {**ABLATION, "steps": 60_000}
CONFIGS += [
    {"name": "rainbow-minatar-breakout", **ABLATION, **BY_PRIORITY},
    {"name": "rainbow-no-double-minatar-breakout", **WITHOUT_ONE_PART, **BY_PRIORITY, "agent.double_q": False},
    {"name": "rainbow-no-dueling-minatar-breakout", **WITHOUT_ONE_PART, **BY_PRIORITY, "model.dueling": False},
    {"name": "rainbow-no-noisy-minatar-breakout", **WITHOUT_ONE_PART, **BY_PRIORITY, "model.noisy": False,
     "agent.exploration_epsilon_start": 1.0, "agent.exploration_epsilon_end": 0.01,
     "agent.exploration_epsilon_steps": 100_000},
    {"name": "rainbow-no-prioritized-minatar-breakout", **WITHOUT_ONE_PART, "memory_type": "shared"},
    {"name": "rainbow-no-nstep-minatar-breakout", **WITHOUT_ONE_PART, **BY_PRIORITY, "agent.n_step": 1},
    {"name": "rainbow-no-distributional-minatar-breakout", **WITHOUT_ONE_PART, **BY_PRIORITY, "agent_type": "dqn",
     "model_type": "dqn-minatar", "model.dueling": True, "model.noisy": True},
    {"name": "rainbow-quantile-minatar-breakout", **WITHOUT_ONE_PART, **BY_PRIORITY,
     "agent.distribution": "quantile"},
]

# The published curves of Atari's value agents: Nature DQN with its RMSProp, what was added to it one at a time, and the
# distributions without the other parts of Rainbow. Double DQN is the tuned one (1509.06461). The code of Nature DQN
# copies the target every 10,000 agent steps (2,500 updates), tuned double DQN every 30,000, and lets epsilon fall over
# 1 M agent steps (its table says frames). Of these only dueling DQN clips the norm of its gradient. Their code adds
# RMSProp's epsilon of 0.01 to squares of gradients that are summed over a batch. The losses here are means, so it is
# 0.01 / 32^2, and with the smaller rate of prioritized replay a 16th of that, both as in dqn_zoo. The last layer of
# tuned double DQN has one bias for all actions there, and one each here.
NATURE = {"agent_type": "dqn", "env_type": "atari", "game": "breakout", "memory_type": "shared",
          "model_type": "dqn-cnn",
          "agent.n_step": 1, "agent.double_q": False, "agent.optimizer": "rmsprop", "agent.learning_rate": 2.5e-4,
          "agent.optimizer_eps": 0.01 / 32**2, "agent.rmsprop_decay": 0.95, "agent.clip_norm": 0.0,
          "agent.exploration_epsilon_end": 0.1, "agent.exploration_epsilon_steps": 1_000_000,
          "agent.evaluation_epsilon": 0.05, "memory.capacity": 1_000_000,
          "rate_limiter.min_replay_size": 50_000, "steps": 50_000_000}
DOUBLE = {**NATURE, "agent.double_q": True, "agent.target_update_period": 7_500, "agent.exploration_epsilon_end": 0.01,
          "agent.evaluation_epsilon": 0.001}
DUELING = {"model.dueling": True, "agent.learning_rate": 6.25e-5, "agent.clip_norm": 10.0}
PROPORTIONAL = {"memory_type": "prioritized", "memory.alpha": 0.6, "memory.beta_updates": 12_500_000,
                "agent.learning_rate": 2.5e-4 / 4, "agent.optimizer_eps": 0.01 / 32**2 / 16}
# C51 (1707.06887), QR-DQN (1710.10044) and IQN (1806.06923): Adam, one step, uniform replay, plain heads. The settings
# are those of Dopamine's c51_icml.gin and implicit_quantile_icml.gin (github.com/google/dopamine), which follow the
# papers. Those of its implicit_quantile.gin are in machado-iqn-breakout. IQN's paper compares up to 64 fractions, which
# Dopamine draws. Dopamine's convolutions pad their pictures (7,744 features); those here are the papers' (3,136), with
# the first weights of dqn_zoo.
PLAIN_DISTRIBUTION = {"env_type": "atari", "game": "breakout", "memory_type": "shared", "agent.n_step": 1,
                      "agent.double_q": False, "agent.optimizer_eps": 0.01 / 32, "agent.target_update_period": 2_500,
                      "agent.clip_norm": 0.0, "agent.exploration_epsilon_start": 1.0,
                      "agent.exploration_epsilon_end": 0.01, "agent.exploration_epsilon_steps": 1_000_000,
                      "agent.evaluation_epsilon": 0.001, "memory.capacity": 1_000_000,
                      "rate_limiter.min_replay_size": 50_000, "steps": 50_000_000}
ATOMS = {**PLAIN_DISTRIBUTION, "agent_type": "rainbow", "model_type": "rainbow-cnn", "model.noisy": False,
         "model.dueling": False}
QUANTILES = {"agent.distribution": "quantile", "model.atoms": 200, "agent.learning_rate": 5e-5}
IQN = {**PLAIN_DISTRIBUTION, "agent_type": "iqn", "model_type": "iqn-cnn", "agent.quantiles": 64,
       "agent.target_quantiles": 64}
# Munchausen (2007.14430) with its paper's Adam. Replay, pace and environment of M_DQN and M_IQN are those of NATURE
# and IQN, with which they are compared. The paper's code (github.com/google-research/google-research, munchausen_rl)
# differs in them: sticky actions, no lives, 20,000 steps before the first update, 2,000 updates between those of the
# target.
MUNCHAUSEN = {"agent.munchausen_alpha": 0.9, "agent.munchausen_temperature": 0.03, "agent.munchausen_clip": -1.0,
              "agent.double_q": False}
M_IQN = {**IQN, **MUNCHAUSEN, "agent.exploration_epsilon_steps": 250_000}
M_DQN = {**NATURE, **MUNCHAUSEN, "agent.optimizer": "adam", "agent.learning_rate": 5e-5,
         "agent.optimizer_eps": 0.01 / 32, "agent.exploration_epsilon_end": 0.01,
         "agent.exploration_epsilon_steps": 250_000, "agent.evaluation_epsilon": 0.001}
# Sticky actions, all 18 actions, no lives (1709.06009), with Dopamine's pace: 20,000 steps before the first update.
# Dopamine's environments offer a game's own actions (--env.full_action_space no). Dopamine's Rainbow has a constant
# beta of 0.5 and does not clip the norm of its gradient. Episodes last up to 108,000 frames as in Dopamine; the paper's
# end after 18,000.
MACHADO = {"env.protocol": "machado", "rate_limiter.min_replay_size": 20_000, "agent.target_update_period": 2_000,
           "agent.exploration_epsilon_end": 0.01, "agent.exploration_epsilon_steps": 250_000,
           "agent.evaluation_epsilon": 0.001}
CONFIGS += [
    {"name": "nature-breakout", **NATURE},
    {"name": "double-breakout", **DOUBLE},
    {"name": "dueling-breakout", **DOUBLE, **DUELING},
    {"name": "prioritized-breakout", **DOUBLE, **PROPORTIONAL},
    {"name": "c51-breakout", **ATOMS, "agent.learning_rate": 2.5e-4},
    {"name": "qr-breakout", **ATOMS, **QUANTILES},
    {"name": "iqn-breakout", **IQN},
    {"name": "iqn-pong", **IQN, "game": "pong"},
    {"name": "munchausen-dqn-breakout", **M_DQN},
    {"name": "munchausen-dqn-pong", **M_DQN, "game": "pong"},
    {"name": "munchausen-iqn-breakout", **M_IQN},
    {"name": "munchausen-iqn-pong", **M_IQN, "game": "pong"},
    {"name": "machado-dqn-breakout", **NATURE, **MACHADO, "agent.optimizer_eps": 1e-5},
    {"name": "machado-rainbow-breakout", **RAINBOW_ATARI, "game": "breakout", **MACHADO, "model.noisy": False,
     "model.dueling": False, "agent.double_q": False, "agent.exploration_epsilon_start": 1.0, "steps": 50_000_000},
    {"name": "machado-iqn-breakout", **IQN, **MACHADO, "agent.n_step": 3},
]
# BTR (2411.03820), with the settings of its authors' code (github.com/VIPTankz/BeyondTheRainbowICML, main.py and
# Agent.py of commit 0e08f8b2): 64 environments, one update of 256 for a step of all. Their code differs in these
# places. Epsilon falls from the first step on, exponentially with a time constant of 2 M agent steps, and is 0 in the
# second half of a run. All environments share a draw of noise (model.noise_per_env False). Munchausen's bonus is of the
# online network. A batch is drawn from the steps of one environment, and priorities are sums over quantiles of the mean
# |td|, where those of IQN here are losses. The dueling head sends the torso its whole gradient. The target's estimate
# of singular values moves in its forwards. Later commits draw a batch from all environments, and weigh it with a
# constant exponent of 0.2.
BTR = {"agent_type": "iqn", "memory_type": "prioritized", **MUNCHAUSEN, "model.dueling": True, "model.noisy": True,
       "model.acting_quantiles": 8, "agent.batch_size": 256, "agent.n_step": 3, "agent.gamma": 0.997,
       "agent.optimizer_eps": 0.005 / 256, "agent.clip_norm": 10.0, "agent.exploration_epsilon_end": 0.01,
       "agent.evaluation_epsilon": 0.01, "memory.alpha": 0.2, "num_envs_per_actor": 64,
       "rate_limiter.samples_per_insert": 4.0}
BTR_ATARI = {**BTR, "env_type": "atari", "model_type": "iqn-resnet", "agent.learning_rate": 1e-4,
             "agent.target_update_period": 500, "agent.exploration_epsilon_steps": 2_000_000,
             "memory.beta_updates": 778_125, "memory.capacity": 1_048_576, "rate_limiter.min_replay_size": 200_000,
             "env.repeat_action_probability": 0.25, "env.life_loss": False, "env.use_fire_reset": False,
             "steps": 50_000_000}
CONFIGS += [{"name": "btr-pong", "game": "pong", **BTR_ATARI},
            {"name": "btr-breakout", "game": "breakout", **BTR_ATARI}]
# BTR's parts at MinAtar's size: its losses, exploration and replay, and 64 environments with one update of 256 for a
# step of all. The torso is that of the other MinAtar rows: BTR's would halve 10x10 three times and enlarge 2x2 to its
# pool of 6x6. Their learning rate is 2.5e-4, where BTR's is 1e-4. Periods are those of a run of 2 M steps. The target
# follows every 3,200 steps, about as in other rows.
BTR_MINATAR = {**BTR, "env_type": "minatar", "model_type": "iqn-minatar", "agent.learning_rate": 2.5e-4,
               "agent.target_update_period": 50, "agent.exploration_epsilon_steps": 100_000,
               "memory.capacity": 100_000, "memory.beta_updates": 31_250, "rate_limiter.min_replay_size": 5_000,
               "learner.threads": 1, "evaluator.period": 30.0, "evaluator.episodes": 30, "steps": 2_000_000}
# BTR's parts on small Pong, with the network, the batches, learning rate, periods and pace of the other rows there.
# With one update of 256 for 64 steps, evaluations of a scratch run were still at -21 after a million steps, which are
# 16,000 updates.
BTR_SMALL_PONG = {**SMALL_PONG, **BTR, "model_type": "iqn-small", "agent.batch_size": 64,
                  "agent.optimizer_eps": 0.005 / 64, "agent.exploration": "linear", "num_envs_per_actor": 8,
                  "rate_limiter.samples_per_insert": 16.0}
# Ape-X's parts at MinAtar's size: its ladder over 16 environments, priorities, 3 steps and dueling network, with Adam
# and the 8 samples an agent step of the other rows. The learner is faster than the actors here, not slower.
APEX_MINATAR = {**DQN_MINATAR, "memory_type": "prioritized", "model.dueling": True, "agent.exploration": "ladder",
                "agent.n_step": 3, "memory.alpha": 0.6, "memory.beta_start": 0.4, "memory.beta_end": 0.4,
                "learner.batches_per_sample": 1, "num_envs_per_actor": 16}
# IQN and Munchausen at the size of two CPU cores have 8 fractions.
IQN_MINATAR = {**MINATAR, "agent_type": "iqn", "model_type": "iqn-minatar"}
IQN_SMALL_PONG = {**SMALL_PONG, "agent_type": "iqn", "model_type": "iqn-small"}
CONFIGS += [
    {"name": "apex-minatar-breakout", "game": "breakout", **APEX_MINATAR},
    {"name": "iqn-minatar-asterix", "game": "asterix", **IQN_MINATAR},
    {"name": "iqn-minatar-breakout", "game": "breakout", **IQN_MINATAR},
    {"name": "iqn-minatar-freeway", "game": "freeway", **IQN_MINATAR},
    {"name": "iqn-minatar-seaquest", "game": "seaquest", **IQN_MINATAR},
    {"name": "iqn-minatar-space_invaders", "game": "space_invaders", **IQN_MINATAR},
    {"name": "iqn-pong-small", **IQN_SMALL_PONG},
    {"name": "munchausen-dqn-minatar-asterix", "game": "asterix", **DQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-dqn-minatar-breakout", "game": "breakout", **DQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-dqn-minatar-freeway", "game": "freeway", **DQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-dqn-minatar-seaquest", "game": "seaquest", **DQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-dqn-minatar-space_invaders", "game": "space_invaders", **DQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-dqn-pong-small", "agent_type": "dqn", "model_type": "dqn-small", **SMALL_PONG, **MUNCHAUSEN},
    {"name": "munchausen-iqn-minatar-asterix", "game": "asterix", **IQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-iqn-minatar-breakout", "game": "breakout", **IQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-iqn-minatar-freeway", "game": "freeway", **IQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-iqn-minatar-seaquest", "game": "seaquest", **IQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-iqn-minatar-space_invaders", "game": "space_invaders", **IQN_MINATAR, **MUNCHAUSEN},
    {"name": "munchausen-iqn-pong-small", **IQN_SMALL_PONG, **MUNCHAUSEN},
    {"name": "btr-pong-small", **BTR_SMALL_PONG},
    {"name": "btr-minatar-asterix", "game": "asterix", **BTR_MINATAR},
    {"name": "btr-minatar-breakout", "game": "breakout", **BTR_MINATAR},
    {"name": "btr-minatar-freeway", "game": "freeway", **BTR_MINATAR},
    {"name": "btr-minatar-seaquest", "game": "seaquest", **BTR_MINATAR},
    {"name": "btr-minatar-space_invaders", "game": "space_invaders", **BTR_MINATAR},
]
CONFIGS += [{"name": "iqn-cartpole", "agent_type": "iqn", "env_type": "gym", "game": "CartPole-v1",
             "memory_type": "shared", "model_type": "iqn-mlp", "agent.n_step": 3, "agent.learning_rate": 1e-3,
             "agent.optimizer_eps": 1e-8, "agent.batch_size": 64, "agent.target_update_period": 200,
             "agent.exploration_epsilon_steps": 10_000, "memory.capacity": 50_000,
             "rate_limiter.min_replay_size": 1_000, "learner.threads": 1, "learner.batches_per_sample": 8,
             "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 200_000}]

# R2D2 (r1lyTjAqYX). It replays each observation about 0.8 times (its appendix), because its 256 actors outrun the
# learner. The actors of one machine do not, so samples_per_insert is 4 here. The paper replays 4 M steps and offers all
# 18 actions; its rewards are not clipped, and a lost life does not end an episode.
R2D2 = {"agent_type": "r2d2", "memory_type": "prioritized", "memory.alpha": 0.9, "memory.beta_start": 0.6,
        "memory.beta_end": 0.6}
R2D2_ATARI = {**R2D2, "env_type": "atari", "model_type": "r2d2-cnn", "env.reward_clipping": "none",
              "env.life_loss": False, "env.full_action_space": True, "agent.evaluation_epsilon": 0.001,
              "memory.capacity": 1_000_000,
              "actor.parameter_pull_period": 400, "rate_limiter.min_replay_size": 50_000,
              "rate_limiter.samples_per_insert": 4.0, "rate_limiter.error_buffer": 2_000}
# R2D2 for tasks of minutes: shorter sequences, and 8 to 16 samples an insert, because actors are slower than the
# learner here. An update learns from 640 steps, so a run has few updates. The target follows every 50, which is 32,000
# samples like the 1,000 updates of dqn-minatar-breakout.
R2D2_SMALL = {**R2D2, "agent.burn_in": 4, "agent.unroll_length": 20, "agent.sequence_period": 10, "agent.n_step": 3,
              "agent.batch_size": 32, "agent.learning_rate": 1e-3, "agent.optimizer_eps": 1e-5,
              "agent.target_update_period": 50, "memory.capacity": 50_000, "rate_limiter.min_replay_size": 2_000,
              "learner.threads": 1, "evaluator.steps": 10_000, "evaluator.episodes": 20}
# Pong for two CPU cores: four times the updates, each of a quarter of the steps.
R2D2_PONG = {**R2D2_SMALL, "env_type": "atari", "game": "pong", "env.reward_clipping": "none", "agent.burn_in": 10,
             "agent.n_step": 5, "agent.gamma": 0.99, "agent.batch_size": 8, "agent.optimizer_eps": 1e-8,
             "agent.target_update_period": 200, "agent.exploration": "linear-ladder",
             "agent.exploration_epsilon_steps": 50_000, "agent.evaluation_epsilon": 0.001,
             "rate_limiter.min_replay_size": 10_000, "evaluator.steps": 100_000, "evaluator.episodes": 30}
CONFIGS += [
    {"name": "r2d2-pong", **R2D2_PONG, "model_type": "r2d2-cnn", "agent.learning_rate": 1e-4,
     "memory.capacity": 400_000},
    {"name": "r2d2-breakout", "game": "breakout", **R2D2_ATARI},
    {"name": "r2d2-pong-small", **R2D2_PONG, "model_type": "r2d2-small", "env.resolution": 42,
     "agent.learning_rate": 2.5e-4, "memory.capacity": 150_000},
    # An episode is 10 steps: with a stride of 10 every stored state would be the first of an episode.
    {"name": "r2d2-recall", "game": "recall", **R2D2_SMALL, "env_type": "recall", "model_type": "r2d2-mlp",
     "agent.sequence_period": 7, "rate_limiter.samples_per_insert": 16.0, "evaluator.steps": 5_000,
     "evaluator.episodes": 50, "steps": 100_000},
    {"name": "r2d2-minatar-breakout", "game": "breakout", **R2D2_SMALL, "env_type": "minatar",
     "model_type": "r2d2-minatar", "agent.burn_in": 10, "memory.capacity": 100_000,
     "rate_limiter.min_replay_size": 5_000, "evaluator.steps": 15_000, "evaluator.episodes": 30, "steps": 300_000},
    {"name": "r2d2-cartpole", "game": "CartPole-v1", **R2D2_SMALL, "env_type": "gym", "model_type": "r2d2-mlp",
     "agent.target_update_period": 20, "steps": 200_000},
]

# V-trace: a queue gives every unroll once and sets the pace; a mixed memory replays some unrolls as well.
def replay(share: float, kind: str, **settings: Any) -> dict[str, Any]:
    """Return the options of a mixed memory: a queue and this share of replayed unrolls.

    The list has the format of the first of the replaced systems.
    """
    return {"memory_type": "mixed", "memory.replay_parameters": [
        {"type": "queue", "capacity": 16, "sample_ratio": 1 - share},
        {"type": kind, "capacity": 1_000, "sample_ratio": share, **settings}]}


QUEUE, CIRCULAR = {"memory_type": "queue", "memory.capacity": 16}, {"memory_type": "circular", "memory.capacity": 16}
IMPALA = {"agent_type": "impala", "rate_limiter.samples_per_insert": None, "rate_limiter.min_replay_size": 1,
          "learner.publish_period": 1, "num_envs_per_actor": 16}
IMPACT = {**IMPALA, **CIRCULAR, "agent_type": "impact"}
# On Atari, IMPALA has the settings of its paper (1802.01561, table G.1), which are defaults of agent and environment.
# Not the paper's are the initial weights (core/models/actor_critic.py) and RMSProp's mean square, which starts at 0.
# Actors pull parameters every 112 agent steps, 7 of each environment; those of the paper pull them before each unroll.
# The learning rate falls over 51 M agent steps; where half of a batch is replayed, these are twice as many updates.
# An actor has two threads of the emulator, and evaluations are rare, because both take their time from training.
ON_CORES = {"actor.env_threads": 2, "evaluator.period": 480.0, "evaluator.episodes": 30}
ON_ATARI = {"env_type": "atari", "model_type": "impala-cnn", "agent.lr_schedule": "linear",
            "agent.lr_schedule_updates": 80_000, **ON_CORES}
HALF_NEW = {**ON_ATARI, "agent.lr_schedule_updates": 160_000}
ADAM = {"agent.optimizer": "adam", "agent.learning_rate": 1e-3, "agent.optimizer_eps": 1e-5, "agent.batch_size": 16,
        "learner.threads": 1}
# Pong of 84x84 for two CPU cores: smaller batches make more updates, with the optimiser of impala-pong-small.
ON_PONG = {**ADAM, "env_type": "atari", "game": "pong", "model_type": "impala-cnn", "agent.learning_rate": 5e-4,
           "agent.batch_size": 8, "num_envs_per_actor": 8, **ON_CORES}
# MinAtar's runs are short: small batches make many updates of them. Of breakout, a trace of 0.8 and three times the
# entropy cost raised the score at 1 M steps from 6.9 to 11.7. The trace is that of MinAtar's own actor-critic
# (1903.03176), whose policy has the same trace.
ON_MINATAR = {**ADAM, "env_type": "minatar", "game": "breakout", "model_type": "minatar-ac", "agent.batch_size": 4,
              "learner.compile": "auto",
              "agent.trace_lambda": 0.8, "agent.entropy_cost": 0.03, "evaluator.period": 30.0,
              "evaluator.episodes": 30, "steps": 2_000_000}
ON_CARTPOLE = {**ADAM, "env_type": "gym", "game": "CartPole-v1", "model_type": "mlp-ac", "agent.unroll_length": 10,
               "agent.batch_size": 8, "agent.lr_schedule": "linear", "agent.lr_schedule_updates": None,
               "num_envs_per_actor": 8, "evaluator.period": 10.0,
               "evaluator.episodes": 20, "steps": 1_000_000}
# 50,000 unrolls of 20 steps: a reservoir of 1 M steps is half of a run on MinAtar, as in the paper (1811.11682). With
# 20,000 steps learning is much slower, also of LASER; all replays on MinAtar have one size (docs/results/minatar.md).
MILLION_STEPS = {"capacity": 50_000}
CLEAR = {**replay(0.5, "reservoir", **MILLION_STEPS), "agent.policy_cloning_cost": 0.01,
         "agent.value_cloning_cost": 0.005}
# The relevance compares pi with mu. LASER compares pi with the policy whose values V-trace learns (implied).
TRUST_REGION = {"agent.relevance": "kl", "agent.relevance_threshold": 0.3}
LASER = {**replay(0.75, "standard", **MILLION_STEPS), **TRUST_REGION}  # the paper: 15 M steps, 87.5 % of a batch
# The replaced system took the updates of the learning rate's schedule as lambda_batches. Here lambda is 1 after 40,000
# batches. On MinAtar it falls from 6 to 4.4 in a run, and that of attentive replay from 4 to 2.5, where the paper's
# reaches 1: these are the settings that were measured.
ELITE = {"sample_strategy": "elite_sampling", "lambda_batch_multiplier": 6, "alfa_annealing_factor": 2.0,
         "lambda_batches": 20_000}
ELITE_MINATAR = {**ELITE, "lambda_batches": 80_000}
CONFIGS += [
    {"name": "impala-pong-small", "game": "pong", **IMPALA, **QUEUE, **ADAM, "env_type": "atari",
     "model_type": "small-ac", "env.resolution": 42, "num_envs_per_actor": 8, "agent.batch_size": 4,
     "agent.learning_rate": 5e-4, "evaluator.period": 480.0, "evaluator.episodes": 30},
    {"name": "impala-pong", "game": "pong", **IMPALA, **QUEUE, **ON_ATARI},
    {"name": "impala-breakout", "game": "breakout", **IMPALA, **QUEUE, **ON_ATARI},
    {"name": "impala-breakout-elite", "game": "breakout", **IMPALA, **HALF_NEW, "model_type": "feature-ac",
     **replay(0.5, "custom", **ELITE, insert_strategy="elite_insertion", elite_sampling_strategy="strategy3")},
    {"name": "impala-breakout-attentive", "game": "breakout", **IMPALA, **HALF_NEW, "model_type": "feature-ac",
     **replay(0.5, "attentive")},
    {"name": "clear-pong", **IMPALA, **ON_PONG, **CLEAR},
    {"name": "clear-breakout", "game": "breakout", **IMPALA, **HALF_NEW, **CLEAR},
    {"name": "elite3-pong", **IMPALA, **ON_PONG,
     **replay(0.5, "custom", **ELITE, **MILLION_STEPS, elite_sampling_strategy="strategy3")},
    {"name": "laser-pong", **IMPALA, **ON_PONG, **LASER},
    # The paper's deep network is for a GPU.
    {"name": "laser-breakout", "game": "breakout", **IMPALA, **ON_ATARI, "model_type": "impala-resnet", **LASER,
     "agent.lr_schedule_updates": 320_000},
    {"name": "impact-pong", **IMPACT, **ON_PONG},
    {"name": "impact-cartpole", **IMPACT, **ON_CARTPOLE},
    {"name": "impala-cartpole", **IMPALA, **QUEUE, **ON_CARTPOLE},
    {"name": "impala-lstm-recall", "game": "recall", **IMPALA, **QUEUE, **ADAM, "env_type": "recall",
     "model_type": "mlp-ac", "model.lstm": 64, "evaluator.steps": 20_000, "evaluator.episodes": 50, "steps": 300_000},
    {"name": "impala-minatar-breakout", **IMPALA, **QUEUE, **ON_MINATAR},
    {"name": "replay-minatar-breakout", **IMPALA, **ON_MINATAR, **replay(0.5, "standard", **MILLION_STEPS)},
    {"name": "clear-minatar-breakout", **IMPALA, **ON_MINATAR, **CLEAR},
    {"name": "laser-minatar-breakout", **IMPALA, **ON_MINATAR, **LASER},
    {"name": "laser50-minatar-breakout", **IMPALA, **ON_MINATAR, **LASER, **replay(0.5, "standard", **MILLION_STEPS)},
    # One new unroll in each batch, as laser has; of four unrolls 90 % are none.
    {"name": "laser90-minatar-breakout", **IMPALA, **ON_MINATAR, **LASER, **replay(0.9, "standard", **MILLION_STEPS),
     "agent.batch_size": 10},
    {"name": "attentive-minatar-breakout", **IMPALA, **ON_MINATAR, **replay(0.5, "attentive", **MILLION_STEPS)},
    {"name": "elite1-minatar-breakout", **IMPALA, **ON_MINATAR,
     **replay(0.5, "custom", **ELITE_MINATAR, **MILLION_STEPS, elite_sampling_strategy="strategy1")},
    {"name": "elite2-minatar-breakout", **IMPALA, **ON_MINATAR,
     **replay(0.5, "custom", **ELITE_MINATAR, **MILLION_STEPS, elite_sampling_strategy="strategy2")},
    {"name": "elite3-minatar-breakout", **IMPALA, **ON_MINATAR,
     **replay(0.5, "custom", **ELITE_MINATAR, **MILLION_STEPS, elite_sampling_strategy="strategy3")},
    {"name": "elite4-minatar-breakout", **IMPALA, **ON_MINATAR,
     **replay(0.5, "custom", **ELITE_MINATAR, **MILLION_STEPS, elite_sampling_strategy="strategy4")},
    {"name": "insertion-minatar-breakout", **IMPALA, **ON_MINATAR,
     **replay(0.5, "custom", **MILLION_STEPS, insert_strategy="elite_insertion")},
]

# PPO with the settings of CleanRL's ppo.py, ppo_atari.py, ppo_atari_lstm.py and ppo_continuous_action.py
# (github.com/vwxyzjn/cleanrl, v1.0.0). An LSTM's first weights are not CleanRL's: forget biases of 1, not orthogonal.
# Learning rates fall to 0 over the steps of a run. memory_type queue in place of rollouts collects without waiting
# (asynchronous PPO).
PPO = {"agent_type": "ppo", "memory_type": "rollouts", "agent.lr_schedule": "linear",
       "rate_limiter.samples_per_insert": None, "rate_limiter.min_replay_size": 1, "learner.publish_period": 1}
PPO_CARTPOLE = {**PPO, "env_type": "gym", "game": "CartPole-v1", "model_type": "mlp-ac", "model.value_torso": True,
                "num_envs_per_actor": 4,
                "learner.threads": 1, "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 500_000}
PPO_ATARI = {**PPO, "env_type": "atari", "model_type": "nature-ac", "agent.clip_epsilon": 0.1,
             "num_envs_per_actor": 8, "steps": 10_000_000}
# MinAtar's networks are small and its games fast, so there are more environments and larger steps.
PPO_MINATAR = {**PPO, "env_type": "minatar", "model_type": "minatar-ac", "agent.clip_epsilon": 0.1,
               "agent.learning_rate": 1e-3,
               "num_envs_per_actor": 16, "learner.threads": 1, "evaluator.period": 30.0, "evaluator.episodes": 30,
               "steps": 5_000_000}
PPO_MUJOCO = {**PPO, "env_type": "gym", "model_type": "mlp-ac", "model.value_torso": True,
              "model.normalize_observations": True, "agent.normalize_rewards": True, "agent.unroll_length": 2_048,
              "agent.epochs": 10, "agent.minibatches": 32, "agent.entropy_cost": 0.0, "agent.learning_rate": 3e-4,
              "num_envs_per_actor": 1, "learner.compile": "auto", "learner.threads": 1, "evaluator.period": 60.0,
              "evaluator.episodes": 10, "steps": 1_000_000}
CONFIGS += [
    {"name": "ppo-cartpole", **PPO_CARTPOLE},
    # At the learning rate of the large network, an update changes the policy of the small one too little.
    {"name": "ppo-pong-small", "game": "pong", **PPO_ATARI, "model_type": "small-ac", "env.resolution": 42,
     "agent.learning_rate": 1e-3, "evaluator.steps": 400_000, "evaluator.episodes": 30, "steps": 4_000_000},
    {"name": "ppo-pong", "game": "pong", **PPO_ATARI},
    {"name": "ppo-breakout", "game": "breakout", **PPO_ATARI},
    {"name": "ppo-minatar-asterix", "game": "asterix", **PPO_MINATAR},
    {"name": "ppo-minatar-breakout", "game": "breakout", **PPO_MINATAR},
    {"name": "ppo-minatar-freeway", "game": "freeway", **PPO_MINATAR},
    {"name": "ppo-minatar-seaquest", "game": "seaquest", **PPO_MINATAR},
    {"name": "ppo-minatar-space_invaders", "game": "space_invaders", **PPO_MINATAR},
    {"name": "ppo-hopper", "game": "Hopper-v5", **PPO_MUJOCO},
    {"name": "ppo-halfcheetah", "game": "HalfCheetah-v5", **PPO_MUJOCO},
    {"name": "ppo-walker2d", "game": "Walker2d-v5", **PPO_MUJOCO},
    # Settings tuned for stable-baselines3 (rl-baselines3-zoo, hyperparams/ppo.yml, HalfCheetah-v3), which clips no
    # values and evaluates greedily. Its first weights are not orthogonal.
    {"name": "ppo-halfcheetah-zoo", "game": "HalfCheetah-v5", **PPO_MUJOCO, "model.hidden": 256,
     "model.activation": "relu", "model.log_std": -2.0, "agent.unroll_length": 512, "agent.minibatches": 8,
     "agent.epochs": 20, "agent.gamma": 0.98, "agent.gae_lambda": 0.92, "agent.learning_rate": 2.0633e-5,
     "agent.lr_schedule": "constant", "agent.entropy_cost": 0.000401762, "agent.clip_epsilon": 0.1,
     "agent.clip_norm": 0.8, "agent.baseline_cost": 0.58096, "agent.value_clipping": False,
     "agent.evaluation": "greedy", "evaluator.steps": 50_000},
    # Each joint has a choice of its own among 7 torques, 343 combinations in all (1901.10500).
    {"name": "ppo-hopper-multidiscrete", "game": "Hopper-v5", **PPO_MUJOCO,
     "env.wrappers": [["gymnasium.wrappers:DiscretizeAction", {"bins": 7, "multidiscrete": True}]]},
    {"name": "ppo-lstm-recall", "game": "recall", **PPO, "env_type": "recall", "model_type": "mlp-ac",
     "model.lstm": 64, "agent.unroll_length": 32, "agent.learning_rate": 1e-3,
     "num_envs_per_actor": 16, "learner.threads": 1, "evaluator.steps": 20_000,
     "evaluator.episodes": 50, "steps": 300_000},
    {"name": "ppo-tictactoe", "game": "tictactoe", **PPO, "env_type": "tictactoe", "model_type": "mlp-ac",
     "model.hidden": 128, "agent.unroll_length": 64, "agent.learning_rate": 1e-3,
     "num_envs_per_actor": 32, "learner.threads": 1, "evaluator.period": 30.0, "evaluator.episodes": 500,
     "steps": 500_000},
    # A picture and a vector, with the settings of rl-starter-files (github.com/lcswillems/rl-starter-files, train.py).
    # Its learning rate does not fall, and Adam's epsilon is 1e-8. Its value loss has no factor 0.5, and it does not
    # normalise advantages (github.com/lcswillems/torch-ac, ppo.py). Its network is smaller, reads symbols unscaled, and
    # is not told the direction. Needs pip install -e ".[minigrid]".
    {"name": "ppo-minigrid-doorkey", "game": "minigrid:MiniGrid-DoorKey-5x5-v0", **PPO, "env_type": "gym",
     "model_type": "minatar-ac", "env.max_byte": 10, "agent.learning_rate": 1e-3, "agent.minibatches": 8,
     "num_envs_per_actor": 16, "learner.threads": 1, "evaluator.period": 10.0,
     "evaluator.episodes": 20, "steps": 100_000},
    # A2C as PPO with one epoch of one minibatch (2205.09123, table 1), with stable-baselines3's defaults and the 8
    # environments of its zoo. There the learning rate is constant, the value loss has no factor 0.5, and RMSProp's
    # epsilon is added to the root.
    {"name": "a2c-cartpole", **PPO_CARTPOLE, "num_envs_per_actor": 8, "agent.unroll_length": 5,
     "agent.epochs": 1, "agent.minibatches": 1, "agent.gae_lambda": 1.0, "agent.normalize_advantages": False,
     "agent.value_clipping": False, "agent.optimizer": "rmsprop", "agent.optimizer_eps": 1e-5,
     "agent.learning_rate": 7e-4, "agent.entropy_cost": 0.0},
]

# PQN (2407.04811) with the settings of its authors' code (github.com/mttga/purejaxql, purejaxql/config/alg). Epsilon
# falls over a tenth of a run, on CartPole over a fifth. Runs on Atari have 10 M agent steps as in that code's commit
# 0436c80; since 2205ae5 they have 50 M, of which epsilon takes 5 M. Not that code's: pictures are in 0 .. 1 also on
# MinAtar (the code divides its planes by 255), and rewards of CartPole are not scaled by 0.1. After a lost life its
# environment plays up to 29 no-ops and FIRE, also in training; here the agent presses FIRE. Its MinAtar is gymnax's: no
# sticky actions, and episodes of most games end for good after 1,000 steps.
PQN = {"agent_type": "pqn", "memory_type": "rollouts", "model.norm": "layer", "num_envs_per_actor": 128,
       "rate_limiter.samples_per_insert": None, "rate_limiter.min_replay_size": 1, "learner.publish_period": 1}
PQN_ATARI = {**PQN, "env_type": "atari", "model_type": "dqn-cnn", "agent.evaluation_epsilon": 0.001,
             "steps": 10_000_000}
PQN_MINATAR = {**PQN, "env_type": "minatar", "model_type": "dqn-minatar", "agent.learning_rate": 5e-4,
               "agent.lr_schedule": "linear",
               "agent.exploration_epsilon_end": 0.05, "learner.compile": "auto", "learner.threads": 1,
               "evaluator.period": 30.0, "evaluator.episodes": 30, "steps": 10_000_000}
CONFIGS += [
    {"name": "pqn-cartpole", **PQN, "env_type": "gym", "game": "CartPole-v1", "model_type": "dqn-mlp",
     "model.hidden": 256, "agent.unroll_length": 64, "agent.epochs": 4, "agent.minibatches": 16,
     "agent.trace_lambda": 0.95, "agent.learning_rate": 1e-4, "agent.lr_schedule": "linear",
     "agent.exploration_epsilon_end": 0.2,
     "agent.exploration_epsilon_steps": 100_000, "num_envs_per_actor": 32, "learner.threads": 1,
     "evaluator.period": 10.0, "evaluator.episodes": 20, "steps": 500_000},
    # The network of dqn-pong-small.
    {"name": "pqn-pong-small", "game": "pong", **PQN_ATARI, "model_type": "dqn-small", "env.resolution": 42,
     "learner.threads": 1, "evaluator.period": 480.0, "evaluator.episodes": 30},
    {"name": "pqn-pong", "game": "pong", **PQN_ATARI},
    {"name": "pqn-breakout", "game": "breakout", **PQN_ATARI},
    {"name": "pqn-minatar-asterix", "game": "asterix", **PQN_MINATAR},
    {"name": "pqn-minatar-breakout", "game": "breakout", **PQN_MINATAR},
    {"name": "pqn-minatar-freeway", "game": "freeway", **PQN_MINATAR},
    {"name": "pqn-minatar-seaquest", "game": "seaquest", **PQN_MINATAR},
    {"name": "pqn-minatar-space_invaders", "game": "space_invaders", **PQN_MINATAR},
]

# Continuous control: an update of 256 samples for each agent step, as is usual.
CONTROL = {"env_type": "gym", "memory_type": "shared", "num_envs_per_actor": 1,
           "rate_limiter.samples_per_insert": 256.0, "rate_limiter.min_replay_size": 1_000,
           "rate_limiter.error_buffer": 40, "actor.chunk_length": 8, "actor.parameter_pull_period": 8,
           "learner.publish_period": 8, "learner.batches_per_sample": 16, "agent.random_exploration_steps": 1_000}
MUJOCO = {"memory.capacity": 1_000_000, "learner.compile": "auto", "evaluator.period": 60.0, "evaluator.episodes": 10,
          "steps": 1_000_000}
PENDULUM = {"game": "Pendulum-v1", "memory.capacity": 50_000, "evaluator.period": 10.0, "evaluator.episodes": 20,
            "steps": 15_000}
INVERTED_PENDULUM = {**MUJOCO, "game": "InvertedPendulum-v5", "steps": 30_000}
REACHER = {**MUJOCO, "game": "Reacher-v5", "steps": 20_000}
HOPPER = {**MUJOCO, "game": "Hopper-v5", "agent.random_exploration_steps": 10_000,
          "rate_limiter.min_replay_size": 10_000}
HALFCHEETAH = {**MUJOCO, "game": "HalfCheetah-v5", "agent.random_exploration_steps": 10_000,
               "rate_limiter.min_replay_size": 10_000}
# DDPG and D4PG have the settings of their descendants. Those of the papers are, for DDPG, learning rates of 1e-4 and
# 1e-3, tau 1e-3 and OU noise; for D4PG, five steps, a learning rate of 1e-4, noise 0.3 and a copy to the target every
# 100 updates. Acme's D4PG has these, layer norm in the first layer, and gradients clipped at 40, those of an action at
# 1.
DDPG = {**CONTROL, "agent_type": "ddpg", "model_type": "ddpg-mlp"}
D4PG = {**CONTROL, "agent_type": "d4pg", "model_type": "d4pg-mlp", "agent.n_step": 3, "agent.learning_rate": 3e-4,
        "agent.critic_learning_rate": 3e-4, "agent.noise_scale": 0.1, "agent.target_update_period": 1,
        "agent.target_update_tau": 0.005}
FAST = {"agent.learning_rate": 1e-3, "agent.critic_learning_rate": 1e-3}
# TD3 and SAC have the learning rates of their papers (1e-3 and 3e-4). TD3's newer code (github.com/sfujim/TD3) has 3e-4
# and 25,000 random steps. Batches of 256 and two layers of 256 are those of SAC and of that code; TD3's paper has
# batches of 100 and layers of 400 and 300.
TD3 = {**CONTROL, "agent_type": "td3", "model_type": "td3-mlp"}
SAC = {**CONTROL, "agent_type": "sac", "model_type": "sac-mlp"}
CONFIGS += [
    {"name": "ddpg-pendulum", **DDPG, **PENDULUM},
    {"name": "ddpg-inverted-pendulum", **DDPG, **INVERTED_PENDULUM},
    {"name": "ddpg-reacher", **DDPG, **REACHER},
    {"name": "ddpg-hopper", **DDPG, **HOPPER},
    {"name": "ddpg-halfcheetah", **DDPG, **HALFCHEETAH},
    {"name": "td3-pendulum", **TD3, **PENDULUM, **FAST},
    {"name": "td3-halfcheetah", **TD3, **HALFCHEETAH},
    {"name": "sac-pendulum", **SAC, **PENDULUM, **FAST},
    {"name": "sac-halfcheetah", **SAC, **HALFCHEETAH},
    # A goal and a reward of 1 in each step near it, else 0. Random forces get around the corners if each is held for
    # five steps. Needs pip install -e ".[robotics]".
    {"name": "sac-point-maze", **SAC, **FAST, **PENDULUM, "game": "gymnasium_robotics:PointMaze_UMaze-v3",
     "env.action_repeat": 5, "learner.threads": 1, "steps": 10_000},
    # D4PG's atoms span the discounted returns: the smallest and largest reward of a step, times 1 / (1 - gamma) = 100.
    # Pendulum: the worst step costs pi^2 + 0.1 8^2 + 0.001 2^2 = 16.3.
    {"name": "d4pg-pendulum", **D4PG, **FAST, **PENDULUM, "agent.v_min": -1_628.0, "agent.v_max": 0.0},
    # InvertedPendulum: every step earns 1.
    {"name": "d4pg-inverted-pendulum", **D4PG, **INVERTED_PENDULUM, "agent.v_min": 0.0, "agent.v_max": 100.0},
    # Reacher: a step costs up to 0.4, which only near-random actions exceed.
    {"name": "d4pg-reacher", **D4PG, **REACHER, "agent.v_min": -40.0, "agent.v_max": 0.0},
    # Hopper: a step earns 1 for standing and up to 3 for speed.
    {"name": "d4pg-hopper", **D4PG, **HOPPER, "agent.v_min": -10.0, "agent.v_max": 400.0},
    # HalfCheetah: the best published returns are below 20 a step.
    {"name": "d4pg-halfcheetah", **D4PG, **HALFCHEETAH, "agent.v_min": -100.0, "agent.v_max": 2_000.0},
    {"name": "d4pg-walker-walk", **D4PG, **MUJOCO, "game": "dm_control/walker-walk-v0", "env.action_repeat": 2,
     "agent.v_min": 0.0, "agent.v_max": 200.0},
    # The environment of the old gym.
    {"name": "ddpg-pendulum-legacy", **DDPG, **PENDULUM, "env.legacy": "v26"},
]

# Other agents for one GPU and 16 cores. A chunk of R2D2 is 40 steps of each environment; IMPALA's actor fills a chunk
# while another chunk waits.
CONFIGS += [
    {"name": "rainbow-pong-gpu", **RAINBOW, "model_type": "rainbow-cnn", **ON_GPU, **REPLAY_ON_GPU, **BATCHES_OF_256,
     "agent.evaluation_epsilon": 0.001},
    {"name": "iqn-pong-gpu", "agent_type": "iqn", "model_type": "iqn-cnn", **ON_GPU, **REPLAY_ON_GPU, **BATCHES_OF_256,
     "model.dueling": True, "agent.n_step": 3, "agent.evaluation_epsilon": 0.001},
    {"name": "munchausen-iqn-pong-gpu", "agent_type": "iqn", "model_type": "iqn-cnn", **ON_GPU, **REPLAY_ON_GPU,
     **BATCHES_OF_256, **MUNCHAUSEN, "model.dueling": True, "agent.n_step": 3, "agent.evaluation_epsilon": 0.001},
    # The settings of btr-pong, with the newest weights at every other step of its 64 environments.
    {"name": "btr-pong-gpu", **ON_GPU, **REPLAY_ON_GPU, **BTR_ATARI, "actor.parameter_pull_period": 100},
    {"name": "r2d2-pong-gpu", **R2D2_ATARI, **ON_GPU, **REPLAY_ON_GPU, "rate_limiter.error_buffer": 16_000,
     "learner.updates_per_graph_launch": 2, "learner.publish_period": 4},
    {"name": "impala-pong-gpu", **IMPALA, **QUEUE, **ON_ATARI, **ON_GPU, "model_type": "impala-resnet",
     "num_envs_per_actor": 128, "memory.capacity": 144, "actor.parameter_pull_period": 2_560},
    # Actor and learner take turns, so there is one split. --learner.cuda_graph on captures the updates.
    {"name": "pqn-pong-gpu", **PQN_ATARI, **ON_GPU, "num_envs_per_actor": 128, "actor.num_env_splits": 1,
     "agent.exploration_epsilon_steps": 5_000_000},
]

# Pictures of a gymnasium environment, preprocessed like those of Atari; needs pip install -e ".[box2d]".
CONFIGS += [{"name": "dqn-carracing", "agent_type": "dqn", "env_type": "gym", "game": "CarRacing-v3",
             "memory_type": "prioritized", "model_type": "dqn-cnn", "env.kwargs": {"continuous": False},
             "env.action_repeat": 4, "env.resolution": 84, "env.grayscale": True, "env.frame_stack": 4,
             "model.dueling": True, "agent.n_step": 3, "agent.learning_rate": 1e-4, "agent.target_update_period": 1_000,
             "agent.exploration_epsilon_steps": 50_000, "memory.capacity": 100_000, "memory.alpha": 0.5,
             "rate_limiter.min_replay_size": 5_000, "steps": 500_000}]
# fmt: on


@frozen_dataclass
class Options(RunOptions):
    """The options of a run, with the classes that its row names."""

    root: str = PROJECT

    @property
    def agent_class(self) -> type[Agent]:
        return cast(type[Agent], AgentsDict[self.agent_type])

    @property
    def env_class(self) -> type[Env]:
        return cast(type[Env], EnvsDict[self.env_type])

    @property
    def memory_class(self) -> type[Memory]:
        return cast(type[Memory], MemoriesDict[self.memory_type])

    @property
    def model_class(self) -> type[Model]:
        return cast(type[Model], ModelsDict[self.model_type])

    def make_agent(self, spec: EnvSpec, device: str = "cpu", precision: str = "float32") -> Agent:
        make_model: Callable[[], Model] = partial(_make_model, self.model_type, self.model, spec, device, precision)
        params = self.agent if self.agent.batch_size else dataclasses.replace(self.agent, batch_size=self.batch_size)
        return self.agent_class(params, spec, make_model)


def _make_model(model_type: str, params: ModelParams, spec: EnvSpec, device: str, precision: str) -> Model:
    model: Model = ModelsDict[model_type](params, spec).to(device)
    return in_bf16(model) if precision_on(device, precision, spec) == "bf16" else model
