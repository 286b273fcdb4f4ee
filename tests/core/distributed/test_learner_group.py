"""Several learners step with the same gradients, computed by hand, and take the same decisions."""

import pytest
import torch

from core.distributed.learner_group import PeerLostError, SingleLearner, all_reduce_mean, num_learners
from core.distributed.lockstep_group import Turns
from core.learning.optimizer import Optimizer, OptimizerParams
from core.models.layers.running_normalization import RunningNormalization


def in_turn(*generators):
    """Run the generators in turn and return their results."""
    waiting, results = dict(enumerate(generators)), {}
    while waiting:
        for number, generator in list(waiting.items()):
            try:
                next(generator)
            except StopIteration as end:
                results[number] = end.value
                del waiting[number]
    return [results[number] for number in range(len(generators))]


def together(*functions):
    """Call one function per learner within a group and return the results."""
    turns = Turns(len(functions))
    return in_turn(*(turns.join(index, "cpu").run(function) for index, function in enumerate(functions)))


def stepping(gradients, sums=False, loss=0.0, **settings):
    """Return a function that takes a learner's step and returns (norm, applied, weights).

    The loss has the given gradient for each parameter; a parameter whose gradient is None is not in the loss.
    """
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    optimizer = Optimizer(parameters, OptimizerParams(**{"clip_norm": 0.0, "eps": 1.0, "lr": 1.0, **settings}), sums=sums)

    def step():
        terms = [(parameter * torch.tensor(gradient)).sum() for parameter, gradient in zip(parameters, gradients) if gradient is not None]
        norm, taken = optimizer.step(sum(terms) + loss)
        return float(norm), taken, torch.cat(parameters).tolist()

    return step


def test_learners_step_with_the_mean_or_sum_of_their_gradients():
    first, second = [(3.0, 1.0)], [(3.0, 7.0)]  # mean (3, 4), sum (6, 8)
    means = together(stepping(first), stepping(second))
    sums = together(stepping(first, sums=True), stepping(second, sums=True))
    assert [norm for norm, *_ in means] == [5.0, 5.0] and [norm for norm, *_ in sums] == [10.0, 10.0]
    adam = [-3 / 4, -4 / 5]  # the first step of Adam: - lr g / (|g| + eps)
    assert [weights for *_, weights in means] == [pytest.approx(adam)] * 2


def test_gradients_are_clipped_after_averaging():
    (norm, _, weights), _ = together(stepping([(10.0, 1.0)], clip_value=2.0), stepping([(-10.0, 1.0)], clip_value=2.0))
    assert norm == 1.0 and weights == [0.0, pytest.approx(-0.5)]


def test_a_missing_gradient_of_one_learner_counts_as_zero():
    both, one = together(stepping([(1.0, 0.0), (4.0, 0.0)]), stepping([(1.0, 0.0), None]))
    assert both == one and both[2] == [pytest.approx(-1 / 2), 0.0, pytest.approx(-2 / 3), 0.0]


@pytest.mark.parametrize("gradient, loss", [((float("nan"), 0.0), 0.0), ((float("inf"), 0.0), 0.0), ((1.0, 0.0), float("nan"))])
def test_a_non_finite_gradient_of_one_learner_skips_all_updates(gradient, loss):
    for _, taken, weights in together(stepping([(1.0, 1.0)]), stepping([gradient], loss=loss), stepping([(1.0, 1.0)])):
        assert not taken and weights == [0.0, 0.0]


def test_statistics_are_averaged_over_learners():
    alone = torch.ones(2)
    assert all_reduce_mean(alone) is alone and num_learners() == 1
    assert in_turn(SingleLearner().run(lambda: all_reduce_mean(alone)))[0] is alone
    found = together(*(lambda value=value: (all_reduce_mean(torch.tensor([value])).item(), num_learners()) for value in (1.0, 2.0, 6.0)))
    assert found == [(3.0, 3)] * 3 and num_learners() == 1


def test_the_joint_variance_is_exact_even_far_from_zero():
    vectors = 300 + 0.1 * torch.randn(2, 500, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([[[0.0]], [[0.05]]])

    def seen(part):
        normalization = RunningNormalization(3)
        normalization.update(part)
        return normalization.mean.double(), normalization.variance.double()

    first, second = together(lambda: seen(vectors[0]), lambda: seen(vectors[1]))
    of_all = vectors.double().flatten(0, 1)
    assert all(torch.equal(*pair) for pair in zip(first, second))
    assert torch.allclose(first[0], of_all.mean(0), rtol=1e-6) and torch.allclose(first[1], of_all.var(0, correction=0), rtol=1e-3)


def test_sums_have_the_same_order_for_all_learners():
    values = torch.rand(3, 1_000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [1e4], [-1e4]])

    def twice(value):
        return all_reduce_mean(all_reduce_mean(value) + value)

    first, *others = together(*(lambda value=value: twice(value) for value in values))
    assert all(torch.equal(first, other) for other in others)
    mean = values.double().mean(0)
    assert torch.allclose(first.double(), 2 * mean, rtol=0, atol=2e-3)


def test_status_is_gathered_by_learner():
    turns = Turns(3)
    rows = in_turn(*(turns.join(index, "cpu").gather([index, -index, 2**62 + index]) for index in range(3)))
    assert rows == [[[index, -index, 2**62 + index] for index in range(3)]] * 3
    assert in_turn(SingleLearner().gather([5, 6])) == [[[5, 6]]]


def test_waiting_for_a_learner_that_left_is_an_error():
    turns = Turns(2)
    staying, leaving = (turns.join(index, "cpu") for index in range(2))
    running = staying.run(lambda: all_reduce_mean(torch.ones(1)))
    assert next(running) is True and next(running) is False  # it has worked, it waits
    leaving.close()
    with pytest.raises(PeerLostError, match="learner 1 is gone"):
        next(running)


def test_a_second_learner_without_a_group_is_an_error():
    with pytest.raises(RuntimeError, match="learner 1 would learn for itself"):
        SingleLearner().join(1, "cpu")
