"""The Ray engine seen from outside: one machine, clusters, and what may be lost of them (F37, F38)."""

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.reliability.cluster import ENVIRONMENT, Nodes
from tests.reliability.program import Program

pytest.importorskip("ray")
CARTPOLE = ("--config", "dqn-cartpole", "--engine", "ray", "--logger.period", "0.5", "--timestamp", "one",
            "--evaluator.max_steps", "100", "--evaluator.episodes", "2")
ENDLESS = (*CARTPOLE, "--steps", "100000000")


@pytest.fixture
def authenticated(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def listening(program: Program) -> set[str]:
    """Addresses at which this program's processes listen."""
    program.children()
    found = set()
    for member in [psutil.Process(program.process.pid), *program.family.values()]:
        try:
            found |= {connection.laddr.ip for connection in member.net_connections("inet") if connection.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(180)
def test_one_machine_trains_listens_to_itself_only_restarts_an_actor_and_leaves_nothing(tmp_path, monkeypatch):
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short: Ray's sockets lie in it
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Program(tmp_path, *ENDLESS, "--num_actors", "2") as program:
        program.until_training(1_500, seconds=100)
        assert listening(program) <= {"127.0.0.1", "::ffff:127.0.0.1"} and listening(program)
        pid = program.kill("actor 1")
        program.until(lambda: program.children().get("actor 1", pid) != pid, 60, "actor 1 to be replaced")
        assert f"actor 1 (pid {pid} on 127.0.0.1) died" in program.output
        program.until_training(program.agent_steps() + 500)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(60) == 130, program.output
        assert program.steps() == sorted(program.steps())
        assert program.metrics()[-1]["values"]["global/restarts"] == 1
        assert list(tmp_path.glob("models/*_checkpoints/step_*/manifest.json"))
        assert not program.leftovers() and not list(temporary.iterdir())
    temporary.rmdir()


def bytes_per_step(program: Program) -> list[float]:
    return [row["values"]["actor/bytes_per_agent_step"] for row in program.metrics() if "actor/bytes_per_agent_step" in row["values"]]


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_cluster_trains_and_a_killed_actor_and_a_lost_node_do_not_end_it(tmp_path, authenticated, nodes):
    with Nodes(2, *[1] * (nodes - 1)) as cluster:
        arguments = (*ENDLESS, "--num_actors", str(nodes - 1), "--ray.address", cluster.address, "--supervisor.stop_timeout", "20")
        with Program(tmp_path, *arguments) as program:
            program.until_training(1_500, seconds=150)
            assert bytes_per_step(program)
            if nodes > 2:
                cluster.kill()
                program.until(lambda: "was lost" in program.output and "actor" in program.output, 60, "the node to be missed")
                program.until_training(program.agent_steps() + 1_000, seconds=100)
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(40) == 130, program.output
            assert program.steps() == sorted(program.steps())
