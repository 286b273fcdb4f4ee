"""IMPACT (1912.00167): each batch of unrolls is learnt from several times, held close to a slowly moving target policy.

Equation 4: L = -E min(r A, clip(r, 1 - eps, 1 + eps) A) with r = clip(mu / pi_target, 0, beta_max) pi / mu; advantages and value targets
are V-trace's with the ratios pi_target / mu. Memory `circular` is the paper's buffer. Deviation: the values in V-trace are those of the
online network. The optional weight of KL(pi_target || pi) is adapted where the target is copied: there the two are farthest apart.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from core.agent import LearnerOutput, output_of
from core.agents.base.actor_critic import ActorCriticAgent, ActorCriticParams
from core.common.settings import frozen_dataclass
from core.distributed.learner_group import all_reduce_mean
from core.learning.device_schedule import UpdateCounter
from core.learning.microbatches import Loss
from core.learning.target_network import TargetUpdater
from core.model import Model, disable_host_sync
from core.ops.policy_losses import adapted_kl_coefficient, baseline_loss, clipped_surrogate, entropy_loss, kl, log_probs_of
from core.ops.vtrace import vtrace
from core.types import Batch, batch_size, piece

KL_SPAN = 1_000.0  # times the first weight, up and down, that the adapted one may go: at 0 or inf it would stay


@frozen_dataclass
class ImpactParams(ActorCriticParams):
    epsilon: float = Field(default=0.3, gt=0, le=1)
    """Half width of the clip around 1 (IMPACT: 0.2 to 0.4)."""
    beta_max: float = Field(default=2.0, gt=0, le=1e30)
    """Clip of mu / pi_target."""
    target_update: int = Field(default=8, ge=1, le=10**9)
    """Updates between copies of the network to the target (IMPACT: N K)."""
    rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi_target / mu in the temporal differences."""
    c_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi_target / mu in the trace."""
    trace_lambda: float = Field(default=1.0, ge=0, le=1)
    """Factor of the trace."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of KL(pi_target || pi) at first; 0 is off."""
    kl_target: float = Field(default=0.01, gt=0, le=1e6)
    """Nats before a copy to the target that the weight of the KL is adapted to."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Optimiser of the network."""
    lr: float = Field(default=5e-4, gt=0, le=100)
    """Learning rate at the start."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the optimiser's second moment."""


class Impact(ActorCriticAgent):
    Params = ImpactParams
    memories = ("circular", "queue", "mixed")
    captures = True
    _target: Model | None = None
    _updates: UpdateCounter
    _follow: TargetUpdater
    _coefficient: Tensor

    def learn(self, batch: Batch) -> LearnerOutput:
        self._prepare()
        found, grad_norm, stepped = self._optimizer.minimise(batch_size(batch), lambda part: self._loss(piece(batch, part)))
        sums = found.statistics
        rows = sums["rows"].clamp(min=1)
        statistics = {"loss": found.loss, "policy_loss": sums["policy_loss"], "baseline_loss": sums["baseline_loss"],
                      "entropy": sums["entropy"] / rows, "value_mean": sums["values"] / batch.window.rewards.numel(),
                      "target_kl": sums["divergence"] / rows, "kl_coefficient": self._coefficient.clone(),
                      "target_lag": sums["target_lag"] / batch.window.rewards[:-1].numel(), "grad_norm": grad_norm,
                      "lr": self._optimizer.rate}
        assert self._target is not None
        copied = self._follow(list(self._target.state_dict().values()), list(self.model.state_dict().values()), self._updates.next(),
                              stepped)
        if self.params.kl_coefficient and copied is not False:
            self._adapt(sums["divergence"], rows, copied & stepped)
        return output_of(statistics, None, stepped)

    def _loss(self, batch: Batch) -> Loss:
        """The loss of these unrolls and what is reported of them, all of them sums over their rows."""
        params, window = self.params, batch.window.to(self.device)
        output, _ = self.unroll(window)
        with torch.no_grad():
            target_logits = self.unroll(window, self._target)[0].logits[:-1]  # [T, B, A]
        logits, values, actions, taken = output.logits[:-1], output.value, window.actions[:-1], ~window.lasts[:-1]
        log_probs, target_log_probs, behaviour_log_probs = (
            log_probs_of(each, actions) for each in (logits, target_logits, window.extras["logits"][:-1]))  # each [T, B]
        returns = vtrace(target_log_probs - behaviour_log_probs, window.rewards[:-1], params.gamma * window.discounts[:-1],
                         values.detach(), taken, rho_bar=params.rho_bar, c_bar=params.c_bar, pg_rho_bar=1.0,
                         trace_lambda=params.trace_lambda)
        objective = clipped_surrogate(log_probs, behaviour_log_probs, target_log_probs, returns.unweighted, params.epsilon, params.beta_max)
        policy, baseline = -(objective * taken).sum(), baseline_loss(values[:-1], returns.targets, taken)
        entropy, divergence = entropy_loss(logits, taken), (kl(target_logits, logits) * taken).sum()
        loss = (policy + params.baseline_cost * baseline + params.entropy_cost * entropy
                + (self._coefficient * divergence if params.kl_coefficient else 0.0))
        statistics = {"policy_loss": policy, "baseline_loss": baseline, "entropy": -entropy, "values": values.sum(),
                      "divergence": divergence, "target_lag": (log_probs - target_log_probs).abs().sum(), "rows": taken.sum()}
        return Loss(loss, {name: value.detach() for name, value in statistics.items()})

    def _adapt(self, divergence: Tensor, rows: Tensor, wanted: bool | Tensor) -> None:
        """Keep the divergence of network and target, as it has become since the last copy, near kl_target."""
        divergence, rows = all_reduce_mean(torch.stack([divergence, rows]))  # of all learners
        adapted, first = adapted_kl_coefficient(self._coefficient, divergence / rows, self.params.kl_target), self.params.kl_coefficient
        adapted = adapted.clamp(first / KL_SPAN, first * KL_SPAN)
        if isinstance(wanted, Tensor):
            adapted = torch.where(wanted, adapted, self._coefficient)
        if wanted is not False:
            self._coefficient.copy_(adapted)

    def _prepare(self) -> None:
        super()._prepare()
        if self._target is None:
            self._target = self._make_model().requires_grad_(False)
            self._target.load_state_dict(self.model.state_dict())
            self._coefficient = torch.tensor(self.params.kl_coefficient, device=self.device)
            self._updates, self._follow = UpdateCounter(), TargetUpdater(self.params.target_update)

    def plan(self, count: int) -> None:
        super().plan(count)
        assert self._target is not None
        disable_host_sync(self._target)
        self._follow.plan(self._updates.made + 1, count, self.device)
        self._updates.plan(count)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        assert self._target is not None
        return {**state, "target": self._target.state_dict(), "updates": self._updates.made, "kl_coefficient": float(self._coefficient)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert self._target is not None
        self._target.load_state_dict(state["target"])
        self._updates.restore(state["updates"])
        if self.params.kl_coefficient and state["kl_coefficient"]:  # else it begins here, or has ended
            self._coefficient.fill_(state["kl_coefficient"])
