"""What the agents of continuous actions share: acting, noise, optimisers and targets of policy and critic, checkpoints.

Their own files say how a critic learns and what a policy maximises. Policy and critic have no parameter in common, and each optimiser
differentiates with respect to its own parameters alone, so no gradient of the policy's loss is ever made for the critic.
"""

import copy
import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.agent import ActorOutput, Agent, LearnerOutput
from core.agents.action_noise import ActionNoise, ActionNoiseParams
from core.env import Continuous, TimeStep
from core.memory import Batch
from core.model import PolicyAndCritic, State
from core.ops.returns import n_step_return
from core.optimizer import Optimizer, OptimizerParams
from core.settings import setting
from core.target import follow
from core.trajectory import WindowSpec


@dataclass(frozen=True)
class ControlParams(ActionNoiseParams, OptimizerParams):
    batch_size: int = setting(256, low=1)                # windows an update
    nstep: int = setting(1, low=1, high=100)             # steps of the return before it bootstraps (D4PG: 5)
    gamma: float = setting(0.99, low=0, high=1)          # discount of a step
    lr: float = setting(1e-3, above=0)                   # learning rate of the policy at the start (DDPG: 1e-4)
    critic_lr: float = setting(1e-3, above=0)            # and of the critic
    critic_weight_decay: float = setting(0.0, low=0)     # L2 of the critic (DDPG: 1e-2); weight_decay is the policy's
    eps: float = setting(1e-8, above=0)                  # added to the root of the second moment
    clip_norm: float = setting(0.0, low=0)               # of each network's gradient; 0: off
    target_update: float = setting(0.005, above=0)       # below 1: soft update each time; else updates between copies (DDPG: 0.001)
    policy_period: int = setting(1, low=1)               # updates of the critic for one of policy and targets (TD3: 2)


class Step(NamedTuple):
    """A batch of n-step transitions as critics learn from them. Observations are prepared, actions in -1 .. 1."""

    observation: Tensor        # [B, ...]
    action: Tensor             # [B, A]
    returns: Tensor            # [B] R of n_step_return
    factors: Tensor            # [B] D: the target is R + D * bootstrap
    next_observation: Tensor   # [B, ...] that the value is bootstrapped from


class CriticLosses(NamedTuple):
    losses: Tensor      # [B]
    priorities: Tensor  # [B] non-negative, no gradient
    values: Tensor      # what the critic thinks of the actions, any shape, no gradient


class ContinuousControl(Agent):
    actions = Continuous
    memories = ("shared", "prioritized")
    _model: PolicyAndCritic | None = None
    _target: PolicyAndCritic | None = None

    # what it samples --------------------------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec(self.params.nstep, (0, self.params.nstep))

    # the actor's side -------------------------------------------------------------------------------------------------
    @property
    def model(self) -> PolicyAndCritic:
        if self._model is None:
            self._model = self._make_model()  # type: ignore[assignment]
        assert self._model is not None
        return self._model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def choose(self, observation: Tensor, exploring: bool) -> Tensor:
        """The policy's actions [E, A] in -1 .. 1 at prepared observations."""
        return self.model.policy(observation)

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        """The action returned is the one the environment executes and the memory stores: with noise, clipped, in the space's units."""
        observation = self.model.prepare(torch.from_numpy(timestep.observation).to(self.device))
        action = self.choose(observation, exploration is not None).cpu().numpy()
        if exploration is not None:
            action = exploration.explored(action, timestep.first)
        return ActorOutput(in_space(action, self.spec.action), {}, state)

    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> ActionNoise:
        return ActionNoise.of(self.params, actor_ind, num_actors, num_envs, self.spec.action.low.size, generator)  # type: ignore[union-attr]

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> None:
        return None

    # the learner's side -----------------------------------------------------------------------------------------------
    @property
    def target(self) -> PolicyAndCritic:
        """The networks that say what comes after a step; made, with the optimisers, when learning begins."""
        if self._target is None:
            self._target = copy.deepcopy(self.model).requires_grad_(False)
            params = self.params
            self._policy_optimizer = Optimizer(self.model.policy.parameters(), params)
            self._critic_optimizer = Optimizer(self.model.critic.parameters(), dataclasses.replace(
                params, lr=params.critic_lr, weight_decay=params.critic_weight_decay))
            self._updates = 0
        return self._target

    @abstractmethod
    def critic_losses(self, step: Step) -> CriticLosses: ...

    @abstractmethod
    def policy_loss(self, observation: Tensor) -> Tensor:
        """Scalar, of prepared observations [B, ...]."""

    def learn(self, batch: Batch) -> LearnerOutput:
        self.target  # noqa: B018  made before the first step
        step = self.step_of(batch)
        found = self.critic_losses(step)
        loss = (batch.weights.to(self.device) * found.losses).mean()
        grad_norm, stepped = self._critic_optimizer.step(loss)
        self._updates += 1
        statistics = {"loss": loss.detach(), "grad_norm": grad_norm, "q_mean": found.values.mean(), "td_error": found.priorities.mean()}
        if stepped and self._updates % self.params.policy_period == 0:
            stepped = self.improve(step.observation, statistics)
        return LearnerOutput(statistics, found.priorities if stepped else None, skipped=not stepped)

    def improve(self, observation: Tensor, statistics: dict[str, Tensor]) -> bool:
        """An update of the policy and of the targets; False if it was not finite."""
        loss = self.policy_loss(observation)
        norm, stepped = self._policy_optimizer.step(loss)
        if stepped:
            follow(self._followers(self.target), self._followers(self.model), self.params.target_update,
                   self._updates // self.params.policy_period)
        statistics |= {"policy_loss": loss.detach(), "policy_grad_norm": norm}
        return stepped

    def _followers(self, model: PolicyAndCritic) -> list[Tensor]:
        return [*model.policy.parameters(), *model.critic.parameters()]

    def step_of(self, batch: Batch) -> Step:
        """The n-step transitions of a batch; the model has seen its observations afterwards."""
        window = batch.window
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, self.params.gamma)
        observations = window.observations.to(self.device, non_blocking=True)  # [2, B, ...]
        self.model.observe(observations[0])
        observation, next_observation = (self.model.prepare(each) for each in observations)
        action = from_space(window.actions[0], self.spec.action).to(self.device)  # type: ignore[arg-type]
        return Step(observation, action, returns.to(self.device), factors.to(self.device), next_observation)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "target": self.target.state_dict(),
                "policy_optimizer": self._policy_optimizer.state_dict(), "critic_optimizer": self._critic_optimizer.state_dict(),
                "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target.load_state_dict(state["target"])
        self.model.load_state_dict(state["model"])
        self._policy_optimizer.load_state_dict(state["policy_optimizer"])
        self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        self._updates = state["updates"]


def in_space(action: np.ndarray, space: Continuous) -> np.ndarray:
    """Actions [E, A] in -1 .. 1 as the space wants them, [E, *shape] float32 within its bounds."""
    middle, half = (space.high + space.low) / 2, (space.high - space.low) / 2
    return (middle + half * action.reshape(-1, *space.low.shape)).clip(space.low, space.high).astype(np.float32)


def from_space(action: Tensor, space: Continuous) -> Tensor:
    """The inverse: actions [B, *shape] as [B, A] in -1 .. 1; 0 where the bounds are one."""
    middle, half = (torch.from_numpy(bound).to(action) for bound in ((space.high + space.low) / 2, (space.high - space.low) / 2))
    return torch.where(half > 0, (action - middle) / half, 0.0).flatten(1)
