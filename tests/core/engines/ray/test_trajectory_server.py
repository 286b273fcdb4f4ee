"""The ingest and an actor's end of the line, without Ray: one event loop, calls in place of messages."""

import asyncio
import dataclasses
import os
import pickle
import time
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

from core.engines.ray.cluster import ClusterError  # noqa: E402
from core.engines.ray.connection import ServerConnection  # noqa: E402
from core.engines.ray.engine import RayEngine  # noqa: E402
from core.engines.ray.placement import check_capacity  # noqa: E402
from core.engines.ray.remote_context import RemoteRunInfo, remote_context  # noqa: E402
from core.engines.ray.trajectory_server import StaleSenderError, TrajectoryServer  # noqa: E402
from core.engines.ray.worker import Worker  # noqa: E402
from core.single_processes.actor import actor  # noqa: E402
from utils.config.command_line import read_options  # noqa: E402
from utils.launch import prepare  # noqa: E402

NOTHING = ("--engine", "inline", "--evaluator.max_steps", "1",
           "--clock.learn_start", "100", "--num_envs_per_actor", "4", "--num_actors", "2")


class Wire:
    """Ray's part: `get` and `wait` of calls that an event loop runs when somebody looks."""

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
    """A run's context, an ingest that shares its memory, and what stands for Ray."""
    wires = []
    monkeypatch.setattr("core.engines.process_main.end_with", lambda main: None)

    def made(*words):
        context, agent = prepare(read_options(["--root", str(tmp_path), *NOTHING, *words]))
        context.parameters.publish(agent.model)
        ingest = TrajectoryServer(pickle.loads(pickle.dumps(context)), 0.0, os.getpid())
        wires.append(Wire(monkeypatch, ingest))
        return context, agent, ingest, wires[-1]

    yield made
    for wire in wires:
        wire.close()


def drive(generator, clock):
    """As engines do, without naps."""
    for worked in generator:
        clock.heartbeat(0)
        yield worked


def run_info(context):
    memory = context.memories[0]
    return RemoteRunInfo(context.options, context.spec, context.roles, memory.layout, memory.window, {})


def test_an_actor_at_the_end_of_a_line_fills_its_ring_counts_and_reports(line):
    context, agent, ingest, wire = line("--config", "rainbow-cartpole")
    link = ServerConnection(wire, 1, 2)
    playing = actor(remote_context(run_info(context), link), 1)
    while context.clock.agent_steps < 500:
        next(playing)
    ring, clock = context.memories[0].trajectories, context.clock
    assert ring.written()[0] == 0 and ring.written()[1] * 4 == clock.inserted + ring.arrays["last"][1, :ring.written()[1]].sum()
    assert clock.episodes and link.status.version == 1 and clock.has_started(context.process_ind("actor", 1))
    assert any(record.name == "actor/episodic_return" for record in context.logs.drain()[0])
    context.parameters.publish(agent.model)
    while link.status.version < 2:
        next(playing)
    clock.stop()
    for _ in range(10_000):
        if next(playing, None) is None:
            break
    else:
        raise AssertionError("the actor has not heard of the stop")


def test_no_more_chunks_are_on_their_way_than_allowed_and_the_ring_is_never_overrun(line):
    context, _, ingest, wire = line("--config", "impala-cartpole", "--clock.learn_start", "1", "--memory.capacity", "16")
    link = ServerConnection(wire, 0, 3)
    playing = actor(remote_context(run_info(context), link), 0)
    most = 0
    for _ in range(400):
        next(playing)
        most = max(most, len(link._in_flight))
    memory = context.memories[0]
    assert most == 3 and 16 <= memory.unread() <= 16 + 4  # a chunk of 4 streams that was begun below 16
    before = memory.trajectories.written()[0]
    memory.shared["taken"][0] += 4  # a learner has read one chunk
    deadline = time.monotonic() + 20
    while memory.trajectories.written()[0] == before:
        next(playing)
        assert time.monotonic() < deadline
    assert memory.trajectories.written()[0] == before + memory.layout.chunk_length


def test_an_actor_that_waits_for_the_learner_with_nothing_on_its_way_hears_when_it_may_go_on(line):
    context, _, ingest, wire = line("--config", "dqn-cartpole", "--clock.tolerance", "50")
    far = remote_context(run_info(context), ServerConnection(wire, 0, 2))
    playing = drive(actor(far, 0), far.clock)
    while context.clock.agent_steps < 150 or far.clock.can_insert():
        next(playing)
    for _ in range(50):
        next(playing)
    waiting = context.clock.agent_steps
    assert waiting < 150 + 2 * 8 * 4 + 32  # learn_start, tolerance, and the chunks on their way
    context.clock.count_update(0, 10_000)
    deadline = time.monotonic() + 20
    while context.clock.agent_steps == waiting:
        next(playing)
        assert time.monotonic() < deadline


def test_a_life_that_was_replaced_stores_nothing_more(line):
    context, _, ingest, wire = line("--config", "dqn-cartpole")
    first = ServerConnection(wire, 0, 2)
    playing = actor(remote_context(run_info(context), first), 0)
    while not context.clock.agent_steps:
        next(playing)
    ServerConnection(wire, 0, 2)
    written = context.memories[0].trajectories.written().tolist()
    with pytest.raises(StaleSenderError):
        for _ in range(200):
            next(playing)
    assert context.memories[0].trajectories.written().tolist() == written


def test_a_life_at_home_stores_alone_though_chunks_of_one_elsewhere_still_wait_for_room(line, monkeypatch):
    context, _, ingest, wire = line("--config", "impala-cartpole", "--clock.learn_start", "1", "--memory.capacity", "16")
    link = ServerConnection(wire, 0, 3)
    playing = actor(remote_context(run_info(context), link), 0)
    while len(link._in_flight) < 3 or context.memories[0].unread() < 16:
        next(playing)
    written = context.memories[0].trajectories.written().tolist()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "home"))
    for name in ("process_main.set_process_name", "signal.signal", "use_threads"):
        monkeypatch.setattr(f"core.engines.ray.worker.{name}", lambda *_: None)
    shared = wire.loop.create_task(wire._value(context))
    Worker("actor", 0).run(lambda context, index: iter(()), "home", os.getpid(), [shared], None, wire, 1)
    context.memories[0].shared["taken"][0] += 16  # a learner has read them all
    wire.loop.run_until_complete(asyncio.sleep(0.2))
    assert context.memories[0].trajectories.written().tolist() == written


def test_a_new_life_has_shown_no_sign_of_itself_before_it_plays_or_waits(line):
    context, _, ingest, wire = line("--config", "dqn-cartpole")
    link, place = ServerConnection(wire, 0, 2), context.process_ind("actor", 0)
    assert not context.clock.has_started(place)  # its environments may take supervisor.start_timeout, or all fail at start
    playing = drive(actor(remote_context(run_info(context), link), 0), remote_context(run_info(context), link).clock)
    deadline = time.monotonic() + 20
    while not context.clock.has_started(place):
        next(playing)
        assert time.monotonic() < deadline


def test_bad_settings_are_named_before_a_start(monkeypatch):
    options = read_options(["--config", "dqn-cartpole", "--engine", "ray"])
    assert RayEngine.problems(options) == []
    with pytest.raises(SystemExit) as ended:
        read_options(["--config", "dqn-cartpole", "--engine", "ray", "--ray.address", "ray://10.0.0.1:10001"])
    assert ended.value.code == 2
    halves = ["--config", "dqn-cartpole", "--engine", "ray", "--num_learners", "2", "--num_actors", "2", "--ray.learner_gpus", "0.5"]
    assert RayEngine.problems(read_options(halves)) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = RayEngine.problems(dataclasses.replace(read_options(["--device", "cpu", *halves]), device="cuda"))
    assert len(found) == 1 and "num_learners=2 need a GPU each, and with ray.learner_gpus=0.5 two could" in found[0]
    most = [*halves[:-1], "0.7", "--ray.actor_gpus", "0.3"]  # of each GPU; the rest is for an actor
    assert RayEngine.problems(dataclasses.replace(read_options(["--device", "cpu", *most]), device="cuda")) == []
    hidden = dataclasses.replace(options, device="cuda:1", actor=dataclasses.replace(options.actor, device="cuda"),
                                 ray=dataclasses.replace(options.ray, learner_gpus=0.0))
    assert [problem.partition(" and ")[0] for problem in RayEngine.problems(hidden)] == ["device=cuda:1", "actor.device=cuda"]
    shared = dataclasses.replace(hidden, ray=dataclasses.replace(options.ray, learner_gpus=0.5, actor_gpus=0.5))
    assert RayEngine.problems(shared) == []
    monkeypatch.setattr("core.engines.ray.engine.importlib.util.find_spec", lambda name: None)
    assert RayEngine.problems(options) == ['engine=ray needs a package that is not installed: pip install -e ".[ray]"']


@pytest.mark.parametrize("cpus, fits", [((3, 1), True), ((2, 2), True), ((2, 1), False), ((1, 9), False)])
def test_a_process_needs_its_cpus_on_one_node_and_the_learner_at_home(cpus, fits):
    nodes = {name: {"Resources": {"CPU": float(count)}} for name, count in zip(("home", "other"), cpus)}
    needs = {name: {"CPU": 1.0, "GPU": 0.0} for name in ("actor 0", "actor 1", "learner 0", "evaluator 0")}
    if fits:
        check_capacity(needs, "home", nodes)
    else:
        with pytest.raises(ClusterError, match=r"needs 1 CPUs.* finds no room: the run needs 4 CPUs.*lower num_actors, ray.actor_cpus, "
                                               "ray.learner_cpus$"):
            check_capacity(needs, "home", nodes)


def test_room_is_counted_as_ray_counts_it():
    """3 - 4 * 0.6 is less than 0.6 in binary."""
    nodes = {"home": {"Resources": {"CPU": 3.0}}}
    check_capacity({f"actor {index}": {"CPU": 0.6, "GPU": 0.0} for index in range(5)}, "home", nodes)
    with pytest.raises(ClusterError, match="finds no room"):
        check_capacity({f"actor {index}": {"CPU": 0.6, "GPU": 0.0} for index in range(6)}, "home", nodes)


def test_who_finds_no_gpu_is_told_of_the_settings_that_ask_for_one():
    nodes = {"home": {"Resources": {"CPU": 4.0, "GPU": 2.0}}}
    shares = {"learner 0": 0.7, "learner 1": 0.7, "actor 0": 0.3, "actor 1": 0.3}
    check_capacity({name: {"CPU": 1.0, "GPU": share} for name, share in shares.items()}, "home", nodes)
    with pytest.raises(ClusterError, match=r"actor 1 needs 1 CPUs and 0\.5 GPUs.*lower num_actors.*, ray\.actor_gpus, ray\.learner_gpus$"):
        check_capacity({name: {"CPU": 1.0, "GPU": max(share, 0.5)} for name, share in shares.items()}, "home", nodes)
