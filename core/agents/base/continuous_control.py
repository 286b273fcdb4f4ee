"""The part that agents of continuous actions share: acting, noise, optimisers, targets, checkpoints.

Each agent's own file says how critics learn and what a policy maximises.
"""

import dataclasses
from abc import abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from core.agent import ActorOutput, Agent, AgentParams, LearnerOutput, make_learner_output
from core.agents.base.action_noise import ActionNoise, ActionNoiseParams
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer, OptimizerParams, TargetUpdater
from core.model import PolicyAndCritic
from core.specs import Continuous, WindowSpec
from core.types import Batch, State, TimeStep, TransitionBatch


@frozen_dataclass
class ControlAgentParams(ActionNoiseParams, OptimizerParams, AgentParams):
    batch_size: int = Field(default=256, ge=1, le=65_536)
    """Windows in a batch."""
    n_step: int = Field(default=1, ge=1, le=100)
    """Steps of the return before it bootstraps (D4PG: 5)."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    learning_rate: float = Field(default=1e-3, gt=0, le=100)
    """Learning rate of the policy at the start (DDPG: 1e-4)."""
    critic_learning_rate: float = Field(default=1e-3, gt=0, le=100)
    """Learning rate of the critic at the start (DDPG: 1e-3)."""
    critic_weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Weight of the critic's L2 penalty (DDPG: 1e-2); weight_decay is the policy's."""
    clip_norm: float = Field(default=0.0, ge=0, le=1e9)
    """Largest norm of the gradient of the policy, of all critics together, and of SAC's temperature; 0 is off."""
    target_update_period: int = Field(default=1, ge=1, le=10**9)
    """Updates between updates of the targets."""
    target_update_tau: float = Field(default=0.005, gt=0, le=1)
    """Weight of the online network in an update of the targets; 1 copies it (DDPG: 0.001)."""
    policy_update_period: int = Field(default=1, ge=1, le=10_000)
    """Updates of the critic for one of policy and targets, which move at these updates only (TD3: 2)."""


class CriticLosses(NamedTuple):
    """Losses of the critics' outputs [C, B, N]."""

    losses: Tensor  # [B]
    priorities: Tensor  # [B] non-negative
    statistics: dict[str, Tensor]  # scalars, each a mean over the batch


class ContinuousControl(Agent):
    """Base of agents with a policy and critics of continuous actions."""

    actions = Continuous
    window_kinds = ("transitions",)

    @classmethod
    def update_cycle(cls, params: ControlAgentParams) -> int:
        return params.policy_update_period

    # sampled windows --------------------------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec.transition(self.params.n_step)

    # acting -----------------------------------------------------------------------------------------------------------
    @cached_property
    def model(self) -> PolicyAndCritic:  # type: ignore[override]
        """The policy and its critics, built on first access.

        Raises:
            TypeError: the model has other parameters, which no optimiser of this agent would train. Or a parameter of
                `policy` or `critic` needs no gradient, or both have it.
        """
        model: PolicyAndCritic = self._make_model()  # type: ignore[assignment]
        policy, critic = set(model.policy.parameters()), set(model.critic.parameters())
        trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
        for rule, refused in (
            ("only parameters of `policy` and `critic` are trained, and it has", trainable - policy - critic),
            ("all parameters of `policy` and `critic` are trained, and it fixes", (policy | critic) - trainable),
            ("`policy` and `critic` have no common parameter, and it shares", policy & critic),
        ):
            if names := [name for name, parameter in model.named_parameters() if parameter in refused]:
                raise TypeError(f"{rule} {', '.join(names)}")
        return model

    @cached_property
    def action_range(self) -> "ActionRange":
        """The bounds of the action space; built on first access."""
        return ActionRange(self.spec.action, self.device)  # type: ignore[arg-type]

    def sample_action(self, output: Tensor, exploring: bool) -> Tensor:
        """Return actions [E, A] in -1 .. 1 from the policy's output."""
        return output

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        """Return the actions that are executed and stored: with noise, clipped, in the units of the space."""
        self.set_training(False)
        output, state = self.model(on_device(timestep.observation, self.device), state)
        action = self.sample_action(output, exploration is not None).cpu().numpy()
        if exploration is not None:
            action = exploration.explore(action, timestep.first)
        return ActorOutput(self.action_range.to_space(torch.from_numpy(action)).numpy(), {}, state)

    def greedy(self, output: Tensor, legal: Tensor | None = None) -> dict[str, Tensor]:
        return {"action": self.action_range.to_space(self.sample_action(output, False))}

    def exploration(
        self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator
    ) -> ActionNoise:
        num_actions = self.spec.action.low.size  # type: ignore[union-attr]
        ladder = self.params.noise_scale * np.geomspace(1.0, self.params.noise_ladder, num_actors * num_envs)
        return ActionNoise(self.params, ladder[actor_ind::num_actors], num_actions, generator)

    # learning ---------------------------------------------------------------------------------------------------------
    def init_learner(self) -> None:
        params = self.params
        self.set_training(True)
        self.target: PolicyAndCritic = self._make_target()  # type: ignore[assignment]
        self.online_vectors, self.target_vectors = FlatParameters(self.model), FlatParameters(self.target)
        self.policy_optimizer = Optimizer(
            [self.online_vectors.policy],
            params,
            period=params.policy_update_period,
            run_progress=lambda: self.run_progress,
        )
        self.optimizers_of_policy_updates = [self.policy_optimizer]
        critic_params = dataclasses.replace(
            params, learning_rate=params.critic_learning_rate, weight_decay=params.critic_weight_decay
        )
        self.critic_optimizer = Optimizer(
            [self.online_vectors.critic], critic_params, run_progress=lambda: self.run_progress
        )
        self._update_target = TargetUpdater(
            params.target_update_period, params.target_update_tau, params.policy_update_period
        )

    @abstractmethod
    def bootstrap(self, transitions: TransitionBatch) -> Tensor:
        """Compute the target critics' outputs [C, B, N] at the next observations, without gradient."""

    @abstractmethod
    def critic_losses(self, transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
        """Compute the losses of the critics' outputs for the actions.

        Args:
            transitions: The batch.
            outputs: [C, B, N] outputs of the critics.
            bootstrap: [C, B, N] as `bootstrap` returned it.
        """

    @abstractmethod
    def policy_loss(self, transitions: TransitionBatch) -> Loss:
        """Compute the mean loss of the policy at the observations, and statistics that are means too."""

    def update_policy(
        self, transitions: TransitionBatch, apply_if: bool | Tensor
    ) -> tuple[dict[str, Tensor], bool | Tensor]:
        """Take a step of the policy's optimiser if `apply_if`, the critics' step, was taken.

        Returns:
            Statistics, and whether the step was taken.
        """

        def differentiate(part: slice | None) -> Loss:
            loss = self.policy_loss(transitions.select(part))
            self.online_vectors.differentiate(loss.loss, self.online_vectors.policy)
            return loss._replace(loss=loss.loss.detach())

        total = self.policy_optimizer.set_gradients(len(transitions.returns), differentiate)
        grad_norm, applied = self.policy_optimizer.apply(total.loss, apply_if)
        lr = self.policy_optimizer.last_lr
        return {"policy_loss": total.loss, "policy_grad_norm": grad_norm, "policy_lr": lr, **total.statistics}, applied

    def learn(self, batch: Batch) -> LearnerOutput:
        self.set_training(True)
        transitions = self.transitions(batch)
        weights = batch.weights.to(self.device)  # [B]

        def differentiate(part: slice | None) -> Loss:
            selected, shares = transitions.select(part), weights if part is None else weights[part]
            outputs = self.model.critic(selected.observation, selected.action)
            with torch.no_grad():
                bootstrap = self.bootstrap(selected)
            critics = self.critic_losses(selected, outputs, bootstrap)
            loss = critics.losses @ (shares / len(shares))
            self.online_vectors.differentiate(loss, self.online_vectors.critic)
            statistics = {"td_error": critics.priorities.mean(), **critics.statistics}
            return Loss(loss.detach(), statistics, critics.priorities)

        total = self.critic_optimizer.set_gradients(len(weights), differentiate)
        grad_norm, applied = self.critic_optimizer.apply(total.loss)
        lr = self.critic_optimizer.last_lr
        statistics = {"loss": total.loss, "grad_norm": grad_norm, "lr": lr, **total.statistics}
        if (update := self.critic_optimizer.steps_begun) % self.params.policy_update_period == 0:
            policy_statistics, applied = self.update_policy(transitions, applied)
            statistics |= policy_statistics
            self._update_target(self.target_vectors.tensors, self.online_vectors.tensors, update, applied)
        self.model.update_normalization(batch.window.observations[0])
        return make_learner_output(statistics, total.priorities, applied)

    def prepare_updates(self, count: int) -> None:
        self.critic_optimizer.plan(count)
        made, period = self.critic_optimizer.steps_begun, self.params.policy_update_period
        if policy_updates := (made + count) // period - made // period:
            first = (made // period + 1) * period
            self._update_target.plan(first, policy_updates, self.online_vectors.both.device)
            for optimizer in self.optimizers_of_policy_updates:
                optimizer.plan(policy_updates)

    def transitions(self, batch: Batch) -> TransitionBatch:
        """Return the n-step transitions of a batch, with preprocessed observations."""
        transitions = self.n_step_transitions(batch.window, self.params.gamma, self.params.n_step)
        return transitions._replace(action=self.action_range.from_space(transitions.action))

    # checkpoint -------------------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> dict[str, Any]:
        optimizers = {"policy_optimizer": self.policy_optimizer, "critic_optimizer": self.critic_optimizer}
        return {"model": self.model, "target": self.target, **optimizers}


class ActionRange:
    """The bounds of a space, to which actions of -1 .. 1 are stretched."""

    def __init__(self, space: Continuous, device: torch.device):
        with torch.inference_mode(False):  # actors make it within their inference
            self._low, self._high = (torch.as_tensor(each, dtype=torch.float32) for each in (space.low, space.high))
            self._middle, self._half = self._high / 2 + self._low / 2, (self._high - self._low) / 2
            divisor = torch.where(self._half == 0, 1, self._half)
            self._on_device = tuple(each.reshape(-1).to(device) for each in (self._middle, divisor))

    def to_space(self, action: Tensor) -> Tensor:
        """Stretch actions [B, A] in -1 .. 1 on the CPU to [B, *shape] within the bounds."""
        stretched: Tensor = self._middle + self._half * action.reshape(-1, *self._middle.shape)
        return stretched.clamp(self._low, self._high)

    def from_space(self, action: Tensor) -> Tensor:
        """Map actions [B, *shape] on the device back to [B, A] in -1 .. 1; 0 where both bounds are equal."""
        middle, half = self._on_device
        return (action.reshape(len(action), -1) - middle) / half


def twin_losses(transitions: TransitionBatch, outputs: Tensor, bootstrap: Tensor) -> CriticLosses:
    """Compute the squared errors of both critics, added, against R + D min_c Q'_c (1802.09477, equation 10).

    The priority is the mean |error|.
    """
    values = outputs[:, :, 0]  # [C, B]
    errors = values - (transitions.returns + transitions.bootstrap_discounts * bootstrap[:, :, 0].amin(0))
    return CriticLosses(errors.square().sum(0), errors.detach().abs().mean(0), {"q_mean": values.mean()})


class FlatParameters:
    """One vector whose views are the parameters of policy and critics, and another for their gradients.

    An optimiser of `policy` or `critic`, and a target update of `tensors`, therefore need one operator each. The model
    gets new parameters, which share the vector's memory and its count of changes (`Tensor._version`). `tensors` are
    `both` and the buffers of policy and critics.
    """

    def __init__(self, model: PolicyAndCritic):
        olds = [*model.policy.parameters(), *model.critic.parameters()]
        self.both = torch.cat([old.detach().flatten() for old in olds])
        self.tensors = [self.both, *model.policy.buffers(), *model.critic.buffers()]
        gradient, offset, news = torch.zeros_like(self.both), 0, dict[Tensor, nn.Parameter]()
        for old in olds:
            span = slice(offset, offset + old.numel())
            news[old] = nn.Parameter(self.both[span].view_as(old), old.requires_grad)
            news[old].grad = gradient[span].view_as(old)
            offset += old.numel()
        for module in (*model.policy.modules(), *model.critic.modules()):
            for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, news[old])
        border = sum(parameter.numel() for parameter in model.policy.parameters())
        self.policy, self.critic = nn.Parameter(self.both[:border]), nn.Parameter(self.both[border:])
        self.policy.grad, self.critic.grad = gradient[:border], gradient[border:]
        self._parameters = {self.policy: [*model.policy.parameters()], self.critic: [*model.critic.parameters()]}

    def differentiate(self, loss: Tensor, vector: nn.Parameter) -> None:
        """Set the gradient of `policy` or `critic` to that of a loss; the gradient of the other stays as it is."""
        assert vector.grad is not None
        vector.grad.zero_()
        torch.autograd.backward(loss, inputs=self._parameters[vector])
