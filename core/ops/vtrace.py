"""V-trace (IMPALA, 1802.01561) and LASER's trust region on it (1909.11583), time-major and without gradients."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from core.types import check_shapes


class VTraceReturns(NamedTuple):
    """Value targets and advantages of V-trace."""

    targets: Tensor  # [T, B] v_s
    advantages: Tensor  # [T, B] weight of grad log pi(a_s); 0 where excluded
    unweighted: Tensor  # [T, B] the advantages without their ratio, for losses that have a ratio of their own


@torch.no_grad()
def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    included: Tensor,
    *,
    rho_bar: float,
    c_bar: float,
    trace_lambda: float,
    pg_rho_bar: float = 1.0,
) -> VTraceReturns:
    """Compute off-policy value targets and policy gradient weights.

        rho_t = min(rho_bar, pi / mu),    c_t = lambda min(c_bar, pi / mu),    delta_t = rho_t (r_t + g_t V_{t+1} - V_t)
        x_t = included_t (delta_t + g_t c_t x_{t+1}),    x_T = 0,    v_t = V_t + x_t,    v_T = V_T
        unweighted_t = included_t (r_t + g_t v_{t+1} - V_t),    advantage_t = min(pg_rho_bar, pi / mu) unweighted_t

    The equations are those of 1802.01561, remark 1 and section 4.2; exclusion is that of 1909.11583. A step is excluded
    because it is `last` and has no action, or because LASER finds its state irrelevant. Either way its target is its
    value, the step before it bootstraps from that value, and the trace stops when it *reaches* the step; its reward and
    ratio are not read.

    Ratios, corrections and advantages that floats cannot hold become the largest that floats can, so that 0 * inf and
    inf - inf do not occur.

    Args:
        log_ratios: [T, B] float, log pi(a) / mu(a).
        rewards: [T, B] float r.
        discounts: [T, B] float g, gamma times the step's discount, 0 at termination.
        values: [T + 1, B] float V.
        included: [T, B] bool.
        rho_bar: Clip of pi / mu in the temporal differences; it may be inf.
        c_bar: Clip of pi / mu in the trace; it may be inf.
        trace_lambda: Factor of the trace.
        pg_rho_bar: Clip of pi / mu in `advantages` alone; it may be inf.

    Raises:
        ValueError: Shapes or dtypes differ.
    """
    check_shapes("T, B", log_ratios, rewards, discounts, included, values[:-1])
    if included.dtype != torch.bool:
        raise ValueError(f"included must be bool, not {included.dtype}")
    largest = torch.finfo(values.dtype).max / 8  # so that a few of them can be added
    ratios = log_ratios.clamp(max=math.log(largest)).exp()
    deltas = (ratios.clamp(max=rho_bar) * (rewards + discounts * values[1:] - values[:-1])).clamp(-largest, largest)
    deltas = torch.where(included, deltas, 0.0)
    traces = torch.where(included, discounts * trace_lambda * ratios.clamp(max=c_bar), 0.0)
    corrections = [torch.zeros_like(values[-1])]  # x_T, x_{T-1} .. x_0, each [B]
    for delta, trace in zip(reversed(deltas.unbind()), reversed(traces.unbind())):
        corrections.append(torch.addcmul(delta, trace, corrections[-1]).clamp_(-largest, largest))
    targets = values + torch.stack(corrections[::-1])  # [T + 1, B]
    unweighted = rewards + discounts * targets[1:] - values[:-1]
    advantages = (ratios.clamp(max=pg_rho_bar) * unweighted).clamp(-largest, largest)
    return VTraceReturns(targets[:-1], torch.where(included, advantages, 0.0), torch.where(included, unweighted, 0.0))


@torch.no_grad()
def lambda_advantages(
    returns: VTraceReturns, rewards: Tensor, discounts: Tensor, values: Tensor, included: Tensor, trace_lambda: float
) -> Tensor:
    """Compute r_t + g_t (lambda v_{t+1} + (1 - lambda) V_{t+1}) - V_t [T, B], 0 where excluded.

    They are the advantages of rlax (vtrace_td_error_and_advantage) without their ratio: those of V-trace for lambda 1,
    and GAE where pi = mu and the clips are at least 1. The arguments are those of `vtrace`, which returned `returns`.
    """
    targets = torch.cat([returns.targets[1:], values[-1:]])  # v_1 .. v_T
    mixed = trace_lambda * targets + (1 - trace_lambda) * values[1:]
    return torch.where(included, rewards + discounts * mixed - values[:-1], 0.0)


@torch.no_grad()
def implied_policy(target_logits: Tensor, behaviour_logits: Tensor, rho_bar: float) -> Tensor:
    """Compute log pi~ [T, B, A] of the policy whose values V-trace learns, pi~ proportional to min(rho_bar mu, pi).

    Sources: 1802.01561, section 4.1; 1909.11583.

    Args:
        target_logits: [T, B, A] of pi, finite.
        behaviour_logits: [T, B, A] of mu, finite.
        rho_bar: Clip of pi / mu in the temporal differences, above 0.

    Raises:
        ValueError: The shapes differ, or rho_bar is not positive.
    """
    check_shapes("T, B, A", target_logits, behaviour_logits)
    log_pi, log_mu = torch.log_softmax(target_logits, -1), torch.log_softmax(behaviour_logits, -1)
    return torch.log_softmax(torch.minimum(log_mu + math.log(rho_bar), log_pi), -1)
