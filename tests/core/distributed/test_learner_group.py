"""Two learners step with what both of their batches say, and take every decision alike."""

from functools import partial

import pytest
import torch

from core.distributed.learner_group import PeerLostError, SingleLearner, all_reduce_mean, all_reduce_sum, num_learners
from core.learning.optimizer import Optimizer, OptimizerParams
from core.models.layers.running_normalization import RunningNormalization
from tests.core.distributed.learner_pair import FirstOfTwo


def step(gradients, sums=False, loss=0.0, **settings):
    """Take a step down a loss with these gradients, one parameter each (None: it is not in the loss).

    Returns the norm, whether the step was taken, and the weights.
    """
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    optimizer = Optimizer(
        parameters,
        OptimizerParams(**{"clip_norm": 0.0, "optimizer_eps": 1.0, "learning_rate": 1.0, **settings}),
        sums=sums,
    )
    terms = [
        (parameter * torch.tensor(gradient)).sum()
        for parameter, gradient in zip(parameters, gradients)
        if gradient is not None
    ]
    norm, applied = optimizer.step(sum(terms) + loss)
    return float(norm), applied, torch.cat(parameters).tolist()


def test_learners_step_with_the_mean_or_sum_of_their_gradients(learners):
    first, second = [(3.0, 1.0)], [(3.0, 7.0)]  # mean (3, 4), sum (6, 8)
    means = learners.run(partial(step, first), partial(step, second))
    sums = learners.run(partial(step, first, sums=True), partial(step, second, sums=True))
    assert [norm for norm, *_ in means] == [5.0, 5.0] and [norm for norm, *_ in sums] == [10.0, 10.0]
    adam = [-3 / 4, -4 / 5]  # the first step of Adam: - lr g / (|g| + eps)
    assert [weights for *_, weights in means] == [pytest.approx(adam)] * 2


def test_gradients_are_clipped_after_averaging(learners):
    (norm, _, weights), _ = learners.run(
        partial(step, [(10.0, 1.0)], clip_value=2.0), partial(step, [(-10.0, 1.0)], clip_value=2.0)
    )
    assert norm == 1.0 and weights == [0.0, pytest.approx(-0.5)]


def test_a_gradient_that_one_learner_lacks_counts_as_zero(learners):
    both, one = learners.run(partial(step, [(1.0, 0.0), (4.0, 0.0)]), partial(step, [(1.0, 0.0), None]))
    assert both == one and both[2] == [pytest.approx(-1 / 2), 0.0, pytest.approx(-2 / 3), 0.0]


@pytest.mark.parametrize(
    "gradient, loss", [((float("nan"), 0.0), 0.0), ((float("inf"), 0.0), 0.0), ((1.0, 0.0), float("nan"))]
)
def test_a_nonfinite_loss_or_gradient_of_one_learner_changes_nothing(learners, gradient, loss):
    for _, applied, weights in learners.run(partial(step, [(1.0, 1.0)]), partial(step, [gradient], loss=loss)):
        assert not applied and weights == [0.0, 0.0]


def mean_and_size(value):
    return all_reduce_mean(torch.tensor([value])).item(), num_learners()


def test_statistics_are_averaged_and_left_alone_by_a_single_learner(learners):
    alone = torch.ones(2)
    assert all_reduce_mean(alone) is alone and num_learners() == 1
    assert SingleLearner().run(lambda: all_reduce_mean(alone)) is alone
    assert learners.run(partial(mean_and_size, 1.0), partial(mean_and_size, 4.0)) == [(2.5, 2)] * 2


def moments(vectors):
    normalization = RunningNormalization(3)
    normalization.update(vectors)
    return normalization.mean.double(), normalization.variance.double()


@pytest.mark.parametrize("of_first", [500, 300])
def test_the_variance_over_all_learners_is_exact_far_from_zero(learners, of_first):
    vectors = (
        300
        + 0.1 * torch.randn(2, 500, 3, generator=torch.Generator().manual_seed(0))
        + torch.tensor([[[0.0]], [[0.05]]])
    )
    vectors = vectors.flatten(0, 1)
    first, second = learners.run(partial(moments, vectors[:of_first]), partial(moments, vectors[of_first:]))
    both = vectors.double()
    assert all(torch.equal(*pair) for pair in zip(first, second))
    assert torch.allclose(first[0], both.mean(0), rtol=1e-6) and torch.allclose(
        first[1], both.var(0, correction=0), rtol=1e-3
    )


def mean_twice(values):
    return all_reduce_mean(all_reduce_mean(values) + values)


def test_sums_that_follow_one_another_are_the_same_to_the_bit(learners):
    values = torch.rand(2, 1_000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [1e4]])
    first, second = learners.run(*(partial(mean_twice, part) for part in values))
    assert torch.equal(first, second)
    assert torch.allclose(first.double(), 2 * values.double().mean(0), rtol=0, atol=2e-3)


class LosesPeer(FirstOfTwo):
    """The first of two learners. The second sends the same values in `exchanges` sums and is then gone."""

    def __init__(self, exchanges):
        super().__init__()
        self.exchanges = exchanges

    def _sum(self, tensor):
        if not self.exchanges:
            raise PeerLostError("gone")
        self.exchanges -= 1
        tensor.mul_(2)


def two_sums():
    tensors = torch.ones(1), torch.full((1,), 3.0)
    for tensor in tensors:
        all_reduce_sum(tensor)
    return [tensor.item() for tensor in tensors]


def test_an_update_is_given_up_before_its_first_exchange_and_finished_after_it():
    group = LosesPeer(exchanges=3)
    assert group.run(two_sums) == [2.0, 6.0] and group.lost_peer is None
    assert group.run(two_sums) == [2.0, 6.0]  # the second sum is of this learner's values alone
    assert isinstance(group.lost_peer, PeerLostError)
    with pytest.raises(PeerLostError, match="gone"):
        LosesPeer(exchanges=0).run(two_sums)
    assert SingleLearner().run(two_sums) == [1.0, 3.0]


def test_sums_that_are_started_together_are_given_up_or_finished_together():
    def update(first):
        if first:
            all_reduce_sum(torch.ones(1))
        tensors = torch.ones(1), torch.full((1,), 3.0)
        for tensor in tensors:
            group.start_sum(tensor)
        kept.extend(tensors)
        group.finish_sums()
        return [tensor.item() for tensor in tensors]

    kept, group = [], LosesPeer(exchanges=1)  # which is that of the first tensor
    with pytest.raises(PeerLostError, match="gone"):
        group.run(partial(update, first=False))
    assert [tensor.item() for tensor in kept] == [1.0, 3.0] and group.lost_peer is None
    group = LosesPeer(exchanges=2)
    assert group.run(partial(update, first=True)) == [2.0, 6.0] and isinstance(group.lost_peer, PeerLostError)
    assert group.run(partial(update, first=True)) == [2.0, 6.0]


def test_a_single_learner_gathers_its_own_values_and_is_alone():
    gathered = SingleLearner().gather([5, 6])
    with pytest.raises(StopIteration) as end:
        next(gathered)
    assert end.value.value == [[5, 6]]
    with pytest.raises(RuntimeError, match="learner 1 would learn for itself"):
        SingleLearner().join(1, "cpu")
