"""The fork server starts processes as spawning would, and none outlives it or main."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]


def program(*words):
    """Start tests/core/common/forked.py, which has one thread, as main has before it starts a server."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.core.common.forked", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


def said(*words):
    with program(*words) as running:
        return json.loads(running.communicate(timeout=60)[0])


def test_a_process_gets_what_main_has_when_it_starts(tmp_path):
    told = said("seen", tmp_path / "output")
    first, second, third = told["scene"]["told"]
    assert told["threads"] == 1 and told["ended"]
    for process in (first, second, third):
        assert process["parent"] == told["server"] and process["main"]
        assert (process["folder"], process["variable"], process["path"]) == ("/", "changed", "/nowhere")
        assert process["default"] == "spawn"
        assert process["descriptors"] == first["descriptors"]  # nothing of the server's or of other processes
    assert len({first["random"], second["random"], third["random"]}) == 3
    assert told["scene"]["sum"] == 3 and (tmp_path / "output").read_text() == "printed\n" * 3


def test_exit_codes_reach_main():
    assert said("codes")["scene"] == [0, 3, -signal.SIGABRT, 7, 1]


@pytest.mark.slow
def test_processes_of_a_killed_server_end():
    told = said("server_killed")["scene"]
    assert (told["code"], told["server"]) == (-signal.SIGKILL, None) and told["raised"] is not None
    ended([told["pid"]])


def test_a_server_without_descriptors_refuses_and_recovers():
    assert said("shortage")["scene"] == {"error": "EMFILE", "code": 5}


def test_killing_main_ends_server_and_process():
    with program("left") as running:
        assert running.stdout is not None
        pids = json.loads(running.stdout.readline())
        os.kill(running.pid, signal.SIGKILL)
        ended(pids)


def test_processes_choose_the_threads_of_their_operators():
    alone, several = said("operators")["scene"]
    assert alone == [1, 1] and several[0] == 3 and several[1] >= 3


@pytest.mark.slow
def test_a_program_with_threads_starts_no_server():
    assert said("threads") is None


def ended(pids):
    """Wait until none of these processes runs."""
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
