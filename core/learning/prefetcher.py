"""Sampling ahead of the learner: one thread draws batches while the learner computes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from core.memory import Memory
from core.types import Batch, SampleIds, slice_batch

RETRY_SECONDS = 0.005  # between attempts while the memory has nothing to sample
LONG_WAIT = 0.001      # seconds that a learner may wait for a batch before one more is kept ready
SMOOTH_GETS = 200      # batches in a row that were ready at once before one fewer is


class Prefetcher:
    """At most `depth` batches of `batch_size` ready for `get`: as few as keep it from waiting, since a batch that waits grows old.

    Once this is made only its thread touches the memory: everything else goes through `update_priorities` and `call`, which the
    thread runs in order before its next draw. What the thread raises, `get` and `call` raise. depth 0: no thread, the same
    calls run at once in the caller. The thread draws `together` batches at a time, which costs less than one by one; each takes every
    `together`-th window of the draw, since a rule may draw in an order, as equal shares of the priorities.
    """

    def __init__(self, memory: Memory, batch_size: int, depth: int, together: int = 1, drawn: Sequence[Batch] = ()):
        """`drawn` are batches that `get` gives first: those that were ready when a run's checkpoint was written."""
        self._memory, self._batch_size, self._most, self._depth, self._together = memory, batch_size, depth, min(depth, 1), together
        self._smooth, self._waiting = 0, 0.0  # batches in a row that were ready at once; seconds that the next one was waited for
        self._waited, self._gets = 0.0, 0     # seconds and batches since statistics()
        self._starved = False                 # the memory had nothing when it was last asked
        self._batches = deque[tuple[Batch, bool]]((batch, False) for batch in drawn)  # and whether its rows had to be waited for
        self._calls: deque[tuple[Callable[[], Any], Future | None]] = deque()
        self._changed = threading.Condition()  # guards the two deques and the three below; nothing slow is done under it
        self._error: BaseException | None = None
        self.starved = False                   # rows had to be waited for, not the drawing, before the last `get`
        self.takes_priorities = memory.takes_priorities
        self._paused = self._closed = False
        memory.batches_per_sample = together if depth else 1
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True) if depth else None
        if self._thread:
            self._thread.start()

    def get(self, timeout: float) -> Batch | None:
        """The oldest batch; None if there is none after `timeout` seconds (depth 0: at once)."""
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        if not self._thread:
            return self._batches.popleft()[0] if self._batches else self._memory.sample(self._batch_size)
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._error, timeout)
            self._raise()
            self._waiting += time.perf_counter() - started
            if not self._batches:
                return None
            batch, self.starved = self._batches.popleft()
            self._adapt(self.starved)
            self._changed.notify_all()
            return batch

    def put_back(self, batch: Batch) -> None:
        """The batch that `get` gave last was not learnt from: it is the next one again."""
        with self._changed:
            self._batches.appendleft((batch, False))

    def drawn(self) -> list[Batch]:
        """Return the batches that are ready, oldest first; within `call` they and the memory belong together."""
        return [batch for batch, _ in self._batches]

    def statistics(self) -> dict[str, float]:
        """Batches kept ready, and how long on average `get` waited for one since the last call, time-outs included."""
        milliseconds = 1_000 * self._waited / max(self._gets, 1)
        self._waited, self._gets = 0.0, 0
        return {"prefetch_depth": float(self._depth), "prefetch_wait_ms": milliseconds}

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Applied before the next draw; an error of it is raised by a later `get`."""
        self._submit(lambda: self._memory.update_priorities(keys, priorities), None)

    def call(self, function: Callable[[], Any]) -> Any:
        """function() where and when the memory is consistent, after all priorities submitted so far; returns its result."""
        result: Future = Future()
        self._submit(function, result)
        return result.result()

    def pause(self) -> None:
        """No more draws until `resume`; batches that are ready stay, priorities and calls still run."""
        self.call(lambda: setattr(self, "_paused", True))

    def resume(self) -> None:
        self.call(lambda: setattr(self, "_paused", False))

    def close(self) -> None:
        """End the thread after what was submitted; further calls of get, call and update_priorities are errors."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def _submit(self, function: Callable[[], Any], result: Future | None) -> None:
        if not self._thread:
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            _perform(function, result)
            return
        with self._changed:
            self._raise()
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            self._calls.append((function, result))
            self._changed.notify_all()

    def _adapt(self, starved: bool) -> None:
        """Keep more ready when drawing was too slow, fewer when it never is; a wait for rows says nothing of either."""
        waited, self._waiting = self._waiting, 0.0
        self._waited, self._gets = self._waited + waited, self._gets + 1
        if waited <= LONG_WAIT:
            self._smooth += 1
        elif not starved:
            self._depth, self._smooth = min(self._depth + 1, self._most), 0
        if self._smooth == SMOOTH_GETS:
            self._depth, self._smooth = max(self._depth - 1, 1), 0

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # the thread -------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # handed to the caller, whatever it is
            with self._changed:
                self._error = error
                for _, result in self._calls:
                    if result is not None:
                        result.set_exception(error)
                self._changed.notify_all()

    def _step(self) -> bool:
        """One thing that was submitted, or else one draw if there is room; False to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed or self._has_room())
            submitted = self._calls.popleft() if self._calls else None
        if submitted:
            _perform(*submitted)
            return True
        if self._closed:
            return False
        size, together = self._batch_size, self._together
        batch = self._memory.sample(size * together)
        with self._changed:
            if batch is not None:
                parts = [batch] if together == 1 else [slice_batch(batch, slice(part, None, together)) for part in range(together)]
                self._batches.extend((part, self._starved) for part in parts)
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._calls or self._closed, RETRY_SECONDS)
        self._starved = batch is None
        return True

    def _has_room(self) -> bool:
        return not self._paused and len(self._batches) < self._depth


def _perform(function: Callable[[], Any], result: Future | None) -> None:
    """Without a result the error is the caller's."""
    if result is None:
        function()
        return
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
