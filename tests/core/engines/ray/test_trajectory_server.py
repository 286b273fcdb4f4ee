"""The trajectory server and its connections work without Ray: one event loop runs calls in place of messages."""

import asyncio
import dataclasses
import os
import pickle
import re
import shlex
import time
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

from core.engines.ray.engine import RayEngine  # noqa: E402
from core.engines.ray.placement import lack_of, learner_groups, number_with_room  # noqa: E402
from core.engines.ray.remote_context import RemoteRunInfo, ServerConnection, remote_context  # noqa: E402
from core.engines.ray.trajectory_server import StaleSenderError, TrajectoryServer  # noqa: E402
from core.engines.ray.worker import Host, Worker  # noqa: E402
from core.single_processes.actor import actor  # noqa: E402
from utils.config.command_line import read_options  # noqa: E402
from utils.launch import create_context  # noqa: E402

NOTHING = shlex.split(
    "--engine inline --evaluator.max_steps 1 --rate_limiter.min_replay_size 100 --num_envs_per_actor 4 --num_actors 2"
)


ACTORS = [f"actor {index}" for index in range(6)]


class Wire:
    """Replace Ray: `get` and `wait` run calls on an event loop."""

    def __init__(self, monkeypatch, ingest):
        self.loop = asyncio.new_event_loop()
        for name in ("register", "put", "report"):
            setattr(self, name, type("Method", (), {"remote": staticmethod(self._caller(getattr(ingest, name)))}))
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "put", lambda value: self.loop.create_task(self._value(value)))

    def _caller(self, method):
        return lambda *arguments: self.loop.create_task(method(*arguments))

    async def _value(self, value):
        return value

    def close(self):
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()

    def get(self, task, timeout=None):
        return self.loop.run_until_complete(task)

    def wait(self, tasks, num_returns=1, timeout=None):
        self.loop.run_until_complete(asyncio.wait(tasks, timeout=min(timeout, 0.05)))
        return [task for task in tasks if task.done()], [task for task in tasks if not task.done()]


@pytest.fixture
def line(tmp_path, monkeypatch):
    """Return a function that makes a run's context, a trajectory server on its memory, and a stand-in for Ray."""
    wires = []
    monkeypatch.setattr("core.engines.ray.worker.end_with", lambda main: None)

    def made(*words):
        words = ["--root", str(tmp_path), *NOTHING, "--ray.parameters_period", "0", *words]
        context, agent = create_context(read_options(words))
        context.parameters.publish(agent.model)
        ingest = TrajectoryServer(pickle.loads(pickle.dumps(context)))
        wires.append(Wire(monkeypatch, ingest))
        return context, agent, ingest, wires[-1]

    yield made
    for wire in wires:
        wire.close()


def drive(generator, run_state):
    """Yield as engines do, without sleeping."""
    for worked in generator:
        run_state.heartbeat(0)
        yield worked


def run_info(context):
    memory = context.memories[0]
    return RemoteRunInfo(context.options, context.spec, context.roles, memory.layout, memory.window, {})


def test_a_remote_actor_fills_its_ring_counts_and_reports(line):
    context, agent, ingest, wire = line("--config", "rainbow-cartpole")
    link = ServerConnection(wire, 1, 2)
    playing = actor(remote_context(run_info(context), link), 1)
    while context.counters.agent_steps < 500:
        next(playing)
    ring, counters, run_state = context.memories[0].trajectories, context.counters, context.run_state
    assert (
        ring.written()[0] == 0
        and ring.written()[1] * 4 == counters.inserted + ring.arrays["last"][1, : ring.written()[1]].sum()
    )
    assert counters.episodes and link.status.version == 1 and run_state.has_started(context.process_ind("actor", 1))
    assert any(record.name == "actor/episodic_return" for record in context.logs.drain()[0])
    context.parameters.publish(agent.model)
    while link.status.version < 2:
        next(playing)
    run_state.stop()
    for _ in range(10_000):
        if next(playing, None) is None:
            break
    else:
        raise AssertionError("the actor has not heard of the stop")


def test_chunks_in_flight_are_limited_and_fit_the_ring(line):
    context, _, ingest, wire = line(
        "--config", "impala-cartpole", "--rate_limiter.min_replay_size", "1", "--memory.capacity", "16"
    )
    link = ServerConnection(wire, 0, 3)
    playing = actor(remote_context(run_info(context), link), 0)
    most = 0
    for _ in range(400):
        next(playing)
        most = max(most, len(link._in_flight))
    memory = context.memories[0]
    assert most == 3 and 16 <= memory.unread() <= 16 + 4  # a chunk of 4 environments that was begun below 16
    before = memory.trajectories.written()[0]
    memory.shared["taken"][0] += 4  # a learner has read one chunk
    deadline = time.monotonic() + 20
    while memory.trajectories.written()[0] == before:
        next(playing)
        assert time.monotonic() < deadline
    assert memory.trajectories.written()[0] == before + memory.layout.chunk_length


def test_a_waiting_remote_actor_learns_when_it_may_continue(line):
    context, _, ingest, wire = line("--config", "dqn-cartpole", "--rate_limiter.error_buffer", "50")
    far = remote_context(run_info(context), ServerConnection(wire, 0, 2))
    playing = drive(actor(far, 0), far.run_state)
    while context.counters.agent_steps < 150 or far.rate_limiter.can_insert():
        next(playing)
    for _ in range(50):
        next(playing)
    waiting = context.counters.agent_steps
    assert waiting < 150 + 2 * 8 * 4 + 32  # min_replay_size, tolerance, and the chunks in flight
    context.counters.count_update(0, 10_000)
    deadline = time.monotonic() + 20
    while context.counters.agent_steps == waiting:
        next(playing)
        assert time.monotonic() < deadline


def test_a_replaced_actor_stores_nothing_more(line):
    context, _, ingest, wire = line("--config", "dqn-cartpole")
    first = ServerConnection(wire, 0, 2)
    playing = actor(remote_context(run_info(context), first), 0)
    while not context.counters.agent_steps:
        next(playing)
    context.run_state.count_restart()
    assert remote_context(run_info(context), ServerConnection(wire, 0, 2)).run_state.restarts == 1
    written = context.memories[0].trajectories.written().tolist()
    with pytest.raises(StaleSenderError):
        for _ in range(200):
            next(playing)
    assert context.memories[0].trajectories.written().tolist() == written


def test_a_local_actor_replaces_a_remote_one_with_waiting_chunks(line, monkeypatch):
    context, _, ingest, wire = line(
        "--config", "impala-cartpole", "--rate_limiter.min_replay_size", "1", "--memory.capacity", "16"
    )
    link = ServerConnection(wire, 0, 3)
    playing = actor(remote_context(run_info(context), link), 0)
    while len(link._in_flight) < 3 or context.memories[0].unread() < 16:
        next(playing)
    written = context.memories[0].trajectories.written().tolist()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "home"))
    for name in ("set_process_name", "signal.signal", "use_threads"):
        monkeypatch.setattr(f"core.engines.ray.worker.{name}", lambda *_: None)
    shared = wire.loop.create_task(wire._value(context))
    Worker("actor", 0).run(lambda context, index: iter(()), Host("home", os.getpid(), [shared], wire), None, 1)
    context.memories[0].shared["taken"][0] += 16  # a learner has read them all
    wire.loop.run_until_complete(asyncio.sleep(0.2))
    assert context.memories[0].trajectories.written().tolist() == written


def test_a_new_actor_has_not_started_before_it_plays_or_waits(line):
    context, _, ingest, wire = line("--config", "dqn-cartpole")
    link, place = ServerConnection(wire, 0, 2), context.process_ind("actor", 0)
    # its environments may take supervisor.start_timeout, or all fail at start
    assert not context.run_state.has_started(place)
    playing = drive(
        actor(remote_context(run_info(context), link), 0), remote_context(run_info(context), link).run_state
    )
    deadline = time.monotonic() + 20
    while not context.run_state.has_started(place):
        next(playing)
        assert time.monotonic() < deadline


def test_bad_options_are_reported_before_a_start(monkeypatch):
    options = read_options(["--config", "dqn-cartpole", "--engine", "ray"])
    assert RayEngine.problems(options) == []
    with pytest.raises(SystemExit) as ended:
        read_options(["--config", "dqn-cartpole", "--engine", "ray", "--ray.address", "ray://10.0.0.1:10001"])
    assert ended.value.code == 2
    halves = shlex.split("--config dqn-cartpole --engine ray --num_learners 2 --num_actors 2 --ray.learner_gpus 0.5")
    assert RayEngine.problems(read_options(halves)) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = RayEngine.problems(dataclasses.replace(read_options(["--device", "cpu", *halves]), device="cuda"))
    assert len(found) == 1 and "num_learners=2 need a GPU each, and with ray.learner_gpus=0.5 two could" in found[0]
    most = [*halves[:-1], "0.7", "--ray.actor_gpus", "0.3"]  # of each GPU; the rest is for an actor
    assert RayEngine.problems(dataclasses.replace(read_options(["--device", "cpu", *most]), device="cuda")) == []
    hidden = dataclasses.replace(
        options,
        device="cuda:1",
        actor=dataclasses.replace(options.actor, device="cuda"),
        ray=dataclasses.replace(options.ray, learner_gpus=0.0),
    )
    assert [problem.partition(" and ")[0] for problem in RayEngine.problems(hidden)] == [
        "device=cuda:1",
        "actor.device=cuda",
    ]
    shared = dataclasses.replace(hidden, ray=dataclasses.replace(options.ray, learner_gpus=0.5, actor_gpus=0.5))
    assert RayEngine.problems(shared) == []
    monkeypatch.setattr("core.engines.ray.engine.importlib.util.find_spec", lambda name: None)
    assert RayEngine.problems(options) == ['engine=ray needs a package that is not installed: pip install -e ".[ray]"']


@pytest.mark.parametrize("cpus, fits", [((3, 1), True), ((2, 2), True), ((2, 1), False), ((1, 9), False)])
def test_a_process_needs_its_cpus_on_one_node(cpus, fits):
    nodes = {name: {"Resources": {"CPU": float(count)}} for name, count in zip(("home", "other"), cpus)}
    needs = {name: {"CPU": 1.0, "GPU": 0.0} for name in ("actor 0", "actor 1", "learner 0", "evaluator 0")}
    lack = lack_of(needs, "home", nodes, ACTORS)
    assert (lack is None) == fits
    told = r"needs 1 CPUs.* finds no room: the run needs 4 CPUs.*lower num_actors, ray.actor_cpus, ray.learner_cpus$"
    assert fits or re.search(told, lack)


def test_resources_are_compared_in_rays_fixed_point():
    """3 - 4 * 0.6 is less than 0.6 in binary."""
    nodes = {"home": {"Resources": {"CPU": 3.0}}}
    needs = {f"actor {index}": {"CPU": 0.6, "GPU": 0.0} for index in range(6)}
    assert "finds no room" in lack_of(needs, "home", nodes, ACTORS)
    del needs["actor 5"]
    assert lack_of(needs, "home", nodes, ACTORS) is None


def test_a_missing_gpu_names_the_options_that_request_one():
    nodes = {"home": {"Resources": {"CPU": 4.0, "GPU": 2.0}}}
    shares = {"learner 0": 0.7, "learner 1": 0.7, "actor 0": 0.3, "actor 1": 0.3}
    needs = {name: {"CPU": 1.0, "GPU": share} for name, share in shares.items()}
    assert lack_of(needs, "home", nodes, ACTORS) is None
    needs = {name: {"CPU": 1.0, "GPU": max(share, 0.5)} for name, share in shares.items()}
    told = r"actor 1 needs 1 CPUs and 0\.5 GPUs.*lower num_actors.*, ray\.actor_gpus, ray\.learner_gpus$"
    assert re.search(told, lack_of(needs, "home", nodes, ACTORS))


@pytest.mark.parametrize(
    ("cpus", "number"),
    [((5, 3, 3), 3), ((5, 3, 2), 2), ((5, 9), 3), ((3, 8), 3), ((2, 9), 0), ((5,), 1), ((8,), 2), ((7, 1, 1), 2)],
)
def test_an_elastic_run_has_as_many_learners_as_nodes_hold_with_two_actors_each(cpus, number):
    """Home holds the first learner and the evaluator: 3 CPUs, or 5 with the learner's actors."""
    options = read_options(["--config", "dqn-cartpole", "--num_learners", "2", "--num_actors", "4"])
    groups = learner_groups(options, range(3))
    groups[0]["evaluator 0"] = {"CPU": 2.0, "GPU": 0.0}
    anywhere = {name for group in groups for name in group} - {"learner 0", "evaluator 0"}
    nodes = {str(node): {"Resources": {"CPU": float(count)}} for node, count in enumerate(cpus)}
    assert [len(group) for group in groups] == [4, 3, 3]
    assert number_with_room(groups, "0", nodes, anywhere) == number
