"""A restored optimiser continues: Adam, RAdam and RMSProp by hand."""

import copy
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import nn

from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer, OptimizerParams, ScheduledTensor, TargetUpdater, learning_rate


def step(parameter, params, state=None):
    """Take one step of gradient 1 and return the distance and the state after it."""
    optimizer, before = Optimizer([parameter], params), parameter.item()
    if state is not None:
        optimizer.load_state_dict(state)
    optimizer.step(parameter.sum())
    return before - parameter.item(), optimizer.state_dict()


@pytest.mark.parametrize("kind", ["adam", "radam", "rmsprop"])
def test_a_restored_optimizer_keeps_moments_with_new_options(kind):
    settings = {"optimizer": kind, "rmsprop_centered": False, "clip_norm": 0.0}
    _, state = step(
        nn.Parameter(torch.tensor([0.0])),
        OptimizerParams(learning_rate=0.3, optimizer_eps=1e-8, rmsprop_decay=0.5, **settings),
    )
    moved, _ = step(
        nn.Parameter(torch.tensor([4.0])),
        OptimizerParams(learning_rate=0.1, optimizer_eps=1.0, rmsprop_decay=0.9, weight_decay=0.25, **settings),
        state,
    )
    gradient = 1 + 0.25 * 4
    if kind == "adam":
        mean, square = 0.9 * 0.1 + 0.1 * gradient, 0.999 * 0.001 + 0.001 * gradient**2
        expected = 0.1 * mean / (1 - 0.9**2) / (sqrt(square / (1 - 0.999**2)) + 1)
    elif kind == "radam":
        expected = 0.1 * (0.9 * 0.1 + 0.1 * gradient) / (1 - 0.9**2)  # the second step is not rectified
    else:
        expected = 0.1 * gradient / sqrt(0.9 * 0.5 + 0.1 * gradient**2 + 1)
    assert moved == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("before, after", [(6, 4), (4, 6), (1, 1)])
@pytest.mark.parametrize("periods", [(1, 1), (1, 2), (2, 1)])
def test_a_restored_schedule_is_at_the_update_it_was_at(before, after, periods):
    params = OptimizerParams(lr_schedule="linear", lr_schedule_updates=100)
    old, new = (
        Optimizer([nn.Parameter(torch.ones(1))], params, period=period, steps_per_update=steps)
        for period, steps in zip(periods, (before, after))
    )
    updates = 12
    old.skip(updates * before // periods[0])
    new.load_state_dict(old.state_dict())
    last_of_period = updates + periods[1] - 1
    assert new.next_lr == learning_rate(params, last_of_period)


@pytest.mark.parametrize("steps_per_update", [1, 2])
def test_the_reported_rate_is_that_of_the_step_that_was_taken(steps_per_update):
    params = OptimizerParams(lr_schedule="linear", lr_schedule_updates=8)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Optimizer([parameter], params, steps_per_update=steps_per_update)
    for step in range(8):
        optimizer.step(parameter.sum())
        taken = optimizer.state_dict()["optimizer"]["param_groups"][0]["lr"]
        expected = learning_rate(params, step // steps_per_update)
        assert optimizer.last_lr.item() == pytest.approx(taken) == pytest.approx(expected)


def test_steps_do_not_import_the_compiler():
    """Its import takes a second, for which actors and the first update would wait."""
    script = (
        "import sys, torch\n"
        "from core.learning.optimizer import Optimizer, OptimizerParams\n"
        "for kind in ('adam', 'radam', 'rmsprop'):\n"
        "    layer = torch.nn.Linear(2, 2)\n"
        "    optimizer = Optimizer(layer.parameters(), OptimizerParams(optimizer=kind))\n"
        "    before = layer.weight.clone()\n"
        "    optimizer.step(layer(torch.ones(2)).sum())\n"
        "    assert not torch.equal(layer.weight, before) and layer.weight.requires_grad\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.6, 0.2, 0.2]),
        ("polynomial", [1.0, 0.2 + 0.8 * 0.5**0.5, 0.2, 0.2]),
        ("step", [1.0, 1.0, 0.5, 0.2]),
    ],
)
def test_learning_rate_schedules_start_and_end_as_configured(schedule, values):
    params = OptimizerParams(learning_rate=1.0, lr_end=0.2, lr_schedule=schedule, lr_schedule_updates=10, lr_decay=0.5)
    assert [learning_rate(params, update) for update in (0, 5, 10, 30)] == pytest.approx(values)


@pytest.mark.parametrize("planned", [False, True])
def test_a_schedule_of_the_whole_run_follows_its_progress(planned):
    params = OptimizerParams(learning_rate=1.0, lr_end=0.2, lr_schedule="linear", lr_schedule_updates=None)
    weight, progress, taken = nn.Parameter(torch.ones(1)), (0.0, 0.25, 1.0), []
    optimizer = Optimizer([weight], params, steps_per_update=2, run_progress=lambda: progress[len(taken) // 2])
    for _ in range(6):
        if planned:
            optimizer.plan(1)
        optimizer.step(weight.sum(), torch.tensor(True))
        taken.append(optimizer.last_lr.item())
    assert taken == pytest.approx([1.0, 1.0, 0.8, 0.8, 0.2, 0.2])
    with pytest.raises(ValueError, match="lr_schedule=linear needs lr_schedule_updates"):
        Optimizer([weight], params)


def test_scheduled_values_are_those_of_each_update_and_uploaded_only_when_they_change(monkeypatch):
    uploaded = []
    monkeypatch.setattr(
        "core.learning.optimizer.upload", lambda array, target: (uploaded.append(array.tolist()), target.copy_(array))
    )
    scheduled, taken = ScheduledTensor(lambda update: float(update // 4), torch.device("cpu")), []
    for first in range(0, 12, 2):
        scheduled.plan(first, 2)
        taken += [scheduled.take().item(), scheduled.take().item()]
    assert taken == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert uploaded == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("planned", [False, True])
def test_a_target_with_batch_normalisation_follows_its_floating_point_tensors(planned):
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    target = copy.deepcopy(online)
    with torch.no_grad():
        online(torch.randn(5, 3))  # moves the statistics, and counts the batch
        online[0].weight.add_(1.0)
    before, after = (copy.deepcopy(network.state_dict()) for network in (target, online))
    updater = TargetUpdater(1, tau=0.25)
    if planned:
        updater.plan(1, 1, torch.device("cpu"))
    assert bool(updater(target, online, 1))
    for name, tensor in target.state_dict().items():
        if tensor.is_floating_point():
            expected = 0.75 * before[name].double() + 0.25 * after[name].double()
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(target[1].running_mean, before["1.running_mean"])


@pytest.mark.parametrize("planned", [False, True])
def test_an_infinite_gradient_is_skipped_despite_clip_value(planned):
    weight = nn.Parameter(torch.tensor([0.0, 1.0]))
    optimizer = Optimizer([weight], OptimizerParams(clip_value=1.0))
    if planned:
        optimizer.plan(1)
    norm, applied = optimizer.step(weight.sqrt().sum(), torch.tensor(True))  # finite, but its derivative is not
    assert torch.isinf(norm) and not applied and weight.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("loss", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_is_skipped_despite_its_gradient(planned, loss):
    """The Huber loss of an infinite error has the gradient 1. A skipped step counts in the schedule."""
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = Optimizer([weight], OptimizerParams(lr_schedule="linear", lr_schedule_updates=4, learning_rate=1.0))
    for _ in range(2):
        if planned:
            optimizer.plan(1)
        weight.grad = torch.tensor(1.0)
        _, applied = optimizer.apply(torch.tensor(loss), torch.tensor(True))
        assert not applied and weight.item() == 1.0
    assert optimizer.next_lr == 0.5


@pytest.mark.parametrize(("clip_norm", "clipped"), [(0.0, (1.0, 1.0)), (0.5, (0.5**1.5, 0.5**1.5))])
def test_the_norm_is_before_clipping_and_elements_come_first(clip_norm, clipped):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([weight], OptimizerParams(clip_value=1.0, clip_norm=clip_norm))
    norm, _ = optimizer.step((weight * torch.tensor([30.0, 40.0])).sum())
    assert norm.item() == 50.0 and weight.grad.tolist() == pytest.approx(clipped, rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(()), "a loss is of <class 'torch.Tensor'>, expected core.learning.gradients.Loss"),
        (Loss(torch.ones(3), {}), r"the loss of a batch is a tensor of shape \[3\], expected a scalar tensor"),
        (Loss(1.0, {}), "the loss of a batch is of <class 'float'>, expected a scalar tensor"),
    ],
)
def test_a_loss_of_another_type_or_shape_is_named(returned, message):
    optimizer = Optimizer([nn.Parameter(torch.ones(2))], OptimizerParams())
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.minimise(3, lambda part: returned)


def test_a_loss_that_reaches_no_parameter_is_refused():
    optimizer = Optimizer([nn.Parameter(torch.ones(2))], OptimizerParams())
    with pytest.raises(ValueError, match="gave no parameter of this optimiser a gradient"):
        optimizer.step(nn.Parameter(torch.tensor(1.0)).square())
