"""Micro-batched updates equal whole ones in float64 for every agent, and follow out-of-memory errors."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from core.agent import make_learner_output
from core.agents.iqn import IQN
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer, OptimizerParams
from core.learning.updates import EagerUpdates
from core.models.dqn import RainbowMLP
from core.models.iqn import IQNMLP
from core.types import slice_batch
from tests.core import resident_agents
from tests.core.distributed.learner_pair import FirstOfTwo
from tests.core.distributed.test_two_learners import double, flat
from tests.core.learning import test_staged_update
from tests.core.single_processes.test_learner import numbered_batch

UNROLLS = [
    name for name in test_staged_update.AGENTS if name not in ("dqn", "ppo", "pqn")
]  # whose minibatches are drawn
# BTR's estimate of the largest singular value moves with every micro-batch.
WITH_REPLAY = [name for name in resident_agents.AGENTS if name != "btr"]
SIZE, FITS = 11, 4  # micro-batches of 4, 4 and 3


class Limited:
    """Train one weight w by gradient descent with rate 1; the loss of window i is i * w.

    The agent runs out of memory above `most` windows, or at the attempts listed in `fails`.
    """

    def __init__(self, most, sums=False, priorities=True, bad=(), fails=(), **settings):
        self.most, self.with_priorities, self.bad, self.fails = most, priorities, bad, fails
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        params = OptimizerParams(
            optimizer="rmsprop",
            rmsprop_centered=False,
            rmsprop_decay=1.0,
            optimizer_eps=1.0,
            learning_rate=1.0,
            **{"clip_norm": 0.0, **settings},
        )
        self.optimizer, self.sums = Optimizer([self.weight], params, sums), sums
        self.attempts, self.parts = [], []

    def checkpoint_parts(self):
        return {"optimizer": self.optimizer}

    def learn(self, batch):
        self.parts.clear()
        found, norm, stepped = self.optimizer.minimise(
            len(batch.weights), lambda part: self.loss(slice_batch(batch, part))
        )
        return make_learner_output(
            {"loss": found.loss, "grad_norm": norm, **found.statistics}, found.priorities, stepped
        )

    def loss(self, batch):
        self.attempts.append(len(batch.weights))
        if len(batch.weights) > self.most or len(self.attempts) in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        numbers = batch.weights.double() * 4
        self.parts.append(numbers.int().tolist())
        losses = numbers * self.weight + torch.where(
            torch.isin(numbers, torch.tensor(self.bad).double()), torch.nan, 0.0
        )
        loss, statistic = (losses.sum(), numbers.sum()) if self.sums else (losses.mean(), numbers.mean())
        return Loss(loss, {"number": statistic}, batch.weights * 4 if self.with_priorities else None)

    @property
    def stepped(self):
        return -self.weight.item()


# every agent ------------------------------------------------------------------------------------------------------
@pytest.fixture
def float64(monkeypatch):
    """Run networks and batches in float64 with noise that is a function of its input."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "randn_like", lambda tensor: (3 * tensor.detach()).sin())
    monkeypatch.setitem(resident_agents.NETWORKS, RainbowMLP, {"hidden": 16, "noisy": False})
    monkeypatch.setitem(resident_agents.NETWORKS, IQNMLP, {"hidden": 16})
    monkeypatch.setitem(resident_agents.NETWORKS, resident_agents.NoisyR2D2, {"hidden": 8, "lstm": 8})
    monkeypatch.setattr(IQN, "_draw_fractions", resident_agents.same_fractions)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def agent_and_batches(name, monkeypatch):
    if name in UNROLLS:
        monkeypatch.setattr(test_staged_update, "STREAMS", SIZE)
        agent = test_staged_update.make_agent(name)
        return agent, [double(test_staged_update.make_batch(agent, seed)) for seed in range(6)]
    agent = resident_agents.make_agent(name)
    memory = resident_agents.shared_memory(agent)
    weights = torch.linspace(0.2, 1.0, SIZE)
    return agent, [double(memory.sample(SIZE)._replace(weights=weights)) for _ in range(6)]


@pytest.mark.parametrize("name", [*WITH_REPLAY, *UNROLLS])
def test_a_micro_batched_update_equals_the_whole_batchs_update(float64, monkeypatch, name):
    torch.manual_seed(0)
    (whole, batches), (parted, _) = (agent_and_batches(name, monkeypatch) for _ in range(2))
    parted.model.load_state_dict(whole.model.state_dict())
    if hasattr(parted, "target"):
        parted.target.load_state_dict(whole.target.state_dict())
    learn = EagerUpdates(parted, microbatch_on_oom=True)
    assert learn._microbatcher is not None
    learn._microbatcher.size, sizes, before = FITS, [], flat(whole.state_dict())
    for batch in batches:
        expected, found = whole.learn(batch), learn(batch)
        assert not found.skipped and found.statistics.keys() == expected.statistics.keys()
        for key, value in expected.statistics.items():
            assert float(found.statistics[key]) == pytest.approx(float(value), rel=1e-8, abs=1e-11), key
        assert (found.priorities is None) == (expected.priorities is None)
        if found.priorities is not None:
            torch.testing.assert_close(found.priorities, expected.priorities, rtol=1e-9, atol=1e-11)
        sizes.append(learn.statistics()["batch_size"])
    assert sizes == [FITS] * 6
    ours, theirs = flat(parted.state_dict()), flat(whole.state_dict())
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-8, atol=1e-10, msg=key)
    assert any((theirs[key] - before[key]).abs().max() > 1e-4 for key in theirs if "model" in key)


# exact gradients --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sums", "settings", "most"),
    [(False, {}, 3), (True, {}, 3), (False, {}, 1), (True, {"clip_norm": 0.5}, 3), (False, {"clip_norm": 0.25}, 3)],
)
def test_unequal_micro_batches_give_the_exact_clipped_gradient(sums, settings, most):
    agent = Limited(most, sums, **settings)
    output = EagerUpdates(agent, microbatch_on_oom=True)(numbered_batch(7))
    gradient = Fraction(sum(range(7)), 1 if sums else 7)
    assert float(output.statistics["grad_norm"]) == pytest.approx(float(gradient), rel=1e-12)
    # g / (0 * g + 1)
    assert agent.stepped == pytest.approx(min(float(gradient), settings.get("clip_norm", math.inf)), rel=1e-5)
    assert float(output.statistics["number"]) == pytest.approx(float(gradient), rel=1e-12)
    assert output.priorities.tolist() == list(range(7))
    assert agent.optimizer._steps == 1


def test_a_linear_learning_rate_falls_once_per_batch():
    agent = Limited(2, lr_schedule="linear", lr_schedule_updates=10)
    learn = EagerUpdates(agent, microbatch_on_oom=True)
    rates = []
    for _ in range(10):
        rates.append(agent.optimizer.next_lr)
        learn(numbered_batch(8))
    assert rates == pytest.approx([1 - number / 10 for number in range(10)]) and agent.parts == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_a_non_finite_micro_batch_skips_the_whole_update():
    agent = Limited(2, bad=(3,))
    output = EagerUpdates(agent, microbatch_on_oom=True)(numbered_batch(8))
    assert output.skipped and output.priorities is None and agent.stepped == 0 and agent.optimizer._steps == 1
    assert len(agent.parts) == 4


class Two(FirstOfTwo):
    """Act as one of two learners whose other one sends the same tensors."""

    def __init__(self):
        super().__init__()
        self.exchanges = 0

    def _sum(self, tensor):
        self.exchanges += 1
        tensor.mul_(2)


def test_learners_exchange_one_gradient_per_batch():
    agent, group = Limited(2), Two()
    group.run(lambda: EagerUpdates(agent, microbatch_on_oom=True)(numbered_batch(8)))
    assert group.exchanges == 1 and agent.stepped == pytest.approx(28 / 8)


def test_a_parameter_unused_by_all_micro_batches_has_no_gradient():
    used, unused, sometimes = (nn.Parameter(torch.ones(1)) for _ in range(3))
    optimizer = Optimizer([used, unused, sometimes], OptimizerParams(optimizer="adam", clip_norm=0.0, weight_decay=0.1))
    agent = Limited(3)
    agent.optimizer = optimizer
    agent.loss = lambda batch: (
        Loss((used * batch.weights).mean() + (sometimes.sum() if 0 in batch.weights else 0), {})
        if len(batch.weights) < 3
        else agent.oom()
    )
    agent.oom = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    EagerUpdates(agent, microbatch_on_oom=True)(numbered_batch(4))
    assert unused.grad is None and unused.item() == 1
    assert used.grad.item() == pytest.approx(6 / 4 / 4) and sometimes.grad.item() == pytest.approx(1 / 2)


# memory that runs out ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "most", "sizes", "parts"),
    [
        (8, 8, [], [8]),
        (8, 4, [4], [4, 4]),
        (8, 3, [4, 2], [2, 2, 2, 2]),
        (7, 4, [4], [4, 3]),
        (7, 1, [4, 2, 1], [1] * 7),
        (9, 2, [5, 3, 2], [2, 2, 2, 2, 1]),
    ],
)
def test_a_batch_that_does_not_fit_is_halved_until_it_does(capsys, size, most, sizes, parts):
    agent = Limited(most)
    learn = EagerUpdates(agent, microbatch_on_oom=True)
    learn(numbered_batch(size))
    assert [len(part) for part in agent.parts] == parts and [window for part in agent.parts for window in part] == list(
        range(size)
    )
    assert agent.attempts[: len(sizes) + 1] == [size, *sizes]
    printed = capsys.readouterr().err.splitlines()
    assert printed == [
        f"out of GPU memory: gradients of batches of {size} are computed from microbatches of "
        f"{smaller} windows from now on"
        for smaller in sizes
    ]
    assert learn.statistics()["batch_size"] == (sizes or [size])[-1]
    agent.attempts.clear()
    learn(numbered_batch(size))
    assert agent.attempts == parts and capsys.readouterr().err == ""


def test_a_batch_much_smaller_than_the_first_is_halved_at_once(capsys):
    agent = Limited(16)
    learn = EagerUpdates(agent, microbatch_on_oom=True)
    learn(numbered_batch(16))
    agent.most, agent.attempts = 2, []
    learn(numbered_batch(4))
    assert agent.attempts == [4, 2, 2]
    assert "batches of 4 are computed from microbatches of 2 windows" in capsys.readouterr().err


def test_out_of_memory_within_a_batch_restarts_its_gradient():
    agent = Limited(4, fails=(3,))  # the second of two micro-batches
    EagerUpdates(agent, microbatch_on_oom=True)(numbered_batch(8))
    assert agent.attempts == [8, 4, 4, 2, 2, 2, 2] and agent.stepped == pytest.approx(28 / 8)


@pytest.mark.parametrize(("shrink", "size", "most"), [(False, 8, 4), (True, 1, 0), (True, 8, 0)])
def test_out_of_memory_is_raised_if_the_batch_cannot_shrink(capsys, shrink, size, most):
    agent = Limited(most)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        EagerUpdates(agent, shrink)(numbered_batch(size))
    assert agent.parts == [] and agent.stepped == 0
    assert len(capsys.readouterr().err.splitlines()) == (3 if shrink and size == 8 else 0)


def test_tensors_of_a_failed_attempt_are_freed_before_the_next(monkeypatch):
    alive = []

    class Kept:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    class Hungry(Limited):
        def loss(self, batch):
            activations = Kept()
            return super().loss(batch) if activations else None

    seen = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(len(alive)))
    EagerUpdates(Hungry(2), microbatch_on_oom=True)(numbered_batch(8))
    assert seen == [0, 0]


def test_without_microbatches_the_batch_is_passed_unchanged():
    agent, seen = Limited(9), []
    agent.loss = lambda batch: seen.append(batch) or Loss(agent.weight * 1, {})
    batch, learn = numbered_batch(4), EagerUpdates(agent, microbatch_on_oom=False)
    learn(batch)
    assert seen[0] is batch and "batch_size" not in learn.statistics()


def test_micro_batches_without_priorities_give_none():
    assert EagerUpdates(Limited(2, priorities=False), microbatch_on_oom=True)(numbered_batch(4)).priorities is None
