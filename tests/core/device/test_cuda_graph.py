"""Updates and answers recorded and replayed by a CUDA graph's rules, on CPU tensors: to the bit what the same code gives eagerly.

What only a GPU can show, that its kernels may be recorded and agree, test_resident_updates, test_staged and test_inference repeat there.
"""

import gc

import pytest
import torch

from core.acting.graphed_inference import capture_forward
from core.device.cuda_graph import WARM_UP
from core.learning.batch_source import InPlaceBatchSource
from core.learning.graphed_update import GraphedDeviceUpdate, GraphedUpdate
from tests.core.acting import test_graphed_inference
from tests.core.learning import test_staged_update
from tests.core.recordings import Recording, Replayed, imitate
from tests.core.resident_agents import AGENTS, make_agent, make_memory, playing, weights
from tests.reliability.test_inline import RUNS, differences, saved, train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    imitate(monkeypatch)


# agents ---------------------------------------------------------------------------------------------------------------
def trained(name: str, capture: bool) -> dict:
    """All that there is after 100 updates between which rows arrived and reports were taken. Some of the updates were not finite."""
    agent, reported = make_agent(name), []
    shared, play = playing(agent)
    memory = shared.device_class(shared, CPU)
    updates = GraphedDeviceUpdate(agent, memory, 16, 4, CPU, capture=capture)
    torch.manual_seed(4)
    for call in range(25):
        if call % 3 == 2:
            play(2)
        if call % 5 == 4:
            reported.append({**updates.statistics(), **memory.statistics()})
        assert InPlaceBatchSource(memory).get(timeout=0.0) is memory
        rewards = memory.ring["reward"].clone()
        memory.ring["reward"][:, call % 7::7] = torch.nan if call % 7 == 6 else 0.0
        updates(memory)
        memory.ring["reward"].copy_(rewards)
    assert 0 < max(values["skipped_updates"] for values in reported) < 90
    return {"agent": agent.state_dict(), "weights": weights(agent), "leaves": memory._leaves, "generator": memory.generator.get_state(),
            "drawn": torch.get_rng_state(), "reported": reported}


@pytest.mark.parametrize("name", AGENTS)
def test_recorded_updates_equal_eager_ones_while_rows_arrive(name):
    assert not differences(trained(name, capture=True), trained(name, capture=False))


@pytest.mark.parametrize("name", test_staged_update.AGENTS)
def test_recorded_updates_on_staged_batches_equal_eager_ones(name):
    recorded, eager = (test_staged_update.learnt(name, lambda agent, capture=capture: GraphedUpdate(agent, CPU, capture=capture), 30)
                       for capture in (True, False))
    assert not differences([recorded[0].state_dict(), recorded[2]], [eager[0].state_dict(), eager[2]])
    assert all((mine is None and theirs is None) or (mine == theirs).all() for mine, theirs in zip(recorded[1], eager[1], strict=True))


@pytest.mark.parametrize("name", test_graphed_inference.ACTING)
def test_recorded_answers_are_the_networks_own(name):
    agent = test_graphed_inference.make_agent(name)
    capture_forward(agent.model, capture=True)
    expected = test_graphed_inference.played(name, test_graphed_inference.make_agent(name))
    test_graphed_inference.assert_same(test_graphed_inference.played(name, agent), expected, rtol=0, atol=0)


def in_graphs() -> dict[int, torch.Tensor]:
    return {id(found): found for found in gc.get_objects() if type(found) is torch.Tensor and found.grad_fn is not None}


@pytest.mark.parametrize(("agents", "name"),
                         [*(("resident", name) for name in AGENTS), *(("staged", name) for name in test_staged_update.AGENTS)])
def test_no_graph_of_an_update_outlives_it(agents, name):
    """What it keeps to add gradients up belongs to the stream of its forward, which a recording on another stream may not wait for."""
    agent = make_agent(name) if agents == "resident" else test_staged_update.make_agent(name)
    if agents == "resident":
        memory = make_memory(agent)
        updates, batch = GraphedDeviceUpdate(agent, memory, 16, 4, CPU, capture=False), InPlaceBatchSource(memory).get(timeout=0.0)
    else:
        updates, batch = GraphedUpdate(agent, CPU, capture=False), test_staged_update.make_batch(agent, 0)
    before = in_graphs()
    updates(batch)
    assert in_graphs().keys() <= before.keys()


# runs -----------------------------------------------------------------------------------------------------------------
RESIDENT = ("--learner.memory_device", "learner", "--learner.updates_per_replay", "2")
RECORDED = {
    "dqn": RUNS["on the learner's device"], "rainbow": (*RUNS["rainbow"], *RESIDENT, "--model.hidden", "16"),
    "r2d2": (*RUNS["r2d2"], *RESIDENT), "d4pg": (*RUNS["d4pg"], *RESIDENT),
    "td3": (*RUNS["td3"], *RESIDENT), "sac": (*RUNS["sac"], *RESIDENT),
    "impala": (*RUNS["impala with replay"], "--learner.captured", "yes"), "impact": (*RUNS["impact"], "--learner.captured", "yes")}


@pytest.fixture
def record(monkeypatch, alone):
    """A run on the CPU records what a run on a GPU would; called with False it does not."""
    def choose(wanted: bool) -> None:
        for kind in (GraphedDeviceUpdate, GraphedUpdate):
            monkeypatch.setattr(f"core.single_processes.learner_setup.{kind.__name__}",
                                lambda *rest, kind=kind, capture: kind(*rest, capture=wanted))
        monkeypatch.setattr("core.single_processes.actor.with_graphed_forward", lambda agent, captured: acting(agent, wanted))

    def acting(agent, wanted):
        capture_forward(agent.model, capture=wanted)
        return agent

    monkeypatch.setattr("utils.config.device_validation.problems", lambda options: [])  # as if there were a GPU to capture for
    choose(True)
    return choose


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_and_one_that_is_continued_equal_the_eager_run(tmp_path, record, monkeypatch, name):
    replays, replay = [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda recording: (replays.append(recording), replay(recording)))
    exact = (*RECORDED[name], "--learner.checkpoint_replay", "true", "--timestamp", "one", "--learner.checkpoint_steps", "250")
    recorded = saved(train(tmp_path / "recorded", *exact, "--steps", "500"))
    assert len({id(recording) for recording in replays}) >= 2 and len(replays) > 50  # learner and actor
    train(tmp_path / "halves", *exact, "--steps", "250")
    continued = saved(train(tmp_path / "halves", "--resume", "test_one", "--steps", "500"))
    record(False)
    eager = saved(train(tmp_path / "eager", *exact, "--steps", "500"))
    for part in ("agent", "clock", "memory"):
        assert not differences(recorded[part], eager[part]), part
        assert not differences(continued[part], eager[part]), part


# the rules ------------------------------------------------------------------------------------------------------------
class Counting:
    """Work with a fault that a recording cannot repeat, or with none."""

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


def test_work_without_a_fault_is_repeated_and_python_is_not():
    counting, generator = Counting(), torch.Generator().manual_seed(1)
    for _ in range(WARM_UP + 4):
        counting.work()
    assert counting.calls == WARM_UP + 1
    torch.testing.assert_close(counting.total, sum(torch.rand(3, generator=generator) for _ in range(WARM_UP + 4)), rtol=0, atol=0)


@pytest.mark.parametrize(("fault", "message"), [
    ("a look", "_local_scalar_dense.*not permitted"), ("a mask", "index.*not permitted"), ("another generator", "not registered"),
    ("another tensor each time", "has been freed")])
def test_what_a_recording_does_not_permit_is_refused(fault, message):
    counting = Counting(fault)
    with pytest.raises(RuntimeError, match=message):
        for _ in range(WARM_UP + 3):
            counting.work()


def test_memory_that_is_gone_is_not_used():
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


def test_a_number_that_python_keeps_stays_what_it_was():
    faulty, sound = Counting("a number of python's"), Counting()
    expected = torch.zeros(3)
    for number in range(1, WARM_UP + 5):
        before = sound.total.clone()
        faulty.work(), sound.work()
        expected += (sound.total - before) * min(number, WARM_UP + 1)
    torch.testing.assert_close(faulty.total, expected)
