"""Groups of learners in processes of their own, over torch.distributed: gloo between CPUs, NCCL between GPUs.

On GPUs, statuses still go by gloo, because gloo notices that another learner has gone and NCCL does not.
"""

import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from core.distributed.learner_group import LearnerGroup, PeerLostError

# The supervisor kills a silent learner much earlier, unless all were stopped (Ctrl-Z).
EXCHANGE_TIMEOUT = timedelta(days=7)
CONNECT_TIMEOUT = 20.0  # seconds within which the store of learners on several machines must answer
HEARTBEAT_PERIOD = timedelta(seconds=1)  # while a learner waits for the others


@dataclass(frozen=True)
class TorchRendezvous:
    """A rendezvous at a store of main."""

    size: int  # number of learners
    host: str
    port: int

    def join(self, index: int, device: str) -> LearnerGroup:
        """Wait for the other learners, and return the group of learner `index`, which computes on this device."""
        on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        interface = _interface_to(self.host, self.port)
        store = TCPStore(self.host, self.port, timeout=EXCHANGE_TIMEOUT, wait_for_workers=False)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without "=", eth1 would permit eth10 as well
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            timeout=EXCHANGE_TIMEOUT,
            world_size=self.size,
            rank=index,
        )
        if on_gpu:  # NCCL connects at the first sum; its errors must appear before the run is under way
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        return TorchGroup(index, self.size)


@contextmanager
def rendezvous(size: int, host: str = "127.0.0.1") -> Iterator[TorchRendezvous]:
    """Yield a rendezvous at a store of this process, until the context ends.

    It listens on this address of the machine only, at a free port. The learners communicate over the interfaces by
    which they reach it.
    """
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        # torch would bind its own socket to every address; it takes over, and closes, the descriptor.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
    yield TorchRendezvous(size, host, port)
    del store  # which ends its thread


def _interface_to(host: str, port: int) -> str:
    """Return the network interface of this machine that has the address by which `host` is reached.

    Raises:
        PeerLostError: nothing answers there.
    """
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT) as connection:
            address = str(connection.getsockname()[0])
    except OSError as error:
        raise PeerLostError(f"the learners' store at {host}:{port} cannot be reached ({error})") from None
    interfaces = psutil.net_if_addrs().items()
    name: str = next(name for name, entries in interfaces if any(entry.address == address for entry in entries))
    return name


class TorchGroup(LearnerGroup):
    """The default process group of torch in this process."""

    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """Exchange values as a sum, to which each learner contributes its own row."""
        if self.lost_peer is not None:
            raise self.lost_peer
        assert len(values), "an exchange of no values does not wait for the other learners"
        rows = torch.zeros(self.size, len(values), dtype=torch.int64)
        rows[self.index] = torch.tensor(values)
        with _peer_lost_errors():
            work = dist.all_reduce(rows, async_op=True)
            while not _is_finished(work):
                self.heartbeat()
                yield False
        return rows.tolist()

    def _start(self, tensor: Tensor) -> Callable[[], None]:
        """Start the sum. NCCL does not notice lost peers, so an error on a GPU is this learner's own."""
        if tensor.is_cuda:
            wait: Callable[[], None] = dist.all_reduce(tensor, async_op=True).wait  # for its stream only
            return wait
        try:
            with _peer_lost_errors():
                work = dist.all_reduce(tensor, async_op=True)
        except PeerLostError as error:
            return partial(_raise, error)
        return partial(self._wait, work)

    def _wait(self, work: dist.Work) -> None:
        with _peer_lost_errors():
            while not _is_finished(work):
                self.heartbeat()

    def close(self, failed: bool = False) -> None:
        """Leave the group. A learner that failed leaves by the end of its process: an exchange may be pending."""
        if not failed:
            dist.destroy_process_group()


def _raise(error: PeerLostError) -> None:
    raise error


def _is_finished(work: dist.Work) -> bool:
    """Wait at most HEARTBEAT_PERIOD for the work. Raises RuntimeError if the work has failed."""
    try:
        work.wait(HEARTBEAT_PERIOD)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


@contextmanager
def _peer_lost_errors() -> Iterator[None]:
    """Raise PeerLostError in place of the RuntimeError by which gloo reports a lost connection."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]  # without gloo's guesses at the cause
        raise PeerLostError(f"another learner is gone, or cannot be reached: {reason}") from None
