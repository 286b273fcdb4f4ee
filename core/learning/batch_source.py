"""Sample the batches of a learner's updates ahead, in a thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from core.device.torch_runtime import use_threads
from core.memory import Memory
from core.types import Batch, SampleIds, slice_batch

RETRY_SECONDS = 0.005  # between attempts while the memory has nothing to sample


class Prefetcher:
    """Keep `depth` batches of `batch_size` windows ready for `get`, or up to batches_per_sample - 1 more.

    - Only the thread touches the memory. It runs `update_priorities` and `call` in order, before it samples again.
    - `get` and `call` raise what the thread raised.
    - With depth 0 there is no thread: everything happens at once in the caller.
    - A ready batch grows old, because its windows and priorities are those of when it was sampled. Keep `depth` small.

    Args:
        batches_per_sample: batches that the thread samples at once, which costs less than one by one. Each takes every
            batches_per_sample-th window, because a memory may return windows in an order, as stratified sampling does.
        ready_batches: what `get` returns first: the batches that were ready when a run's checkpoint was written.
        is_warming_up: while it returns True the thread samples nothing, because the first batches would all come from
            the first chunk.
        precompute: gives `Batch.precomputed` of each batch, in the thread. Its operators have one thread of their own.
    """

    def __init__(
        self,
        memory: Memory,
        batch_size: int,
        depth: int,
        batches_per_sample: int = 1,
        ready_batches: Sequence[Batch] = (),
        is_warming_up: Callable[[], bool] = lambda: False,
        precompute: Callable[[Batch], Any] | None = None,
    ):
        self._is_warming_up, self._precompute = is_warming_up, precompute
        self._memory, self._batch_size, self._depth = memory, batch_size, depth
        self._batches_per_sample = batches_per_sample
        self._wait_seconds, self._gets = 0.0, 0  # since the last `statistics`
        # True if the memory had nothing when it was last asked. Stored with each batch that was sampled next.
        self._memory_was_empty = False
        # The condition guards both queues, the error and the flag; nothing slow happens under it.
        self._changed = threading.Condition()
        self._batches = deque[tuple[Batch, bool]]((batch, False) for batch in ready_batches)
        self._calls = deque[tuple[Callable[[], Any], Future[Any] | None]]()
        self._error: BaseException | None = None
        self._closed = False
        # True if the memory had nothing to sample at the last `get`, so that its wait was not for sampling.
        self.starved = False
        self.takes_priorities = memory.takes_priorities  # if False, priorities are not read back from the device
        memory.batches_per_sample = batches_per_sample if depth else 1
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True) if depth else None
        if self._thread:
            self._thread.start()

    def get(self, timeout: float) -> Batch | None:
        """Return the oldest batch, or None if there is none after `timeout` seconds (with depth 0: at once)."""
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        started = time.perf_counter()
        if not self._thread:
            sampled = self._batches.popleft()[0] if self._batches else self._sample(1)
            self._wait_seconds += time.perf_counter() - started
            self._gets, self.starved = self._gets + (sampled is not None), sampled is None
            return sampled
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._error, timeout)
            self._raise_error()
            self._wait_seconds += time.perf_counter() - started
            if not self._batches:
                self.starved = self._memory_was_empty
                return None
            self._gets += 1
            batch, self.starved = self._batches.popleft()
            self._changed.notify_all()
            return batch

    def put_back(self, batch: Batch) -> None:
        """Make the batch that `get` returned last the next one again, because it was not learned from."""
        with self._changed:
            self._batches.appendleft((batch, False))

    def ready_batches(self) -> list[Batch]:
        """Return the ready batches, oldest first. Within `call` they and the memory are consistent with each other."""
        return [batch for batch, _ in self._batches]

    def statistics(self) -> dict[str, float]:
        """Return how long `get` waited for a batch on average since the last call, time-outs included."""
        milliseconds = 1_000 * self._wait_seconds / max(self._gets, 1)
        self._wait_seconds, self._gets = 0.0, 0
        return {"batch_wait_ms": milliseconds}

    def update_priorities(self, keys: SampleIds, priorities: np.ndarray) -> None:
        """Update priorities before the next batch is sampled. A later `get` raises what this raises."""
        self._submit(lambda: self._memory.update_priorities(keys, priorities), None)

    def call(self, function: Callable[[], Any]) -> Any:
        """Return function(), called in the thread after all priorities that were submitted so far."""
        result: Future[Any] = Future()
        self._submit(function, result)
        return result.result()

    def close(self) -> None:
        """End the thread after what was submitted. Further calls of get, call and update_priorities are errors."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def _submit(self, function: Callable[[], Any], result: Future[Any] | None) -> None:
        with self._changed:
            self._raise_error()
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if self._thread:
                self._calls.append((function, result))
                self._changed.notify_all()
        if not self._thread:
            _perform(function, result)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _sample(self, count: int) -> Batch | None:
        """Sample `count` batches at once. Raises ValueError if they have fewer or more windows."""
        size = self._batch_size * count
        sampled = self._memory.sample(size)
        if sampled is not None and len(sampled.weights) != size:
            name = type(self._memory).__name__
            raise ValueError(f"{name}.sample({size}) has returned {len(sampled.weights)} windows, not {size}")
        return sampled

    # the thread -------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        if self._precompute:
            use_threads(1)
        try:
            while self._work():
                pass
        except BaseException as error:  # whatever it is, callers raise it
            with self._changed:
                self._error = error
                for _, result in self._calls:
                    if result is not None:
                        result.set_exception(error)
                self._changed.notify_all()

    def _work(self) -> bool:
        """Perform one submitted call or else sample once. Return False to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed or len(self._batches) < self._depth)
            submitted = self._calls.popleft() if self._calls else None
        if submitted:
            _perform(*submitted)
            return True
        if self._closed:
            return False
        count = self._batches_per_sample
        sampled = None if self._is_warming_up() else self._sample(count)
        if sampled is None:
            self._memory_was_empty = True
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed, RETRY_SECONDS)
            return True
        for start in range(count):
            batch = slice_batch(sampled, slice(start, None, count) if count > 1 else None)
            if self._precompute:
                batch = batch._replace(precomputed=self._precompute(batch))
            with self._changed:
                self._batches.append((batch, self._memory_was_empty))
                self._changed.notify_all()
        self._memory_was_empty = False
        return True


def _perform(function: Callable[[], Any], result: Future[Any] | None) -> None:
    """Call the function. Its error goes into the result or, if that is None, is raised."""
    if result is None:
        function()
        return
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
