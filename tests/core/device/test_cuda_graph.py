"""Updates and inference captured under a CUDA graph's rules equal eager ones bit for bit, on CPU tensors.

On CUDA, test_graphed_update, test_staged_update and test_graphed_inference repeat this with real graphs.
"""

import gc

import pytest
import torch

from core.acting.graphed_inference import capture_forward
from core.device.cuda_graph import WARM_UP
from core.learning.batch_source import InPlaceBatchSource
from core.learning.graphed_update import GraphedUpdate
from tests.core.acting import test_graphed_inference
from tests.core.learning import test_staged_update
from tests.core.learning.test_graphed_update import graphed
from tests.core.recordings import Recording, Replayed, imitate
from tests.core.resident_agents import AGENTS, make_agent, make_memory, playing, weights
from tests.reliability.test_inline import RUNS, differences, saved, train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    imitate(monkeypatch)


# agents -----------------------------------------------------------------------------------------------------------
def trained(name: str, capture: bool) -> dict:
    """Return all state after 100 updates, some not finite, between which steps arrived and reports were taken."""
    agent, reported = make_agent(name), []
    shared, play = playing(agent)
    memory = shared.device_class(shared, CPU)
    updates = graphed(agent, memory, 16, 4, capture=capture)
    torch.manual_seed(4)
    for call in range(25):
        if call % 3 == 2:
            play(2)
        if call % 5 == 4:
            reported.append({**updates.statistics(), **memory.statistics()})
        assert InPlaceBatchSource(memory).get(timeout=0.0) is memory
        rewards = memory.ring["reward"].clone()
        memory.ring["reward"][:, call % 7 :: 7] = torch.nan if call % 7 == 6 else 0.0
        updates(memory)
        memory.ring["reward"].copy_(rewards)
    assert 0 < max(values["nonfinite_updates"] for values in reported) < 90
    return {
        "agent": agent.state_dict(),
        "weights": weights(agent),
        "leaves": memory._leaves,
        "generator": memory.generator.get_state(),
        "drawn": torch.get_rng_state(),
        "reported": reported,
    }


@pytest.mark.parametrize("name", AGENTS)
def test_captured_updates_equal_eager_ones_while_steps_arrive(name):
    assert not differences(trained(name, capture=True), trained(name, capture=False))


@pytest.mark.parametrize("name", test_staged_update.AGENTS)
def test_captured_updates_on_host_batches_equal_eager_ones(name):
    recorded, eager = (
        test_staged_update.learnt(
            name, lambda agent, capture=capture: test_staged_update.staged(agent, capture=capture), 30
        )
        for capture in (True, False)
    )
    assert not differences([recorded[0].state_dict(), recorded[2]], [eager[0].state_dict(), eager[2]])
    assert all(
        (mine is None and theirs is None) or (mine == theirs).all()
        for mine, theirs in zip(recorded[1], eager[1], strict=True)
    )


@pytest.mark.parametrize("name", test_graphed_inference.ACTING)
def test_captured_inference_equals_the_networks(name):
    agent = test_graphed_inference.make_agent(name)
    capture_forward(agent.model, capture=True)
    expected = test_graphed_inference.played(name, test_graphed_inference.make_agent(name))
    test_graphed_inference.assert_same(test_graphed_inference.played(name, agent), expected, rtol=0, atol=0)


def in_graphs() -> dict[int, torch.Tensor]:
    return {id(found): found for found in gc.get_objects() if type(found) is torch.Tensor and found.grad_fn is not None}


@pytest.mark.parametrize(
    ("agents", "name"),
    [*(("resident", name) for name in AGENTS), *(("staged", name) for name in test_staged_update.AGENTS)],
)
def test_no_autograd_graph_survives_its_update(agents, name):
    """Gradient accumulators belong to the stream of the forward pass; no capture on another stream can wait for it."""
    agent = make_agent(name) if agents == "resident" else test_staged_update.make_agent(name)
    if agents == "resident":
        memory = make_memory(agent)
        updates, batch = graphed(agent, memory, 16, 4), InPlaceBatchSource(memory).get(timeout=0.0)
    else:
        updates, batch = test_staged_update.staged(agent), test_staged_update.make_batch(agent, 0)
    before = in_graphs()
    updates(batch)
    assert in_graphs().keys() <= before.keys()


# runs -------------------------------------------------------------------------------------------------------------
RESIDENT = ("--learner.replay_device", "learner", "--learner.updates_per_graph_launch", "2")
RECORDED = {
    "dqn": RUNS["on the learner's device"],
    "rainbow": (*RUNS["rainbow"], *RESIDENT, "--model.hidden", "16"),
    "r2d2": (*RUNS["r2d2"], *RESIDENT),
    "d4pg": (*RUNS["d4pg"], *RESIDENT),
    "td3": (*RUNS["td3"], *RESIDENT),
    "sac": (*RUNS["sac"], *RESIDENT),
    "impala": (*RUNS["impala with replay"], "--learner.cuda_graph", "yes"),
    "impact": (*RUNS["impact"], "--learner.cuda_graph", "yes"),
}


@pytest.fixture
def record(monkeypatch, alone):
    """Make a run on the CPU capture what a run on a GPU would; the returned function called with False turns it off."""

    def choose(wanted: bool) -> None:
        monkeypatch.setattr(
            "core.single_processes.learner.GraphedUpdate", lambda *rest, capture: GraphedUpdate(*rest, capture=wanted)
        )
        monkeypatch.setattr(
            "core.single_processes.actor.with_graphed_forward", lambda agent, captured: acting(agent, wanted)
        )

    def acting(agent, wanted):
        capture_forward(agent.model, capture=wanted)
        return agent

    # as if there were a GPU to capture for
    monkeypatch.setattr("utils.config.device_validation.problems", lambda options: [])
    choose(True)
    return choose


@pytest.mark.parametrize("name", RECORDED)
def test_captured_and_resumed_runs_equal_the_eager_run(tmp_path, record, monkeypatch, name):
    replays, replay = [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda recording: (replays.append(recording), replay(recording)))
    exact = (
        *RECORDED[name],
        "--learner.checkpoint_replay",
        "true",
        "--timestamp",
        "one",
        "--learner.checkpoint_steps",
        "250",
    )
    recorded = saved(train(tmp_path / "recorded", *exact, "--steps", "500"))
    assert len({id(recording) for recording in replays}) >= 2 and len(replays) > 50  # learner and actor
    train(tmp_path / "halves", *exact, "--steps", "250")
    continued = saved(train(tmp_path / "halves", "--resume", "test_one", "--steps", "500"))
    record(False)
    eager = saved(train(tmp_path / "eager", *exact, "--steps", "500"))
    for part in ("agent", "clock", "memory"):
        assert not differences(recorded[part], eager[part]), part
        assert not differences(continued[part], eager[part]), part


# the rules --------------------------------------------------------------------------------------------------------
class Counting:
    """Do work with a fault that a captured graph cannot repeat, or with none."""

    def __init__(self, fault: str = ""):
        self.fault, self.calls, self.total = fault, 0, torch.zeros(3)
        self.generator, self.other = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        self.work = Replayed(self._count, CPU, [self.generator], capture=True)

    def _count(self) -> None:
        self.calls += 1
        drawn = torch.rand(3, generator=self.other if self.fault == "another generator" else self.generator)
        if self.fault == "a look" and drawn.sum() > 100:
            return
        if self.fault == "a mask":
            drawn = drawn[drawn > 0]
        if self.fault == "another tensor each time":
            self.total = self.total + drawn
        else:
            self.total.add_(drawn * (self.calls if self.fault == "a number of python's" else 1))


def test_captured_work_is_repeated_without_python():
    counting, generator = Counting(), torch.Generator().manual_seed(1)
    for _ in range(WARM_UP + 4):
        counting.work()
    assert counting.calls == WARM_UP + 1
    torch.testing.assert_close(
        counting.total, sum(torch.rand(3, generator=generator) for _ in range(WARM_UP + 4)), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a look", "_local_scalar_dense.*not permitted"),
        ("a mask", "index.*not permitted"),
        ("another generator", "not registered"),
        ("another tensor each time", "has been freed"),
    ],
)
def test_operations_that_capture_forbids_are_refused(fault, message):
    counting = Counting(fault)
    with pytest.raises(RuntimeError, match=message):
        for _ in range(WARM_UP + 3):
            counting.work()


def test_freed_memory_of_a_graph_is_not_used():
    counting = Counting()
    for _ in range(WARM_UP + 2):
        counting.work()
    kept = counting.total
    counting.total = torch.zeros(3)
    counting.work()
    assert counting.total.tolist() == [0, 0, 0] and kept.sum() > 0
    del kept
    with pytest.raises(RuntimeError, match="has been freed"):
        counting.work()


def test_a_python_number_in_a_graph_stays_constant():
    faulty, sound = Counting("a number of python's"), Counting()
    expected = torch.zeros(3)
    for number in range(1, WARM_UP + 5):
        before = sound.total.clone()
        faulty.work(), sound.work()
        expected += (sound.total - before) * min(number, WARM_UP + 1)
    torch.testing.assert_close(faulty.total, expected)
