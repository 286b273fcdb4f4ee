"""The local engine: every single-process is a spawned process of this machine."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from core.engines import process_main
from core.engines.launcher import ALLOCATOR_VARIABLES, ExitStatus, ReportedError
from core.engines.strays import Strays, end_marked
from core.engines.supervisor import Supervisor
from core.runtime.context import Context, Process

START_METHOD: Final = "spawn"


class LocalEngine:
    """Run the processes of a context on this machine."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = context, processes

    def run(self, roles: list[tuple[str, int]]) -> int:
        """Run to the end. Returns the exit code of the program."""
        return Supervisor(self._context, LocalLauncher(self._context, self._processes)).run()


class LocalLauncher:
    """Start processes by multiprocessing, and end what their environments start."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = context, processes
        self._multiprocessing = get_context(START_METHOD)
        self._strays: Strays | None = None

    def prepare(self, interrupted: Callable[[], bool]) -> None:
        """Set the variables of malloc that processes inherit, unless the user has set them."""
        for name, value in ALLOCATOR_VARIABLES.items():
            os.environ.setdefault(name, value)

    def start(self, role: str, index: int, threads: int) -> "LocalProcess":
        """Spawn a process. Raises OSError if there is no process or file descriptor for it."""
        receiver, sender = self._multiprocessing.Pipe(duplex=False)
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        process = self._multiprocessing.Process(
            target=process_main.main,
            name=f"{role} {index}",
            daemon=False,  # a daemon could not start workers for an environment
            args=(self._processes[role], self._context, role, index, threads, os.getpid(), sender),
        )
        with _signals_blocked():
            self._strays = self._strays or Strays()
            with self._strays.mark() as mark:
                process.start()
        sender.close()
        return LocalProcess(process, receiver, mark)

    def wait(self, waitables: list[Any]) -> None:
        """Wait at most 0.1 s for one of these sentinels."""
        connection.wait(waitables, timeout=0.1)

    def check(self) -> str | None:
        """Return None: no cluster can fail."""
        return None

    def close(self) -> None:
        """End everything that environments of the run have started."""
        if self._strays is not None:
            self._strays.close()


class LocalProcess:
    """A spawned process, the pipe on which it reports its end, and the mark of what its environments start."""

    def __init__(self, process: BaseProcess, receiver: Connection, mark: str):
        self._process, self._receiver, self._mark = process, receiver, mark

    @property
    def pid(self) -> int | str:
        return self._process.pid or 0

    @property
    def waitable(self) -> int:
        """A descriptor that becomes readable at the end of the process."""
        return self._process.sentinel

    def has_process(self) -> bool:
        return True

    def lacks_node(self) -> bool:
        return False

    def poll(self) -> ExitStatus | None:
        """Return how the process ended, or None if it has not ended. After its end, the pipe is read once."""
        if (code := self._process.exitcode) is None:
            return None
        try:
            report = self._receiver.recv() if self._receiver.poll() else ()
        except (EOFError, OSError):
            report = ()
        self._receiver.close()
        if report is None:
            return ExitStatus(code, done=True)
        if report:
            return ExitStatus(code, error=ReportedError(*report))
        if code >= 0:
            return ExitStatus(code, reason=f"exited with code {code} without an error message")
        likely = ", by hand or by the kernel for lack of memory" if code == -signal.SIGKILL else ""
        return ExitStatus(code, reason=f"was killed by signal {-code}{likely}")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._process.join()

    def clean_up(self) -> None:
        """End what the environments of the process have started."""
        end_marked(self._mark)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals while a child starts.

    The child inherits the mask, so Ctrl-C, which reaches every process of a terminal, cannot kill it before
    `process_main.main` ignores signals. The parent receives pending signals afterwards.
    """
    resource_tracker.ensure_running()  # with the first child it would start itself, and unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, process_main.IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
