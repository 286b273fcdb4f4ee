"""IMPACT (1912.00167): several updates on each batch of unrolls, held close to a slowly moving target policy.

- Equation 4: L = -E min(r A, clip(r, 1 - eps, 1 + eps) A) with r = clip(mu / pi_target, 0, beta_max) pi / mu.
  Advantages and value targets are V-trace's with the ratios pi_target / mu.
- The memory `circular` is the paper's buffer.
- The optional weight of KL(pi_target || pi) is adapted where the target is copied, because there the two are farthest
  apart.
- Deviations: the values in V-trace are those of the online network. The advantage r + g v_{t+1} - V_t has no factor
  min(1, pi_target / mu), which V-trace's advantage has in the authors' code (RLlib's APPO). Losses are sums over the
  T B steps of a batch, where that code clips the gradient of their mean at 40: a clip_norm of 40 T B here. V-trace
  serves every action space, where the paper has advantages with lambda 0.995 for continuous actions.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from core.agent import LearnerOutput, make_learner_output
from core.agents.base.actor_critic import ActorCriticAgentParams, SumLossAgent
from core.common.settings import frozen_dataclass
from core.distributed.learner_group import all_reduce_mean
from core.learning.gradients import Loss
from core.learning.optimizer import OptimizerName, TargetUpdater
from core.ops.policy_losses import adapted_kl_coefficient, baseline_loss, clipped_surrogate, masked_sum
from core.ops.vtrace import vtrace
from core.types import Batch

# Largest factor between the adapted weight of the KL and the first one, up and down: at 0 or inf the weight would stay.
KL_SPAN = 1_000.0


@frozen_dataclass
class ImpactParams(ActorCriticAgentParams):
    clip_epsilon: float = Field(default=0.3, gt=0, le=1)
    """Half width of the clip around 1 (IMPACT: 0.2 to 0.4)."""
    beta_max: float = Field(default=2.0, gt=0, le=1e30)
    """Clip of mu / pi_target."""
    target_update_period: int = Field(default=8, ge=1, le=10**9)
    """Updates between copies of the network to the target (IMPACT: N K)."""
    rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi_target / mu in the temporal differences."""
    c_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi_target / mu in the trace."""
    trace_lambda: float = Field(default=1.0, ge=0, le=1)
    """Factor of the trace. The policy's advantages bootstrap from v, as SEED RL's; rlax mixes lambda v + (1 - lambda)
    V."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of KL(pi_target || pi) at first; 0 is off."""
    kl_target: float = Field(default=0.01, gt=0, le=1e6)
    """Nats before a copy to the target that the weight of the KL is adapted to."""
    optimizer: OptimizerName = "adam"
    """Optimiser of the network."""
    learning_rate: float = Field(default=5e-4, gt=0, le=100)
    """Learning rate at the start."""
    optimizer_eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of Adam's second moment; for RMSProp see rmsprop_eps_in_root."""


class Impact(SumLossAgent):
    """Clipped surrogate objective against a target policy, with V-trace's advantages."""

    Params = ImpactParams
    supports_cuda_graphs = True
    window_kinds = ("unrolls", "repeated unrolls")
    trained_options = {"kl_coefficient": "kl_target"}

    def init_learner(self) -> None:
        super().init_learner()
        self.target = self._make_target()
        self._kl_coefficient = torch.tensor(self.params.kl_coefficient, device=self.device)
        self._update_target = TargetUpdater(self.params.target_update_period)

    def learn(self, batch: Batch) -> LearnerOutput:
        statistics, sums, applied = self.minimise(batch)
        steps = sums["steps"].clamp(min=1)
        statistics["target_kl"], statistics["kl_coefficient"] = sums["target_kl"] / steps, self._kl_coefficient.clone()
        statistics["target_abs_log_ratio"] = sums["target_abs_log_ratio"] / steps
        copied = self._update_target(self.target, self.model, self._optimizer.steps_begun, applied)
        if self.params.kl_coefficient and copied is not False:
            self._adapt_kl_coefficient(sums["target_kl"], steps, copied)
        return make_learner_output(statistics, None, applied)

    def loss(self, batch: Batch) -> Loss:
        params, window = self.params, batch.window.to(self.device)
        output, _ = self.unroll(window)
        with torch.no_grad():
            target_logits = self.unroll(window, self.target)[0].logits[:-1]  # [T, B, A]
        logits, values, valid = output.logits[:-1], output.value, ~window.lasts[:-1]
        actions = self.taken_actions(window)
        log_probs, target_log_probs, behaviour_log_probs = (  # each [T, B]
            self.policy.log_probs(each, actions) for each in (logits, target_logits, window.extras["logits"][:-1])
        )
        log_ratios, rewards = target_log_probs - behaviour_log_probs, window.rewards[:-1]
        discounts, clips = params.gamma * window.discounts[:-1], {"rho_bar": params.rho_bar, "c_bar": params.c_bar}
        returns = vtrace(log_ratios, rewards, discounts, values, valid, **clips, trace_lambda=params.trace_lambda)
        objective = clipped_surrogate(
            log_probs, behaviour_log_probs, target_log_probs, returns.unweighted, params.clip_epsilon, params.beta_max
        )
        policy = -masked_sum(objective, valid)
        baseline = baseline_loss(values[:-1], returns.targets, valid)
        entropy = masked_sum(self.policy.entropies(logits), valid)
        target_kl = (self.policy.kl(target_logits, logits) * valid).sum()
        loss = policy + params.baseline_cost * baseline - params.entropy_cost * entropy
        if params.kl_coefficient:
            loss = loss + self._kl_coefficient * target_kl
        statistics = {"policy_loss": policy, "baseline_loss": baseline, "entropy": entropy, "values": values.sum()}
        statistics |= {"target_abs_log_ratio": ((log_probs - target_log_probs).abs() * valid).sum()}
        statistics |= {"target_kl": target_kl, "steps": valid.sum()}
        return Loss(loss, statistics)

    def _adapt_kl_coefficient(self, target_kl: Tensor, steps: Tensor, apply_if: bool | Tensor) -> None:
        """Keep the divergence of network and target since the last copy, a mean over all learners, near kl_target."""
        target_kl, steps = all_reduce_mean(torch.stack([target_kl, steps]))
        adapted = adapted_kl_coefficient(self._kl_coefficient, target_kl / steps, self.params.kl_target)
        adapted = adapted.clamp(self.params.kl_coefficient / KL_SPAN, self.params.kl_coefficient * KL_SPAN)
        apply_if = torch.as_tensor(apply_if, device=self.device)
        self._kl_coefficient.copy_(torch.where(apply_if, adapted, self._kl_coefficient))

    def prepare_updates(self, count: int) -> None:
        super().prepare_updates(count)
        self._update_target.plan(self._optimizer.steps_begun + 1, count, self.device)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> dict[str, Any]:
        return {**super().checkpoint_parts(), "target": self.target}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kl_coefficient": float(self._kl_coefficient)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.params.kl_coefficient and state["kl_coefficient"]:  # else the adaptation begins here, or has ended
            self._kl_coefficient.fill_(state["kl_coefficient"])
