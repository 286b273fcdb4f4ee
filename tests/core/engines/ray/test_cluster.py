"""A folder is removed when its owner has ended, and neither another cluster nor a silent head is waited for."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from core.engines.ray import cluster
from core.engines.ray.cluster import Cluster, ClusterError, Head, Sweeper
from core.runtime.options import RayParams

OWNER = """
import sys
import psutil
from core.engines.ray.cluster import Sweeper
sweeper = Sweeper(sys.argv[1])
print(len(psutil.Process().children()), flush=True)
input()
"""


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp())
    (path / "inner").mkdir()
    (path / "inner" / "file").touch()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shells(folder: Path) -> list[psutil.Process]:
    """Return the running sweepers of this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-2:] == ["sweeper", str(folder)]:
                found.append(process)
    return found


def test_a_cluster_of_its_own_does_not_join_that_of_the_environment(monkeypatch):
    def init(**given):
        arguments.update(given)
        raise RuntimeError("no start")

    arguments: dict = {}
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(psutil.Process, "children", lambda *given, **named: [])  # which `close` would kill
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"})  # which keeps what is set
    with pytest.raises(ClusterError, match="no start"):
        Cluster(RayParams(), {"actor 0": {"CPU": 1.0, "GPU": 0.0}})
    assert arguments["address"] == "local"


def test_a_head_that_falls_silent_is_not_waited_for(monkeypatch):
    nodes, gone = {"home": {}}, threading.Event()

    def alive_nodes():
        if nodes:
            return nodes
        gone.wait(20)
        raise ConnectionError

    monkeypatch.setattr(cluster, "alive_nodes", alive_nodes)
    monkeypatch.setattr(cluster, "free_resources", dict)
    monkeypatch.setattr(cluster, "QUERY_PERIOD", 0.05)
    head = Head(None)
    try:
        begin = time.monotonic()
        assert head.fresh_answer(10.0).time >= begin
        nodes.clear()
        until(lambda: head.fresh_answer(0.5) is None)
        assert time.monotonic() - begin < 10
    finally:
        gone.set()
        head.close()


@pytest.mark.slow
def test_a_killed_owners_folder_and_the_processes_in_it_go(folder):
    """Ray kills the children of a process with it, so that the shell must be none."""
    with open(folder / "inner" / "file") as file:
        user = subprocess.Popen(["sleep", "60"], stdin=file)
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout.readline() == "0\n" and shells(folder) and user.poll() is None
            owner.kill()
            assert user.wait(30) < 0
            until(lambda: not folder.exists() and not shells(folder))
        finally:
            owner.kill()
            user.kill()


def test_a_closed_sweeper_leaves_no_shell(folder):
    sweeper = Sweeper(str(folder))
    assert len(shells(folder)) == 1 and os.getpgid(shells(folder)[0].pid) != os.getpgid(0)
    sweeper.close()
    assert not folder.exists()
    until(lambda: not shells(folder))
