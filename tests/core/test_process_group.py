"""Learners in processes of their own: what they tell each other, over what, and what they are told when one dies."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import psutil
import pytest
import torch

from core import process_group
from core.averaging import LearnersParted, averaged
from core.process_group import on_this_machine

LATE = 0.5  # seconds


def finished(generator):
    """What it yielded, and its result."""
    yielded = []
    while True:
        try:
            yielded.append(next(generator))
        except StopIteration as end:
            return yielded, end.value


def other_learner(groups) -> None:
    group = groups.join(1, "cpu")
    time.sleep(LATE)
    finished(group.gather([3, -(2**62)]))
    finished(group.run(lambda: averaged(torch.tensor([2.0, 5.0]))))
    time.sleep(LATE)
    os.kill(os.getpid(), signal.SIGKILL)


def test_learners_of_one_machine_share_their_news_and_gradients_over_loopback_until_one_dies(monkeypatch):
    monkeypatch.setattr(process_group, "PATIENCE", timedelta(seconds=0.05))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    with on_this_machine(2) as groups:
        process = multiprocessing.get_context("spawn").Process(target=other_learner, args=(groups,))
        process.start()
        group = groups.join(0, "cpu")
        try:
            yielded, rows = finished(group.gather([1, 2]))
            assert len(yielded) > 2 and not any(yielded)  # signs of life while the other one is late
            assert rows == [[1, 2], [3, -(2**62)]]
            assert finished(group.run(lambda: averaged(torch.tensor([1.0, 2.0]))))[1].tolist() == [1.5, 3.5]
            ports = [port for pid in (os.getpid(), process.pid) for port in psutil.Process(pid).net_connections("inet")]
            assert ports and {port.laddr.ip for port in ports} == {"127.0.0.1"}
            for wait in (group.gather([1]), group.run(lambda: averaged(torch.ones(1)))):
                with pytest.raises(LearnersParted, match="another learner is gone"):
                    finished(wait)
        finally:
            group.close()
            process.kill()
            process.join()
    assert not os.path.exists(groups.address.removeprefix("file://"))
