"""Learners in separate processes exchange status and gradients, and notice a lost peer."""

import importlib
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from core.distributed import torch_group
from core.distributed.learner_group import PeerLostError, all_reduce_mean
from tests.core.tapes import quick_processes

LATE = 0.5  # seconds


def finished(generator):
    """Return what the generator yielded, and its result."""
    yielded = []
    while True:
        try:
            yielded.append(next(generator))
        except StopIteration as end:
            return yielded, end.value


def silent_learner(rendezvous) -> None:
    group = rendezvous.join(1, "cpu")
    finished(group.gather([0]))
    time.sleep(100)


def test_learners_of_a_network_meet_at_one_address_and_give_up_a_silent_one(monkeypatch):
    """The network says nothing about a node without power; `heartbeat` does."""
    monkeypatch.setattr(torch_group, "HEARTBEAT_PERIOD", timedelta(seconds=0.05))
    lost = []

    def heartbeat():
        if lost:
            raise PeerLostError("learner 1 was lost")

    with torch_group.rendezvous(2) as rendezvous:
        process = quick_processes().Process(target=silent_learner, args=(rendezvous,))
        process.start()
        group = rendezvous.join(0, "cpu")
        group.heartbeat = heartbeat
        try:
            finished(group.gather([0]))
            ports = [port for pid in (os.getpid(), process.pid) for port in psutil.Process(pid).net_connections("inet")]
            listening = {port.laddr.ip for port in ports if port.status == psutil.CONN_LISTEN}
            assert listening == {"127.0.0.1"}
            waiting = group.gather([1])
            assert not next(waiting)
            lost.append(1)
            with pytest.raises(PeerLostError, match="learner 1 was lost"):
                finished(waiting)
        finally:
            process.kill()
            process.join()
            dist.destroy_process_group()


def test_a_store_that_nobody_serves_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        host, port = taken.getsockname()
        with pytest.raises(PeerLostError, match=f"store at {host}:{port} cannot be reached"):
            torch_group.TorchRendezvous(2, host, port).join(1, "cpu")


def broadcast(group):
    value = {"weights": torch.arange(5.0), "words": ["one", 2]} if group.index == 0 else None
    return finished(group.broadcast(value))[1]


def test_the_first_learners_value_reaches_all(learners):
    for received in learners.call(broadcast, broadcast):
        assert received["words"] == ["one", 2] and torch.equal(received["weights"], torch.arange(5.0))


def times_at_barrier(late, group):
    finished(group.gather([0]))
    time.sleep(late)
    begin = time.monotonic()
    finished(group.barrier())
    return begin, time.monotonic()


def test_a_barrier_waits_for_a_learner_that_is_late(learners):
    (_, ended), (began, _) = learners.call(partial(times_at_barrier, 0.0), partial(times_at_barrier, LATE))
    assert ended >= began


def test_an_exchange_of_no_values_is_refused():
    """Gloo would return at once, so that the exchange would not wait for anyone."""
    with pytest.raises(AssertionError, match="an exchange of no values does not wait"):
        finished(torch_group.TorchGroup(0, 2).gather([]))


def other_learner(rendezvous) -> None:
    group = rendezvous.join(1, "cpu")
    time.sleep(LATE)
    finished(group.gather([3, -(2**62)]))
    group.run(lambda: all_reduce_mean(torch.tensor([2.0, 5.0])))
    time.sleep(100)


def test_local_learners_exchange_over_loopback_until_one_dies(monkeypatch):
    monkeypatch.setattr(torch_group, "HEARTBEAT_PERIOD", timedelta(seconds=0.05))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    with torch_group.rendezvous(2) as rendezvous:
        process = quick_processes().Process(target=other_learner, args=(rendezvous,))
        process.start()
        group = rendezvous.join(0, "cpu")
        try:
            yielded, rows = finished(group.gather([1, 2]))
            assert len(yielded) > 2 and not any(yielded)  # heartbeats while the other learner is late
            assert rows == [[1, 2], [3, -(2**62)]]
            assert group.run(lambda: all_reduce_mean(torch.tensor([1.0, 2.0]))).tolist() == [1.5, 3.5]
            ports = [port for pid in (os.getpid(), process.pid) for port in psutil.Process(pid).net_connections("inet")]
            assert ports and {port.laddr.ip.removeprefix("::ffff:") for port in ports} == {"127.0.0.1"}
            threading.Timer(LATE, process.kill).start()
            for wait in (
                lambda: finished(group.gather([1])),
                lambda: group.run(lambda: all_reduce_mean(torch.ones(1))),
            ):
                with pytest.raises(PeerLostError, match="another learner is gone"):
                    wait()
        finally:
            group.close()
            process.kill()
            process.join()


def dies_in_an_update(rendezvous) -> None:
    def update() -> None:
        all_reduce_mean(torch.tensor([4.0]))
        os.kill(os.getpid(), signal.SIGKILL)

    rendezvous.join(1, "cpu").run(update)


def test_an_update_in_which_a_learner_dies_is_finished_and_nothing_follows_it():
    with torch_group.rendezvous(2) as rendezvous:
        process = quick_processes().Process(target=dies_in_an_update, args=(rendezvous,))
        process.start()
        with rendezvous.join(0, "cpu") as group:
            try:
                means = group.run(lambda: [all_reduce_mean(torch.tensor([value])).item() for value in (2.0, 6.0)])
                assert means == [3.0, 6.0]  # the second mean is that of this learner alone
                assert isinstance(group.lost_peer, PeerLostError)
                with pytest.raises(PeerLostError, match="another learner is gone"):
                    finished(group.gather([1]))
            finally:
                process.kill()
                process.join()


def dies_between_two_sums(rendezvous) -> None:
    def update() -> None:
        group.sum(torch.ones(1_000))
        os.kill(os.getpid(), signal.SIGKILL)

    group = rendezvous.join(1, "cpu")
    group.run(update)


def test_sums_under_way_are_undone_together_if_a_learner_dies_between_them():
    def update() -> None:
        for tensor in tensors:
            group.start_sum(tensor)
        group.finish_sums()

    tensors = [torch.full((1_000,), float(value)) for value in range(1, 4)]
    with torch_group.rendezvous(2) as rendezvous:
        process = quick_processes().Process(target=dies_between_two_sums, args=(rendezvous,))
        process.start()
        with rendezvous.join(0, "cpu") as group:
            try:
                with pytest.raises(PeerLostError, match="another learner is gone"):
                    group.run(update)
                assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [2.0], [3.0]]
            finally:
                process.kill()
                process.join()


@pytest.fixture
def calls(monkeypatch):
    """Record the torch calls that learners on GPUs make, in order."""
    made = []
    for owner, name in (
        (torch.cuda, "set_device"),
        (torch.cuda, "synchronize"),
        (dist, "init_process_group"),
        (dist, "all_reduce"),
        (dist, "destroy_process_group"),
    ):
        monkeypatch.setattr(owner, name, lambda *given, name=name, **named: made.append((name, *given, named)))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: f"zeros on {device}")
    return made


def test_a_gpu_learner_joins_with_nccl_and_gloo(calls, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    addresses = psutil.net_if_addrs()["lo"]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth10": [], "eth1": addresses})
    with torch_group.rendezvous(2) as rendezvous:
        rendezvous.join(1, "cuda:1")
    # gloo takes a name, NCCL a prefix of names unless "=" precedes it
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1" and os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
    names = [name for name, *_ in calls]
    assert names == ["set_device", "init_process_group", "all_reduce", "synchronize"]
    assert calls[0][1] == calls[3][1] == "cuda:1" and calls[2][1] == "zeros on cuda:1"
    assert calls[1][1] == "cpu:gloo,cuda:nccl" and calls[1][2]["world_size"] == 2 and calls[1][2]["rank"] == 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_learner_that_failed_does_not_wait_for_peers(calls, failed):
    with suppress(ValueError), torch_group.TorchGroup(0, 2):
        if failed:
            raise ValueError
    assert bool(calls) != failed


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_nccl_error_is_reported_whole_as_the_learners_own(monkeypatch, on_gpu):
    def fail(tensor, async_op=False):
        raise dist.DistBackendError("NCCL error. Last error: two ranks have one GPU")

    monkeypatch.setattr(dist, "all_reduce", fail)
    tensor = SimpleNamespace(is_cuda=on_gpu, clone=lambda: None, copy_=lambda own: None)
    with pytest.raises(RuntimeError) as raised:
        torch_group.TorchGroup(0, 2).sum(tensor)
    assert ("two ranks have one GPU" in str(raised.value)) == on_gpu == (not isinstance(raised.value, PeerLostError))


def test_status_uses_gloo_if_gradients_use_another_backend():
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # importing it registers the backend
    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        backends = {kind: type(dist.group.WORLD._get_backend(torch.device(kind))).__name__ for kind in ("cpu", "cuda")}
    finally:
        dist.destroy_process_group()
    assert "Gloo" in backends["cpu"] and "Fake" in backends["cuda"]
