"""Agents for continuous actions on small networks, and batches for them."""

from dataclasses import replace

import numpy as np
import torch

from core.agents.base.continuous_control import ControlAgentParams
from core.agents.d4pg import D4PG, D4PGParams
from core.agents.ddpg import DDPG
from core.agents.sac import SAC, SACParams
from core.agents.td3 import TD3, TD3Params
from core.models.policy_critic import D4PGMLP, DDPGMLP, SACMLP, TD3MLP, ControlMLPParams, D4PGMLPParams
from core.specs import ArraySpec, Continuous, EnvSpec
from core.types import Batch, SampleIds, TimeStep, Window

KINDS = {
    "ddpg": (DDPG, ControlAgentParams(), DDPGMLP, ControlMLPParams(hidden=(16, 12))),
    "d4pg": (
        D4PG,
        D4PGParams(v_min=-5.0, v_max=5.0, n_step=1, target_update_period=1, target_update_tau=0.1),
        D4PGMLP,
        D4PGMLPParams(hidden=(16, 12), atoms=11),
    ),
    "td3": (TD3, TD3Params(), TD3MLP, ControlMLPParams(hidden=(16, 12))),
    "sac": (SAC, SACParams(), SACMLP, ControlMLPParams(hidden=(16, 12))),
}


def space(*shape, low=-1.0, high=1.0):
    return Continuous(np.full(shape, low, np.float32), np.full(shape, high, np.float32))


def make_agent(kind, action=None, frame=(5,), seed=0, network=None, learner=True, **settings):
    agent, params, model, model_params = KINDS[kind]
    spec = EnvSpec("numbers", ArraySpec(frame, "float32"), 0, space(3) if action is None else action)
    torch.manual_seed(seed)
    made = agent(replace(params, **settings), spec, lambda: model(replace(model_params, **(network or {})), spec))
    with torch.no_grad():  # last layers begin at almost zero, which would hide mistakes
        for part in made.model.parameters():
            part.copy_(torch.randn_like(part) * 0.4)
    if learner:
        made.init_learner()
    return made


def make_batch(agent, batch_size=7, seed=0, discounts=1.0, lasts=False, weights=None):
    generator, spec, length = torch.Generator().manual_seed(seed), agent.spec, agent.window.length
    low, high = (torch.from_numpy(bound) for bound in spec.action[:2])

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    actions = low + (high - low) * torch.rand(length + 1, batch_size, *low.shape, generator=generator)
    window = Window(
        normal(2, batch_size, *spec.observation_shape),
        torch.zeros(length + 1, batch_size, dtype=torch.bool),
        torch.zeros(length + 1, batch_size, dtype=torch.bool) | lasts,
        actions,
        normal(length + 1, batch_size),
        torch.full((length + 1, batch_size), float(discounts)),
        {},
    )
    keys = SampleIds(np.zeros(batch_size, np.int64), np.arange(batch_size))
    return Batch(window, keys, torch.ones(batch_size) if weights is None else weights)


def timestep(observation, first=None):
    num = len(observation)
    zeros = np.zeros(num, np.float32)
    return TimeStep(
        observation, zeros, zeros + 1, np.zeros(num, bool) if first is None else first, np.zeros(num, bool), zeros
    )
