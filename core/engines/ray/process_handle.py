"""A handle on one process that Ray runs."""

import time
from typing import Any

from core.engines import run_end

KILL_TIMEOUT = 10.0  # seconds until killed processes are gone


class RayProcessHandle:
    """One life of a worker, as the supervisor looks at processes: it is asked where it is, and once Ray has started it, to run."""

    def __init__(self, worker: Any, arguments: tuple[Any, ...]):
        self._worker, self._arguments = worker, arguments
        self.asked = time.monotonic()
        self.next = worker.where.remote()  # what it will answer next
        self._place: tuple[int, str] | None = None
        self._exitcode: int | None = None
        self._failure: tuple[str, str, str] | None = None
        self.death = ""

    @property
    def placed(self) -> bool:
        """Ray has started its process."""
        _ = self.exitcode
        return self._place is not None

    @property
    def pid(self) -> str:
        return "{} on {}".format(*self._place) if self._place else "without a place"

    @property
    def exitcode(self) -> int | None:
        """None while it waits for a place or runs; 0: done."""
        import ray
        if self._exitcode is None and ray.wait([self.next], timeout=0)[0]:
            self._exitcode = self._answer()
        return self._exitcode

    def _answer(self) -> int | None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
        try:
            answer = ray.get(self.next)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            notes = "".join(f" ({note})" for note in getattr(cause, "__notes__", ()))
            self._failure = (f"{type(cause).__name__}: {cause}", notes, str(error))
            return run_end.of(cause)
        except ActorUnavailableError as error:  # its process or its node: the head will know, and may place nothing there until then
            self.death, self.next = self.death or _told(error), self._worker.where.remote()
            return None
        except RayError as error:
            self.death = _told(error)
            return run_end.TRAINING_FAILED
        if self.death:  # it could be reached again, but what it was doing was lost
            return run_end.TRAINING_FAILED
        if self._place is not None:
            return run_end.DONE
        self._place, self.next = answer, self._worker.run.remote(*self._arguments)
        return None

    def poll(self) -> bool:
        """Return True if it said how it ended."""
        return self._exitcode is not None and not self.death

    def recv(self) -> tuple[str, str, str] | None:
        """Return the error that it sent; None if it was done."""
        return self._failure

    def kill(self) -> None:
        import ray
        ray.kill(self._worker)

    def join(self) -> None:
        import ray
        ray.wait([self.next], timeout=KILL_TIMEOUT)


def _told(error: Exception) -> str:
    """Return Ray's reason on one line, without its advice."""
    return "died: " + " ".join(str(error).partition("Some common causes")[0].split())
