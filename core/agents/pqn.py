"""PQN (2407.04811): Q-learning from fresh rollouts, without replay and without a target network.

    G_t = r_t + g_t ((1 - lambda) max_a Q(s_{t+1}, a) + lambda G_{t+1}),    G_T = max_a Q(s_T, a)

- LayerNorm (`model.norm layer`) takes the place of the target network, and many environments that of the replay.
- Rollouts are by the newest parameters (memory `rollouts`), so the values in G are those that actors computed when they
  acted. Only those of the last observations are computed by the learner, before the update. Where actions are masked,
  maxima are over the legal ones.
- The loss is half the squared error, mean over a minibatch. Each step of a rollout is learnt from `epochs` times.
- G is that of the paper's Atari code (github.com/mttga/purejaxql, pqn_atari.py). Its code for MinAtar and gymnax
  bootstraps the step before the last from the value of s_T.
- Deviations: a truncated episode bootstraps from its final observation; the step after an episode's end, where no
  action was taken, is left out of all means.
"""

from functools import partial
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from core.agent import LearnerOutput, make_learner_output
from core.agents.base.action_values import ActionValueAgent, ActionValueParams
from core.agents.base.rollout_epochs import RolloutAgent, RolloutAgentParams, normalized_weights
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.learning.optimizer import OptimizerName
from core.ops.actions import mask_actions
from core.ops.returns import generalised_advantages
from core.specs import ArraySpec, WindowSpec
from core.types import ACTION_MASK, Batch, Window


@frozen_dataclass
class PQNParams(RolloutAgentParams, ActionValueParams):
    """Defaults: the paper's settings for Atari (github.com/mttga/purejaxql, pqn_atari.yaml)."""

    unroll_length: int = Field(default=32, ge=1, le=10_000)
    """Steps of an unroll (PQN: 32)."""
    epochs: int = Field(default=2, ge=1, le=1_000)
    """Times that a rollout is learnt from (PQN: 2)."""
    minibatches: int = Field(default=32, ge=1, le=65_536)
    """Parts of a rollout's steps in an epoch (PQN: 32)."""
    trace_lambda: float = Field(default=0.65, ge=0, le=1)
    """Weight lambda of the next step's return in a return; the rest is its value's (PQN: 0.65)."""
    optimizer: OptimizerName = "radam"
    """Optimiser of the network (PQN: RAdam)."""
    learning_rate: float = Field(default=2.5e-4, gt=0, le=100)
    """Learning rate at the start (PQN: 2.5e-4)."""
    optimizer_eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of Adam's second moment; for RMSProp see rmsprop_eps_in_root."""
    exploration_epsilon_end: float = Field(default=0.001, ge=0, le=1)
    """Share of random actions at the end of exploration "linear" (PQN: 0.001)."""
    exploration_epsilon_steps: int = Field(default=1_000_000, ge=1, le=10**12)
    """Agent steps of the run until epsilon is at its end or at the ladder (PQN: a tenth of the run)."""


class Samples(NamedTuple):
    """Single steps of a rollout, [N, ...], which minibatches select."""

    observations: Tensor
    actions: Tensor
    targets: Tensor
    weights: Tensor  # 1 where an action was taken, else 0

    def select(self, index: Tensor | slice) -> "Samples":
        """Return some of the N samples."""
        return Samples(*(field[index] for field in self))


class PQN(RolloutAgent, ActionValueAgent):
    """Parallelised Q-learning of action values [B, A]."""

    Params = PQNParams
    supports_cuda_graphs = True
    required_output = "q"
    window_kinds = ("rollouts",)

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec.unroll(self.params.unroll_length)

    @property
    def extras(self) -> dict[str, ArraySpec]:
        return {"q_max": ArraySpec((), "float32")}

    # learning ---------------------------------------------------------------------------------------------------------
    def learn(self, batch: Batch) -> LearnerOutput:
        self.set_training(True)
        window = batch.window.to(self.device)
        samples = self._samples(window)
        statistics, applied = self._epochs.learn(
            samples,
            len(samples.weights),
            lambda minibatch: partial(self._loss, self._weighted(minibatch)),
            apply_if=torch.isfinite(samples.targets.sum()),  # sums spread NaN
        )
        self.model.update_normalization(window.observations[:-1].flatten(0, 1))
        return make_learner_output(statistics, None, applied)

    @torch.no_grad()
    def _samples(self, window: Window) -> Samples:
        """Return the steps of a rollout, with their returns by the parameters before the update."""
        params, valid = self.params, ~window.lasts[:-1]  # [T, B]: steps where an action was taken
        legal = window.extras[ACTION_MASK][-1] if self.spec.has_action_mask else None
        bootstrap = mask_actions(self.model(window.observations[-1], ())[0], legal).amax(1)  # [B]
        values = torch.cat([window.extras["q_max"][:-1], bootstrap[None]])  # [T + 1, B]
        discounts = params.gamma * window.discounts[:-1]
        # The module's G is the target of generalised advantages where max_a Q is the value of a state.
        _, targets = generalised_advantages(window.rewards[:-1], discounts, values, valid, params.trace_lambda)
        steps = Samples(window.observations[:-1], window.actions[:-1], targets, valid.to(values.dtype))
        return Samples(*(field.flatten(0, 1) for field in steps))

    def _weighted(self, minibatch: Samples) -> Samples:
        return minibatch._replace(weights=normalized_weights(minibatch.weights)[0])

    def _loss(self, minibatch: Samples, part: slice | None) -> Loss:
        """Compute the loss of a minibatch, or its share of the loss if it is a part."""
        samples = minibatch if part is None else minibatch.select(part)
        values = self.model(samples.observations, ())[0]  # [N, A]
        errors = samples.targets - values.gather(1, samples.actions[:, None])[:, 0]
        with torch.no_grad():
            statistics = {"q_mean": values.mean(1), "td_error": errors.abs()}
            statistics = {name: (samples.weights * each).sum() for name, each in statistics.items()}
        return Loss((samples.weights * 0.5 * errors.square()).sum(), statistics)
