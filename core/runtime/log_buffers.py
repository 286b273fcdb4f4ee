"""Collect metrics of all processes: a lock-free ring buffer of records for each process, which the logger drains.

- Names begin with their namespace: global/ actor/ learner/ evaluator/ profile/.
- The ring of a process that died stays readable.
- A process announces the records that it is about to write, so that the logger leaves out those that may be torn.
- A logger that falls behind loses the oldest records and learns how many.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from core.common.shared_arrays import CACHE_LINE, SharedArrays
from core.specs import ArraySpec

NAME_BYTES = 64
WRITTEN, ANNOUNCED = 0, 1  # counters of a process, both in its cache line
MIN_RATE_SECONDS = 0.5  # rates over a shorter time are too noisy
EVALUATOR = "evaluator/"  # prefix of records that are aggregated over an evaluation's episodes already


class Record(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    # Agent steps of the run when the value was reported.
    step: int
    # Seconds since the epoch.
    time: float


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if a metric's name is too long to be logged. Cut, two names could become one."""
    for name in names:
        if len(name.encode()) > NAME_BYTES:
            raise ValueError(f"the name of metric {name!r} is longer than {NAME_BYTES} bytes")


class LogRings:
    """Ring buffers of `capacity` records for num_processes processes."""

    def __init__(self, num_processes: int, capacity: int = 4096):
        self._capacity, self._epoch_offset = capacity, time.time() - time.monotonic()
        self.began = self.now()  # when this start of the run made its shared memory
        dtypes = {"name": f"S{NAME_BYTES}", "value": "float64", "step": "int64", "time": "float64"}
        counters = {
            "counters": ArraySpec((num_processes, CACHE_LINE), "int64"),
            # Shared, so that a restarted logger continues where the last one was.
            "read": ArraySpec((num_processes,), "int64"),
        }
        columns = {name: ArraySpec((num_processes, capacity), dtype) for name, dtype in dtypes.items()}
        self._arrays = SharedArrays({**columns, **counters})

    def now(self) -> float:
        """Return seconds since the epoch that never jump.

        The system clock was read once; monotonic time is added to it.
        """
        return self._epoch_offset + time.monotonic()

    def write(self, process_ind: int, values: Mapping[str, float], step: int) -> None:
        """Report values now. Only process_ind itself may call this."""
        check_names(values)
        now = self.now()
        self.append(process_ind, [Record(name, value, step, now) for name, value in values.items()])

    def append(self, process_ind: int, records: Sequence[Record]) -> None:
        """Append records to the ring of a process. Only the ring's one writer may call this."""
        arrays, counters = self._arrays, self._arrays["counters"][process_ind]
        written = int(counters[WRITTEN])
        counters[ANNOUNCED] = written + len(records)
        for number, record in enumerate(records, written):
            slot = number % self._capacity
            arrays["name"][process_ind, slot] = record.name.encode()
            arrays["value"][process_ind, slot], arrays["step"][process_ind, slot] = record.value, record.step
            arrays["time"][process_ind, slot] = record.time
        counters[WRITTEN] = written + len(records)

    def drain(self, from_share: float = 0.0) -> tuple[list[Record], int]:
        """Return new records, ordered by process, and how many were overwritten unread. Only the logger calls this.

        Args:
            from_share: Rings of which a smaller share is filled are left, where a new logger would find their records.
        """
        filled = (self._arrays["counters"][:, WRITTEN] - self._arrays["read"]) / self._capacity
        drained = [self.drain_process(int(process_ind)) for process_ind in np.flatnonzero(filled >= from_share)]
        return [record for records, _ in drained for record in records], sum(dropped for _, dropped in drained)

    def drain_process(self, process_ind: int) -> tuple[list[Record], int]:
        """Return the new records of one process, and how many were overwritten unread."""
        read, counters = self._arrays["read"], self._arrays["counters"][process_ind]
        first, written = int(read[process_ind]), int(counters[WRITTEN])
        oldest = max(first, written - self._capacity)
        slots = np.arange(oldest, written) % self._capacity
        columns = (self._arrays[name][process_ind, slots].tolist() for name in Record._fields)
        records = [Record(name.decode(errors="replace"), *numbers) for name, *numbers in zip(*columns)]
        # The process may have overwritten the oldest ones while they were read.
        intact = min(max(int(counters[ANNOUNCED]) - self._capacity, oldest), written)
        read[process_ind] = written
        return records[intact - oldest :], intact - first
