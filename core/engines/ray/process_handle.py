"""A handle on one process that Ray starts and runs."""

import time
from collections.abc import Callable
from typing import Any

from core.distributed.learner_group import PeerLostError
from core.engines.launcher import ExitStatus, ReportedError
from core.engines.run_end import DONE, TRAINING_FAILED, exit_code_of

KILL_TIMEOUT = 10.0  # seconds that a killed process may take to end


class RayProcessHandle:
    """The process of one Ray actor. The actor is first asked for its node, and, once it has answered, to run."""

    def __init__(self, worker: Any, arguments: tuple[Any, ...], node_is_missing: Callable[[float], bool]):
        """Ask Ray for the process.

        Args:
            worker: handle of the Ray actor, a `Worker`.
            arguments: those of `Worker.run`.
            node_is_missing: takes the time of this request and returns True if no node has had room for it since
                then.
        """
        self._worker, self._arguments, self._node_is_missing = worker, arguments, node_is_missing
        self._requested_at = self._kill_deadline = time.monotonic()
        self._pending = worker.pid_and_address.remote()  # the call that Ray answers next
        self._pid_and_address: tuple[int, str] | None = None
        self._lost_reason = ""  # why the process could not be reached
        self._status: ExitStatus | None = None

    @property
    def pid(self) -> int | str:
        return "{} on {}".format(*self._pid_and_address) if self._pid_and_address else "without a node"

    @property
    def waitable(self) -> Any:
        """The reference of the next answer, which is there at the end of the process or before."""
        return self._pending

    def has_process(self) -> bool:
        """Return True once Ray has started the process."""
        self.poll()
        return self._pid_and_address is not None

    def lacks_node(self) -> bool:
        """Return True if the head has said since the request that no node has room."""
        return not self.has_process() and self._status is None and self._node_is_missing(self._requested_at)

    def poll(self) -> ExitStatus | None:
        """Return how the process ended; None while it waits for a node or runs."""
        import ray

        if self._status is None and ray.wait([self._pending], timeout=0)[0]:
            self._status = self._read_answer()
        return self._status

    def _read_answer(self) -> ExitStatus | None:
        """Read the answer that is there. Returns the status of a process that has ended, else None."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        try:
            answer = ray.get(self._pending)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if self._lost_reason:
                return ExitStatus(exit_code_of(cause), reason=self._lost_reason)
            notes = "".join(f" ({note})" for note in getattr(cause, "__notes__", ()))
            message, is_of_peer = f"{type(cause).__name__}: {cause}", isinstance(cause, PeerLostError)
            reported = ReportedError(message, notes, str(error), is_of_peer)
            return ExitStatus(exit_code_of(cause), error=reported)
        except ActorUnavailableError as error:
            # The process or its node is out of reach. The head will find out which; until then it may place nothing
            # there.
            self._lost_reason = self._lost_reason or _one_line(error)
            self._pending = self._worker.pid_and_address.remote()
            return None
        except RayError as error:
            return ExitStatus(TRAINING_FAILED, reason=_one_line(error))
        if self._lost_reason:  # the process can be reached again, but its work was lost
            return ExitStatus(TRAINING_FAILED, reason=self._lost_reason)
        if self._pid_and_address is not None:
            return ExitStatus(DONE, done=True)
        self._pid_and_address, self._pending = answer, self._worker.run.remote(*self._arguments)
        return None

    def kill(self) -> None:
        """Tell Ray to kill the process."""
        import ray

        ray.kill(self._worker)
        self._kill_deadline = time.monotonic() + KILL_TIMEOUT

    def join(self) -> None:
        """Wait until the killed process has ended, at most KILL_TIMEOUT after `kill`."""
        import ray

        ray.wait([self._pending], timeout=max(self._kill_deadline - time.monotonic(), 0.0))

    def clean_up(self) -> None:
        """End the process, because Ray keeps that of an actor whose call has failed or returned."""
        self.kill()


def _one_line(error: Exception) -> str:
    """Return Ray's reason on one line, without its advice."""
    return "died: " + " ".join(str(error).partition("Some common causes")[0].split())
