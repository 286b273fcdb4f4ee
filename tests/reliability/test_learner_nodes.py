"""Learners on several nodes of a Ray cluster train as one, and lose processes and nodes (F37, F72, F73)."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from core.checkpoint import run_checkpoint
from tests.reliability.cluster import ENVIRONMENT, PROJECT, Nodes
from tests.reliability.program import Program
from tests.reliability.test_ray import CARTPOLE, at_the_end, authenticated, head, workers  # noqa: F401

pytest.importorskip("ray")
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("authenticated")]
TWO = (*CARTPOLE, "--num_learners", "2", "--num_actors", "2", "--logger.period", "0.5")
ENDLESS = (*TWO, "--steps", "100000000")
MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a node folders of its own")


@pytest.fixture
def temporary(monkeypatch):
    """Return the folder of temporary files for main and the nodes of a test, which must be empty at the end."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        yield folder
        assert not list(folder.iterdir())
    finally:
        shutil.rmtree(folder)


def shared_memory(cluster: Nodes) -> set[Path]:
    """Return the files of /dev/shm, by their names, that processes of a run have mapped."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in workers(cluster).values()]
    return {Path(path) for text in maps for path in re.findall(r"/dev/shm/\S+", text)}


def until_nothing_is_left(
    cluster: Nodes, named: Iterable[Path] = (), temporary: Path | None = None, seconds: float = 30
) -> None:
    """Wait until the processes of a run have ended, with hosts, and have left no file in memory or on the disk."""

    def left() -> list[str]:
        files = [path for path in named if path.exists()] + list(temporary.iterdir() if temporary else ())
        return [*workers(cluster), *map(str, files)]

    deadline = time.monotonic() + seconds
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left()


def checkpoint(program: Program) -> dict:
    (folder,) = program.root.glob("models/*_checkpoints")
    return run_checkpoint.load(folder)[0]


def until_updates(program: Program, updates: int) -> None:
    program.until(lambda: (program.children(), program.updates() >= updates)[1], 150, f"{updates} updates")


def node_of(process: psutil.Process) -> int:
    """Return the pid of the node (Ray's raylet) that started this process."""
    return process.ppid()


@pytest.mark.timeout(200)
def test_f37_two_learners_on_two_nodes_count_as_one_run_and_listen_on_the_cluster_only(tmp_path):
    with Nodes(3, 2) as cluster:
        with Program(tmp_path, *TWO, "--ray.address", cluster.address, "--updates", "500") as program:
            until_updates(program, 50)
            nodes = {name: node_of(process) for name, process in workers(cluster).items()}
            assert nodes["learner 0"] == nodes["evaluator 0"] == nodes["logger 0"] != nodes["learner 1"]
            assert nodes["actor 1"] == nodes["learner 1"]
            assert listening_learners(cluster) == {"127.0.0.1"}
            assert program.until_ended(100) == 0, program.output
        check_counts(program, 2, 500)
        until_nothing_is_left(cluster)


def check_counts(program: Program, learners: int, min_updates: int) -> None:
    """Check the counts of a run that has ended, with an actor of 8 environments for each learner."""
    assert program.steps() == sorted(program.steps()) and at_the_end(program)["global/restarts"] == 0
    state, last = checkpoint(program), at_the_end(program)
    updates, steps = state["clock"]["updates"], state["clock"]["agent_steps"]
    assert len(updates) == learners and set(updates) == {updates[0]} and updates[0] >= min_updates
    assert min(steps) > 250 and {"learner", *(f"learner_{index}" for index in range(1, learners))} <= state.keys()
    assert last["global/agent_steps"] >= sum(steps)
    ended = last["global/episodes"] + 8 * learners
    assert 0 <= last["global/replay_steps"] - last["global/agent_steps"] <= ended  # all memories, nothing dropped
    # 64 samples a learner and update, 8 a step from 1,000 on, and what is learnt in the period of the mirror
    sampled, inserted = sum(state["clock"]["sampled"]), sum(state["clock"]["inserted"])
    assert sampled == sum(updates) * 64 and sampled <= (inserted - 1_000) * 8 + 20 * 64 * learners


@pytest.mark.timeout(500)
def test_four_learners_on_four_nodes_count_as_one_run_that_two_continue(tmp_path):
    with Nodes(3, 2, 2, 2) as cluster:
        words = (*CARTPOLE, "--logger.period", "0.5", "--num_learners", "4", "--num_actors", "4", "--updates", "200")
        with Program(tmp_path, *words, "--ray.address", cluster.address) as program:
            until_updates(program, 20)
            nodes = {name: node_of(process) for name, process in workers(cluster).items()}
            assert len({nodes[f"learner {index}"] for index in range(4)}) == 4
            assert all(
                nodes[f"{role} {index}"] == nodes[f"learner {index}"]
                for role in ("actor", "host")
                for index in range(1, 4)
            )
            assert program.until_ended(150) == 0, program.output
        check_counts(program, 4, 200)
        before = checkpoint(program)["clock"]
        words = ("--config", "dqn-cartpole", "--resume", "test_one", "--num_learners", "2", "--num_actors", "2")
        with Program(tmp_path, *words, "--updates", str(before["updates"][0] + 50)) as program:
            assert program.until_ended(150) == 0, program.output
        after = checkpoint(program)["clock"]
        assert len(after["updates"]) == 2 and min(after["updates"]) >= before["updates"][0] + 50
        assert sum(after["agent_steps"]) > sum(before["agent_steps"])
        until_nothing_is_left(cluster)


def listening_learners(cluster: Nodes) -> set[str]:
    """Return the addresses at which learners listen for each other's gradients."""
    learners = [process for name, process in workers(cluster).items() if name.startswith("learner")]
    ports = [port for process in learners for port in process.net_connections("inet")]
    return {port.laddr.ip.removeprefix("::ffff:") for port in ports if port.status == psutil.CONN_LISTEN}


@pytest.mark.timeout(300)
def test_three_learners_share_two_nodes(tmp_path):
    with Nodes(3, 4) as cluster:
        words = (*CARTPOLE, "--num_learners", "3", "--num_actors", "3", "--updates", "200")
        with Program(tmp_path, *words, "--ray.address", cluster.address) as program:
            assert program.until_ended(200) == 0, program.output
        assert [count >= 200 for count in checkpoint(program)["clock"]["updates"]] == [True] * 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "row", ["rainbow-cartpole", "r2d2-cartpole", "impala-cartpole", "ppo-cartpole", "iqn-cartpole", "sac-pendulum"]
)
def test_every_family_of_agents_learns_on_two_nodes(tmp_path, row):
    later = () if row.startswith(("impala", "ppo")) else ("--rate_limiter.min_replay_size", "500")
    queue = ("--memory_type", "queue") if row.startswith("ppo") else ()
    words = ("--config", row, *TWO[2:], "--updates", "20", "--steps", "1000000", *later, *queue)
    with Nodes(3, 2) as cluster:
        with Program(tmp_path, *words, "--ray.address", cluster.address) as program:
            assert program.until_ended(250) == 0, program.output
        assert min(checkpoint(program)["clock"]["updates"]) >= 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", ["learner 1", "learner 0", "host 1"])
def test_f72_a_killed_learner_leaves_a_checkpoint_that_any_number_of_learners_continues(tmp_path, killed, temporary):
    with Nodes(3, 2) as cluster:
        with Program(tmp_path, *ENDLESS, "--ray.address", cluster.address) as program:
            until_updates(program, 100)
            seen, named = program.updates(), shared_memory(cluster)
            workers(cluster)[killed].kill()
            assert program.until_ended(40) == 4
            assert f"learner {killed[-1]}" in program.output and "--resume test_one" in program.output
        until_nothing_is_left(cluster, named, temporary)
        state = checkpoint(program)
        assert max(state["clock"]["updates"]) >= seen and sum(state["clock"]["agent_steps"]) > 0
        words = ("--config", "dqn-cartpole", "--resume", "test_one", "--num_learners", "3", "--num_actors", "3")
        updates = max(state["clock"]["updates"]) + 100
        cluster.add(2)
        with Program(tmp_path, *words, "--steps", "100000000", "--updates", str(updates)) as program:
            assert program.until_ended(150) == 0, program.output
        assert min(checkpoint(program)["clock"]["updates"]) >= updates


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_f72_a_lost_node_of_a_learner_ends_the_run_saved(tmp_path, is_frozen):
    """A frozen node is silent: its connections stay open, as those of a node without power."""
    with Nodes(3, 2) as cluster:
        with Program(tmp_path, *ENDLESS, "--ray.address", cluster.address) as program:
            until_updates(program, 100)
            seen, begin, frozen = program.updates(), time.monotonic(), []
            if is_frozen:
                raylet = psutil.Process(node_of(workers(cluster)["learner 1"]))
                frozen = [raylet, *raylet.children(recursive=True)]
                for member in frozen:
                    member.suspend()
            else:
                cluster.kill()
            try:
                assert program.until_ended(110) == 4
            finally:
                for member in frozen:
                    with suppress(psutil.Error):
                        member.resume()
            assert time.monotonic() - begin < 100
            assert "learner 1" in program.output and "--resume test_one" in program.output
        assert max(checkpoint(program)["clock"]["updates"]) >= seen


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("lost", "is_hidden"), [("main", False), pytest.param("main", True, marks=MOUNTS), ("home", False)]
)
def test_f72_a_lost_main_leaves_nothing_on_the_nodes_of_learners(tmp_path, lost, is_hidden, temporary):
    """The loss of home includes that of the head, for which other nodes wait a minute."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with Nodes(3) as cluster:
        if is_hidden:
            cluster.mount(elsewhere, tmp_path)
        cluster.add(2)
        cluster.add(1)  # for an actor that is neither at home nor on its learner's node
        words = (*CARTPOLE, "--steps", "100000000", "--num_learners", "2", "--num_actors", "3")
        with Program(tmp_path, *words, "--ray.address", cluster.address) as program:
            program.until(lambda: {"actor 0", "actor 1", "actor 2"} <= workers(cluster).keys(), 100, "all actors")
            until_updates(program, 50)
            named = shared_memory(cluster)
            assert "host 1" in workers(cluster) and any(temporary.iterdir()) == is_hidden
            assert len({node_of(process) for process in workers(cluster).values()}) == 3
            raylet = psutil.Process(node_of(workers(cluster)["learner 0"]))
            home = [head(cluster.process.pid), raylet, *raylet.children(recursive=True)] if lost == "home" else []
            for process in (*home, program.process):
                with suppress(psutil.Error):
                    process.kill()
            until_nothing_is_left(cluster, named, temporary, 100 if home else 30)


@pytest.mark.timeout(300)
def test_ctrl_c_saves_the_replay_of_every_node_and_a_resumed_run_has_it(tmp_path):
    with Nodes(3, 2) as cluster:
        words = (*ENDLESS, "--ray.address", cluster.address, "--learner.checkpoint_replay", "true")
        with Program(tmp_path, *words) as program:
            until_updates(program, 50)
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(60) == 130, program.output
        before = checkpoint(program)
        assert before["clock"]["updates"][0] == before["clock"]["updates"][1]
        words = (
            *shlex.split("--config dqn-cartpole --resume test_one --updates"),
            str(before["clock"]["updates"][0] + 50),
        )
        with Program(tmp_path, *words) as program:
            assert program.until_ended(150) == 0, program.output
        after = checkpoint(program)
    check_replay(before, after)
    assert after["clock"]["sampled"][1] > before["clock"]["sampled"][1] > 0


def check_replay(before: dict, after: dict) -> None:
    """Check that the memories of both learners still begin with what they held before."""
    for name in ("memory", "memory_1"):
        old, new = (state[name]["trajectories"] for state in (before, after))
        kept = int(old["written"].sum())
        assert kept > 0 and torch.equal(new["frame"][:, :kept], old["frame"][:, :kept])


@pytest.mark.timeout(200)
def test_learners_without_room_are_refused_with_what_they_need(tmp_path):
    with Nodes(3, 1) as cluster:
        where = ("--ray.address", cluster.address, "--ray.placement_timeout", "4")
        with Program(tmp_path, *TWO, *where, "--ray.learner_cpus", "2") as program:
            assert program.until_ended(90) == 2
            assert "learner 1 needs 2 CPUs and finds no room: the run needs 7 CPUs in all" in program.output
            assert "no such node joined within ray.placement_timeout=4 s" in program.output


@MOUNTS
@pytest.mark.timeout(200)
def test_f70_a_learners_node_with_different_code_refuses_the_run(tmp_path, temporary):
    project, other = tmp_path / "project", tmp_path / "other"
    for name in ("core", "utils", "main.py"):
        (shutil.copytree if (PROJECT / name).is_dir() else shutil.copy)(PROJECT / name, project / name)
    shutil.copytree(project, other)
    with (other / "core" / "runtime" / "run_state.py").open("a") as file:
        file.write("# another version")
    with Nodes(3) as cluster:
        cluster.mount(other, project)
        cluster.add(2)
        with Program(tmp_path, *ENDLESS, "--ray.address", cluster.address, project=project) as program:
            assert program.until_ended(120) == 2
            assert "error: learner 1 cannot be on its node" in program.output
            assert "has another version of the code than main: core/runtime/run_state.py differ" in program.output
        until_nothing_is_left(cluster, (), temporary)


@pytest.mark.timeout(240)
def test_a_run_waits_for_the_node_of_a_learner(tmp_path):
    with Nodes(3) as cluster:
        with Program(tmp_path, *TWO, "--ray.address", cluster.address, "--updates", "50") as program:
            waits = "waits for nodes that join: actor 0 needs 1 CPUs and finds no room"
            program.until(lambda: waits in program.output, 60, "the run to wait")
            cluster.add(2)
            assert program.until_ended(120) == 0, program.output


@pytest.mark.timeout(1000)
def test_cartpole_is_solved_by_learners_on_two_nodes(tmp_path):
    with Nodes(3, 2) as cluster:
        words = ("--config", "dqn-cartpole", "--engine", "ray", "--timestamp", "one", "--target_score", "475")
        words += ("--steps", "1000000", "--seconds", "800", "--num_learners", "2", "--num_actors", "2")
        with Program(tmp_path, *words, "--ray.address", cluster.address) as program:
            assert program.until_ended(900) == 0, program.output
        scores = [row["values"].get("evaluator/episodic_return_mean", 0.0) for row in program.metrics()]
        assert max(scores) >= 475


@pytest.mark.timeout(400)
def test_f73_an_elastic_run_goes_on_without_a_lost_node_and_takes_in_one_that_joins(tmp_path):
    with Nodes(3, 2) as cluster:
        elastic = ("--supervisor.elastic", "2", "--learner.checkpoint_period", "5")
        with Program(tmp_path, *ENDLESS, *elastic, "--ray.address", cluster.address) as program:
            until_updates(program, 100)
            cluster.kill()
            program.until(lambda: "goes on with learners=1" in program.output, 110, "a part with one learner")
            seen = program.updates()
            until_updates(program, seen + 50)
            assert {"learner 0", "actor 0"} <= workers(cluster).keys() and "learner 1" not in workers(cluster)
            cluster.add(2)
            program.until(lambda: "goes on with learners=2" in program.output, 60, "a part with two learners")
            program.until(lambda: "learner 1" in workers(cluster), 60, "learner 1")
            seen = program.updates()
            until_updates(program, seen + 50)
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(60) == 130, program.output
        until_nothing_is_left(cluster)
        updates = checkpoint(program)["clock"]["updates"]
        assert len(updates) == 2 and updates[0] == updates[1] >= seen


# the same without main ------------------------------------------------------------------------------------------------
# PPO on whole rollouts, because each learner draws its own minibatches.
FAMILIES = ("dqn", "rainbow", "iqn", "r2d2", "sac", "impala", "ppo with LSTM", "pqn, whole rollouts")


@pytest.mark.timeout(300)
def test_two_learners_on_two_nodes_learn_what_one_learns_from_both_batches():
    with Nodes(1, 1) as cluster:
        command = [sys.executable, "-m", "tests.reliability.test_learner_nodes", cluster.address]
        done = subprocess.run(command, cwd=PROJECT, env={**os.environ, **ENVIRONMENT}, timeout=250)
    assert done.returncode == 0


def compare(address: str) -> None:
    """Let learners on two nodes learn from halves of batches, and one here from whole ones; compare their states."""
    import ray

    from core.distributed.learner_group import SingleLearner
    from core.distributed.torch_group import rendezvous
    from tests.core.distributed.test_two_learners import HALVES, WHOLE, learn

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def learner(rendezvous, index):
        torch.set_num_threads(1)
        with rendezvous.join(index, "cpu") as group:
            states = {name: learn(name, HALVES[index], False, group)[:3] for name in FAMILIES}
            return ray.get_runtime_context().get_node_id(), states

    ray.init(address=address, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": str(PROJECT)}})
    with rendezvous(2, ray.util.get_node_ip_address()) as meeting:
        (node, first), (other, second) = ray.get([learner.remote(meeting, index) for index in range(2)])
    assert node != other
    for name in FAMILIES:
        before, after, *_ = learn(name, WHOLE, False, SingleLearner())
        assert first[name][2] == second[name][2], name
        for key, value in after.items():
            torch.testing.assert_close(first[name][1][key], value, rtol=1e-6, atol=1e-6, msg=f"{name}{key}")
        assert any((after[key] - before[key]).abs().max() > 1e-4 for key in after if "model" in key), name


if __name__ == "__main__":
    compare(*sys.argv[1:])
