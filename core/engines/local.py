"""The local engine: every single-process is a process of this machine, of the fork server or else spawned.

`LocalLauncher` starts and watches the processes, and `main` is what each of them runs.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from core.common import fork_server
from core.common.exit_codes import DONE, TRAINING_FAILED
from core.common.processes import (
    IGNORED_SIGNALS,
    deliver_signals_to_forks,
    die_with_parent,
    idle_delays,
    reuse_freed_memory,
    set_process_name,
    signals_blocked,
)
from core.device.torch_runtime import use_threads
from core.engines.launcher import ExitStatus, Launcher, ProcessHandle, ReportedError
from core.engines.run_end import exit_code_of
from core.engines.strays import Strays, end_marked, mark_forks
from core.engines.supervisor import Supervisor
from core.runtime.context import Context, Process

# Characters of an error's message, of its notes and of its traceback. A pipe takes all three, of up to four bytes a
# character, although nobody reads it yet.
MAX_TEXT = 5_000


class LocalEngine:
    """Run the processes of a context on this machine."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = context, processes

    def run(self) -> int:
        """Run to the end. Returns the exit code of the program."""
        return Supervisor(self._context, LocalLauncher(self._context, self._processes)).run()


class LocalLauncher(Launcher):
    """Start processes by multiprocessing, and end what their environments start."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = context, processes
        self._strays: Strays | None = None

    def start(self, role: str, index: int, threads: int) -> "LocalProcess":
        """Fork or spawn a process. Raises OSError if there is no process or file descriptor for it."""
        receiver, sender = connection.Pipe(duplex=False)
        server = fork_server.server_pid()
        process = (fork_server.ForkedProcess if server else get_context("spawn").Process)(
            target=main,
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
        connection.wait(waitables, timeout=0.1)

    def close(self) -> None:
        if self._strays is not None:
            self._strays.close()


class LocalProcess(ProcessHandle):
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
            return ExitStatus(done=True)
        if report:
            return ExitStatus(error=report, run_exit_code=code if code > 0 else TRAINING_FAILED)
        if code >= 0:
            return ExitStatus(reason=f"exited with code {code} without an error message")
        if self._server and self._server != fork_server.server_pid():
            return ExitStatus(reason=f"was killed with the fork server (pid {self._server})")
        likely = ", by hand or by the kernel for lack of memory" if code == -signal.SIGKILL else ""
        return ExitStatus(reason=f"was killed by signal {-code}{likely}")

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._process.join()

    def clean_up(self) -> None:
        end_marked(self._mark)


# in a process ---------------------------------------------------------------------------------------------------------
def main(
    process: Process, context: Context, role: str, index: int, threads: int, parent: int, report: Connection
) -> None:
    """Drive the generator of a role and index to its end, then exit.

    The supervisor receives a report: None if the work was done, or the error as text. The exit code says of which
    kind it was.

    Args:
        threads: intra-op threads of torch.
        parent: process id of the parent, which is main or the fork server.
        report: pipe to the supervisor.
    """
    die_with_parent(parent, signal.SIGKILL, TRAINING_FAILED)
    set_process_name(f"{role} {index}")
    _ignore_signals()
    mark_forks()
    reuse_freed_memory()
    use_threads(threads)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)  # of what environments start
    try:
        # Without line buffering the reader of a pipe would get whole pages only.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        drive(process, context, role, index)
        report.send(None)
        exit_code = DONE
    except BaseException as error:
        reported = ReportedError.of(error, _shortened(traceback.format_exc()))
        report.send(reported._replace(message=_shortened(reported.message), notes=_shortened(reported.notes)))
        exit_code = exit_code_of(error, context.run_state.has_started(context.process_ind(role, index)))
    report.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # an environment may have closed or replaced it
            stream.flush()
    # At once: the interpreter would wait for an environment's threads and other learners' GPUs, or crash in gloo's
    # threads.
    os._exit(exit_code)


def drive(process: Process, context: Context, role: str, index: int) -> None:
    """Run a single-process to its end: a heartbeat after every slice of work, a short sleep where there was none."""
    process_ind, delays = context.process_ind(role, index), idle_delays()
    for worked in process(context, index):
        context.run_state.heartbeat(process_ind)
        if worked:
            delays = idle_delays()
        else:
            time.sleep(next(delays))


def _ignore_signals() -> None:
    """Ignore the signals that main handles.

    Programs and workers of an environment inherit ignored signals. They must end when the environment terminates
    them, so SIGTERM has an empty handler instead, which they do not inherit.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    deliver_signals_to_forks()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def _shortened(text: str) -> str:
    """Return the text, without its middle if it is longer than MAX_TEXT."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]}\n... {len(text) - MAX_TEXT:,} characters ...\n{text[-MAX_TEXT // 2 :]}"
