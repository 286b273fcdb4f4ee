"""What processes report: one lock-free ring of (name, value, step, time) records a process; the logger drains them all.

Names carry their group: global/ actor/ learner/ evaluator/. A process that dies leaves its ring readable; a logger that
lags loses the oldest records and is told how many.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

from core.common.shared_arrays import SharedArrays
from core.specs import ArraySpec

NAME_BYTES = 64


class Record(NamedTuple):
    name: str
    value: float
    step: int     # agent steps of the run when reported
    time: float   # seconds since the epoch


class LogRings:
    """Rings of `capacity` records for num_processes processes."""

    def __init__(self, num_processes: int, capacity: int = 4096):
        self._capacity, self._begun = capacity, time.time() - time.monotonic()
        self._arrays = SharedArrays({
            "name": ArraySpec((num_processes, capacity), f"S{NAME_BYTES}"),
            "value": ArraySpec((num_processes, capacity), "float64"), "step": ArraySpec((num_processes, capacity), "int64"),
            "time": ArraySpec((num_processes, capacity), "float64"), "written": ArraySpec((num_processes, 8), "int64"),
            "read": ArraySpec((num_processes,), "int64")})  # shared: a logger that takes over goes on where the last one was

    def now(self) -> float:
        """Return seconds since the epoch. They never jump: the clock was read when this was made, and what is added is monotonic."""
        return self._begun + time.monotonic()

    def write(self, process_ind: int, values: Mapping[str, float], step: int) -> None:
        """Report values now. Only process_ind itself may call this."""
        arrays, now = self._arrays, self.now()
        written = int(arrays["written"][process_ind, 0])
        for number, (name, value) in enumerate(values.items(), written):
            slot = number % self._capacity
            arrays["name"][process_ind, slot] = name.encode()
            arrays["value"][process_ind, slot], arrays["step"][process_ind, slot] = value, step
            arrays["time"][process_ind, slot] = now
        arrays["written"][process_ind, 0] = written + len(values)

    def drain(self) -> tuple[list[Record], int]:
        """Records not seen before, process by process, and how many were overwritten unseen. Only the logger calls this."""
        records: list[Record] = []
        lost = 0
        read = self._arrays["read"]
        for process_ind, written in enumerate(self._arrays["written"][:, 0].copy()):
            oldest = max(int(read[process_ind]), int(written) - self._capacity)
            lost += oldest - int(read[process_ind])
            records += [self._record(process_ind, number % self._capacity) for number in range(oldest, int(written))]
            read[process_ind] = written
        return records, lost

    def _record(self, process_ind: int, slot: int) -> Record:
        arrays = self._arrays
        return Record(bytes(arrays["name"][process_ind, slot]).decode(errors="replace"), float(arrays["value"][process_ind, slot]),
                      int(arrays["step"][process_ind, slot]), float(arrays["time"][process_ind, slot]))
