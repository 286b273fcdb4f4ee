"""Home and the node of a learner have the same counts, flags and heartbeats, each value with one writer."""

import asyncio
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from core.checkpoint import run_checkpoint  # noqa: E402
from core.distributed.learner_group import SingleLearner  # noqa: E402
from core.engines.ray import learner_host, trajectory_server  # noqa: E402
from core.engines.ray.cluster import ClusterError  # noqa: E402
from core.engines.ray.launcher import RayLauncher  # noqa: E402
from core.engines.ray.learner_host import HostPlan, LearnerHost, Mirror, send_home  # noqa: E402
from core.engines.ray.placement import _with_room_beside  # noqa: E402
from core.engines.ray.remote_context import RemoteRunInfo  # noqa: E402
from core.engines.ray.trajectory_server import TrajectoryServer, accept, snapshot  # noqa: E402
from core.runtime import run_state as run_state_module  # noqa: E402
from core.runtime.run_state import COUNTS, RunCounters, RunState  # noqa: E402
from utils.config.command_line import read_options  # noqa: E402
from utils.launch import create_context  # noqa: E402

WORDS = ["--config", "dqn-cartpole", "--engine", "ray", "--ray.address", "127.0.0.1:1", "--num_learners", "2"]
WORDS += ["--num_actors", "5", "--memory.capacity", "4000"]


def plan_of(context, token: Path) -> HostPlan:
    memory = context.memories[0]
    info = RemoteRunInfo(context.options, context.spec, context.roles, memory.layout, memory.window, {})
    makers, size = context.memory_makers, context.parameters.size
    return HostPlan(info, makers[1], size, snapshot(context), SingleLearner(), context.resume_from, None, token)


@pytest.fixture
def home(tmp_path):
    return create_context(read_options(["--root", str(tmp_path), "--timestamp", "one", *WORDS]))[0]


@pytest.fixture
def node(home, tmp_path):
    """Return the context of learner 1's node, and its mirror."""
    plan = pickle.loads(pickle.dumps(plan_of(home, tmp_path)))  # as Ray sends it
    context = LearnerHost(1, plan, None)._make_context()
    mirror = Mirror(context, 1)
    mirror.restore(plan.run)
    return context, mirror


def exchange(home, mirror) -> None:
    report = pickle.loads(pickle.dumps(mirror.report()))
    accept(home, report)
    mirror.follow(pickle.loads(pickle.dumps(snapshot(home, report.processes))))


def test_each_node_allocates_the_memory_of_its_own_learner(home, node):
    assert list(home.memories) == [0] and list(node[0].memories) == [1]
    assert [home.memories[0].layout.num_actors, node[0].memories[1].layout.num_actors] == [3, 2]
    assert node[0].memory_of(3) == (node[0].memories[1], 1) and home.memory_of(4) == (home.memories[0], 2)
    assert node[0].parameters.size == home.parameters.size and node[0].publishes(1) and home.publishes(0)


def test_counts_of_both_nodes_add_up_to_the_bit(home, node):
    context, mirror = node
    generator, expected = np.random.default_rng(1), dict.fromkeys(COUNTS, 0)
    for _ in range(200):
        actor, steps, episodes = (int(generator.integers(size)) for size in (5, 1 << 40, 3))
        where = context if actor % 2 else home
        where.counters.count_agent_steps(actor, steps, episodes)
        expected["agent_steps"] += steps
        expected["inserted"] += steps
        expected["episodes"] += episodes
        if generator.random() < 0.3:
            for learner, counters in enumerate((home.counters, context.counters)):
                counters.count_update(learner, 32 + learner)
            expected["updates"] += 1
            expected["sampled"] += 65
        if generator.random() < 0.3:
            exchange(home, mirror)
    exchange(home, mirror)
    for counters in (home.counters, context.counters):
        assert {name: getattr(counters, name) for name in COUNTS} == expected
    assert home.rate_limiter._deficit(8.0) == context.rate_limiter._deficit(8.0)


def test_no_side_writes_what_the_other_counts(home, node):
    """A stale answer or report arrives while processes count on."""
    context, mirror = node
    exchange(home, mirror)
    stale_answer, stale_report = snapshot(home), mirror.report()
    home.counters.count_agent_steps(0, 10)
    context.counters.count_agent_steps(1, 7)
    context.counters.count_update(1, 5)
    mirror.follow(stale_answer)
    accept(home, stale_report)
    assert home.counters.agent_steps == 10 and context.counters.agent_steps == 7 and context.counters.sampled == 5
    exchange(home, mirror)
    assert home.counters.agent_steps == context.counters.agent_steps == 17


def test_restored_counts_of_other_numbers_continue_on_every_node(home, tmp_path):
    saved = RunCounters(7, 3)
    for actor in range(7):
        saved.count_agent_steps(actor, 100 + actor, 1)
    saved.count_update(2, 11, updates=4)
    home.counters.load_state_dict(saved.state_dict(), with_replay=False)
    context = LearnerHost(1, plan_of(home, tmp_path), None)._make_context()
    mirror = Mirror(context, 1)
    mirror.restore(snapshot(home))
    context.counters.count_agent_steps(3, 1)
    exchange(home, mirror)
    assert home.counters.agent_steps == context.counters.agent_steps == saved.agent_steps + 1
    assert home.counters.updates == context.counters.updates == 4 and home.counters.inserted == 1


def test_a_checkpoint_has_counts_that_the_mirror_has_not_sent_yet(home, node):
    context, mirror = node
    for actor in (1, 3):
        context.counters.count_agent_steps(actor, 10 + actor, 1)
    exchange(home, mirror)
    context.counters.count_agent_steps(3, 7)
    context.counters.count_update(1, 5)
    home.counters.count_agent_steps(0, 100)
    state = home.counters.state_dict({1: context.counters.totals()[1]})
    sums = {name: sum(state[name]) for name in COUNTS}
    assert sums == {"agent_steps": 131, "episodes": 2, "updates": 1, "inserted": 131, "sampled": 5}
    assert home.counters.agent_steps == 124  # nothing is written


def test_heartbeats_are_sent_as_ages(home, node, monkeypatch):
    context, mirror = node
    process_ind = home.process_ind("learner", 1)
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=5.0)  # of the node
    monkeypatch.setattr(run_state_module, "time", clock)
    exchange(home, mirror)
    assert not home.run_state.has_started(process_ind)
    context.run_state.heartbeat(process_ind)
    clock.now = 8.0
    report = mirror.report()
    clock.now = 1_000_000.0  # home's
    accept(home, report)
    assert home.run_state.seconds_since_heartbeat(process_ind) == 3.0
    clock.now += 2
    assert home.run_state.seconds_since_heartbeat(process_ind) == 5.0


def test_a_successor_does_not_inherit_heartbeats(home, node):
    context, mirror = node
    process_ind = home.process_ind("actor", 1)
    home.run_state.count_start(process_ind)
    exchange(home, mirror)
    context.run_state.heartbeat(process_ind)
    context.run_state.activity_marker(process_ind)[0] = 3
    exchange(home, mirror)
    assert home.run_state.has_started(process_ind) and home.run_state.active_env(process_ind) == 2
    stale = mirror.report()
    home.run_state.count_start(process_ind)
    accept(home, stale)
    assert not home.run_state.has_started(process_ind) and home.run_state.active_env(process_ind) is None
    mirror.follow(snapshot(home, stale.processes))
    assert not context.run_state.has_started(process_ind)
    context.run_state.heartbeat(process_ind)
    exchange(home, mirror)
    assert home.run_state.has_started(process_ind)


def test_flags_scores_and_replay_sizes_are_mirrored(home, node):
    context, mirror = node
    home.run_state.request_checkpoint()
    home.run_state.lose_learner(0)
    home.counters.record_evaluation(12.5, agent_steps=3)
    home.run_state.stop(interrupt=True)
    exchange(home, mirror)
    assert context.run_state.interrupted and context.run_state.checkpoint_due and context.run_state.lost_learner == 0
    assert context.counters.scores == (12.5, 12.5) and context.counters.evaluated_at == 3
    mirror._context.memories[1].size = lambda: 42
    exchange(home, mirror)
    assert home.counters.remote_replay_steps == 42


def test_log_records_arrive_once_confirmed_with_their_age(home, node):
    context, mirror = node
    context.logs._epoch_offset += 1_000  # the node's clock is fast
    context.report("actor", 1, {"a": 1.0})
    unanswered = mirror.report()
    context.report("actor", 3, {"b": 2.0})
    assert mirror.report().records.keys() == unanswered.records.keys()
    exchange(home, mirror)
    exchange(home, mirror)
    records, dropped = home.logs.drain()
    assert [(record.name, record.value) for record in records] == [("actor/a", 1.0), ("actor/b", 2.0)] and not dropped
    assert all(abs(record.time - home.logs.now()) < 10 for record in records)


def test_records_of_a_report_whose_answer_was_lost_are_logged_once(home, node):
    context, mirror = node
    server = TrajectoryServer(home)
    for value in range(2):
        context.report("actor", 1, {"a": float(value)})
        for _ in range(2):
            answer = asyncio.run(server.exchange(mirror.report()))
        mirror.follow(answer)
    assert [record.value for record in home.logs.drain()[0]] == [0.0, 1.0]


def test_an_actor_is_placed_beside_its_learner_while_there_is_room():
    needs = {f"actor {index}": {"CPU": 1.0, "GPU": 0.0} for index in range(6)}
    needs |= {f"learner {index}": {"CPU": 1.0, "GPU": 1.0} for index in range(3)}
    groups = [["learner 1", "actor 1", "actor 4"], ["learner 2", "actor 2", "actor 5"]]
    free = {"home": {"CPU": 9.0, "GPU": 4.0}, "a": {"CPU": 3.0, "GPU": 1.0}, "b": {"CPU": 2.0, "GPU": 1.0}}
    assert _with_room_beside(groups, needs, "home", free) == [groups[0], groups[1][:2]]
    assert _with_room_beside(groups, needs, "home", {"home": {"CPU": 0.0}}) == [["learner 1"], ["learner 2"]]
    free = {"home": {"CPU": 1.0, "GPU": 0.0}, "a": {"CPU": 5.0, "GPU": 2.0}}  # both learners on one node
    assert _with_room_beside(groups, needs, "home", free) == [groups[0], groups[1][:2]]


# files of a node that does not see the run's folder -------------------------------------------------------------------
@pytest.fixture
def server(home, tmp_path, monkeypatch):
    """Return a stand-in for the trajectory server at home, whose answers are there at once."""
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    for module in (learner_host, trajectory_server):
        monkeypatch.setattr(module, "PIECE_BYTES", 1_000)
    files = TrajectoryServer(home)

    def read(name: str, offset: int) -> SimpleNamespace:
        return SimpleNamespace(
            future=lambda: SimpleNamespace(result=lambda: asyncio.run(files.read_piece(name, offset)))
        )

    calls = {
        "write_piece": lambda *arguments: asyncio.run(files.write_piece(*arguments)),
        "adopt": lambda name: asyncio.run(files.adopt(name)),
        "read_piece": read,
    }
    return SimpleNamespace(**{name: SimpleNamespace(remote=function) for name, function in calls.items()})


def test_parts_and_checkpoints_are_sent_home_whole(home, server, tmp_path):
    state = {"values": np.arange(3_000).tolist()}
    far = tmp_path / "far"
    for path in run_checkpoint.save_parts(far, {"memory_1": state}):
        send_home(server, path)
    assert not list(far.iterdir())
    folder = home.options.checkpoint_folder
    run_checkpoint.save(folder, {"agent": {"a": 1}}, 5, 2, ["memory_1"])
    assert run_checkpoint.load(folder)[0]["memory_1"] == state
    send_home(server, run_checkpoint.save(far, {"agent": {"a": 2}, "more": state}, 9, 2))
    loaded, path = run_checkpoint.load(folder)
    assert loaded == {"agent": {"a": 2}, "more": state} and path.name == "step_000000000009"
    assert not list(folder.glob(".temporary_*"))


def test_a_node_without_the_runs_folder_has_one_of_its_own(home, server, tmp_path):
    home.resume_from = run_checkpoint.save(tmp_path, {"agent": {"a": 1}, "memory_1": {"b": [2] * 2_000}}, 1, 2)
    token = tmp_path / "token"
    token.touch()
    assert LearnerHost(1, plan_of(home, token), server)._make_context().send_home is None
    token.unlink()
    host = LearnerHost(1, plan_of(home, token), server)
    context = host._make_context()
    assert context.send_home is not None and context.options.checkpoint_folder != home.options.checkpoint_folder
    parts = run_checkpoint.read(context.resume_from, ("memory_1", "learner_1"), is_verified=True)
    assert parts == {"memory_1": {"b": [2] * 2_000}}
    host.close()
    assert not os.path.exists(context.options.root)


class Ended(Exception):
    pass


def mirror_until_ended(tmp_path, monkeypatch, exchange) -> None:
    """Run a host whose calls to home are those of `exchange` until the host ends itself."""

    def end(code):
        raise Ended(code)

    options = read_options(["--root", str(tmp_path), "--timestamp", "two", *WORDS, "--ray.learner_timeout", "0.3"])
    context = create_context(options)[0]
    home = SimpleNamespace(exchange=SimpleNamespace(remote=exchange))
    host = LearnerHost(1, plan_of(context, tmp_path), home)
    host._context = host._make_context()
    host._mirror = Mirror(host._context, 1)
    monkeypatch.setattr("core.engines.ray.learner_host.os._exit", end)
    with pytest.raises(Ended, match=r"^4$"):
        asyncio.run(asyncio.wait_for(host.mirror(), 20))


def test_a_silent_home_ends_a_node(tmp_path, monkeypatch):
    mirror_until_ended(tmp_path, monkeypatch, lambda report: asyncio.sleep(60))


def test_an_error_of_home_is_logged_once(tmp_path, monkeypatch, capsys):
    async def fail(report):
        raise ray.exceptions.RayTaskError("exchange", "KeyError: 7, with its traceback", KeyError(7))

    mirror_until_ended(tmp_path, monkeypatch, fail)
    assert capsys.readouterr().err.count("KeyError: 7") == 1


def test_an_answer_that_cannot_be_followed_ends_a_node(tmp_path, monkeypatch, capsys):
    async def answer(report):
        return None

    mirror_until_ended(tmp_path, monkeypatch, answer)
    assert "learner 1's node ends: AttributeError" in capsys.readouterr().err


def test_a_node_without_memory_refuses_the_run_with_its_reason(monkeypatch):
    def fail(answer):
        raise ray.exceptions.RayTaskError("prepare", "a traceback", MemoryError("5 bytes are needed and 4 are free"))

    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(ClusterError, match=r"^learner 1 cannot be on its node: 5 bytes are needed and 4 are free$"):
        RayLauncher._host_of(None, 1, None)


def test_rows_of_processes_are_forgotten_by_a_new_start():
    run_state = RunState(2)
    run_state.heartbeat(1)
    run_state.count_start(1)
    assert not run_state.has_started(1) and run_state.starts(1) == 1 and run_state.starts(0) == 0
