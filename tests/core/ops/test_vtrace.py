"""V-trace equals the paper's double sum, written with plain loops in float64."""

from decimal import Decimal
from fractions import Fraction
from math import exp, inf, log

import numpy as np
import pytest
import torch

from core.ops.policy_losses import kl
from core.ops.returns import generalised_advantages
from core.ops.vtrace import VTraceReturns, implied_policy, lambda_advantages, vtrace

# at ratio 1, the n-step Bellman target
UNCLIPPED = {"rho_bar": 1.0, "c_bar": 1.0, "pg_rho_bar": 1.0, "trace_lambda": 1.0}


def double_sum(log_ratios, rewards, discounts, values, included, rho_bar, c_bar, trace_lambda):
    """Return the targets of one environment, up to the first excluded step (1802.01561, eq. 1).

    v_s = V_s + sum_{t >= s} (prod_{s <= i < t} g_i c_i) delta_t.
    """
    length = len(rewards)
    targets = []
    for s in range(length):
        total = values[s]
        for t in range(s, length):
            if not included[t]:
                break
            product = 1.0
            for i in range(s, t):
                product *= discounts[i] * trace_lambda * min(c_bar, exp(log_ratios[i]))
            rho = min(rho_bar, exp(log_ratios[t]))
            total += product * rho * (rewards[t] + discounts[t] * values[t + 1] - values[t])
        targets.append(total)
    return [*targets, values[length]]


def random_window(seed, length=9, streams=200):
    """Return a window with terminations, truncations and irrelevant steps, and ratios on both sides of every clip."""
    generator = np.random.default_rng(seed)
    lasts = generator.random((length, streams)) < 0.15
    included = ~lasts & (generator.random((length, streams)) > 0.15)
    discounts = np.full((length, streams), 0.97)
    ends = np.zeros_like(lasts)
    ends[:-1] = lasts[1:]  # the step that leads to a last step; half of them terminate
    discounts[ends & (generator.random((length, streams)) < 0.5)] = 0.0
    shape = (length, streams)
    window = (
        generator.normal(size=shape),
        generator.normal(size=shape),
        discounts,
        generator.normal(size=(length + 1, streams)),
        included,
    )
    return [torch.from_numpy(array) for array in window]


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def rows(*flags):
    return torch.tensor(flags).unsqueeze(1)


def numbers(tensor):
    return tensor.squeeze(1).tolist()


def logits_of(*probabilities):
    """Return unnormalised logits [1, 1, A]."""
    return torch.tensor(probabilities, dtype=torch.float64).log().view(1, 1, -1) + 3.7


@pytest.mark.parametrize(
    "rho_bar, c_bar, pg_rho_bar, trace_lambda",
    [(1.0, 1.0, 1.0, 1.0), (1.3, 0.7, 2.0, 0.9), (0.8, 1.5, 0.6, 1.0), (inf, inf, inf, 1.0), (inf, 1.0, 1.0, 0.0)],
)
def test_targets_and_advantages_equal_the_papers_sums(rho_bar, c_bar, pg_rho_bar, trace_lambda):
    window = random_window(seed=1)
    returns = vtrace(*window, rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, trace_lambda=trace_lambda)
    for b in range(200):
        log_ratios, rewards, discounts, values, included = (tensor[:, b].tolist() for tensor in window)
        v = double_sum(log_ratios, rewards, discounts, values, included, rho_bar, c_bar, trace_lambda)
        weights = [min(pg_rho_bar, exp(x)) if inside else 0.0 for x, inside in zip(log_ratios, included)]
        advantages = [
            w * (r + g * v[t + 1] - values[t]) for t, (w, r, g) in enumerate(zip(weights, rewards, discounts))
        ]
        assert returns.targets[:, b].tolist() == pytest.approx(v[:-1], abs=1e-10)
        assert returns.advantages[:, b].tolist() == pytest.approx(advantages, abs=1e-10)


def saturating_sum(log_ratios, rewards, discounts, values, included, trace_lambda, largest):
    """Return unclipped targets and advantages of one environment, in exact arithmetic except for ratios.

    Numbers that float32 cannot hold become `largest`.
    """

    def bounded(number):
        return max(-largest, min(largest, number))

    targets, advantages, correction = [], [], Fraction(0)
    for t in reversed(range(len(rewards))):
        ratio = bounded(Fraction(Decimal(log_ratios[t]).exp()))
        following = Fraction(values[t + 1]) + correction
        delta = bounded(
            ratio * (Fraction(rewards[t]) + Fraction(discounts[t]) * Fraction(values[t + 1]) - Fraction(values[t]))
        )
        correction = (
            bounded(delta + Fraction(discounts[t]) * trace_lambda * ratio * correction) if included[t] else Fraction(0)
        )
        weighted = bounded(ratio * (Fraction(rewards[t]) + Fraction(discounts[t]) * following - Fraction(values[t])))
        targets.append(float(Fraction(values[t]) + correction))
        advantages.append(float(weighted) if included[t] else 0.0)
    return targets[::-1], advantages[::-1]


@pytest.mark.parametrize("trace_lambda", [1, 0])
def test_without_clips_large_ratios_give_no_nan(trace_lambda):
    """The exp of float32 is inf from 88.73 on; times 0, or minus another inf, it would be NaN."""
    log_ratios, rewards, discounts, values, included = (
        tensor.float() for tensor in random_window(seed=5, length=6, streams=300)
    )
    log_ratios = (60 * log_ratios).clamp(-300, 300)  # a third of the ratios exceed float32 on one side
    rewards[:, ::3], values[:, ::3] = 0, 0  # errors of exactly 0
    window = (log_ratios, rewards, discounts, values, included.bool())
    largest = Fraction(float(np.float64(np.finfo(np.float32).max) / 8))
    returns = vtrace(*window, rho_bar=inf, c_bar=inf, pg_rho_bar=inf, trace_lambda=float(trace_lambda))
    for b in range(300):
        targets, advantages = saturating_sum(*(tensor[:, b].tolist() for tensor in window), trace_lambda, largest)
        assert returns.targets[:, b].tolist() == pytest.approx(targets, rel=1e-3, abs=1e-3)
        assert returns.advantages[:, b].tolist() == pytest.approx(advantages, rel=1e-3, abs=1e-3)


def test_an_error_that_floats_cannot_hold_is_finite_in_the_sum():
    """The error of step 0 is 10 times the largest ratio; the correction that reaches it is its product with another."""
    log_ratios, rewards, values = column(200.0, 200.0), column(10.0, -10.0), column(0.0, 0.0, 0.0)
    window = [tensor.float() for tensor in (log_ratios, rewards, column(1.0, 1.0), values)]
    returns = vtrace(*window, rows(True, True), rho_bar=inf, c_bar=inf, pg_rho_bar=inf, trace_lambda=1.0)
    largest = float(np.finfo(np.float32).max) / 8
    assert numbers(returns.targets) == [-largest, -largest]


def test_each_clip_acts_where_the_paper_puts_it():
    # Ratio 4 in both steps: rho 2, c 1 * 1/2, weight 3. delta_1 = 2 (1 + 6 - 5) = 4, delta_0 = 2 (1 + 5 - 3) = 6, x_0 =
    # 6 + 4 / 2.
    returns = vtrace(
        column(log(4), log(4)),
        column(1, 1),
        column(1, 1),
        column(3, 5, 6),
        rows(True, True),
        rho_bar=2.0,
        c_bar=1.0,
        pg_rho_bar=3.0,
        trace_lambda=0.5,
    )
    assert numbers(returns.targets) == pytest.approx([3 + 8, 5 + 4])
    assert numbers(returns.advantages) == pytest.approx([3 * (1 + 9 - 3), 3 * (1 + 6 - 5)])


def test_the_trace_stops_at_an_irrelevant_step():
    # delta = 1 + 10 - 0, 2 + 20 - 10, 4 + 30 - 20. One step too late v_0 would be 11 + 12 = 23, never 37, one too early
    # 0.
    returns = vtrace(
        column(0, 0, 0), column(1, 2, 4), column(1, 1, 1), column(0, 10, 20, 30), rows(True, False, True), **UNCLIPPED
    )
    assert numbers(returns.targets) == [11, 10, 34]
    assert numbers(returns.advantages) == [11, 0, 14]


@pytest.mark.parametrize(
    "discount, first_targets", [(0.5, [1 + 0.5 * 2 + 0.25 * 8, 2 + 0.5 * 8]), (0.0, [1 + 0.5 * 2, 2])]
)
def test_truncations_bootstrap_and_terminations_do_not(discount, first_targets):
    discounts, included = column(0.5, discount, 0.5, 0.5), rows(True, True, False, True)
    returns = vtrace(column(0, 0, 0, 0), column(1, 2, 50, 3), discounts, column(6, 7, 8, 9, 10), included, **UNCLIPPED)
    assert numbers(returns.targets) == [*first_targets, 8, 3 + 0.5 * 10]


def test_reward_and_ratio_of_an_excluded_step_are_not_read():
    log_ratios, rewards, discounts, values, included = random_window(seed=2)
    clean = vtrace(log_ratios, rewards, discounts, values, included, **UNCLIPPED)
    log_ratios, rewards = log_ratios.masked_fill(~included, float("nan")), rewards.masked_fill(~included, float("nan"))
    soiled = vtrace(log_ratios, rewards, discounts, values, included, **UNCLIPPED)
    assert torch.equal(clean.targets, soiled.targets) and torch.equal(clean.advantages, soiled.advantages)


def test_outputs_carry_no_gradient_and_inputs_stay_unchanged():
    window = random_window(seed=3)
    before = [tensor.clone() for tensor in window]
    returns = vtrace(*(tensor.requires_grad_() for tensor in window[:4]), window[4], **UNCLIPPED)
    assert isinstance(returns, VTraceReturns)
    advantages = lambda_advantages(returns, *window[1:], 0.9)
    assert not any(output.requires_grad for output in (*returns, advantages))
    assert all(torch.equal(now, then) for now, then in zip(window, before))


def test_opposite_infinite_corrections_give_no_nan():
    """The second step's correction is the lowest float, and the ratio of the first multiplies it beyond all floats."""
    log_ratios, rewards = torch.full((2, 1), 300.0), torch.tensor([[1e30], [-1e30]])
    discounts, values = torch.ones(2, 1), torch.zeros(3, 1)
    returns = vtrace(
        log_ratios, rewards, discounts, values, discounts > 0, **{**UNCLIPPED, "rho_bar": inf, "c_bar": inf}
    )
    largest = torch.finfo(torch.float32).max / 8
    assert returns.targets.flatten().tolist() == pytest.approx([-largest, -largest])


@pytest.mark.parametrize("trace_lambda", [0.0, 0.9, 1.0])
def test_lambda_advantages_on_policy_are_generalised_advantages(trace_lambda):
    _, *window = random_window(7)
    returns = vtrace(torch.zeros_like(window[0]), *window, **{**UNCLIPPED, "trace_lambda": trace_lambda})
    expected, targets = generalised_advantages(*window, trace_lambda)
    torch.testing.assert_close(lambda_advantages(returns, *window, trace_lambda), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns.targets, targets, rtol=1e-12, atol=1e-12)


def test_lambda_advantages_for_lambda_1_are_those_of_vtrace():
    log_ratios, *window = random_window(8)
    returns = vtrace(log_ratios, *window, **UNCLIPPED)
    torch.testing.assert_close(lambda_advantages(returns, *window, 1.0), returns.unweighted, rtol=1e-12, atol=1e-12)


# pi = (.8, .15, .05) and mu = (.5, .25, .25): min(mu, pi) = (.5, .15, .05), which sums to .7.
PI, MU = logits_of(0.8, 0.15, 0.05), logits_of(0.5, 0.25, 0.25)


@pytest.mark.parametrize(
    "rho_bar, expected",
    [
        (1.0, [0.5 / 0.7, 0.15 / 0.7, 0.05 / 0.7]),
        (0.4, [0.2 / 0.35, 0.1 / 0.35, 0.05 / 0.35]),
        (0.1, [0.5, 0.25, 0.25]),
        (inf, [0.8, 0.15, 0.05]),
    ],
)
def test_implied_policy_is_the_normalised_minimum(rho_bar, expected):
    assert implied_policy(PI, MU, rho_bar).exp().flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_the_implied_policy_has_no_gradient():
    logits = PI.clone().requires_grad_()
    assert not implied_policy(logits, MU, 1.0).requires_grad


def test_the_divergence_from_the_implied_policy():
    divergence = kl(PI, implied_policy(PI, MU, 1.0)).item()
    assert divergence == pytest.approx(0.8 * log(0.8 * 0.7 / 0.5) + 0.2 * log(0.7), abs=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    log_ratios, rewards, discounts, values, included = random_window(seed=4, length=3, streams=2)
    with pytest.raises(ValueError, match=r"\[T, B\].*\(3, 1\)"):
        vtrace(log_ratios[:, :1], rewards, discounts, values, included, **UNCLIPPED)
    with pytest.raises(ValueError, match=r"\[T, B\].*\(2, 2\)"):
        vtrace(log_ratios, rewards, discounts, values[1:], included, **UNCLIPPED)
    with pytest.raises(ValueError, match=r"bool, not torch\.float64"):
        vtrace(log_ratios, rewards, discounts, values, included.double(), **UNCLIPPED)
    with pytest.raises(ValueError, match=r"\[T, B, A\].*\(1, 1, 2\), \(1, 1, 3\)"):
        implied_policy(PI, MU[..., :2], 1.0)
