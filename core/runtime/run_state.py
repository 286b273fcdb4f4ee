"""Stop flag, checkpoint requests and heartbeats of a run, in shared memory. A checkpoint keeps none of them.

Every value has one writer and a cache line of its own, so no process takes a lock.
"""

import time
from collections.abc import Generator
from typing import NamedTuple, TypeVar, cast

import numpy as np

from core.common.shared_arrays import SharedArrays
from core.runtime.run_counters import CACHE_LINE
from core.specs import ArraySpec

Result = TypeVar("Result")

FLAGS = {
    "stop": 0,
    "checkpoints_requested": 1,
    "checkpoints_written": 2,
    "logger_may_end": 3,
    "restarts": 4,
    "lost_learner": 5,
}
FINISHED, INTERRUPTED = 1, 2  # values of "stop"
# Columns: monotonic seconds, 1 + environment in foreign code, 0 or 1, processes that the row has had.
HEARTBEAT, ACTIVE_ENV, WRITE_FAILED, STARTS = 0, 1, 2, 3


class ProcessState(NamedTuple):
    """The row of a process as another machine can read it, whose monotonic clock is another."""

    starts: float
    age: float | None  # seconds since the last heartbeat; None before the first
    active_env: float
    write_failed: float


class RunState:
    """Signals between the engine and num_processes processes of a run."""

    def __init__(self, num_processes: int):
        self._arrays = SharedArrays(
            {
                "flags": ArraySpec((len(FLAGS), CACHE_LINE), "int64"),
                "processes": ArraySpec((num_processes, CACHE_LINE), "float64"),
            }
        )

    def _flag(self, name: str) -> int:
        return int(self._arrays["flags"][FLAGS[name], 0])

    def _set_flag(self, name: str, value: int) -> None:
        self._arrays["flags"][FLAGS[name], 0] = value

    @property
    def stopped(self) -> bool:
        return self._flag("stop") != 0

    @property
    def interrupted(self) -> bool:
        """Return True if processes must save and exit at once. A finished run still plays its last evaluation."""
        return self._flag("stop") == INTERRUPTED

    def until_interrupted(self, work: Generator[bool, None, Result]) -> Generator[bool, None, Result | None]:
        """Yield what `work` yields, and return its result, or None if the run is interrupted before."""
        while not self.interrupted:
            try:
                yield next(work)
            except StopIteration as end:
                return cast(Result, end.value)
        return None

    def stop(self, interrupt: bool = False) -> None:
        self._set_flag("stop", INTERRUPTED if interrupt or self.interrupted else FINISHED)

    @property
    def logger_may_end(self) -> bool:
        """Return True once every other process has sent its last report."""
        return self._flag("logger_may_end") != 0

    def end_logger(self) -> None:
        self._set_flag("logger_may_end", 1)

    @property
    def checkpoint_due(self) -> bool:
        return self._flag("checkpoints_requested") > self._flag("checkpoints_written")

    @property
    def checkpoints_written(self) -> int:
        return self._flag("checkpoints_written")

    def request_checkpoint(self) -> None:
        """Ask the learners for a full checkpoint. Only the engine calls this."""
        self._set_flag("checkpoints_requested", self._flag("checkpoints_requested") + 1)

    def confirm_checkpoint(self) -> None:
        """Answer all requests so far. Learner 0 calls this, even if the disk was full."""
        self._set_flag("checkpoints_written", self._flag("checkpoints_requested"))

    @property
    def restarts(self) -> int:
        return self._flag("restarts")

    def count_restart(self) -> None:
        self._set_flag("restarts", self.restarts + 1)

    @property
    def lost_learner(self) -> int | None:
        """Return the learner without which the run ends, or None."""
        return self._flag("lost_learner") - 1 if self._flag("lost_learner") else None

    def lose_learner(self, learner: int) -> None:
        """Tell the other learners that this one is lost. Only the supervisor calls this."""
        self._set_flag("lost_learner", 1 + learner)

    def heartbeat(self, process_ind: int) -> None:
        self._arrays["processes"][process_ind, HEARTBEAT] = time.monotonic()

    def has_started(self, process_ind: int) -> bool:
        return bool(self._arrays["processes"][process_ind, HEARTBEAT])

    def seconds_since_heartbeat(self, process_ind: int) -> float:
        """Return the seconds since the last heartbeat; 0 before the first."""
        last = float(self._arrays["processes"][process_ind, HEARTBEAT])
        return time.monotonic() - last if last else 0.0

    def reset_heartbeat(self, process_ind: int) -> None:
        """Forget all of a process, because a new one takes its place."""
        self._arrays["processes"][process_ind, :STARTS] = 0.0

    def count_start(self, process_ind: int) -> None:
        """Forget all of a process before the supervisor starts a new one in its place."""
        self.reset_heartbeat(process_ind)
        self._arrays["processes"][process_ind, STARTS] += 1

    def activity_marker(self, process_ind: int) -> np.ndarray:
        """Return the cell [1] in which the environment of a process notes whose code runs (Env.set_activity_marker)."""
        return self._arrays["processes"][process_ind, ACTIVE_ENV : ACTIVE_ENV + 1]

    def active_env(self, process_ind: int) -> int | None:
        """Return the environment whose foreign code the process runs, or None."""
        marker = int(self._arrays["processes"][process_ind, ACTIVE_ENV])
        return marker - 1 if marker else None

    def record_write(self, process_ind: int, succeeded: bool) -> None:
        """Record whether the last write of this process (a checkpoint, the best model, metrics) reached the disk."""
        self._arrays["processes"][process_ind, WRITE_FAILED] = not succeeded

    @property
    def failed_writers(self) -> list[int]:
        """Return the indices of the processes whose last write failed. A run that ends with one is not complete."""
        return np.flatnonzero(self._arrays["processes"][:, WRITE_FAILED]).tolist()

    # several nodes (core/engines/ray/learner_host.py) -----------------------------------------------------------------
    def flags(self) -> list[int]:
        """Return all flags, as `set_flags` takes them."""
        flags: list[int] = self._arrays["flags"][:, 0].tolist()
        return flags

    def set_flags(self, flags: list[int]) -> None:
        """Take over the flags of home, where all of them are written."""
        self._arrays["flags"][:, 0] = flags

    def process_state(self, process_ind: int) -> ProcessState:
        """Return the row of a process."""
        last, active_env, write_failed, starts = self._arrays["processes"][process_ind, : STARTS + 1].tolist()
        return ProcessState(starts, time.monotonic() - last if last else None, active_env, write_failed)

    def set_process_state(self, process_ind: int, state: ProcessState) -> None:
        """Take over the row of a process on another node, unless it is that of a predecessor."""
        row = self._arrays["processes"][process_ind]
        if state.starts == row[STARTS]:
            row[HEARTBEAT] = 0.0 if state.age is None else time.monotonic() - state.age
            row[ACTIVE_ENV], row[WRITE_FAILED] = state.active_env, state.write_failed

    def starts(self, process_ind: int) -> float:
        """Return how many processes the supervisor has started for this row."""
        return float(self._arrays["processes"][process_ind, STARTS])

    def set_starts(self, process_ind: int, starts: float) -> None:
        """Take over the starts that home counts; a new process forgets its predecessor's row."""
        if starts != self.starts(process_ind):
            self.reset_heartbeat(process_ind)
            self._arrays["processes"][process_ind, STARTS] = starts
