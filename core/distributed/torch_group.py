"""Learners in processes of their own, on one machine or many: torch.distributed carries their sums, gloo on CPUs and NCCL on GPUs."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from core.distributed.learner_group import LearnerGroup, PeerLostError, Result

LIMIT = timedelta(days=7)          # of any exchange: the supervisor gives up a silent learner long before, unless all were stopped (Ctrl-Z)
PATIENCE = timedelta(seconds=1)    # between two signs of life while the others are waited for


@dataclass(frozen=True)
class ProcessGroups:
    """A Meeting by address: file://<path> on one machine, tcp://<host>:<port> on several, where learner 0 listens on that port."""

    size: int
    address: str
    interface: str | None = None  # of the network that gradients travel on; None: torch's choice

    def join(self, index: int, device: str) -> LearnerGroup:
        on_gpu = torch.device(device).type == "cuda"
        if self.interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = self.interface
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=self.address, timeout=LIMIT,
                                world_size=self.size, rank=index)
        if on_gpu:  # NCCL connects at the first sum: what is wrong with that is to be seen before a run is under way
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        return ProcessGroup(index, self.size, on_gpu)


@contextmanager
def on_this_machine(size: int) -> Iterator[ProcessGroups]:
    """For processes of this machine, as long as it is open: they find each other by an anonymous file and talk over loopback alone."""
    descriptor = os.memfd_create("learners")
    try:
        yield ProcessGroups(size, f"file:///proc/{os.getpid()}/fd/{descriptor}", "lo")
    finally:
        os.close(descriptor)


class ProcessGroup(LearnerGroup):
    """torch's default process group of this process."""

    def __init__(self, index: int, size: int, on_gpu: bool = False):
        super().__init__(index, size)
        self._on_gpu = on_gpu

    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        if self.parted is not None:
            raise self.parted
        rows = torch.zeros(self.size, len(values), dtype=torch.int64)
        rows[self.index] = torch.tensor(values)
        with _parting():
            work = dist.all_reduce(rows, async_op=True)
            while not _finished(work):
                yield False
        return rows.tolist()

    def run(self, function: Callable[[], Result]) -> Generator[bool, None, Result]:
        yield from ()
        return self._within(function)

    def _sum(self, tensor: Tensor) -> None:
        if tensor.is_cuda:  # NCCL does not tell of others: an error there is this learner's own
            dist.all_reduce(tensor)
            return
        own = tensor.clone()
        try:
            with _parting():
                work = dist.all_reduce(tensor, async_op=True)
                while not _finished(work):
                    self.heartbeat()
        except PeerLostError:
            tensor.copy_(own)
            raise

    def close(self, failed: bool = False) -> None:
        if not (failed and self._on_gpu):  # NCCL would wait for the others; without leave, the end of the process ends it
            dist.destroy_process_group()


def _finished(work: dist.Work) -> bool:
    """After a while at most. Raises RuntimeError when it failed."""
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


@contextmanager
def _parting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]  # then follows what might be the matter
        raise PeerLostError(f"another learner is gone, or cannot be reached: {reason}") from None
