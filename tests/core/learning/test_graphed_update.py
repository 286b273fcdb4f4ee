"""Graphed updates from the device replay equal plain ones and do nothing that a CUDA graph could not repeat."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.agent import Agent, LearnerOutput
from core.agents.dqn import DQN
from core.device.recorded_work import WARM_UP, CudaGraphCallable, _nothing_freed
from core.learning.updates import DeviceReplayBatches, EagerMetricAccumulator, GraphedUpdate, MetricAccumulator
from tests.core.devices import DEVICES
from tests.core.resident_agents import AGENTS, DISCRETE, make_agent, make_memory, optimizers, weights

CPU = torch.device("cpu")


def graphed(
    agent, memory, batch_size: int, count: int, device: torch.device = CPU, *, capture: bool = False
) -> GraphedUpdate:
    return GraphedUpdate(agent, DeviceReplayBatches(memory, batch_size, count, device), capture=capture)


def trained(name: str, calls: int, count: int, device: str = "cpu", capture: bool = False, **settings):
    """Return agent, memory and reported means after calls * count updates."""
    agent = make_agent(name, device, **settings)
    memory = make_memory(agent, device)
    torch.manual_seed(4)  # the seed of the noise
    updates = graphed(agent, memory, 16, count, torch.device(device), capture=capture)
    for _ in range(calls):
        assert memory.refresh() and updates(memory).priorities is None
    return agent, memory, {**updates.statistics(), **memory.statistics()}


def assert_close(found, expected, rtol: float, atol: float) -> None:
    for name, tensor in weights(expected[0]).items():
        torch.testing.assert_close(weights(found[0])[name], tensor, rtol=rtol, atol=atol, msg=name)
    torch.testing.assert_close(found[1]._leaves.cpu(), expected[1]._leaves.cpu(), rtol=rtol, atol=atol)
    assert found[2] == pytest.approx(expected[2], rel=max(rtol, 1e-5), abs=atol)


def period(name: str) -> int:
    agent, _, settings = AGENTS[name]
    return agent.update_cycle(agent.Params(**settings))


@pytest.mark.parametrize("name", AGENTS)
def test_prepared_updates_equal_those_of_a_plain_agent(name):
    planned = trained(name, calls=40 // period(name), count=period(name))
    agent = make_agent(name)
    memory = make_memory(agent)
    torch.manual_seed(4)
    reported = EagerMetricAccumulator()
    for _ in range(40):
        memory.refresh()
        memory.plan(1)
        batch, places = memory.sample(16)
        output = agent.learn(batch)
        assert output.skipped is False
        memory.update_priorities(places, output.priorities)
        reported.add(output)
    means = {**memory.statistics(), **reported.take()}
    assert_close(planned, (agent, memory, means), 1e-3, 1e-6)
    assert [each.steps_begun for each in optimizers(planned[0])] == [each.steps_begun for each in optimizers(agent)]
    assert [each.next_lr for each in optimizers(planned[0])] == [each.next_lr for each in optimizers(agent)]
    moved = [
        name for name, tensor in weights(make_agent(name)).items() if not torch.equal(tensor, weights(agent)[name])
    ]
    assert set(weights(agent)) - set(moved) == {name for name in weights(agent) if "target normalization" in name}


def test_updates_at_once_are_multiples_of_the_agents_period():
    apart, planned = trained("td3", 12, 1), trained("td3", 6, 2)
    assert apart[0].critic_optimizer._planned is None and planned[0].critic_optimizer._planned is not None
    assert_close(apart, planned, 1e-3, 1e-6)
    assert "policy_loss" in apart[2] and "policy_grad_norm" in planned[2]
    with pytest.raises(ValueError, match="3 updates of TD3 at once cannot be captured"):
        graphed(make_agent("td3"), planned[1], 16, 3, capture=True)


@pytest.mark.parametrize("name", ["dqn, rmsprop", "rainbow", "iqn", "r2d2", "d4pg", "td3", "sac"])
def test_several_updates_per_launch_equal_single_ones(name):
    count = period(name)
    assert_close(trained(name, calls=3, count=5 * count), trained(name, calls=15, count=count), 0.0, 0.0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", AGENTS)
def test_captured_updates_equal_eager_ones(name):
    """Sums on a GPU have no fixed order: eps keeps Adam from dividing the rest of a zero gradient by almost zero."""
    assert_close(
        trained(name, 25, 4, "cuda", capture=True, optimizer_eps=1e-4),
        trained(name, 25, 4, "cuda", optimizer_eps=1e-4),
        1e-3,
        1e-4,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("first", [True, False])
def test_a_prepared_non_finite_update_changes_nothing(device, name, first):
    agent = make_agent(name, device, **({"policy_update_period": 1} if period(name) > 1 else {}))
    memory = make_memory(agent, device)
    memory.refresh()
    for _ in range(0 if first else 3):
        memory.plan(1), agent.prepare_updates(1)
        agent.learn(memory.sample(16)[0])
    before, states = weights(agent), [[tensor.clone() for tensor in each._tensors()] for each in optimizers(agent)]
    memory.plan(1), agent.prepare_updates(1)
    batch, places = memory.sample(16)
    output = agent.learn(batch._replace(weights=batch.weights * torch.nan))
    assert bool(output.skipped) and output.priorities.isnan().all()
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(agent).items() if "normalization" not in key)
    for optimizer, old in zip(optimizers(agent), states):
        after = optimizer._tensors()
        assert all(map(torch.equal, after, old)) and not any(tensor.any() for tensor in after[len(old) :])
    leaves = memory._leaves.clone()
    memory.update_priorities(places, output.priorities)
    assert torch.equal(memory._leaves, leaves)


# what a CUDA graph cannot repeat ----------------------------------------------------------------------------------


def test_agents_without_prepared_updates_are_not_captured():
    class Own(DQN):  # which does not inherit `supports_cuda_graphs`
        prepare_updates = Agent.prepare_updates

    agent = Own(DQN.Params(), DISCRETE, lambda: None)
    with pytest.raises(ValueError, match="updates of Own at once cannot be captured"):
        graphed(agent, SimpleNamespace(generator=None, takes_priorities=False), 1, 1, capture=True)
    with pytest.raises(NotImplementedError, match="Own cannot be captured"):
        agent.prepare_updates(1)


# CUDA graphs ------------------------------------------------------------------------------------------------------
def test_capture_needs_cuda():
    with pytest.raises(ValueError, match="not on cpu"):
        CudaGraphCallable(lambda: None, torch.device("cpu"))


@pytest.mark.parametrize("collects", [False, True])
def test_nothing_is_garbage_collected_during_capture(collects):
    class Old:
        def __init__(self):
            self.itself = self

    def lose():
        gone.append(weakref.ref(Old()))

    gone = []
    lose()
    (gc.enable if collects else gc.disable)()
    try:
        with _nothing_freed():
            assert gone[0]() is None  # garbage from before is collected before
            lose()
            [[] for _ in range(100_000)]
            assert gone[1]() is not None and not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.cuda
def test_capture_works_after_an_older_graph_was_lost():
    device = torch.device("cuda")

    class Owner:
        def __init__(self):
            self.total = torch.zeros(3, device=device)
            self.captured = CudaGraphCallable(self.work, device)

        def work(self):
            self.total.add_(1)
            [[] for _ in range(100_000)]  # triggers garbage collection

    for _ in range(5):
        owner = Owner()
        for _ in range(WARM_UP + 2):
            owner.captured()
        assert owner.total.tolist() == [WARM_UP + 2] * 3


@pytest.mark.cuda
def test_a_launch_works_once_and_continues_its_generator():
    device, calls = torch.device("cuda"), []
    totals = []
    for capture in (False, True):
        total, generator = torch.zeros(3, device=device), torch.Generator(device).manual_seed(5)

        def work(total=total, generator=generator):
            calls.append(1)
            total.add_(torch.rand(3, generator=generator, device=device))

        captured = CudaGraphCallable(work, device, [generator]) if capture else work
        for _ in range(WARM_UP + 4):
            captured()
        totals.append(total)
    assert len(calls) == WARM_UP + 4 + WARM_UP + 1
    torch.testing.assert_close(*totals)


# reports ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_reports_are_means_over_finite_updates(device):
    tally = MetricAccumulator(torch.device(device))
    assert tally.take() == {"nonfinite_updates": 0.0} and tally.consecutive_skipped == 0
    losses = [1.0, np.nan, np.nan, 5.0, np.nan]
    for loss in losses:
        tally.add(
            LearnerOutput(
                {"loss": torch.tensor(loss, device=device)}, None, torch.tensor(np.isnan(loss), device=device)
            )
        )
    assert tally.take() == {"loss": 3.0, "nonfinite_updates": 3.0} and tally.consecutive_skipped == 2
    tally.add(LearnerOutput({"loss": torch.tensor(np.nan)}, None, skipped=True))
    assert tally.take() == {"nonfinite_updates": 4.0} and tally.consecutive_skipped == 2  # in a row with the one before
    tally.add(LearnerOutput({"loss": torch.tensor(2.0)}, None))
    assert tally.take() == {"loss": 2.0, "nonfinite_updates": 4.0} and tally.consecutive_skipped == 0


def test_a_statistic_of_some_updates_is_the_mean_over_those():
    accumulators = MetricAccumulator(torch.device("cpu")), EagerMetricAccumulator()
    for number, loss in enumerate([1.0, 2.0, 3.0, 6.0]):
        found = {"loss": torch.tensor(loss, requires_grad=True)} | (
            {"policy_loss": torch.tensor(10.0 * number)} if number % 2 else {}
        )
        for accumulator in accumulators:
            accumulator.add(LearnerOutput(found, None))
    for accumulator in accumulators:
        assert not any(total.requires_grad for total in accumulator._sums.values())  # They would keep every graph.
        assert accumulator.take() == {"loss": 3.0, "policy_loss": 20.0, "nonfinite_updates": 0.0}
