"""Learners that one process drives one after another (inline engine): never two at once, so that a seed gives the same run every time.

What a learner runs must be able to wait in the middle for the others' gradients. It is given a thread that runs only while the learner's
own one waits for it.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic

import torch
from torch import Tensor

from core.distributed.learner_group import LearnerGroup, PeerLostError, Result


class Turns:
    """A Meeting of `size` learners."""

    def __init__(self, size: int):
        self.size = size
        self._offers: dict[int, dict[int, Tensor]] = {}  # of each sum that is not over, by learner
        self._left: set[int] = set()

    def join(self, index: int, device: str) -> LearnerGroup:
        return InTurn(self, index)

    def offer(self, number: int, index: int, tensor: Tensor) -> None:
        """Learner `index` comes to its sum of this number; it has done so for all before."""
        self._offers.setdefault(number, {})[index] = tensor.clone()

    def total(self, number: int) -> Tensor | None:
        """In order of the learners; None while one is missing."""
        offers = self._offers[number]
        if missing := self._left - offers.keys():
            raise PeerLostError(f"learner {min(missing)} is gone")
        if len(offers) < self.size:
            return None
        self._offers.pop(number - 1, None)  # all have it
        first, *others = (offers[index] for index in range(self.size))
        for tensor in others:
            first = first + tensor.to(first.device)
        return first

    def leave(self, index: int) -> None:
        self._left.add(index)


class InTurn(LearnerGroup):
    def __init__(self, turns: Turns, index: int):
        super().__init__(index, turns.size)
        self._turns, self._number = turns, 0
        self._routine: Coroutine | None = None

    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        if self.parted is not None:
            raise self.parted
        rows = torch.zeros(self.size, len(values), dtype=torch.int64)
        rows[self.index] = torch.tensor(values)
        self._offer(rows)
        yield True
        yield from self._others()
        return self._total().tolist()

    def run(self, function: Callable[[], Result]) -> Generator[bool, None, Result]:
        self._routine = Coroutine(lambda: self._within(function))
        try:
            while not self._routine.resume():
                yield True
                with suppress(PeerLostError):  # which the sum it waits in is told too
                    yield from self._others()
            return self._routine.result()
        finally:
            self._routine.close()

    def _sum(self, tensor: Tensor) -> None:
        assert self._routine is not None
        self._offer(tensor)
        if self._turns.total(self._number) is None:
            self._routine.pause()
        tensor.copy_(self._total())

    def close(self, failed: bool = False) -> None:
        self._turns.leave(self.index)

    def _offer(self, tensor: Tensor) -> None:
        self._number += 1
        self._turns.offer(self._number, self.index, tensor)

    def _others(self) -> Generator[bool, None, None]:
        while self._turns.total(self._number) is None:
            yield False

    def _total(self) -> Tensor:
        found = self._turns.total(self._number)
        assert found is not None
        return found


class Coroutine(Generic[Result]):
    """function() in a thread of its own, which runs only while its maker is in `resume`."""

    def __init__(self, function: Callable[[], Result]):
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._future: Future[Result] = Future()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, args=(function, torch.get_num_threads()), name="learn", daemon=True)
        self._thread.start()

    def resume(self) -> bool:
        """Until it pauses or ends; whether it has ended."""
        self._go.release()
        self._back.acquire()
        return self._future.done()

    def pause(self) -> None:
        """Called from within: until it is resumed."""
        self._back.release()
        self._await()

    def result(self) -> Result:
        """What the function returned, or raises what it raised."""
        return self._future.result()

    def close(self) -> None:
        """A function that has not ended is given up where it pauses."""
        self._given_up = True
        self._go.release()
        self._thread.join()

    def _await(self) -> None:
        self._go.acquire()
        if self._given_up:
            raise PeerLostError("given up")

    def _run(self, function: Callable[[], Result], num_threads: int) -> None:
        try:
            self._await()
            torch.set_num_threads(num_threads)  # a new thread has its own number
            self._future.set_result(function())
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            self._back.release()
