"""Learners on two nodes with addresses of their own, which share no folder (F37, F72); for root, with `ip netns`."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from core.checkpoint import run_checkpoint
from tests.reliability.cluster import ENVIRONMENT, PROJECT
from tests.reliability.program import Program
from tests.reliability.test_learner_nodes import check_replay
from tests.reliability.test_ray import CARTPOLE, ROLES, comm

pytest.importorskip("ray")
HOME, OTHER = ("nodehome", "10.77.0.1"), ("nodeother", "10.77.0.2")
CLONE_NEWNET = 0x40000000
TWO = (*CARTPOLE, "--num_learners", "2", "--num_actors", "2", "--ray.address", f"{HOME[1]}:6399")


def namespaces_are_permitted() -> bool:
    """Return True if this user can make network namespaces and mounts."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "nodeprobe"], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", "nodeprobe"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("several_addresses"),
    pytest.mark.skipif(not namespaces_are_permitted(), reason="needs root and network namespaces"),
]


@pytest.fixture
def several_addresses(monkeypatch):
    """Set Ray's variables for a cluster whose nodes are not on 127.0.0.1."""
    for name, value in {**ENVIRONMENT, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}.items():
        monkeypatch.setenv(name, value)


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")
    os.close(descriptor)


@contextmanager
def two_machines(root: Path) -> Iterator[list[psutil.Process]]:
    """Start a Ray cluster of two nodes, each in a network namespace; the second one sees an empty folder at `root`.

    Yields the process of each node, under which are its workers.
    """
    with ExitStack() as stack:
        for namespace, _ in (HOME, OTHER):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)  # left by a test that was killed
            subprocess.run(["ip", "netns", "add", namespace], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=True)
        link = ["ip", "link", "add", "name", "link", "netns", HOME[0], "type", "veth"]
        subprocess.run([*link, "peer", "name", "link", "netns", OTHER[0]], check=True)
        for namespace, address in (HOME, OTHER):
            for words in (f"addr add {address}/24 dev link", "link set dev link up", "link set dev lo up"):
                subprocess.run(["ip", "-n", namespace, *words.split()], check=True)
        folder = tempfile.mkdtemp(prefix="rn_", dir="/tmp")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        common = "--block --object-store-memory 83886080 --disable-usage-stats --node-ip-address"
        head = f"--head --port 6399 --include-dashboard false --temp-dir {folder} --num-cpus 3 {common} {HOME[1]}"
        other = f"--address {HOME[1]}:6399 --num-cpus 2 {common} {OTHER[1]}"
        hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(root)]
        ray = str(Path(sys.executable).with_name("ray"))
        nodes = []
        for (namespace, _), words, before in ((HOME, head, []), (OTHER, other, hide)):
            output = stack.enter_context(open(Path(folder) / f"{namespace}.txt", "w"))
            node = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *before, ray, "start", *words.split()],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                cwd=PROJECT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(end, node)
            nodes.append(psutil.Process(node.pid))
            until_started(Path(output.name), 120)
        yield nodes


def end(node: subprocess.Popen) -> None:
    """End a node with all its processes."""
    members = psutil.Process(node.pid).children(recursive=True)
    for member in (*members, node):
        member.kill()
    node.wait()
    psutil.wait_procs(members, 10)


def until_started(output: Path, seconds: float) -> None:
    """Wait until the node that writes this output is up."""
    deadline = time.monotonic() + seconds
    while "Ray runtime started" not in (text := output.read_text()):
        assert time.monotonic() < deadline, f"no node within {seconds} s:\n{text}"
        time.sleep(0.1)


def roles(node: psutil.Process) -> set[str]:
    """Return the processes of a run on this node."""
    return {name for name in map(comm, node.children(recursive=True)) if name.split(" ")[0] in ROLES}


def until_none_is_left(*nodes: psutil.Process) -> None:
    """Wait until the processes of a run on these nodes have ended; Ray ends hosts shortly after main."""
    deadline = time.monotonic() + 30
    while (left := set[str]().union(*map(roles, nodes))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.timeout(300)
def test_f37_learners_with_addresses_of_their_own_train_and_send_their_files_home(tmp_path):
    """The replay of the second learner goes home by Ray, and back when the run is continued."""
    root = tmp_path / "home"
    root.mkdir()
    with two_machines(root) as (home, other):
        replay = ("--learner.checkpoint_replay", "true", "--steps", "100000000")
        with Program(root, *TWO, *replay, before=lambda: enter(HOME[0])) as program:
            program.until(lambda: program.updates() >= 50, 150, "50 updates")
            assert {"learner 0", "evaluator 0", "logger 0"} <= roles(home) and "learner 1" in roles(other)
            os.kill(program.process.pid, signal.SIGINT)
            assert program.until_ended(60) == 130, program.output
        (folder,) = root.glob("models/*_checkpoints")
        state = run_checkpoint.load(folder)[0]
        assert {"memory", "memory_1", "learner", "learner_1"} <= state.keys()
        updates = state["clock"]["updates"]
        assert updates[0] == updates[1] >= 50
        words = ("--config", "dqn-cartpole", "--resume", "test_one", "--updates", str(updates[0] + 50))
        with Program(root, *words, before=lambda: enter(HOME[0])) as program:
            assert program.until_ended(150) == 0, program.output
            assert "(host of learner" not in program.output  # no warnings of Ray
        check_replay(state, run_checkpoint.load(folder)[0])
        until_none_is_left(home, other)


@pytest.mark.timeout(300)
def test_f72_a_learner_at_another_address_is_lost(tmp_path):
    root = tmp_path / "home"
    root.mkdir()
    with two_machines(root) as (home, other):
        with Program(root, *TWO, "--steps", "100000000", before=lambda: enter(HOME[0])) as program:
            program.until(lambda: program.updates() >= 50, 150, "50 updates")
            subprocess.run(["ip", "-n", OTHER[0], "link", "set", "dev", "link", "down"], check=True)
            begin = time.monotonic()
            assert program.until_ended(110) == 4, program.output
            assert time.monotonic() - begin < 100 and "learner 1" in program.output
            assert "--resume test_one" in program.output
        (folder,) = root.glob("models/*_checkpoints")
        assert max(run_checkpoint.load(folder)[0]["clock"]["updates"]) >= 50
        until_none_is_left(home)
