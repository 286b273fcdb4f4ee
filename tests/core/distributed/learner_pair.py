"""Two learners in processes of their own, joined by gloo, which run functions of a test together."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from core.distributed.learner_group import LearnerGroup
from core.distributed.torch_group import TorchRendezvous, rendezvous
from tests.core.tapes import quick_processes

TIMEOUT = 100  # seconds for one answer; the first includes the import of torch


class LearnerPair:
    """Use as a context manager, whose end kills both processes. Functions and results must be picklable."""

    def __enter__(self) -> "LearnerPair":
        processes = quick_processes()
        with ExitStack() as stack:
            meeting = stack.enter_context(rendezvous(2))
            self._pipes, self._processes = [], []
            for index in range(2):
                pipe, end = processes.Pipe()
                process = processes.Process(target=_serve, args=(meeting, index, end))
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                end.close()
                self._pipes.append(pipe)
            self._stack, self._broken = stack.pop_all(), False
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def renew_if_broken(self) -> None:
        """Replace both processes if the last call did not end."""
        if self._broken:
            self._stack.close()
            self.__enter__()

    def call(self, *functions: Callable[[LearnerGroup], Any]) -> list[Any]:
        """Return function(group) of both learners, called at the same time."""
        self._broken = True
        for pipe, function in zip(self._pipes, functions, strict=True):
            pipe.send(function)
        results = []
        for index, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT), f"learner {index} gave no answer"
            result, error = pipe.recv()
            assert error is None, f"learner {index}: {error}"
            results.append(result)
        self._broken = False
        return results

    def run(self, *functions: Callable[[], Any]) -> list[Any]:
        """Return function() of both learners, each run as an update of its group."""
        return self.call(*(partial(_run, function) for function in functions))


class FirstOfTwo(LearnerGroup):
    """Act as the first of two learners; a subclass's `_sum` puts the sum in place of a tensor."""

    def __init__(self):
        super().__init__(0, 2)

    def gather(self, values):
        raise NotImplementedError

    def _start(self, tensor):
        return partial(self._sum, tensor)


def _run(function: Callable[[], Any], group: LearnerGroup) -> Any:
    return group.run(function)


def _serve(meeting: TorchRendezvous, index: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = meeting.join(index, "cpu")
    while True:
        function = pipe.recv()
        try:
            pipe.send((function(group), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
