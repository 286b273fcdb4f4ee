"""Actor-critic losses and their gradients equal formulas by hand, in float64."""

from math import exp, log

import numpy as np
import pytest
import torch

from core.ops.policy_losses import (
    MAX_LOG_RATIO,
    adapted_kl_coefficient,
    baseline_loss,
    clipped_policy_loss,
    clipped_surrogate,
    clipped_value_loss,
    entropies_of,
    kl,
    log_probs_of,
    masked_sum,
    policy_gradient_loss,
    value_cloning_loss,
)

T, B, A = 4, 3, 5
MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).requires_grad_()


def probabilities(logits):
    """Return the softmax as numpy [T, B, A]."""
    powers = np.exp(logits.detach().numpy())
    return powers / powers.sum(-1, keepdims=True)


def gradient(loss, *inputs):
    """Return the gradients of a scalar; None for an input that the loss is detached from."""
    return [None if g is None else g.numpy() for g in torch.autograd.grad(loss, inputs, allow_unused=True)]


def logits_of(*rows):
    """Return [1, B, A] unnormalised logits of B rows of probabilities."""
    return torch.tensor([rows], dtype=torch.float64).log() - 2.5


def test_log_probs_are_those_of_the_taken_actions():
    actions = torch.tensor([[2, 0]])
    assert log_probs_of(logits_of([0.2, 0.3, 0.5], [0.6, 0.3, 0.1]), actions).flatten().tolist() == pytest.approx(
        [log(0.5), log(0.6)]
    )


def test_policy_gradient_weights_log_pi_by_a_constant_advantage():
    logits, advantages = normal(0, T, B, A), normal(1, T, B)
    actions = torch.from_numpy(np.random.default_rng(2).integers(A, size=(T, B)))
    pi, one_hot = probabilities(logits), np.eye(A)[actions.numpy()]
    weights = MASK.numpy() * advantages.detach().numpy()
    loss = policy_gradient_loss(log_probs_of(logits, actions), advantages, MASK)
    assert float(loss.detach()) == pytest.approx(-(weights * np.log((pi * one_hot).sum(-1))).sum())
    to_logits, to_advantages = gradient(loss, logits, advantages)
    # d log pi(a) / dz = 1[a] - pi
    np.testing.assert_allclose(to_logits, -weights[..., None] * (one_hot - pi), atol=1e-12)
    assert to_advantages is None


@pytest.mark.parametrize(("loss_of", "factor"), [(baseline_loss, 0.5), (value_cloning_loss, 1.0)])
def test_losses_of_values_are_squared_errors(loss_of, factor):
    values, targets = normal(3, T, B), normal(4, T, B)
    errors = MASK.numpy() * (values - targets).detach().numpy()
    loss = loss_of(values, targets, MASK)
    assert float(loss.detach()) == pytest.approx(factor * (errors**2).sum())
    to_values, to_targets = gradient(loss, values, targets)
    np.testing.assert_allclose(to_values, 2 * factor * errors, atol=1e-12)
    assert to_targets is None


def test_entropies_are_summed_over_the_mask():
    rows = torch.ones(1, 2, dtype=torch.bool)
    assert float(masked_sum(entropies_of(logits_of([0.5, 0.5], [0.9, 0.1])), rows)) == pytest.approx(
        log(2) - 0.9 * log(0.9) - 0.1 * log(0.1)
    )
    logits = normal(5, T, B, A)
    pi = probabilities(logits)
    expected = pi * ((pi * np.log(pi)).sum(-1, keepdims=True) - np.log(pi))  # d (- sum pi log pi) / dz
    (to_logits,) = gradient(masked_sum(entropies_of(logits), MASK), logits)
    np.testing.assert_allclose(to_logits, MASK.numpy()[..., None] * expected, atol=1e-12)


def test_kl_is_taken_from_the_first_to_the_second():
    p, q = logits_of([0.9, 0.1]), logits_of([0.5, 0.5])
    assert float(kl(p, q)) == pytest.approx(0.9 * log(1.8) + 0.1 * log(0.2))  # .368
    assert float(kl(q, p)) == pytest.approx(0.5 * log(5 / 9) + 0.5 * log(5))  # .511


def test_policy_cloning_is_the_kl_from_behaviour_to_policy():
    pi, mu, rows = logits_of([0.5, 0.5]), logits_of([0.9, 0.1]), torch.ones(1, 1, dtype=torch.bool)
    # the opposite is .511
    assert float(masked_sum(kl(mu, pi), rows)) == pytest.approx(0.9 * log(1.8) + 0.1 * log(0.2))
    logits, behaviour = normal(6, T, B, A), normal(7, T, B, A)
    to_logits, to_behaviour = gradient(masked_sum(kl(behaviour.detach(), logits), MASK), logits, behaviour)
    expected = probabilities(logits) - probabilities(behaviour)  # d (- sum mu log pi) / dz
    np.testing.assert_allclose(to_logits, MASK.numpy()[..., None] * expected, atol=1e-12)
    assert to_behaviour is None


def test_value_cloning_is_the_squared_error_to_replayed_values():
    values, replayed = normal(8, T, B), normal(9, T, B)
    errors = MASK.numpy() * (values - replayed).detach().numpy()
    loss = value_cloning_loss(values, replayed, MASK)
    assert float(loss.detach()) == pytest.approx((errors**2).sum())
    to_values, to_replayed = gradient(loss, values, replayed)
    np.testing.assert_allclose(to_values, 2 * errors, atol=1e-12)
    assert to_replayed is None


def test_cloning_replayed_columns_ignores_fresh_ones():
    logits, behaviour, values, behaviour_values = (
        normal(10, T, B, A),
        normal(11, T, B, A),
        normal(12, T, B),
        normal(13, T, B),
    )
    replayed = torch.tensor([False, True, True]).expand(T, B)
    loss = masked_sum(kl(behaviour, logits), replayed) + value_cloning_loss(values, behaviour_values, replayed)
    alone = torch.ones(T, 2, dtype=torch.bool)
    expected = masked_sum(kl(behaviour, logits)[:, 1:], alone) + value_cloning_loss(
        values[:, 1:], behaviour_values[:, 1:], alone
    )
    assert float(loss.detach()) == pytest.approx(float(expected.detach()))
    to_logits, to_values = gradient(loss, logits, values)
    assert not to_logits[:, 0].any() and not to_values[:, 0].any()
    assert to_logits[:, 1:].all() and to_values[:, 1:].all()


# mu, pi_target, pi, A -> objective and its gradient to log pi, at epsilon .2 and beta_max 2; r = min(mu / pi_target, 2)
# pi / mu.
SURROGATE = {
    "below, gain": (0.5, 0.5, 0.3, 2, 0.6 * 2, 0.6 * 2),
    "inside, gain": (0.5, 0.5, 0.55, 2, 1.1 * 2, 1.1 * 2),
    "above, gain, clipped": (0.5, 0.5, 0.8, 2, 1.2 * 2, 0),
    "below, loss, clipped": (0.5, 0.5, 0.3, -2, 0.8 * -2, 0),
    "inside, loss": (0.5, 0.5, 0.55, -2, 1.1 * -2, 1.1 * -2),
    "above, loss": (0.5, 0.5, 0.8, -2, 1.6 * -2, 1.6 * -2),
    "beta 1/4, r = pi / pi_target": (0.2, 0.8, 0.6, 2, 0.75 * 2, 0.75 * 2),
    "beta 1/4, loss, clipped": (0.2, 0.8, 0.6, -2, 0.8 * -2, 0),
    "beta 9 clipped to 2": (0.9, 0.1, 0.405, 2, 0.9 * 2, 0.9 * 2),  # unclipped, r is 4.05
    "beta 9 clipped to 2, loss": (0.9, 0.1, 0.81, -2, 1.8 * -2, 1.8 * -2),
}


@pytest.mark.parametrize("mu, target, pi, advantage, objective, slope", SURROGATE.values(), ids=SURROGATE.keys())
def test_clipped_surrogate_is_exact_in_every_region(mu, target, pi, advantage, objective, slope):
    mu, target, pi = (torch.tensor([[x]], dtype=torch.float64).log().requires_grad_() for x in (mu, target, pi))
    advantages = torch.tensor([[advantage]], dtype=torch.float64, requires_grad=True)
    result = clipped_surrogate(pi, mu, target, advantages, 0.2)
    assert result.shape == (1, 1) and float(result.detach()) == pytest.approx(objective)
    to_pi, *others = gradient(result.sum(), pi, mu, target, advantages)
    assert float(to_pi.item()) == pytest.approx(slope) and others == [None, None, None]


@pytest.mark.parametrize("target", [-1_000.0, 0.0])
def test_clipped_surrogate_is_finite_for_any_ratio(target):
    pi, mu, targets = (torch.tensor([[x, x]], dtype=torch.float64) for x in (0.0, -1_000.0, target))
    pi.requires_grad_()
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    result = clipped_surrogate(pi, mu, targets, advantages, 0.2)
    (to_pi,) = gradient(result.sum(), pi)
    ratio = exp(MAX_LOG_RATIO) if target else 1.0  # r is exp(1000), or exp(-1000) exp(1000)
    assert result[0].tolist() == pytest.approx([min(ratio, 1.2), -ratio])
    assert to_pi[0].tolist() == pytest.approx([0.0, 0.0] if target else [1.0, -1.0])


# r, A -> loss and its gradient to log r, at epsilon .2
CLIPPED = {
    "below, gain": (0.3, 2, -0.6, -0.6),
    "inside, gain": (1.1, 2, -2.2, -2.2),
    "above, gain, clipped": (1.6, 2, -2.4, 0),
    "below, loss, clipped": (0.3, -2, 1.6, 0),
    "inside, loss": (1.1, -2, 2.2, 2.2),
    "above, loss": (1.6, -2, 3.2, 3.2),
}


@pytest.mark.parametrize("ratio, advantage, loss, slope", CLIPPED.values(), ids=CLIPPED.keys())
def test_clipped_policy_loss_is_exact_in_every_region(ratio, advantage, loss, slope):
    log_ratios = torch.tensor([[log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[advantage]], dtype=torch.float64, requires_grad=True)
    found = clipped_policy_loss(log_ratios, advantages, 0.2)
    to_ratios, to_advantages = gradient(found.sum(), log_ratios, advantages)
    assert (float(found.detach()), float(to_ratios.item())) == pytest.approx((loss, slope)) and to_advantages is None


# V, V_old, target -> loss and its gradient to V, at epsilon .5
VALUES = {
    "inside": (1.2, 1.0, 3.0, 0.5 * 1.8**2, -1.8),
    "moved towards the target, clipped": (2.0, 1.0, 3.0, 0.5 * 1.5**2, 0.0),
    "moved away from the target": (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0),
    "moved beyond the target, clipped": (3.4, 1.0, 3.0, 0.5 * 1.5**2, 0.0),
    "moved far beyond the target": (6.0, 1.0, 3.0, 0.5 * 3.0**2, 3.0),
}


@pytest.mark.parametrize("value, old, target, loss, slope", VALUES.values(), ids=VALUES.keys())
def test_clipped_value_loss_is_exact_in_every_region(value, old, target, loss, slope):
    value, old, target = (torch.tensor([[x]], dtype=torch.float64, requires_grad=True) for x in (value, old, target))
    found = clipped_value_loss(value, old, target, 0.5)
    to_value, *others = gradient(found.sum(), value, old, target)
    assert (float(found.detach()), float(to_value.item())) == pytest.approx((loss, slope)) and others == [None, None]


def test_rounding_does_not_clip_values_that_moved_little():
    """In float32 V_old + (V - V_old) is not always V. A value that counts as clipped has no gradient."""
    generator = np.random.default_rng(0)
    values, old, targets = generator.uniform(-0.2, 0.2, (3, 1, 1_000)).astype(np.float32)
    assert (old + (values - old) != values).any()
    tensors = [torch.from_numpy(array) for array in (values, old, targets)]
    (to_values,) = gradient(clipped_value_loss(tensors[0].requires_grad_(), *tensors[1:], 0.5).sum(), tensors[0])
    np.testing.assert_array_equal(to_values, values - targets)


def test_beta_max_bounds_the_correction():
    mu, target, pi = (torch.tensor([[x]], dtype=torch.float64).log() for x in (0.9, 0.3, 0.3))
    one = torch.ones(1, 1, dtype=torch.float64)
    assert float(clipped_surrogate(pi, mu, target, one, 10.0, beta_max=5.0)) == pytest.approx(3 * 0.3 / 0.9)
    assert float(clipped_surrogate(pi, mu, target, one, 10.0)) == pytest.approx(2 * 0.3 / 0.9)


def test_kl_coefficient_doubles_above_and_halves_below_target():
    measured = torch.tensor([0.031, 0.029, 0.02, 0.0134, 0.0133, 0.0])  # 1.5 target is .03, target / 1.5 is .01333
    assert adapted_kl_coefficient(torch.full((6,), 0.4), measured, 0.02).tolist() == pytest.approx(
        [0.8, 0.4, 0.4, 0.4, 0.2, 0.2]
    )
    assert float(adapted_kl_coefficient(torch.tensor(1.0), torch.tensor(1.0), 0.02)) == 2.0


def test_shapes_that_do_not_fit_are_refused():
    logits, rows = torch.zeros(T, B, A), torch.zeros(T, B)
    actions = torch.zeros(T, B, dtype=torch.int64)
    for wrong in (
        lambda: baseline_loss(rows, rows[:, :1], MASK),
        lambda: value_cloning_loss(rows, rows, MASK[0]),
        lambda: log_probs_of(logits, actions[1:]),
        lambda: policy_gradient_loss(rows, rows[:1], MASK),
        lambda: masked_sum(rows, MASK[:, :1]),
        lambda: clipped_surrogate(rows, rows, rows, rows[:1], 0.2),
        lambda: clipped_policy_loss(rows, rows[:1], 0.2),
        lambda: clipped_value_loss(rows, rows[:1], rows, 0.2),
    ):
        with pytest.raises(ValueError, match=r"\[T, B\] of one shape, not \[\("):
            wrong()
    for wrong in (lambda: kl(logits, logits[..., :1]), lambda: entropies_of(rows)):
        with pytest.raises(ValueError, match=r"\[T, B, A\] of one shape, not \[\("):
            wrong()
    with pytest.raises(ValueError, match=r"bool, not torch\.float32"):
        baseline_loss(rows, rows, MASK.float())
    with pytest.raises(ValueError, match="one shape"):
        adapted_kl_coefficient(torch.ones(2), torch.ones(3), 0.1)
