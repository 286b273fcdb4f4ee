"""Ray clusters lose processes and nodes, seen from outside (F37, F38, F63-F65, F69, F70)."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.reliability.cluster import ENVIRONMENT, Nodes
from tests.reliability.program import PROJECT, Program

pytest.importorskip("ray")
CARTPOLE = shlex.split(
    "--config dqn-cartpole --engine ray --logger.period 0.5 --timestamp one --evaluator.max_steps 100 "
    "--evaluator.episodes 2"
)
ENDLESS = (*CARTPOLE, "--steps", "100000000")


@pytest.fixture
def authenticated(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def listening(program: Program) -> set[str]:
    """Return the addresses at which this program's processes listen."""
    program.children()
    found = set()
    for member in [psutil.Process(program.process.pid), *program.family.values()]:
        try:
            found |= {
                connection.laddr.ip
                for connection in member.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_f37_f38_a_local_ray_run_is_private_and_ends_clean(tmp_path, monkeypatch):
    """Memories of unrolls write to numpy arrays, and those that Ray pickles are read-only."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short, because Ray's socket paths are limited to 107 bytes
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with Program(tmp_path, "--config", "impact-cartpole", *ENDLESS[2:]) as program:
        program.until_training(1_500, seconds=100)
        assert listening(program) <= {"127.0.0.1", "::ffff:127.0.0.1"} and listening(program)
        pid = program.kill("actor 0")
        program.until(lambda: program.children().get("actor 0", pid) != pid, 60, "actor 0 to be replaced")
        died = f"actor 0 (pid {pid} on 127.0.0.1) died"
        program.until(lambda: died in program.output, 30, "the message")
        program.until_training(program.agent_steps() + 500)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(60) == 130, program.output
        assert program.steps() == sorted(program.steps())
        assert at_the_end(program)["global/restarts"] == 1 and at_the_end(program)["global/updates"] > 0
        assert list(tmp_path.glob("models/*_checkpoints/step_*/manifest.json"))
        assert not program.leftovers() and not list(temporary.glob("ray*"))
    checkpoints = next(tmp_path.glob("models/*_checkpoints"))
    tested = ("--mode", "2", "--episodes", "2", "--model_file", str(checkpoints))
    with Program(tmp_path, "--config", "impact-cartpole", "--engine", "ray", *tested) as program:
        assert program.until_ended(60) == 0 and "all returns: " in program.output, program.output
    shutil.rmtree(temporary)


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_f37_a_local_cluster_needs_its_token(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(100, seconds=100)
        program.children()
        commands = {member.pid: member.cmdline() for member in program.family.values() if member.is_running()}
        assert head(program.process.pid).environ()["RAY_USAGE_STATS_ENABLED"] == "0"
        servers = [command for command in commands.values() if any(word.endswith("dashboard.py") for word in command)]
        # what is left of Ray's dashboard serves no pages
        assert all("--disable-frontend" in command for command in servers)
        address = next(
            word.partition("=")[2]
            for command in commands.values()
            for word in command
            if word.startswith("--gcs-address=")
        )
        joining = f"import ray; ray.init(address='{address}')"
        stranger = subprocess.run(
            [sys.executable, "-c", joining],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": "another-token-" + "1" * 20},
        )
        assert stranger.returncode and "token" in stranger.stderr.lower(), stranger


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_f38_killing_main_ends_ray(tmp_path, monkeypatch):
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(500, seconds=100)
        program.children()
        assert list(temporary.glob("ray*"))
        os.kill(program.process.pid, signal.SIGKILL)
        assert not program.leftovers(seconds=15) and not list(temporary.glob("ray*"))
    shutil.rmtree(temporary)


def head(pid: int) -> psutil.Process:
    """Return the process of the head's service among the descendants of a process."""
    return next(
        member
        for member in psutil.Process(pid).children(recursive=True)
        if "gcs_server" in "".join(member.cmdline()[:1])
    )


@pytest.mark.cluster
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("signals", "exit_code"), [((), 4), ((signal.SIGINT,), 130)])
def test_f63_a_dead_head_ends_the_run_and_signals_are_answered(tmp_path, signals, exit_code):
    timeout = ("--ray.head_timeout", "30" if signals else "4")
    with Program(tmp_path, *ENDLESS, *timeout) as program:
        program.until_training(1_500, seconds=100)
        killed = time.monotonic()
        head(program.process.pid).kill()
        if signals:
            time.sleep(3)  # by now a request to the head is waiting for its answer
        for number in signals:
            os.kill(program.process.pid, number)
        assert program.until_ended(40) == exit_code
        assert time.monotonic() - killed < 28  # Ray needs 7 s of these to end without a head
        assert (
            signals
            or "the head of Ray on this machine did not answer for 4 s (ray.head_timeout); the run ends"
            in program.output
        )
        assert "continue this run with" in program.output and "--resume test_one" in program.output
        assert list(tmp_path.glob("models/*_checkpoints/step_*/manifest.json")) and not program.leftovers()


def bytes_per_step(program: Program) -> list[float]:
    """Return the bytes per agent step that the trajectory server reported of actors on other nodes."""
    rows = [row["values"] for row in program.metrics()]
    return [values["actor/bytes_per_agent_step"] for values in rows if "actor/bytes_per_agent_step" in values]


def comm(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def at_the_end(program: Program) -> dict[str, float]:
    """Return the run's last own statistics; an evaluation that began earlier may be reported after them."""
    return next(row["values"] for row in reversed(program.metrics()) if "global/updates" in row["values"])


ROLES = ("actor", "learner", "evaluator", "logger", "host")


def workers(cluster: Nodes, *roles: str) -> dict[str, psutil.Process]:
    """Return the processes of these roles, by default all of a run, on all nodes of this cluster, by name."""
    names = {comm(member): member for member in psutil.Process(cluster.process.pid).children(recursive=True)}
    return {name: member for name, member in names.items() if name.split(" ")[0] in (roles or ROLES)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_f38_a_killed_remote_actor_is_replaced_with_exact_counts(tmp_path, authenticated):
    with Nodes(2, 1) as cluster:
        with Program(tmp_path, *ENDLESS, "--ray.address", cluster.address) as program:
            program.until_training(1_500, seconds=120)
            program.until(lambda: "actor 0" in workers(cluster), 60, "actor 0 to start")
            first = workers(cluster)["actor 0"]
            first.kill()
            program.until(lambda: workers(cluster).get("actor 0", first) != first, 90, "actor 0 to be replaced")
            died = f"actor 0 (pid {first.pid} on 127.0.0.1) died"
            program.until(lambda: died in program.output, 30, "the message")
            program.until_training(program.agent_steps() + 500, seconds=90)
            program.until(lambda: bytes_per_step(program), 30, "the bytes per step, which follow a log period")
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(60) == 130, program.output
            assert program.steps() == sorted(program.steps())
            last = at_the_end(program)
            assert last["global/restarts"] == 1
            # One column holds 50,000 steps: the ring has one per counted agent step and one per episode end.
            ended = last["global/episodes"] + 8  # plus at most one per environment of the killed actor
            assert 0 <= last["global/replay_steps"] - last["global/agent_steps"] <= ended
        assert not workers(cluster)


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_f38_four_nodes_survive_a_lost_node_and_accept_a_new_one(tmp_path, authenticated):
    with Nodes(2, 1, 1, 1) as cluster:
        with Program(tmp_path, *ENDLESS, "--num_actors", "3", "--ray.address", cluster.address) as program:
            program.until_training(1_500, seconds=150)
            cluster.kill()
            program.until(lambda: "was lost, the cluster has 3 now" in program.output, 90, "the node to be missed")
            program.until(lambda: "has no place now" in program.output, 60, "its actor to be without a place")
            program.until_training(program.agent_steps() + 1_000, seconds=100)
            cluster.add(1)
            program.until(
                lambda: {"actor 0", "actor 1", "actor 2"} <= workers(cluster).keys(), 90, "the actor to have a place"
            )
            program.until_training(program.agent_steps() + 1_000, seconds=100)
            cluster.kill()
            program.until(
                lambda: program.output.count("has no place now") == 2, 90, "its actor to be without a place again"
            )
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(60) == 130, program.output
            assert program.steps() == sorted(program.steps())


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_f38_counts_are_exact_after_losing_an_actor_and_a_node(tmp_path, authenticated):
    with Nodes(2, 1, 1) as cluster:
        arguments = (
            *CARTPOLE,
            "--num_actors",
            "2",
            "--ray.address",
            cluster.address,
            *shlex.split("--seconds 150 --memory.capacity 1000000"),
        )
        with Program(tmp_path, *arguments) as program:
            program.until_training(1_000, seconds=100)
            first = workers(cluster)["actor 0"]
            first.kill()
            program.until(lambda: workers(cluster).get("actor 0", first) != first, 90, "actor 0 to be replaced")
            cluster.kill()
            program.until(lambda: "was lost, the cluster has 2 now" in program.output, 90, "the node to be missed")
            program.until_training(program.agent_steps() + 500, seconds=60)
            assert program.until_ended(200) == 0, program.output
            assert program.steps() == sorted(program.steps())
            last = at_the_end(program)
            ended = last["global/episodes"] + 16  # plus at most one per environment of the two lost actors
            assert 0 <= last["global/replay_steps"] - last["global/agent_steps"] <= ended
        assert not workers(cluster)


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "row", ["rainbow-cartpole", "r2d2-cartpole", "impala-cartpole", "dqn-pong-small", "impact-cartpole"]
)
def test_every_kind_of_memory_receives_steps_of_another_node(tmp_path, authenticated, row):
    codec = ("--replay.frame_compression", "lz4", "--memory.capacity", "20000") if row == "dqn-pong-small" else ()
    with Nodes(2, 1) as cluster:
        with Program(
            tmp_path,
            "--config",
            row,
            *CARTPOLE[2:],
            "--ray.address",
            cluster.address,
            *shlex.split("--updates 20 --steps 1000000 --logger.period 0.1"),
            *(() if row.startswith("imp") else ("--rate_limiter.min_replay_size", "500")),
            *codec,
        ) as program:
            assert program.until_ended(250) == 0, program.output
            assert bytes_per_step(program) and list(tmp_path.glob("models/*_checkpoints/step_*/manifest.json"))


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_two_learners_train_together_as_ray_actors(tmp_path):
    with Program(tmp_path, *CARTPOLE, "--num_learners", "2", "--num_actors", "2", "--updates", "300") as program:
        assert program.until_ended(200) == 0, program.output
        assert at_the_end(program)["global/updates"] >= 300
        assert not program.leftovers()


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_two_learners_receive_steps_of_other_nodes(tmp_path, authenticated):
    with Nodes(3, 1, 1) as cluster:
        with Program(
            tmp_path,
            *CARTPOLE,
            *shlex.split("--num_learners 2 --ray.learner_placement pack --num_actors 2 --ray.address"),
            cluster.address,
            *shlex.split("--updates 300 --logger.period 0.5"),
        ) as program:
            program.until_training(500, seconds=150)
            assert {"actor 0", "actor 1", "learner 0", "learner 1"} <= workers(cluster).keys()
            assert program.until_ended(100) == 0, program.output
            assert at_the_end(program)["global/updates"] >= 300 and bytes_per_step(program)
        assert not workers(cluster)


@pytest.mark.cluster
@pytest.mark.timeout(1000)
def test_cartpole_is_solved_on_the_ray_engine(tmp_path):
    with Program(
        tmp_path,
        *shlex.split(
            "--config dqn-cartpole --engine ray --timestamp one --target_score 475 --steps 1000000 --seconds 800"
        ),
    ) as program:
        assert program.until_ended(900) == 0, program.output
        assert max(row["values"].get("evaluator/episodic_return_mean", 0.0) for row in program.metrics()) >= 475
        assert not program.leftovers()


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_f64_a_run_ends_if_a_learner_loses_its_only_actor(tmp_path, authenticated):
    with Nodes(3, 1, 1) as cluster:
        with Program(
            tmp_path,
            *ENDLESS,
            *shlex.split("--num_learners 2 --ray.learner_placement pack --num_actors 2 --ray.address"),
            cluster.address,
            "--ray.learner_timeout",
            "5",
        ) as program:
            program.until_training(1_500, seconds=150)
            cluster.kill()
            program.until(lambda: "has no place now" in program.output, 90, "an actor to be without a place")
            assert program.until_ended(60) == 4
            assert "had a place for 5 s (ray.learner_timeout); the run ends" in program.output
            assert "--resume test_one" in program.output
            assert list(tmp_path.glob("models/*_checkpoints/step_*/manifest.json"))
        assert not workers(cluster)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_f65_f69_a_lost_node_costs_one_restart_of_its_actor(tmp_path, authenticated):
    with Nodes(2, 1, 1) as cluster:
        with Program(tmp_path, *ENDLESS, "--num_actors", "1", "--ray.address", cluster.address) as program:
            program.until_training(1_500, seconds=150)
            first, before = workers(cluster)["actor 0"], {member.pid for member in of_ray(cluster)}
            first.kill()
            program.until(
                lambda: [member for member in of_ray(cluster) if member.pid not in before], 60, "a new process"
            )
            new = [member for member in of_ray(cluster) if member.pid not in before]
            for member in new:
                member.suspend()
            time.sleep(6)
            for member in new:
                member.resume()
            program.until(lambda: workers(cluster).get("actor 0", first) != first, 90, "actor 0 to be replaced")
            assert "has no place" not in program.output
            program.until_training(program.agent_steps() + 500, seconds=60)
            node = psutil.Process(workers(cluster)["actor 0"].ppid())
            node.kill()
            program.until(lambda: "was lost, the cluster has 2 now" in program.output, 90, "the node to be missed")
            program.until(lambda: "actor 0" in workers(cluster), 90, "actor 0 to be replaced")
            program.until_training(program.agent_steps() + 1_000, seconds=60)
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(60) == 130, program.output
            assert at_the_end(program)["global/restarts"] == 2 and "has no place" not in program.output


def of_ray(cluster: Nodes) -> list[psutil.Process]:
    """Return Ray's worker processes on all nodes, including those that have no single-process name yet."""
    found = []
    for member in psutil.Process(cluster.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if member.cmdline()[:1] and (
                member.cmdline()[0].startswith("ray::") or "default_worker.py" in " ".join(member.cmdline())
            ):
                found.append(member)
    return found


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_f69_a_run_waits_for_nodes_to_join(tmp_path, authenticated):
    with Nodes(2) as cluster:
        with Program(
            tmp_path, *CARTPOLE, "--ray.address", cluster.address, "--num_actors", "2", "--steps", "600"
        ) as program:
            waits = "waits for nodes that join: actor 0 needs 1 CPUs and finds no room"
            program.until(lambda: waits in program.output, 60, "the run to wait")
            cluster.add(2)
            assert program.until_ended(120) == 0, program.output


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_f70_a_node_with_different_code_is_named(tmp_path, authenticated):
    project = tmp_path / "project"
    for name in ("core", "utils", "main.py"):
        (shutil.copytree if (PROJECT / name).is_dir() else shutil.copy)(PROJECT / name, project / name)
    with Nodes(2, 1) as cluster:
        with Program(
            tmp_path, *ENDLESS, "--ray.address", cluster.address, "--supervisor.max_restarts", "1", project=project
        ) as program:
            program.until_training(1_500, seconds=150)
            assert "TrajectoryServer" not in program.output and "trajectory server" not in program.output
            with (project / "core" / "runtime" / "run_state.py").open("a") as file:
                file.write("# another version")
            workers(cluster)["actor 0"].kill()
            assert program.until_ended(90) == 4
            assert "has another version of the code than main: core/runtime/run_state.py differ" in program.output
            assert "--resume test_one" in program.output


# several runs on one cluster ------------------------------------------------------------------------------------------
WAITS = "waits for room on the cluster: 3 CPUs in all"


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_a_run_waits_for_cpus_that_another_run_uses(tmp_path, authenticated):
    with Nodes(3) as cluster:
        where = ("--ray.address", cluster.address)
        with Program(tmp_path / "first", *ENDLESS, *where) as first:
            first.until_training(100, seconds=100)
            with Program(
                tmp_path / "second", *CARTPOLE, *where, "--ray.placement_timeout", "none", "--steps", "600"
            ) as second:
                second.until(lambda: WAITS in second.output, 60, "the second run to wait")
                assert not second.agent_steps()
                os.kill(first.process.pid, signal.SIGINT)
                assert first.until_ended(60) == 130, first.output
                assert second.until_ended(100) == 0, second.output
                assert second.agent_steps() >= 600


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_waiting_for_cpus_has_a_timeout_and_can_be_interrupted(tmp_path, authenticated):
    with Nodes(3) as cluster:
        where = ("--ray.address", cluster.address)
        with Program(tmp_path / "first", *ENDLESS, *where) as first:
            first.until_training(100, seconds=100)
            with Program(tmp_path / "second", *CARTPOLE, *where, "--ray.placement_timeout", "4") as second:
                assert second.until_ended(60) == 2
                assert "no room within ray.placement_timeout=4 s: it needs 3 CPUs in all" in second.output
                assert not list((tmp_path / "second" / "logs").iterdir())
            with Program(tmp_path / "third", *CARTPOLE, *where) as third:
                third.until(lambda: WAITS in third.output, 60, "the third run to wait")
                os.kill(third.process.pid, signal.SIGINT)
                assert third.until_ended(60) == 130, third.output
            first.until_training(first.agent_steps() + 100)


def sweep(root: Path, address: str, steps: int) -> list[str]:
    """Return the command of a sweep of two runs that start together."""
    return [
        sys.executable,
        "-m",
        "utils.sweep",
        "--root",
        str(root),
        *shlex.split("--configs dqn-cartpole --seeds 1 2 --jobs 2 -- --engine ray --ray.address"),
        address,
        "--steps",
        str(steps),
        *shlex.split(
            "--rate_limiter.min_replay_size 200 --logger.period 0.5 --evaluator.max_steps 30 --evaluator.episodes 1"
        ),
    ]


def outputs(root: Path) -> list[str]:
    paths = [root / "logs" / "sweep" / f"dqn-cartpole-seed{seed}.txt" for seed in (1, 2)]
    return [path.read_text() if path.exists() else "" for path in paths]


def metrics(root: Path) -> str:
    """Return the metrics of the run that trains."""
    return "".join(path.read_text() for path in root.glob("logs/*/metrics.jsonl"))


def until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.cluster
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two jobs need two cores")
@pytest.mark.timeout(600)
def test_a_killed_sweep_continues_on_another_cluster(tmp_path, authenticated):
    with Nodes(3) as cluster:
        process = subprocess.Popen(sweep(tmp_path, cluster.address, 100_000_000), cwd=PROJECT)
        try:
            until(
                lambda: any(WAITS in output for output in outputs(tmp_path)) and "learner/loss" in metrics(tmp_path),
                200,
            )
        finally:
            process.kill()
        until(
            lambda: (
                sum(
                    "cannot be continued" in output or "continue this run with" in output
                    for output in outputs(tmp_path)
                )
                == 2
            ),
            60,
        )
    lines = metrics(tmp_path).splitlines()
    with Nodes(3) as cluster:
        done = subprocess.run(
            sweep(tmp_path, cluster.address, json.loads(lines[-1])["step"] + 1_000),
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=250,
        )
    assert done.returncode == 0 and "| dqn-cartpole | 2 of 2 |" in done.stdout, (done, outputs(tmp_path))
    assert sum("continues with" in output for output in outputs(tmp_path)) == 1


@pytest.mark.cluster
@pytest.mark.timeout(200)
def test_the_node_of_main_reserves_cpus_first(tmp_path, authenticated):
    with Nodes(3, 3) as cluster:  # an actor on the node of main would leave no CPU for learner and evaluator
        with Program(
            tmp_path, *CARTPOLE, "--ray.address", cluster.address, "--ray.actor_cpus", "3", "--steps", "1000"
        ) as program:
            assert program.until_ended(150) == 0, program.output


# refusals -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_f38_an_address_without_a_listener_is_refused_soon(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Program(tmp_path, *CARTPOLE, "--ray.address", address) as program:
            assert program.until_ended(60) == 2
            assert f"ray.address={address}: nothing answers there" in program.output
            assert "Traceback" not in program.output


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_f38_an_address_of_another_service_is_refused_in_time(tmp_path, authenticated):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()  # accepts connections and never answers
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with Program(tmp_path, *CARTPOLE, "--ray.address", address) as program:
            assert program.until_ended(150) == 2
            assert f"the Ray cluster at ray.address={address} cannot be used" in program.output


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_f38_impossible_cluster_requests_are_refused_in_time(tmp_path, authenticated, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray would look for a token
    with Nodes(2, 1) as cluster:
        with Program(
            tmp_path, *CARTPOLE, "--ray.address", cluster.address, "--num_actors", "5", "--ray.placement_timeout", "4"
        ) as program:
            assert program.until_ended(90) == 2
            assert "no such node joined within ray.placement_timeout=4 s" in program.output
            assert "actor 1 needs 1 CPUs and finds no room: the run needs 7 CPUs in all" in program.output
        with Program(tmp_path, *CARTPOLE, "--ray.address", cluster.address, "--ray.learner_gpus", "1") as program:
            assert program.until_ended(90) == 2
            assert "learner 0 needs 1 CPUs and 1 GPUs on the node of main.py" in program.output
        for token in (None, "another-token-" + "1" * 20):
            monkeypatch.delenv("RAY_AUTH_TOKEN") if token is None else monkeypatch.setenv("RAY_AUTH_TOKEN", token)
            with Program(tmp_path, *CARTPOLE, "--ray.address", cluster.address) as program:
                assert program.until_ended(120) == 2, program.output
                assert f"the Ray cluster at ray.address={cluster.address} cannot be used" in program.output
                assert "token" in program.output
