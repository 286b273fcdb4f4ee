"""Every agent whose updates can be prepared, on small networks, and the device replay of a full memory for it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from core.agents.d4pg import D4PG
from core.agents.ddpg import DDPG
from core.agents.dqn import DQN
from core.agents.iqn import IQN
from core.agents.r2d2 import R2D2
from core.agents.rainbow import Rainbow
from core.agents.sac import SAC
from core.agents.td3 import TD3
from core.learning.optimizer import Optimizer
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.models.dqn import DQNMLP, RainbowMLP
from core.models.iqn import IQNMLP, ImplicitQuantileNetwork
from core.models.layers.spectral_norm import SpectralConv2d
from core.models.layers.torsos import VectorTorso
from core.models.policy_critic import D4PGMLP, DDPGMLP, SACMLP, TD3MLP
from core.models.r2d2 import R2D2MLP, R2D2Network
from core.ops.distributional import midpoints
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec
from tests.core.tapes import RandomPlay, small_layout

ENVS = 4
DISCRETE = EnvSpec("bytes", ArraySpec((2, 3), "uint8"), 4, Discrete(5), max_value=255.0)
CONTINUOUS = replace(DISCRETE, action=Continuous(np.full(3, -2, np.float32), np.full(3, 1, np.float32)))
SETTINGS = {"batch_size": 16, "n_step": 3, "learning_rate": 1e-3, "optimizer_eps": 1e-8, "target_update_period": 7}
MUNCHAUSEN = {"munchausen_alpha": 0.9, "double_q": False}
SEQUENCES = {"burn_in": 3, "unroll_length": 5, "sequence_period": 4, "n_step": 2}
CONTROL = {"critic_learning_rate": 2e-3}
NORMALIZED = {"hidden": (16, 12), "normalize_observations": True}


class SpectralTorso(VectorTorso):
    """A convolution as BTR's, whose estimate of its largest singular value moves at every forward in training."""

    def layers(self, spec: EnvSpec) -> nn.Sequential:
        return nn.Sequential(SpectralConv2d(4, 4, 3, padding=1), nn.Flatten(), nn.ReLU())


class NoisyR2D2(R2D2Network, torso=VectorTorso):
    """R2D2's network with noise on its head."""


class SpectralIQN(ImplicitQuantileNetwork, torso=SpectralTorso):
    """A small network of BTR's parts."""


NETWORKS = {
    DQNMLP: {"hidden": 16},
    RainbowMLP: {"hidden": 16},
    IQNMLP: {"hidden": 16, "noisy": True, "dueling": True},
    SpectralIQN: {"hidden": 16, "noisy": True, "dueling": True},
    R2D2MLP: {"hidden": 8, "lstm": 8},
    NoisyR2D2: {"hidden": 8, "lstm": 8, "noisy": True},
    DDPGMLP: NORMALIZED,
    D4PGMLP: {"hidden": (16, 12), "layer_norm": True},
    TD3MLP: NORMALIZED,
    SACMLP: NORMALIZED,
}
AGENTS = {
    "dqn": (DQN, DQNMLP, {}),
    "dqn, rmsprop": (
        DQN,
        DQNMLP,
        {"optimizer": "rmsprop", "lr_schedule": "linear", "lr_schedule_updates": 80, "clip_value": 0.1},
    ),
    "dqn, soft target": (
        DQN,
        DQNMLP,
        {"target_update_period": 1, "target_update_tau": 0.05, "loss": "squared", "weight_decay": 1e-3},
    ),
    "rainbow": (Rainbow, RainbowMLP, {}),
    "rainbow of quantiles": (
        Rainbow,
        RainbowMLP,
        {"distribution": "quantile", "lr_schedule": "step", "lr_schedule_updates": 30},
    ),
    "dqn, munchausen": (DQN, DQNMLP, MUNCHAUSEN),
    "quantiles, munchausen": (Rainbow, RainbowMLP, {**MUNCHAUSEN, "distribution": "quantile"}),
    "iqn": (IQN, IQNMLP, {"double_q": True}),
    "iqn, munchausen": (IQN, IQNMLP, MUNCHAUSEN),
    "btr": (IQN, SpectralIQN, {**MUNCHAUSEN, "clip_norm": 10.0}),
    "r2d2": (R2D2, R2D2MLP, SEQUENCES),
    "r2d2 with noise": (R2D2, NoisyR2D2, SEQUENCES),
    "ddpg": (DDPG, DDPGMLP, {**CONTROL, "lr_schedule": "linear", "lr_schedule_updates": 80, "clip_norm": 1.0}),
    "ddpg, soft target": (DDPG, DDPGMLP, {"target_update_tau": 0.05}),
    "d4pg": (D4PG, D4PGMLP, {**CONTROL, "v_min": -5.0, "v_max": 5.0}),
    "td3": (TD3, TD3MLP, {**CONTROL, "policy_update_period": 2, "target_update_period": 3, "target_update_tau": 1.0}),
    "sac": (SAC, SACMLP, {**CONTROL, "temperature": 0.2, "target_update_tau": 0.05}),
}


def make_agent(name: str, device: str = "cpu", seed: int = 3, **more):
    """Make an agent, including what is made on first use."""
    agent, model, settings = AGENTS[name]
    torch.manual_seed(seed)
    params = agent.Params(**{**SETTINGS, **settings, **more})
    spec = CONTINUOUS if agent.actions is Continuous else DISCRETE
    made = agent(params, spec, lambda: model(model.Params(**NETWORKS[model]), spec).to(device))
    made.init_learner()
    return made


def shared_memory(agent):
    return playing(agent)[0]


def playing(agent) -> tuple[PrioritizedMemory, Callable[[int], None]]:
    """Return a memory of 80 random steps in a ring of 64, and a function that appends more.

    Actions, extras and states are as this agent has them.
    """
    play, draw = RandomPlay(1, ENVS), np.random.default_rng(2)
    states = tuple(tuple(tensor.shape[1:]) for tensor in agent.initial_state(1))
    layout = small_layout(
        agent.spec,
        rows=64,
        chunk_length=agent.window.stride or 4,
        num_envs=ENVS,
        extras=agent.extras,
        with_priority=True,
        states=tuple(ArraySpec(shape, "float32") for shape in states),
    )
    memory = PrioritizedMemory(PrioritizedParams(100, beta_updates=60), layout, agent.window, 0)
    writer = memory.writer(0)
    append = writer.append

    def append_own(before, action, after, extras, state):
        if isinstance(agent.spec.action, Continuous):
            action = draw.uniform(-2, 1, (ENVS, 3)).astype(np.float32)
        own = {name: draw.integers(0, 2, ENVS).astype(spec.dtype) for name, spec in agent.extras.items()}
        return append(
            before, action, after, own, tuple(torch.from_numpy(draw.normal(size=(ENVS, *shape))) for shape in states)
        )

    def more(rows: int) -> None:
        play.play(writer, rows)

    writer.append = append_own
    more(80)
    return memory, more


def make_memory(agent, device: str = "cpu"):
    memory = shared_memory(agent)
    return memory.device_class(memory, torch.device(device))


def optimizers(agent) -> list[Optimizer]:
    return [part for part in vars(agent).values() if isinstance(part, Optimizer)]


def same_fractions(agent: IQN, size: int, number: int) -> torch.Tensor:
    """Replace `IQN._draw_fractions` by one that does not depend on the other windows of a batch."""
    return midpoints(number, torch.ones(())).expand(size, number)


def weights(agent) -> dict[str, torch.Tensor]:
    return {
        f"{kind} {name}": tensor.detach().cpu()
        for kind, model in (("online", agent.model), ("target", agent.target))
        for name, tensor in model.state_dict().items()
    }
