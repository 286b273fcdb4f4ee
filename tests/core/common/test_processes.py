"""Idle processes sleep longer and longer, signals become requests, and a process gets a signal when its parent dies."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from core.common.processes import Interrupts, idle_delays, set_process_name

PARENT = """
import os, subprocess, sys
from functools import partial
from signal import SIGTERM
from core.common.processes import die_with_parent
child = subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL,
                         preexec_fn=partial(die_with_parent, os.getpid(), SIGTERM, 7))
print(child.pid, flush=True)
"""

# The C library calls the hook in the child before fork returns to Python there. Python handles signals in the main
# thread only, which the forking thread becomes after the hook.
TERMINATED_FORK = """
import ctypes, os, signal, sys, threading, time
from core.common.processes import deliver_signals_to_forks

def end(number, frame):
    if os.getpid() != parent:
        os._exit(7)

parent = os.getpid()
signal.signal(signal.SIGTERM, end)
if sys.argv[1] == "delivered":
    deliver_signals_to_forks()
hook = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))
assert ctypes.CDLL(None).__register_atfork(None, None, hook, None) == 0

def start():
    if not (child := os.fork()):
        time.sleep(0.5)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))

thread = threading.Thread(target=start)
thread.start()
thread.join()
"""


def test_an_idle_process_sleeps_longer_and_longer_up_to_20_ms():
    delays = list(itertools.islice(idle_delays(), 30))
    assert delays[0] == 0.0005 and delays[-1] == 0.02
    assert delays[:10] == pytest.approx([0.0005 * 1.25**number for number in range(10)])


def test_any_thread_names_its_process():
    """Methods of asynchronous Ray actors run in a thread."""
    before = Path("/proc/self/comm").read_text().strip()
    try:
        thread = threading.Thread(target=set_process_name, args=("a name of more than 15 letters",))
        thread.start()
        thread.join()
        assert Path(f"/proc/{os.getpid()}/comm").read_text() == "a name of more \n"
    finally:
        set_process_name(before)


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_gets_the_signal_when_its_parent_ends():
    parent = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True, timeout=60)
    child, deadline = int(parent.stdout), time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    if running(child):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child outlived its parent")


@pytest.mark.parametrize(("signals", "exit_code"), [("delivered", 7), ("as Python has them", 0)])
def test_a_fork_gets_the_signals_that_reach_it_while_it_starts(signals, exit_code):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TERMINATED_FORK, signals]  # of forks, 3.12
    forked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (forked.stdout, forked.stderr) == (f"{exit_code} set()\n", "")


def test_a_process_whose_parent_is_gone_already_exits():
    program = (
        "import signal; from core.common.processes import die_with_parent; die_with_parent(1 << 22, signal.SIGKILL, 7)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 7


def test_signals_at_once_are_one_request(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    interrupts = Interrupts()
    assert not interrupts and interrupts.exit_code == 0
    assert [interrupts.add(signal.SIGTERM), interrupts.add(signal.SIGTERM)] == [True, False]
    now += 0.4
    assert not interrupts.add(signal.SIGINT) and interrupts.requests == 1
    now += 0.2
    assert interrupts.add(signal.SIGINT) and interrupts.requests == 2 and interrupts.exit_code == 143


# `timeout` signals its child and then its process group, to which the child belongs.
COUNTING = """
import signal, time
from core.common.processes import Interrupts
interrupts, signals = Interrupts(), []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(interrupts.add(number)))
print("ready", flush=True)
deadline = time.monotonic() + 60
while not signals and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.2)
print(signals.count(True), interrupts.exit_code)
"""


@pytest.mark.timeout(120)
def test_a_signal_of_timeout_is_one_request():
    command = ["timeout", "100", sys.executable, "-c", COUNTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "1 143\n"
