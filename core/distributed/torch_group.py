"""Groups of learners in processes of their own, over torch.distributed: gloo between CPUs, NCCL between GPUs.

On GPUs, statuses still go by gloo, because gloo notices that another learner has gone and NCCL does not.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from core.distributed.learner_group import LearnerGroup, PeerLostError

# The supervisor kills a silent learner much earlier, unless all were stopped (Ctrl-Z).
EXCHANGE_TIMEOUT = timedelta(days=7)
HEARTBEAT_PERIOD = timedelta(seconds=1)  # while a learner waits for the others
FILE = "file://"


@dataclass(frozen=True)
class TorchRendezvous:
    """A rendezvous by address: file://<path> on one machine, tcp://<host>:<port> on several.

    In the second case learner 0 listens on that port.
    """

    size: int  # number of learners
    address: str
    interface: str | None = None  # network interface of the gradients; None leaves the choice to torch

    def join(self, index: int, device: str) -> LearnerGroup:
        """Wait for the other learners, and return the group of learner `index`, which computes on this device."""
        on_gpu = torch.device(device).type == "cuda"
        if self.interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = self.interface
        if on_gpu:
            torch.cuda.set_device(device)
        address = self.address
        if address.startswith(FILE):
            # torch opens the file by its name once more when it deletes its store, perhaps after the owner has closed
            # it. So the name is that of a descriptor which this process keeps open.
            address = f"{FILE}/proc/self/fd/{os.open(address.removeprefix(FILE), os.O_RDWR)}"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=address,
            timeout=EXCHANGE_TIMEOUT,
            world_size=self.size,
            rank=index,
        )
        if on_gpu:  # NCCL connects at the first sum; its errors must appear before the run is under way
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        return TorchGroup(index, self.size, on_gpu)


@contextmanager
def local_rendezvous(size: int) -> Iterator[TorchRendezvous]:
    """Yield a rendezvous for processes of this machine: an anonymous file, which is there until the context ends.

    The learners then communicate over the loopback interface only.
    """
    descriptor = os.memfd_create("learners")
    try:
        yield TorchRendezvous(size, f"{FILE}/proc/{os.getpid()}/fd/{descriptor}", "lo")
    finally:
        os.close(descriptor)


class TorchGroup(LearnerGroup):
    """The default process group of torch in this process."""

    def __init__(self, index: int, size: int, on_gpu: bool = False):
        super().__init__(index, size)
        self._on_gpu = on_gpu

    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """Exchange values as a sum, to which each learner contributes its own row."""
        if self.lost_peer is not None:
            raise self.lost_peer
        rows = torch.zeros(self.size, len(values), dtype=torch.int64)
        rows[self.index] = torch.tensor(values)
        with _peer_lost_errors():
            work = dist.all_reduce(rows, async_op=True)
            while not _is_finished(work):
                yield False
        return rows.tolist()

    def _sum(self, tensor: Tensor) -> None:
        if tensor.is_cuda:  # NCCL does not notice lost peers: an error there is this learner's own
            dist.all_reduce(tensor)
            return
        original = tensor.clone()
        try:
            with _peer_lost_errors():
                work = dist.all_reduce(tensor, async_op=True)
                while not _is_finished(work):
                    self.heartbeat()
        except PeerLostError:
            tensor.copy_(original)
            raise

    def close(self, failed: bool = False) -> None:
        """Leave the group. On GPUs, a learner that failed leaves by the end of its process, because NCCL would wait."""
        if not (failed and self._on_gpu):
            dist.destroy_process_group()


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
