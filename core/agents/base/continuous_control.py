"""What the agents of continuous actions share: acting, noise, optimisers and targets of policy and critic, checkpoints.

Their own files say how critics learn and what a policy maximises; core/agents/base/policy_critic_gradients.py differentiates.
"""

import copy
import dataclasses
from abc import abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, Agent, AgentParams, LearnerOutput, output_of
from core.agents.base.action_noise import ActionNoise, ActionNoiseParams
from core.agents.base.policy_critic_gradients import Gradients, gradients
from core.common.settings import frozen_dataclass
from core.device.transfers import on_device
from core.learning.device_schedule import UpdateCounter
from core.learning.microbatches import Loss
from core.learning.optimizer import Optimizer, OptimizerParams
from core.learning.target_network import TargetUpdater
from core.model import PolicyAndCritic
from core.ops.returns import n_step_return
from core.specs import Continuous, WindowSpec
from core.types import Batch, State, TimeStep


@frozen_dataclass
class ControlParams(ActionNoiseParams, OptimizerParams, AgentParams):
    batch_size: int = Field(default=256, ge=1, le=65_536)
    """Windows in a batch."""
    nstep: int = Field(default=1, ge=1, le=100)
    """Steps of the return before it bootstraps (D4PG: 5)."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    lr: float = Field(default=1e-3, gt=0, le=100)
    """Learning rate of the policy at the start (DDPG: 1e-4)."""
    critic_lr: float = Field(default=1e-3, gt=0, le=100)
    """Learning rate of the critic at the start (DDPG: 1e-3)."""
    critic_weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Weight of the critic's L2 penalty (DDPG: 1e-2); weight_decay is the policy's."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the optimiser's second moment."""
    clip_norm: float = Field(default=0.0, ge=0, le=1e9)
    """Largest norm of each network's gradient; 0 is off."""
    target_update: float = Field(default=0.005, gt=0, le=1e9)
    """Updates between copies to the targets; below 1 the factor of a soft update each time (DDPG: 0.001)."""
    policy_period: int = Field(default=1, ge=1, le=10_000)
    """Updates of the critic for one of policy and targets (TD3: 2)."""
    lean: bool = True
    """Differentiate small networks on a CPU by hand, which is faster and gives the same numbers."""


class Step(NamedTuple):
    """A batch of n-step transitions as critics learn from them. Observations are prepared, actions in -1 .. 1."""

    observation: Tensor        # [B, ...]
    action: Tensor             # [B, A]
    returns: Tensor            # [B] R of n_step_return
    factors: Tensor            # [B] D: the target is R + D * bootstrap
    next_observation: Tensor   # [B, ...] that the value is bootstrapped from

    def part(self, part: slice | None) -> "Step":
        """Some of the transitions; None: all."""
        return self if part is None else Step(*(field[part] for field in self))


class CriticLosses(NamedTuple):
    losses: Tensor      # [B]
    slopes: Tensor      # [C, B, N] their derivative with respect to what the critics gave
    priorities: Tensor  # [B] non-negative
    values: Tensor      # what the critics think of the actions, any shape


class ContinuousControl(Agent):
    actions = Continuous
    memories = ("shared", "prioritized")
    _model: PolicyAndCritic | None = None
    _gradients: Gradients | None = None

    @classmethod
    def period(cls, params: ControlParams) -> int:
        return params.policy_period

    # what it samples --------------------------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec(self.params.nstep, (0, self.params.nstep))

    @cached_property
    def range(self) -> "ActionRange":
        return ActionRange(self.spec.action, self.device)  # type: ignore[arg-type]

    # the actor's side -------------------------------------------------------------------------------------------------
    @property
    def model(self) -> PolicyAndCritic:
        if self._model is None:
            self._model = self._make_model()  # type: ignore[assignment]
        assert self._model is not None
        return self._model

    @cached_property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def choose(self, output: Tensor, exploring: bool) -> Tensor:
        """Actions [E, A] in -1 .. 1, of what the policy says."""
        return output

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        """The action returned is the one the environment executes and the memory stores: with noise, clipped, in the space's units."""
        output, state = self.model(on_device(timestep.observation, self.device), state)
        action = self.choose(output, exploration is not None).cpu().numpy()
        if exploration is not None:
            action = exploration.explored(action, timestep.first)
        return ActorOutput(self.range.in_space(action), {}, state)

    def greedy(self, output: Tensor) -> dict[str, Tensor]:
        return {"action": self.range.to_space(self.choose(output, False))}

    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> ActionNoise:
        return ActionNoise.of(self.params, actor_ind, num_actors, num_envs, self.spec.action.low.size, generator)  # type: ignore[union-attr]

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> None:
        return None

    # the learner's side -----------------------------------------------------------------------------------------------
    @property
    def gradients(self) -> Gradients:
        """Of the model, with its target; made, with the optimisers, when learning begins."""
        if self._gradients is None:
            params, self.target = self.params, copy.deepcopy(self.model).requires_grad_(False)
            self._gradients = gradients(self.model, self.target, params.lean)
            self.policy_optimizer = Optimizer([self._gradients.online.policy], params, period=params.policy_period)
            self.critic_optimizer = Optimizer([self._gradients.online.critic], dataclasses.replace(
                params, lr=params.critic_lr, weight_decay=params.critic_weight_decay))
            self._updates, self._follow = UpdateCounter(), TargetUpdater(params.target_update, params.policy_period)
        return self._gradients

    @abstractmethod
    def bootstrap(self, step: Step) -> Tensor:
        """What the target critics say of what comes after, [C, B, N], without gradient."""

    @abstractmethod
    def critic_losses(self, step: Step, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        """Of what the critics say of the actions, [C, B, N], and of `bootstrap`."""

    @abstractmethod
    def improve(self, step: Step, wanted: bool | Tensor) -> tuple[dict[str, Tensor], bool | Tensor]:
        """A step of the policy, if the critics' one was taken. Returns statistics, and whether it was."""

    def learn(self, batch: Batch) -> LearnerOutput:
        networks, step = self.gradients, self.step_of(batch)
        weights = batch.weights.to(self.device)  # [B]

        def differentiate(part: slice | None) -> Loss:
            some, shares = step.part(part), weights if part is None else weights[part]
            found = self.critic_losses(some, networks.critic_values(some.observation, some.action), self.bootstrap(some))
            shares = shares / len(shares)
            loss = found.losses @ shares
            networks.differentiate_critic(loss, found.slopes * shares[:, None])
            return Loss(loss.detach(), {"q_mean": found.values.detach().mean(), "td_error": found.priorities.mean()}, found.priorities)

        found = self.critic_optimizer.gradient_of(len(weights), differentiate)
        grad_norm, stepped = self.critic_optimizer.apply(found.loss)
        statistics = {"loss": found.loss, "grad_norm": grad_norm, **found.statistics}
        if (update := self._updates.next()) % self.params.policy_period == 0:
            more, stepped = self.improve(step, stepped)
            statistics |= more
            self._follow([networks.target.both], [networks.online.both], update, stepped)
        self.model.observe(batch.window.observations[0], stepped)
        return output_of(statistics, found.priorities, stepped)

    def plan(self, count: int) -> None:
        networks, improvements = self.gradients, count // self.params.policy_period
        first = (self._updates.made // self.params.policy_period + 1) * self.params.policy_period
        self._follow.plan(first, improvements, networks.online.both.device)
        self.critic_optimizer.plan(count)
        self.policy_optimizer.plan(improvements)
        self._updates.plan(count)

    def step_of(self, batch: Batch) -> Step:
        """Return the n-step transitions of a batch."""
        window = batch.window.to(self.device)
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, self.params.gamma)
        observation, next_observation = (self.model.prepare(each) for each in window.observations)  # of [2, B, ...]
        return Step(observation, self.range.from_space(window.actions[0]), returns, factors, next_observation)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        self.gradients  # noqa: B018  made if nothing was learnt yet
        return {"model": self.model.state_dict(), "target": self.target.state_dict(),
                "policy_optimizer": self.policy_optimizer.state_dict(), "critic_optimizer": self.critic_optimizer.state_dict(),
                "updates": self._updates.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gradients  # noqa: B018  made before anything is loaded into it
        self.target.load_state_dict(state["target"])
        self.model.load_state_dict(state["model"])
        self.policy_optimizer.load_state_dict(state["policy_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self._updates.restore(state["updates"])


class ActionRange:
    """The bounds of a space, between which actions of -1 .. 1 are stretched."""

    def __init__(self, space: Continuous, device: torch.device):
        self._space, self._middle, self._half = space, space.high / 2 + space.low / 2, (space.high - space.low) / 2
        halves = np.where(self._half, self._half, 1)
        self._tensors = tuple(torch.from_numpy(each.reshape(-1)).to(device) for each in (self._middle, halves))

    def in_space(self, action: np.ndarray) -> np.ndarray:
        """Actions [E, A] in -1 .. 1 as the space wants them, [E, *shape] float32 within its bounds."""
        stretched = self._middle + self._half * action.reshape(-1, *self._middle.shape)
        return stretched.clip(self._space.low, self._space.high).astype(np.float32)

    def to_space(self, action: Tensor) -> Tensor:
        """Return actions [B, A] in -1 .. 1 on the device as the space wants them, [B, *shape] within its bounds."""
        middle, half, low, high = (torch.as_tensor(each, dtype=torch.float32, device=action.device)
                                   for each in (self._middle, self._half, self._space.low, self._space.high))
        return (middle + half * action.unflatten(1, self._middle.shape)).clamp(low, high)

    def from_space(self, action: Tensor) -> Tensor:
        """The inverse, on the device: actions [B, *shape] as [B, A] in -1 .. 1; 0 where the bounds are one."""
        middle, half = self._tensors
        return (action.reshape(len(action), -1) - middle) / half


def twin_losses(step: Step, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
    """Squared errors of both critics, added, against R + D min_c Q'_c (equation 10); priority: the mean |error|."""
    values = outputs[:, :, 0]  # [C, B]
    errors = values - (step.returns + step.factors * bootstrap[:, :, 0].amin(0))
    return CriticLosses(errors.square().sum(0), 2 * errors.detach()[:, :, None], errors.detach().abs().mean(0), values)
