"""Updates and inference captured under a CUDA graph's rules equal eager ones bit for bit, on CPU tensors.

On CUDA, test_graphed_update, test_staged_update and test_graphed_inference repeat this with real graphs.
"""

import gc

import pytest
import torch

from core.acting.graphed_inference import capture_forward
from core.device.recorded_work import WARM_UP
from tests.core.acting import test_graphed_inference
from tests.core.learning import test_staged_update
from tests.core.learning.test_graphed_update import graphed
from tests.core.recordings import Recording, Replayed, imitate
from tests.core.resident_agents import AGENTS, make_agent, make_memory, playing, weights
from tests.reliability.test_inline import differences
from tests.selection import slow_except

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    imitate(monkeypatch)


# agents -----------------------------------------------------------------------------------------------------------
def trained(name: str, capture: bool) -> dict:
    """Return all state after 20 updates, some not finite, between which steps arrived and reports were taken."""
    agent, reported = make_agent(name), []
    shared, play = playing(agent)
    memory = shared.device_class(shared, CPU)
    updates = graphed(agent, memory, 16, 2, capture=capture)
    torch.manual_seed(4)
    for call in range(10):
        if call % 3 == 2:
            play(2)
        if call % 5 == 4:
            reported.append({**updates.statistics(), **memory.statistics()})
        assert memory.refresh()
        rewards = memory.ring.tensors["reward"].clone()
        memory.ring.tensors["reward"][:, call % 7 :: 7] = torch.nan if call % 7 == 6 else 0.0
        updates(memory)
        memory.ring.tensors["reward"].copy_(rewards)
    assert 0 < max(values["nonfinite_updates"] for values in reported) < 15
    return {
        "agent": agent.state_dict(),
        "weights": weights(agent),
        "leaves": memory._leaves,
        "generator": memory.generator.get_state(),
        "drawn": torch.get_rng_state(),
        "reported": reported,
    }


@pytest.mark.parametrize("name", slow_except(["rainbow"], AGENTS))
def test_captured_updates_equal_eager_ones_while_steps_arrive(name):
    assert not differences(trained(name, capture=True), trained(name, capture=False))


@pytest.mark.parametrize("name", slow_except(["impala with LSTM"], test_staged_update.AGENTS))
def test_captured_updates_on_host_batches_equal_eager_ones(name):
    recorded, eager = (
        test_staged_update.learnt(
            name, lambda agent, capture=capture: test_staged_update.staged(agent, capture=capture), 12
        )
        for capture in (True, False)
    )
    assert not differences([recorded[0].state_dict(), recorded[2]], [eager[0].state_dict(), eager[2]])
    assert all(
        (mine is None and theirs is None) or (mine == theirs).all()
        for mine, theirs in zip(recorded[1], eager[1], strict=True)
    )


@pytest.mark.parametrize("name", slow_except(["r2d2"], test_graphed_inference.ACTING))
def test_captured_inference_equals_the_networks(name):
    agent = test_graphed_inference.make_agent(name)
    capture_forward(agent.model, capture=True)
    expected = test_graphed_inference.played(name, test_graphed_inference.make_agent(name))
    test_graphed_inference.assert_same(test_graphed_inference.played(name, agent), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("agents", "name"),
    [*(("resident", name) for name in AGENTS), *(("staged", name) for name in test_staged_update.AGENTS)],
)
def test_no_autograd_graph_survives_its_update(agents, name):
    """Gradient accumulators belong to the stream of the forward pass; no capture on another stream can wait for it."""
    agent = make_agent(name) if agents == "resident" else test_staged_update.make_agent(name)
    if agents == "resident":
        batch = make_memory(agent)
        assert batch.refresh()
        updates = graphed(agent, batch, 16, 4)
    else:
        updates, batch = test_staged_update.staged(agent), test_staged_update.make_batch(agent, 0)
    gc.freeze()  # hides older objects from get_objects
    try:
        updates(batch)
        made = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        assert made and not [found.shape for found in made if found.grad_fn is not None]
    finally:
        gc.unfreeze()


# the rules --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("read", [bool, lambda mask: torch.ones(1)[mask]])
def test_captured_work_may_not_read_a_value(read):
    mask = torch.ones(1) > 0
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), Recording([]):
        read(mask)


def test_captured_work_is_repeated_without_python():
    """The imitation must repeat a number of python's; otherwise the tests above would prove nothing."""
    calls, total, generator = [], torch.zeros(3), torch.Generator().manual_seed(1)

    def work():
        calls.append(1)
        total.add_(torch.rand(3, generator=generator) * len(calls))

    captured = Replayed(work, CPU, [generator])
    for _ in range(WARM_UP + 4):
        captured()
    assert len(calls) == WARM_UP + 1
    again = torch.Generator().manual_seed(1)
    expected = sum(torch.rand(3, generator=again) * min(number, WARM_UP + 1) for number in range(1, WARM_UP + 5))
    torch.testing.assert_close(total, expected)
