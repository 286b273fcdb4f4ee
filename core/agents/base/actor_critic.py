"""The part that actor-critics of unrolls share: acting by sampling the policy, and stored fields.

Each agent's own file says how it learns.

Several choices at once (MultiDiscrete) are drawn independently of each other. Log-probabilities, entropies and the
ratios of V-trace are those of all choices together.

Continuous actions are drawn from a Gaussian, in units where the bounds of the space are -1 and 1. The environment gets
them clipped to the bounds or, with `squash_actions`, their tanh. Steps store them as drawn, for their densities.
Choices and numbers at once (Mixed) are both, drawn independently of each other.
"""

from abc import abstractmethod
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, Agent, AgentParams
from core.agents.base.continuous_control import ActionRange
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer, OptimizerName, OptimizerParams
from core.model import Model
from core.ops.actions import mask_actions
from core.ops.policy_distributions import Categorical, ChoicesAndNumbers, DiagonalGaussian, MultiCategorical
from core.specs import ArraySpec, Continuous, Discrete, Mixed, MultiDiscrete, WindowSpec
from core.types import ACTION_MASK, ActorCriticOutput, Batch, State, TimeStep, Window, slice_batch


@frozen_dataclass
class ActorCriticAgentParams(OptimizerParams, AgentParams):
    """Defaults of the optimiser: IMPALA's on Atari (1802.01561, table G.1)."""

    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Unrolls in a batch (IMPALA: 32)."""
    unroll_length: int = Field(default=20, ge=1, le=10_000)
    """Steps of an unroll (IMPALA: 20)."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    evaluation: Literal["sample", "greedy"] = "sample"
    """Actions in evaluations: sampled as in training, or the likeliest one (greedy)."""
    squash_actions: bool = False
    """Squash continuous actions into their bounds by tanh; else they are clipped to them."""
    baseline_cost: float = Field(default=0.5, ge=0, le=1e6)
    """Weight of the value loss (IMPALA: 0.5)."""
    entropy_cost: float = Field(default=0.01, ge=0, le=1e6)
    """Weight of the negative entropy (IMPALA: 0.01)."""
    optimizer: OptimizerName = "rmsprop"
    """Optimiser of the network."""
    learning_rate: float = Field(default=6e-4, gt=0, le=100)
    """Learning rate at the start."""
    optimizer_eps: float = Field(default=0.01, gt=0, le=1)
    """Added to the optimiser's second moment under the root, for Adam to the root (IMPALA: 0.01)."""
    rmsprop_decay: float = Field(default=0.99, ge=0, le=1)
    """Decay of RMSProp's moments (IMPALA: 0.99)."""
    rmsprop_centered: bool = False
    """Divide RMSProp's steps by the standard deviation (IMPALA: no)."""
    clip_norm: float = Field(default=40.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; losses are sums over [T, B]; 0 is off."""


class Sampling:
    """Exploration by sampling the policy, which never changes."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def update(self, agent_steps: int, learning_steps: int) -> None:
        """Do nothing."""

    def statistics(self) -> dict[str, float]:
        return {}


class ActorCriticAgent(Agent):
    """Base of agents that learn a policy and a value from whole unrolls."""

    required_output = "actor-critic"
    actions = Discrete | MultiDiscrete | Continuous | Mixed
    uses_action_masks = True

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._has_numbers = isinstance(self.spec.action, Continuous | Mixed)
        self.policy = self._make_policy()

    def _make_policy(self) -> Categorical | MultiCategorical | DiagonalGaussian | ChoicesAndNumbers:
        if isinstance(self.spec.action, Continuous):
            return DiagonalGaussian(self.params.squash_actions)
        if isinstance(self.spec.action, Mixed):
            return ChoicesAndNumbers(self.spec.action.nvec, self.params.squash_actions)
        return MultiCategorical(self.spec.action.nvec) if isinstance(self.spec.action, MultiDiscrete) else Categorical()

    @cached_property
    def action_range(self) -> ActionRange:
        """The bounds of an action's numbers; built on first access."""
        space = self.spec.action
        assert isinstance(space, Continuous | Mixed)
        return ActionRange(space.continuous if isinstance(space, Mixed) else space, self.device)

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec.unroll(self.params.unroll_length)

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """Return the fields of the behaviour policy's parameters, its value, and actions with numbers as drawn."""
        value, action = ArraySpec((), "float32"), self.spec.action
        if not isinstance(action, Continuous | Mixed):
            return {"logits": ArraySpec((sum(action.choice_sizes),), "float32"), "value": value}
        nvec = action.nvec if isinstance(action, Mixed) else ()
        numbers = action.low.size
        logits = ArraySpec((sum(nvec) + 2 * numbers,), "float32")  # a mean and a log deviation of each number
        return {"logits": logits, "value": value, "drawn_action": ArraySpec((len(nvec) + numbers,), "float32")}

    @property
    def feature_field(self) -> ArraySpec:
        return ArraySpec((self.model.feature_size,), "float32")  # type: ignore[arg-type]

    @torch.inference_mode()
    def features(self, window: Window) -> Tensor:
        self.set_training(False)
        return self.unroll(window.to(self.device))[0].features[:-1]

    # acting -----------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        self.set_training(False)
        output, state = self.model(on_device(timestep.observation, self.device), state)
        legal = None if timestep.action_mask is None else on_device(timestep.action_mask, self.device)
        output = output._replace(logits=mask_actions(output.logits, legal))
        extras = {name: tensor.cpu().numpy() for name, tensor in output._asdict().items()}
        if exploration is None:
            action = self.policy.likeliest(output.logits).cpu().numpy()
        else:
            action = self.policy.sample(extras["logits"], exploration.generator)
        if self._has_numbers:
            extras["drawn_action"] = action
            action = self._executed(torch.from_numpy(action)).numpy()
        return ActorOutput(action, extras, state)

    def _executed(self, drawn: Tensor) -> Tensor:
        """Return the actions [E, ...] that environments get for actions as they were drawn."""
        count = len(self.spec.action.nvec) if isinstance(self.spec.action, Mixed) else 0  # choices before the numbers
        choices, numbers = drawn[:, :count], drawn[:, count:]
        numbers = self.action_range.to_space(numbers.tanh() if self.params.squash_actions else numbers)
        return torch.cat([choices, numbers], 1) if count else numbers

    def greedy(self, output: ActorCriticOutput, legal: Tensor | None = None) -> dict[str, Tensor]:
        action = self.policy.likeliest(mask_actions(output.logits, legal))
        if self._has_numbers:
            action = self._executed(action)
        return {"action": action, "logits": output.logits, "value": output.value}

    def policy_diagnostics(self, output: ActorOutput) -> dict[str, np.ndarray]:
        if self._has_numbers:
            return {"value": output.extras["value"], "actions": output.extras["drawn_action"]}
        logits = torch.from_numpy(output.extras["logits"])
        parts = self.policy.split(logits) if isinstance(self.policy, MultiCategorical) else (logits,)
        probabilities = torch.cat([part.softmax(-1) for part in parts], -1).numpy()
        return {"value": output.extras["value"], "action probabilities": probabilities}

    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> Sampling:
        return Sampling(generator)

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> Sampling | None:
        return Sampling(generator) if self.params.evaluation == "sample" else None

    # learning ---------------------------------------------------------------------------------------------------------
    def unroll(self, window: Window, model: Model | None = None) -> tuple[ActorCriticOutput, State]:
        """Run the network, or another of its kind, over all steps [T + 1, B, ...] of windows on its device.

        Logits of illegal actions are the lowest float.
        """
        output, state = (model or self.model).unroll(window.observations, window.firsts, window.states)
        return output._replace(logits=mask_actions(output.logits, window.extras.get(ACTION_MASK))), state

    def taken_actions(self, window: Window) -> Tensor:
        """Return the actions of steps 0 .. T - 1 whose log-probabilities the policy gives: [T, B], or [T, B, A]."""
        return (window.extras["drawn_action"] if self._has_numbers else window.actions)[:-1]

    def init_learner(self) -> None:
        self._optimizer = Optimizer(
            self.model.parameters(), self.params, sums=True, run_progress=lambda: self.run_progress
        )

    def prepare_updates(self, count: int) -> None:
        self._optimizer.plan(count)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self._optimizer}


class SumLossAgent(ActorCriticAgent):
    """Base of agents that take one optimiser step a batch, down a loss that is a sum over the steps of its unrolls."""

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """Compute the loss of the unrolls and its statistics, all of them sums over their steps."""

    def minimise(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """Take an optimiser step down the loss of a batch.

        Returns:
            Statistics that all actor-critics report, the sums over steps that `loss` gave, and whether the step was
            taken.
        """
        self.set_training(True)
        total, grad_norm, applied = self._optimizer.minimise(
            len(batch.weights), lambda part: self.loss(slice_batch(batch, part))
        )
        self.model.update_normalization(batch.window.observations[:-1].flatten(0, 1))
        sums = total.statistics
        statistics = {"loss": total.loss, "policy_loss": sums["policy_loss"], "baseline_loss": sums["baseline_loss"]}
        statistics["entropy"] = sums["entropy"] / sums["steps"].clamp(min=1)
        statistics["value_mean"] = sums["values"] / batch.window.rewards.numel()
        return {**statistics, "grad_norm": grad_norm, "lr": self._optimizer.last_lr}, sums, applied
