"""R2D2: recurrent replay distributed DQN (Kapturowski et al. 2019, r1lyTjAqYX).

- Sequences start with the recurrent state that the actor stored, and with a burn-in (section 3).
- Targets are n-step double targets under a rescaling of values (section 2.3, after 1805.11593).
- A sequence's priority is eta max |td| + (1 - eta) mean |td|. Epsilon is the ladder of Ape-X.
- Deviations: sequences may cross episodes, and the state is reset where an episode begins; a truncated episode
  bootstraps from its final observation; the n steps after the trained ones are read as well, so that every trained step
  has an n-step target.
- The reward is an input of the network, and the rescaling of values takes the place of clipping. Therefore
  `env.reward_clipping` must be none, unless `allow_clipped_rewards` says otherwise.
"""

from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput
from core.agents.base.action_values import QLearning, QLearningParams
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.learning.gradients import Loss
from core.model import Model
from core.ops.actions import mask_actions
from core.ops.returns import n_step_targets, rescaled, unrescaled
from core.specs import ArraySpec, WindowSpec
from core.types import ACTION_MASK, Batch, OARInputs, State, TimeStep, Window

NO_ACTION = -1  # the action before an episode's first


@frozen_dataclass
class R2D2Params(QLearningParams):
    """Defaults are the paper's (table 2) where the paper names them."""

    batch_size: int = Field(default=64, ge=1, le=65_536)
    """Sequences in a batch (R2D2: 64)."""
    burn_in: int = Field(default=40, ge=0, le=10_000)
    """Steps of a sequence that only bring the recurrent state up to date (R2D2: 40)."""
    unroll_length: int = Field(default=80, ge=1, le=10_000)
    """Steps of a sequence that are learnt from (R2D2: 80)."""
    sequence_period: int = Field(default=40, ge=1, le=10_000)
    """Steps between the starts of sequences; a recurrent state is stored at each (R2D2: 40)."""
    n_step: int = Field(default=5, ge=1, le=100)
    """Steps of the return before it bootstraps (R2D2: 5)."""
    gamma: float = Field(default=0.997, ge=0, le=1)
    """Discount of a step (R2D2: 0.997)."""
    rescaling_eps: float = Field(default=1e-3, ge=0, le=1)
    """Epsilon of the value rescaling h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x."""
    eta: float = Field(default=0.9, ge=0, le=1)
    """Share of the largest |td| in a sequence's priority; the rest is the mean's (R2D2: 0.9)."""
    optimizer_eps: float = Field(default=1e-3, gt=0, le=1)
    """Added to the root of Adam's second moment (R2D2: 1e-3); for RMSProp see rmsprop_eps_in_root."""
    clip_norm: float = Field(default=40.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; 0 is off (Ape-X: 40)."""
    allow_clipped_rewards: bool = False
    """Train on clipped rewards. The network reads the last reward, and evaluations never clip it."""
    exploration: Literal["linear", "ladder", "linear-ladder"] = "ladder"
    """Epsilon falls (linear), differs between environments (ladder), or falls to those values (linear-ladder)."""


class R2D2(QLearning):
    """Recurrent Q-learning of sequences.

    The acting state is the model's and, last, the action [B] that led here. As in Acme's R2D2, a sequence's loss is the
    sum of td^2 / 2 over its trained steps, times its importance weight. The batch's is their mean.
    """

    Params = R2D2Params
    supports_cuda_graphs = True
    required_output = "recurrent-q"
    window_kinds = ("sequences",)

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.samples_per_window, self.burn_in_steps = self.params.unroll_length, self.params.burn_in

    @classmethod
    def refuses_clipped_rewards(cls, params: R2D2Params) -> bool:
        return not params.allow_clipped_rewards

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        """Return the burn-in, the trained steps, and n more to bootstrap from."""
        params = self.params
        steps = params.burn_in + params.unroll_length + params.n_step
        return WindowSpec(steps - 1, tuple(range(steps)), stride=params.sequence_period)

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """Return the fields of the actor's values, and of its network's inputs beside the observation."""
        num_actions = self.spec.action.num_actions  # type: ignore[union-attr]
        return {
            "q_taken": ArraySpec((), "float32"),
            "q_max": ArraySpec((), "float32"),
            "previous_action": ArraySpec((), "int16" if num_actions <= 2**15 else "int32"),
            "previous_reward": ArraySpec((), "float32"),
        }

    def initial_priorities(self, window: Window) -> np.ndarray:
        """Compute priorities from the actor's values, in which its network replaces the online and the target one."""
        after_burn_in = slice(self.params.burn_in, None)
        targets = self._targets(window, window.extras["q_max"][after_burn_in])
        return self._priorities(*self._errors(window, targets, window.extras["q_taken"][after_burn_in])).numpy()

    # acting -----------------------------------------------------------------------------------------------------------
    def initial_state(self, batch_size: int) -> State:
        return *self.model.initial_state(batch_size), torch.full((batch_size,), NO_ACTION, device=self.device)

    def values(self, timestep: TimeStep, state: State) -> tuple[Tensor, State]:
        """Return the action values [E, A], and the model's next state without an action, which is not chosen yet."""
        observation, reward = (on_device(array, self.device) for array in (timestep.observation, timestep.reward))
        values, state = self.model(OARInputs(observation, state[-1], reward), state[:-1])
        return values, state

    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        output = super().act(timestep, state, exploration)
        # A copy, because the environment may reuse the array in the step that follows.
        inputs = {"previous_action": state[-1].cpu().numpy(), "previous_reward": timestep.reward.copy()}
        state = *output.state, on_device(output.action, self.device)
        return ActorOutput(output.action, {**output.extras, **inputs}, state)

    # learning ---------------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> Loss:
        params, after_burn_in = self.params, slice(self.params.burn_in, None)
        (window, firsts), (target_values,), _ = self.inputs_and_target_outputs(batch)  # target_values: [U + n, B, A]
        values = self._unroll(self.model, window, firsts)  # [U + n, B, A]
        with torch.no_grad():
            legal = window.extras[ACTION_MASK][after_burn_in] if self.spec.has_action_mask else None  # [U + n, B, A]
            best = mask_actions(values if params.double_q else target_values, legal).argmax(2, keepdim=True)
            targets = self._targets(window, target_values.gather(2, best)[..., 0])  # [U, B]
        q_taken = values.gather(2, window.actions[after_burn_in, :, None])[..., 0]  # [U + n, B]
        errors, valid = self._errors(window, targets, q_taken)
        loss = self.weighted_mean(0.5 * errors.square().sum(0), batch)
        priorities = self._priorities(errors.detach(), valid)
        return Loss(loss, {"q_mean": values.mean(), "td_error": priorities.mean()}, priorities)

    def learning_inputs(self, window: Window) -> tuple[Window, Tensor]:
        """Return the windows on the learner's device, and `firsts` as they came, whose reading waits for no device."""
        return window.to(self.device), window.firsts

    def target_outputs(self, inputs: tuple[Window, Tensor]) -> tuple[Tensor, ...]:
        """Compute the target network's values [U + n, B, A] of the steps after the burn-in."""
        return (self._unroll(self.target, *inputs),)

    def _unroll(self, model: Model, window: Window, firsts: Tensor) -> Tensor:
        """Compute the action values [U + n, B, A] of the steps after the burn-in, from the stored state."""
        inputs = OARInputs(window.observations, window.extras["previous_action"], window.extras["previous_reward"])
        state, burn_in = window.states[:-1], self.params.burn_in
        if burn_in:
            with torch.no_grad():
                state = model.unroll(OARInputs(*(field[:burn_in] for field in inputs)), firsts[:burn_in], state)[1]
        values: Tensor
        values, _ = model.unroll(OARInputs(*(field[burn_in:] for field in inputs)), firsts[burn_in:], state)
        return values

    def _targets(self, window: Window, bootstrap: Tensor) -> Tensor:
        """Compute the targets h(R + D h^-1(bootstrap)) [U, B] of the trained steps.

        Args:
            window: The whole sequences.
            bootstrap: [U + n, B] values of the steps after the burn-in.
        """
        params = self.params
        fields = (window.rewards, window.discounts, window.lasts)
        rewards, discounts, lasts = (field[params.burn_in :] for field in fields)
        values = unrescaled(bootstrap, params.rescaling_eps)
        targets = n_step_targets(rewards, discounts, lasts, values, params.gamma, params.n_step)
        return rescaled(targets, params.rescaling_eps)

    def _errors(self, window: Window, targets: Tensor, q_taken: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the errors [U, B] of the values of the actions taken, 0 in `last` steps.

        Args:
            window: The whole sequences.
            targets: [U, B].
            q_taken: [U + n, B] values of the actions taken.

        Returns:
            The errors, and a mask [U, B] of the steps where an action was taken.
        """
        length = self.params.unroll_length
        valid = ~window.lasts[self.params.burn_in :][:length]
        return (targets - q_taken[:length]) * valid, valid

    def _priorities(self, errors: Tensor, valid: Tensor) -> Tensor:
        """Compute eta max |td| + (1 - eta) mean |td| [B] over the steps of each sequence where an action was taken."""
        absolute, eta = errors.abs(), self.params.eta
        priorities: Tensor = eta * absolute.amax(0) + (1 - eta) * absolute.sum(0) / valid.sum(0).clamp(min=1)
        return priorities
