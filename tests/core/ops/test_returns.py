"""n-step returns equal a step-by-step loop in float64."""

import numpy as np
import pytest
import torch

from core.ops.returns import bootstrap_position, generalised_advantages, n_step_return


def walk(rewards, discounts, lasts, gamma):
    """Return the paper's sum for one window, its bootstrap discount and the bootstrap position."""
    total, factor = 0.0, 1.0
    length = len(rewards) - 1
    for k in range(length):
        if lasts[k]:
            return total, factor, k
        total += factor * rewards[k]
        factor *= gamma * discounts[k]
    return total, factor, length if not lasts[:length].any() else int(lasts.argmax())


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_returns_equal_the_step_by_step_sum(length):
    generator = np.random.default_rng(length)
    rewards = generator.normal(size=(length + 1, 400))
    lasts = generator.random((length + 1, 400)) < 0.2
    lasts[0] = False  # a last step is never a start
    discounts = (generator.random((length + 1, 400)) > 0.15).astype(np.float64)
    returns, factors = n_step_return(*map(torch.from_numpy, (rewards, discounts, lasts)), 0.97)
    positions = bootstrap_position(torch.from_numpy(lasts))
    for column in range(400):
        expected = walk(rewards[:, column], discounts[:, column], lasts[:, column], 0.97)
        assert (float(returns[column]), float(factors[column])) == pytest.approx(expected[:2], abs=1e-12)
        if lasts[:, column].any():
            assert int(positions[column]) == lasts[:, column].argmax()
        else:
            assert int(positions[column]) == length


def test_a_terminated_episode_has_a_bootstrap_discount_of_zero():
    rewards = torch.tensor([[1.0], [2.0], [0.0], [5.0]])
    discounts = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    lasts = torch.tensor([[False], [False], [True], [False]])
    returns, factors = n_step_return(rewards, discounts, lasts, 0.5)
    assert float(returns) == 2.0 and float(factors) == 0.0


def test_a_truncated_episode_bootstraps_from_its_last_step():
    rewards = torch.tensor([[1.0], [2.0], [0.0], [5.0]])
    discounts = torch.ones(4, 1)
    lasts = torch.tensor([[False], [False], [True], [False]])
    returns, factors = n_step_return(rewards, discounts, lasts, 0.5)
    assert float(returns) == 2.0 and float(factors) == 0.25
    assert int(bootstrap_position(lasts)) == 2


def test_windows_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[n \+ 1, B\]"):
        n_step_return(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.bool), 0.9)


@pytest.mark.parametrize("trace_lambda", [0.0, 0.9, 1.0])
def test_generalised_advantages_are_sums_of_errors_up_to_an_episodes_end(trace_lambda):
    generator, length, streams = np.random.default_rng(0), 9, 100
    rewards, values = generator.normal(size=(length, streams)), generator.normal(size=(length + 1, streams))
    included = generator.random((length, streams)) > 0.2
    discounts = 0.97 * (generator.random((length, streams)) > 0.2)
    rewards[~included] = np.nan  # of steps without an action nothing is read
    found = generalised_advantages(*map(torch.from_numpy, (rewards, discounts, values, included)), trace_lambda)
    for b in range(streams):
        for s in range(length):
            expected, product = 0.0, 1.0
            for t in range(s, length):
                if not included[t, b]:
                    break
                expected += product * (rewards[t, b] + discounts[t, b] * values[t + 1, b] - values[t, b])
                product *= discounts[t, b] * trace_lambda
            assert float(found[0][s, b]) == pytest.approx(expected, abs=1e-12)
            assert float(found[1][s, b]) == pytest.approx(values[s, b] + expected, abs=1e-12)


def test_generalised_advantages_refuse_shapes_that_do_not_fit():
    rows = torch.zeros(3, 2)
    for wrong in ((rows, rows, rows, rows.bool()), (rows, rows[:2], torch.zeros(4, 2), rows.bool())):
        with pytest.raises(ValueError, match=r"\[T, B\] and values \[T \+ 1, B\]"):
            generalised_advantages(*wrong, 0.9)
