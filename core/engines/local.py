"""The local engine: every single-process is a process of this machine, of the fork server or else spawned."""

import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from core.common import fork_server
from core.common.processes import signals_blocked
from core.engines import process_main
from core.engines.launcher import ExitStatus, ReportedError
from core.engines.strays import Strays, end_marked
from core.engines.supervisor import Supervisor
from core.runtime.context import Context, Process


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
        self._strays: Strays | None = None

    @property
    def address(self) -> str | None:
        """None, because all learners are on this machine."""
        return None

    def prepare(self, interrupted: Callable[[], bool]) -> None:
        """Do nothing: this machine can start processes."""

    def start(self, role: str, index: int, threads: int) -> "LocalProcess":
        """Fork or spawn a process. Raises OSError if there is no process or file descriptor for it."""
        receiver, sender = connection.Pipe(duplex=False)
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # of what environments start
        server = fork_server.server_pid()
        process = (fork_server.ForkedProcess if server else get_context("spawn").Process)(
            target=process_main.main,
            name=f"{role} {index}",
            daemon=False,  # a daemon could not start workers for an environment
            args=(self._processes[role], self._context, role, index, threads, server or os.getpid(), sender),
        )
        resource_tracker.ensure_running()  # with the first process it would start itself, and unblock the signals
        with signals_blocked():
            self._strays = self._strays or Strays()
            with self._strays.mark() as mark:
                process.start()
        sender.close()
        return LocalProcess(process, receiver, mark, server)

    def wait(self, waitables: list[Any]) -> None:
        """Wait at most 0.1 s for one of these sentinels."""
        connection.wait(waitables, timeout=0.1)

    def check(self) -> str | None:
        """Return None: no cluster can fail."""
        return None

    def room_for_learners(self) -> int:
        """Return 0: no node can join."""
        return 0

    def collect(self) -> None:
        """Do nothing: all processes report into the memory of this one."""

    def close(self) -> None:
        """End everything that environments of the run have started."""
        if self._strays is not None:
            self._strays.close()


class LocalProcess:
    """A process, the pipe on which it reports its end, the mark of what its environments start, and its fork server."""

    def __init__(self, process: BaseProcess, receiver: Connection, mark: str, server: int | None):
        self._process, self._receiver, self._mark, self._server = process, receiver, mark, server

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
        if self._server and self._server != fork_server.server_pid():
            return ExitStatus(code, reason=f"was killed with the fork server (pid {self._server})")
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
