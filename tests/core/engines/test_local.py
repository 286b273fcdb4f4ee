"""A process of the local engine exits at once with the exit code of its own work."""

import atexit
import multiprocessing
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from core.common.exit_codes import BAD_OPTIONS, DONE, TRAINING_FAILED
from core.distributed.learner_group import PeerLostError
from core.engines import local
from tests.core.tapes import quick_processes


def done(context, index):
    """Leave a running thread and an abort at interpreter exit, which gloo's threads cause occasionally."""
    atexit.register(os.abort)
    threading.Thread(target=time.sleep, args=(60,)).start()
    yield True


def failed(context, index):
    yield from done(context, index)
    raise ValueError("a fault")


LONG = "\U0001f600" * 50_000  # of four bytes each


def failed_at_length(context, index):
    yield from done(context, index)
    error = ValueError(LONG)
    error.add_note(LONG)
    raise error


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def unreadable(context, index):
    yield from done(context, index)
    raise Unreadable


def failed_without_streams(context, index):
    yield from done(context, index)
    sys.stdout.close(), sys.stderr.close()
    raise ValueError("a fault")


def peer_lost(context, index):
    yield from done(context, index)
    raise PeerLostError("learner 1 was lost")


def package_missing(context, index):
    yield from ()
    raise ImportError("no such package")


def package_missing_later(context, index):
    yield from done(context, index)
    raise ImportError("no such package")


def ind(role, index):
    return 0


class Beats:
    """The state of a run with one process, which is pickled before its first heartbeat."""

    count = 0

    def heartbeat(self, process_ind):
        self.count += 1

    def has_started(self, process_ind):
        return self.count > 0


def main_of_this_parent(process, sender):
    context = SimpleNamespace(process_ind=ind, run_state=Beats())
    local.main(process, context, "learner", 0, 1, os.getppid(), sender)


@pytest.mark.parametrize(
    ("process", "exit_code", "told"),
    [
        (done, DONE, None),
        (failed, TRAINING_FAILED, ("ValueError: a fault", False)),
        (failed_at_length, TRAINING_FAILED, (local._shortened(f"ValueError: {LONG}"), False)),
        (unreadable, TRAINING_FAILED, ("Unreadable: (its __str__ raises RuntimeError)", False)),
        (failed_without_streams, TRAINING_FAILED, ("ValueError: a fault", False)),
        (peer_lost, TRAINING_FAILED, ("PeerLostError: learner 1 was lost", True)),
        (package_missing, BAD_OPTIONS, ("ImportError: no such package", False)),
        (package_missing_later, TRAINING_FAILED, ("ImportError: no such package", False)),
    ],
)
def test_a_process_exits_at_once_with_the_code_of_its_work(process, exit_code, told):
    # Only a spawned process has an interpreter of its own to exit, but its import of torch takes seconds.
    processes = multiprocessing.get_context("spawn") if process is done else quick_processes()
    receiver, sender = processes.Pipe(duplex=False)
    started = processes.Process(target=main_of_this_parent, args=(process, sender))
    started.start()
    sender.close()
    try:
        started.join(50)
        assert started.exitcode == exit_code
        said = receiver.recv()
        assert (said and (said.message, said.is_of_peer)) == told
    finally:
        started.kill()
        started.join()


def tell_threads(context, index):
    yield from ()
    raise ValueError(f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']} {os.environ['MKL_NUM_THREADS']}")


def test_threads_are_those_of_a_process_and_not_of_the_next_ones(monkeypatch):
    """The learner starts last, and asks for its threads by main's OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    launcher = local.LocalLauncher(SimpleNamespace(process_ind=ind, run_state=Beats()), {"actor": tell_threads})
    try:
        process = launcher.start("actor", 0, 1)
        assert dict(os.environ) == before
        process.join()
        assert process.poll().error.message == "ValueError: 1 1 1"
    finally:
        launcher.close()
