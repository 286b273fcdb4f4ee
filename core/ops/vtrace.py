"""V-trace (IMPALA, 1802.01561) and LASER's trust region on it (1909.11583). Time-major, nothing here carries a gradient."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from core.ops.policy_losses import kl


class VTraceReturns(NamedTuple):
    targets: Tensor      # [T, B] v_s
    advantages: Tensor   # [T, B] weight of grad log pi(a_s); 0 where excluded
    unweighted: Tensor   # [T, B] the advantages without their ratio, for losses that have a ratio of their own


@torch.no_grad()
def vtrace(log_ratios: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, included: Tensor, *,
           rho_bar: float, c_bar: float, pg_rho_bar: float, trace_lambda: float) -> VTraceReturns:
    """Off-policy value targets and policy gradient weights (1802.01561, remark 1 and section 4.2; exclusion: 1909.11583).

        rho_t = min(rho_bar, pi / mu),    c_t = lambda min(c_bar, pi / mu),    delta_t = rho_t (r_t + g_t V_{t+1} - V_t)
        x_t = included_t (delta_t + g_t c_t x_{t+1}),    x_T = 0,    v_t = V_t + x_t,    v_T = V_T
        unweighted_t = included_t (r_t + g_t v_{t+1} - V_t),    advantage_t = min(pg_rho_bar, pi / mu) unweighted_t

    log_ratios log pi(a)/mu(a), rewards, discounts g (gamma times the row's discount, 0 at termination) [T, B] float,
    values [T + 1, B], included [T, B] bool. A row is excluded because it is `last`, no action was taken there, or because LASER
    finds its state irrelevant. Either way its target is its value, the row before it bootstraps from that value, and the trace stops
    when it *reaches* it; its reward and ratio are not read. The three clips may be inf: ratios, corrections and advantages that their
    numbers cannot hold are the largest ones that these can, so that 0 * inf and inf - inf do not occur. Shapes or dtypes that differ:
    ValueError.
    """
    _assert_window(log_ratios, rewards, discounts, values, included)
    largest = torch.finfo(values.dtype).max / 8  # so that a few of them can be added
    ratios = log_ratios.clamp(max=math.log(largest)).exp()
    deltas = (ratios.clamp(max=rho_bar) * (rewards + discounts * values[1:] - values[:-1])).clamp(-largest, largest)
    deltas = torch.where(included, deltas, 0.0)
    traces = torch.where(included, discounts * trace_lambda * ratios.clamp(max=c_bar), 0.0)
    corrections = [torch.zeros_like(values[-1])]  # x_T, x_{T-1} .. x_0, each [B]
    for t in reversed(range(len(rewards))):
        corrections.append(torch.addcmul(deltas[t], traces[t], corrections[-1]).clamp_(-largest, largest))
    targets = values + torch.stack(corrections[::-1])  # [T + 1, B]
    unweighted = rewards + discounts * targets[1:] - values[:-1]
    advantages = (ratios.clamp(max=pg_rho_bar) * unweighted).clamp(-largest, largest)
    return VTraceReturns(targets[:-1], torch.where(included, advantages, 0.0), torch.where(included, unweighted, 0.0))


@torch.no_grad()
def implied_policy(target_logits: Tensor, behaviour_logits: Tensor, rho_bar: float) -> Tensor:
    """Whose values V-trace with rho_bar > 0 learns (1802.01561, section 4.1; 1909.11583): pi~ proportional to min(rho_bar mu, pi).

    Logits of pi and mu [T, B, A], finite. Returns log pi~ [T, B, A]. Shapes that differ or rho_bar <= 0: ValueError.
    """
    if target_logits.ndim != 3 or target_logits.shape != behaviour_logits.shape or rho_bar <= 0:
        raise ValueError(f"logits must be [T, B, A] of one shape, not {tuple(target_logits.shape)} and {tuple(behaviour_logits.shape)}, "
                         f"and rho_bar positive, not {rho_bar}")
    log_pi, log_mu = torch.log_softmax(target_logits, -1), torch.log_softmax(behaviour_logits, -1)
    return torch.log_softmax(torch.minimum(log_mu + math.log(rho_bar), log_pi), -1)


@torch.no_grad()
def relevance(target_logits: Tensor, behaviour_logits: Tensor, kind: str, threshold: float, rho_bar: float) -> Tensor:
    """Which states LASER (1909.11583) learns from: KL(pi || pi~) < threshold, or KL(pi || mu) < threshold for kind "kl".

    Logits [T, B, A] of pi and mu; rho_bar belongs to kind "implied". Returns [T, B] bool. Another kind or other shapes: ValueError.
    """
    if kind not in ("implied", "kl"):
        raise ValueError(f"relevance is measured by 'implied' or 'kl', not {kind!r}")
    reference = implied_policy(target_logits, behaviour_logits, rho_bar) if kind == "implied" else behaviour_logits
    return kl(target_logits, reference) < threshold


def _assert_window(log_ratios: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, included: Tensor) -> None:
    rows = [tuple(tensor.shape) for tensor in (log_ratios, rewards, discounts, included)]
    if len(set(rows)) != 1 or rewards.ndim != 2 or len(rewards) < 1:
        raise ValueError(f"log_ratios, rewards, discounts and included must be [T, B] of one shape with T >= 1, not {rows}")
    if tuple(values.shape) != (len(rewards) + 1, rewards.shape[1]):
        raise ValueError(f"values must be [T + 1, B] = {(len(rewards) + 1, rewards.shape[1])}, not {tuple(values.shape)}")
    if included.dtype != torch.bool:
        raise ValueError(f"included must be bool, not {included.dtype}")
