"""V-trace actor-critic: IMPALA, and with replay CLEAR and LASER, by settings alone.

IMPALA (1802.01561): memory `queue`, every unroll learnt from once. With memory `mixed`, on replayed unrolls only: CLEAR's cloning of the
old policy and value (1811.11682), where policy_cloning_cost and value_cloning_cost are not 0; LASER's relevance (1909.11583), where a
state whose behaviour has become too unlike the policy leaves every loss and stops the trace that reaches it.
Deviations: the loss of a truncated episode bootstraps from its final observation; entropy is on all rows, with LASER on fresh ones.
"""


from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from core.agent import LearnerOutput, output_of
from core.agents.base.actor_critic import ActorCriticAgent, ActorCriticParams
from core.common.settings import frozen_dataclass
from core.learning.microbatches import Loss
from core.ops.policy_losses import (
    baseline_loss,
    entropy_loss,
    kl,
    log_probs_of,
    policy_cloning_loss,
    policy_gradient_loss,
    value_cloning_loss,
)
from core.ops.vtrace import relevance, vtrace
from core.types import Batch, batch_size, piece


@frozen_dataclass
class ImpalaParams(ActorCriticParams):
    rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in the temporal differences (IMPALA: 1)."""
    c_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in the trace (IMPALA: 1)."""
    pg_rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in the policy gradient (IMPALA: 1)."""
    trace_lambda: float = Field(default=1.0, ge=0, le=1)
    """Factor of the trace (IMPALA: 1)."""
    policy_cloning_cost: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the policy cloning loss on replayed unrolls; 0 is off (CLEAR: 0.01)."""
    value_cloning_cost: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the value cloning loss on replayed unrolls; 0 is off (CLEAR: 0.005)."""
    relevance: Literal["none", "implied", "kl"] = "none"
    """Divergence by which replayed steps are left out: LASER's implied policy, or pi and mu themselves (kl)."""
    relevance_threshold: float = Field(default=0.3, gt=0, le=1e6)
    """Nats of relevance from which steps are left out; LASER leaves it open, the replaced system had 0.3."""


class Impala(ActorCriticAgent):
    Params = ImpalaParams
    captures = True
    memories = ("queue", "mixed")

    def learn(self, batch: Batch) -> LearnerOutput:
        self._prepare()
        found, grad_norm, stepped = self._optimizer.minimise(batch_size(batch), lambda part: self._loss(piece(batch, part)))
        sums = found.statistics
        rows = sums["rows"].clamp(min=1)
        statistics = {"loss": found.loss, "policy_loss": sums["policy_loss"], "baseline_loss": sums["baseline_loss"],
                      "entropy": sums["entropy"] / rows, "value_mean": sums["values"] / batch.window.rewards.numel(),
                      "behaviour_kl": sums["behaviour_kl"] / rows, "fresh_share": sums["fresh"] / rows,
                      "relevant_share": sums["relevant"] / rows, "grad_norm": grad_norm, "lr": self._optimizer.rate}
        return output_of(statistics, None, stepped)

    def _loss(self, batch: Batch) -> Loss:
        """The loss of these unrolls and what is reported of them, all of them sums over their rows."""
        params, window = self.params, batch.window.to(self.device)
        output, _ = self.unroll(window)
        logits, values, actions = output.logits[:-1], output.value, window.actions[:-1]  # [T, B, A], [T + 1, B], [T, B]
        behaviour_logits, behaviour_values = window.extras["logits"][:-1], window.extras["value"][:-1]
        taken = ~window.lasts[:-1]  # [T, B]: rows where an action was taken
        fresh = taken & self._fresh(batch)
        included = taken & self._relevant(logits, behaviour_logits, fresh)
        log_ratios = (log_probs_of(logits, actions) - log_probs_of(behaviour_logits, actions)).detach()
        returns = vtrace(log_ratios, window.rewards[:-1], params.gamma * window.discounts[:-1], values.detach(), included,
                         rho_bar=params.rho_bar, c_bar=params.c_bar, pg_rho_bar=params.pg_rho_bar, trace_lambda=params.trace_lambda)
        replayed = included & ~fresh
        policy = policy_gradient_loss(logits, actions, returns.advantages, included)
        baseline = baseline_loss(values[:-1], returns.targets, included)
        entropy = entropy_loss(logits, fresh if params.relevance != "none" else taken)
        loss = policy + params.baseline_cost * baseline + params.entropy_cost * entropy
        if params.policy_cloning_cost:
            loss = loss + params.policy_cloning_cost * policy_cloning_loss(logits, behaviour_logits, replayed)
        if params.value_cloning_cost:
            loss = loss + params.value_cloning_cost * value_cloning_loss(values[:-1], behaviour_values, replayed)
        statistics = {"policy_loss": policy, "baseline_loss": baseline, "entropy": -entropy_loss(logits, taken), "values": values.sum(),
                      "behaviour_kl": (kl(logits, behaviour_logits) * taken).sum(), "fresh": fresh.sum(), "relevant": included.sum(),
                      "rows": taken.sum()}
        return Loss(loss, {name: value.detach() for name, value in statistics.items()})

    def _fresh(self, batch: Batch) -> Tensor:
        """[B] bool."""
        return torch.ones(len(batch.weights), dtype=torch.bool, device=self.device) if batch.fresh is None else batch.fresh.to(self.device)

    def _relevant(self, logits: Tensor, behaviour_logits: Tensor, fresh: Tensor) -> Tensor:
        """[T, B] bool: what is fresh, and what LASER would learn from."""
        if self.params.relevance == "none":
            return torch.ones_like(fresh)
        params = self.params
        return fresh | relevance(logits.detach(), behaviour_logits, params.relevance, params.relevance_threshold, params.rho_bar)
