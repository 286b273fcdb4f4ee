"""Learners send buckets of gradients during the backward pass, in float32 or in bfloat16."""

from functools import partial

import pytest
import torch
from torch import nn

from core.distributed.learner_group import PeerLostError
from core.learning import gradients as gradients_module
from core.learning.gradients import MICROBATCHER, GradientExchange, Loss, MicroBatcher
from core.learning.optimizer import Optimizer, OptimizerParams
from tests.core.distributed.learner_pair import FirstOfTwo

UNIT = 2.0**-8  # largest relative error of rounding to bfloat16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model, batch):
    return (model(batch) ** 3).mean()


def batch_of(learner):
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(learner)) * 10.0**learner


def exchanged(learner, dtype, in_parts, group):
    """Return gradients and weights of a learner after a step, and how many buckets its backward pass had sent."""
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients_module, "BUCKET_BYTES", 64)
        model = network()
        optimizer = Optimizer(model.parameters(), OptimizerParams(clip_norm=0.0))
        model[0].weight.register_post_accumulate_grad_hook(lambda _: sent.append(len(optimizer._exchange._sent)))
        group.gradient_dtype = dtype
        token = MICROBATCHER.set(MicroBatcher() if in_parts else None)
        try:
            _, _, applied = group.run(
                lambda: optimizer.minimise(12, lambda part: Loss(loss_of(model, batch_of(learner)), {}))
            )
        finally:
            group.gradient_dtype = None
            MICROBATCHER.reset(token)
    assert applied
    return flat(parameter.grad for parameter in model.parameters()), flat(model.parameters()), sent


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def gradient_alone(learner):
    """Return the gradient of a learner's batch in float64."""
    model = network().double()
    loss_of(model, batch_of(learner).double()).backward()
    return flat(parameter.grad for parameter in model.parameters())


def test_buckets_are_sent_during_the_backward_pass_and_give_the_mean(learners):
    first, second = learners.call(*(partial(exchanged, index, None, False) for index in range(2)))
    truth = (gradient_alone(0) + gradient_alone(1)) / 2
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    torch.testing.assert_close(first[0].double(), truth, rtol=1e-5, atol=1e-6 * float(truth.abs().max()))
    # Of five buckets, those of the last two layers are on their way before the first layer has its gradient.
    assert first[2] == second[2] and first[2][0] >= 2


def test_learners_whose_gradient_comes_in_parts_send_the_same_buckets_later(learners):
    first, second = learners.call(partial(exchanged, 0, None, False), partial(exchanged, 1, None, True))
    whole, _ = learners.call(*(partial(exchanged, index, None, False) for index in range(2)))
    assert first[2][0] >= 2 and second[2] == [0]
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], whole[0])


def test_bfloat16_keeps_learners_alike_and_errs_by_rounding_only(learners):
    first, second = learners.call(*(partial(exchanged, index, torch.bfloat16, False) for index in range(2)))
    gradients = torch.stack([gradient_alone(index) for index in range(2)])
    # Each gradient is rounded once and their sum once: |error| <= ((1 + u)^2 - 1) of the sum of sizes.
    bound = ((1 + UNIT) ** 2 - 1) * gradients.abs().sum(0) / 2 + 1e-6 * gradients.abs().max()
    error = (first[0].double() - gradients.mean(0)).abs()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert (error <= bound).all() and error.max() > 1e-4 * gradients.abs().max()


def test_a_fixed_layer_is_neither_sent_nor_decayed(monkeypatch):
    monkeypatch.setattr(gradients_module, "BUCKET_BYTES", 64)
    model = network()
    fixed, trained = model[2].requires_grad_(False), model[4].weight
    before = flat(fixed.parameters()), trained.clone()
    optimizer = Optimizer(model.parameters(), OptimizerParams(learning_rate=0.1, weight_decay=1.0))
    _, _, applied = Alike(sums=100).run(
        lambda: optimizer.minimise(12, lambda part: Loss(loss_of(model, batch_of(0)), {}))
    )
    assert applied and not torch.equal(trained, before[1])
    assert torch.equal(flat(fixed.parameters()), before[0])


def test_hooks_of_a_backward_pass_are_gone_after_it():
    model = network()
    exchange = GradientExchange(list(model.parameters()))
    exchange._buckets = [[parameter] for parameter in reversed(list(model.parameters()))]
    exchange._number_of = {parameter: number for number, (parameter,) in enumerate(exchange._buckets)}
    group = Alike(sums=100)
    with pytest.raises(ZeroDivisionError), exchange.overlapped(group):
        raise ZeroDivisionError
    loss_of(model, batch_of(0)).backward()
    assert exchange._sent == [] and group.sums == 100


class Alike(FirstOfTwo):
    """The first of two learners. The second has the same gradients in some sums, and is then gone."""

    def __init__(self, sums):
        super().__init__()
        self.sums = sums

    def _sum(self, tensor):
        if not self.sums:
            tensor.fill_(float("nan"))
            raise PeerLostError("gone")
        self.sums -= 1
        tensor.mul_(2)


@pytest.mark.parametrize("sums", [0, 1, 4])
def test_a_peer_lost_between_buckets_abandons_the_update_and_changes_no_weight(monkeypatch, sums):
    monkeypatch.setattr(gradients_module, "BUCKET_BYTES", 64)
    model = network()
    before, optimizer = flat(model.parameters()), Optimizer(model.parameters(), OptimizerParams())
    with pytest.raises(PeerLostError):
        Alike(sums).run(lambda: optimizer.minimise(12, lambda part: Loss(loss_of(model, batch_of(0)), {})))
    assert torch.equal(flat(model.parameters()), before)


def test_a_step_after_the_first_is_finished_with_the_gradient_of_this_learner(monkeypatch):
    monkeypatch.setattr(gradients_module, "BUCKET_BYTES", 64)
    group, model = Alike(5 + 1), network()
    optimizer = Optimizer(model.parameters(), OptimizerParams(clip_norm=0.0))

    def two_steps():
        for _ in range(2):
            _, _, applied = optimizer.minimise(12, lambda part: Loss(loss_of(model, batch_of(0)), {}))
            assert applied
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            own = torch.autograd.grad(loss_of(model, batch_of(0)), list(model.parameters()))
        return own

    gradients = []
    weights = [flat(model.parameters())]
    group.run(two_steps)
    assert isinstance(group.lost_peer, PeerLostError) and not torch.equal(flat(model.parameters()), weights[0])
    alone = network()
    optimizer = Optimizer(alone.parameters(), OptimizerParams(clip_norm=0.0))
    for gradient in gradients:
        optimizer.minimise(12, lambda part: Loss(loss_of(alone, batch_of(0)), {}))
        torch.testing.assert_close(flat(gradient), flat(parameter.grad for parameter in alone.parameters()))
