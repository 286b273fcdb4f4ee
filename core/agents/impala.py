"""V-trace actor-critic: IMPALA, and with replay CLEAR and LASER, by settings alone.

- IMPALA (1802.01561) learns from every unroll once, from the memory `queue`.
- Replayed unrolls of the memory `mixed` get CLEAR's cloning of the old policy and value (1811.11682), where
  policy_cloning_cost and value_cloning_cost are not 0.
- LASER's relevance (1909.11583) selects among replayed steps of the memory `mixed`: a state whose behaviour has become
  too unlike the policy is left out of every loss and stops the trace that reaches it.
- Deviations: the loss of a truncated episode bootstraps from its final observation; the entropy is over all steps, with
  LASER over fresh ones.
"""

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from core.agent import LearnerOutput, make_learner_output
from core.agents.base.actor_critic import ActorCriticAgentParams, SumLossAgent
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.ops.policy_losses import baseline_loss, masked_sum, policy_gradient_loss, value_cloning_loss
from core.ops.vtrace import implied_policy, vtrace
from core.specs import Discrete
from core.types import Batch


@frozen_dataclass
class ImpalaAgentParams(ActorCriticAgentParams):
    rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in the temporal differences (IMPALA: 1)."""
    c_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in the trace (IMPALA: 1)."""
    pg_rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in the policy gradient (IMPALA: 1)."""
    trace_lambda: float = Field(default=1.0, ge=0, le=1)
    """Factor of the trace (IMPALA: 1). The policy's advantages bootstrap from v, as SEED RL's; rlax mixes lambda v +
    (1 - lambda) V."""
    policy_cloning_cost: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the policy cloning loss on replayed unrolls; 0 is off (CLEAR: 0.01)."""
    value_cloning_cost: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the value cloning loss on replayed unrolls; 0 is off (CLEAR: 0.005)."""
    relevance: Literal["none", "implied", "kl"] = "none"
    """KL divergence by which replayed steps are left out: of LASER's implied policy, or of pi and mu (kl)."""
    relevance_threshold: float = Field(default=0.3, gt=0, le=1e6)
    """KL divergence in nats from which replayed steps are left out; LASER names no value."""


class Impala(SumLossAgent):
    """V-trace actor-critic on fresh and replayed unrolls."""

    Params = ImpalaAgentParams
    supports_cuda_graphs = True
    window_kinds = ("unrolls",)

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        if self.params.relevance == "implied" and not isinstance(self.spec.action, Discrete):
            raise ValueError(
                "agent.relevance=implied needs Discrete actions; kl suits MultiDiscrete and continuous ones"
            )

    @classmethod
    def replay_options(cls, params: ImpalaAgentParams) -> list[str]:
        costs = [name for name in ("policy_cloning_cost", "value_cloning_cost") if getattr(params, name)]
        return [*costs, *(["relevance"] if params.relevance != "none" else [])]

    def learn(self, batch: Batch) -> LearnerOutput:
        statistics, sums, applied = self.minimise(batch)
        for name in ("behaviour_kl", "on_policy_fraction", "trusted_fraction"):
            statistics[name] = sums[name] / sums["steps"].clamp(min=1)
        return make_learner_output(statistics, None, applied)

    def loss(self, batch: Batch) -> Loss:
        params, window = self.params, batch.window.to(self.device)
        output, _ = self.unroll(window)
        logits, values, actions = output.logits[:-1], output.value, self.taken_actions(window)  # [T, B, P], [T + 1, B]
        behaviour_logits, behaviour_values = window.extras["logits"][:-1], window.extras["value"][:-1]
        valid = ~window.lasts[:-1]  # [T, B]: steps where an action was taken
        fresh = valid if batch.fresh is None else valid & batch.fresh.to(self.device)
        included = valid
        if params.relevance != "none":
            included = valid & (fresh | self._is_relevant(logits.detach(), behaviour_logits))
        log_probs, entropies = self.policy.log_probs(logits, actions), self.policy.entropies(logits)
        log_ratios = log_probs - self.policy.log_probs(behaviour_logits, actions)
        rewards, discounts = window.rewards[:-1], params.gamma * window.discounts[:-1]
        clips = {"rho_bar": params.rho_bar, "c_bar": params.c_bar, "pg_rho_bar": params.pg_rho_bar}
        returns = vtrace(log_ratios, rewards, discounts, values, included, **clips, trace_lambda=params.trace_lambda)
        replayed = included & ~fresh
        policy = policy_gradient_loss(log_probs, returns.advantages, included)
        baseline = baseline_loss(values[:-1], returns.targets, included)
        entropy = masked_sum(entropies, fresh if params.relevance != "none" else valid)
        loss = policy + params.baseline_cost * baseline - params.entropy_cost * entropy
        if params.policy_cloning_cost:
            cloning = masked_sum(self.policy.kl(behaviour_logits, logits), replayed)  # KL(mu || pi) (1811.11682)
            loss = loss + params.policy_cloning_cost * cloning
        if params.value_cloning_cost:
            cloning = value_cloning_loss(values[:-1], behaviour_values, replayed)
            loss = loss + params.value_cloning_cost * cloning
        statistics = {"policy_loss": policy, "baseline_loss": baseline, "entropy": masked_sum(entropies, valid)}
        behaviour_kl = self.policy.kl(logits.detach(), behaviour_logits)
        statistics |= {"values": values.sum(), "behaviour_kl": (behaviour_kl * valid).sum()}
        statistics |= {"on_policy_fraction": fresh.sum(), "trusted_fraction": included.sum(), "steps": valid.sum()}
        return Loss(loss, statistics)

    def _is_relevant(self, logits: Tensor, behaviour_logits: Tensor) -> Tensor:
        """Return a mask [T, B] of the states that LASER (1909.11583) learns from."""
        params, reference = self.params, behaviour_logits
        if params.relevance == "implied":
            reference = implied_policy(logits, behaviour_logits, params.rho_bar)
        near: Tensor = self.policy.kl(logits, reference) < params.relevance_threshold
        return near
