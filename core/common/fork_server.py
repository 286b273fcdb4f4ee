"""Start processes in milliseconds: the fork server, a copy of main that forks a process at each request.

`running` forks the server from main once the heavy modules are imported, and before main runs code of a user. At that
time main has one thread, no device and no environment, so a fork of it is as good as a new interpreter. As a spawned
process does, a process of the server gets main's import path, working folder, environment variables and standard
streams of the moment. It has a random state of its own.

- The server and its processes end with main, because the kernel kills each of them with its parent.
- The server has no thread, and unlike that of `multiprocessing` no address at which another program could reach it.
- What such a process starts by `multiprocessing` itself is spawned by default.
"""

import errno
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import popen_fork, reduction, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np

from core.common.processes import die_with_parent, set_process_name, signals_blocked

REPLY_TIMEOUT = 60.0  # seconds that the server may take to fork
MAX_DESCRIPTORS = 253  # in one message of a socket (SCM_MAX_FD)
OWN_DESCRIPTORS = 4  # of each request: the process's message and exit code, standard output, standard error
SERVER_ENDED = -signal.SIGKILL  # exit code of a process whose server has ended: the kernel killed it

_server: "_ForkServer | None" = None
_received: list[int] = []  # descriptors that the server received for the process that this is


@contextmanager
def running() -> Iterator[None]:
    """Run the fork server inside the block, unless this process has several threads or cannot watch processes."""
    global _server
    if len(os.listdir("/proc/self/task")) == 1 and _can_watch_processes():
        _server = _ForkServer()
    try:
        yield
    finally:
        if _server is not None:
            _server.end()
        _server = None


def server_pid() -> int | None:
    """Return the process id of the server, or None if there is no server or it has ended."""
    return _server.pid if _server is not None and _server.is_alive() else None


class ForkedProcess(BaseProcess):
    """A process of the fork server. `start` raises OSError if the server or the machine cannot start one."""

    _start_method = "spawn"  # the default of what the process itself starts

    @staticmethod
    def _Popen(process: BaseProcess) -> "_Popen":
        return _Popen(process)


class _ReceivedDescriptor:
    """A descriptor on its way to a process, as its number among those that the server receives."""

    def __init__(self, number: int):
        self._number = number

    def detach(self) -> int:
        return _received[self._number]


class _Popen(popen_fork.Popen):
    """Start and watch one process of the fork server, in the way `multiprocessing` asks for."""

    DupFd = _ReceivedDescriptor

    def __init__(self, process: BaseProcess):
        self._descriptors: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    def _launch(self, process: BaseProcess) -> None:
        if _server is None:
            raise ConnectionError("there is no fork server")
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            pickled = reduction.ForkingPickler.dumps(process)
        finally:
            set_spawning_popen(None)
        self.pid, self._exit = _server.fork(pickled, self._descriptors)
        self.sentinel = self._exit.fileno()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and wait([self._exit], 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = self._exit.recv()
            except (EOFError, OSError):
                self.returncode = SERVER_ENDED
        return self.returncode


class _ForkServer:
    """The server as main sees it: its process id, and the socket that carries requests."""

    def __init__(self) -> None:
        resource_tracker.ensure_running()  # main's: it outlives the processes of a run, and removes what they leave
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        main, (self._control, control) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended = False
        with signals_blocked():
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    self._control.close()
                    _serve(control, main)
                finally:
                    os._exit(1)
        control.close()
        self._control.settimeout(REPLY_TIMEOUT)

    def is_alive(self) -> bool:
        self._ended = self._ended or os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return not self._ended

    def end(self) -> None:
        """Kill the server, and with it every process that it has started."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._ended = True
        self._control.close()

    def fork(self, process: Any, descriptors: list[int]) -> tuple[int, Connection]:
        """Start a pickled process, which gets copies of these descriptors.

        Returns:
            Its process id, and a connection on which its exit code arrives.
        """
        if len(descriptors) + OWN_DESCRIPTORS > MAX_DESCRIPTORS:
            raise OSError(errno.EMFILE, f"a process needs {len(descriptors)} open files at its start")
        source, sink = Pipe(duplex=False)
        exit_code, report = Pipe(duplex=False)
        request = [source.fileno(), report.fileno(), 1, 2, *descriptors]
        socket.send_fds(self._control, [str(len(request)).encode()], request)
        try:
            answer = int(self._control.recv(64) or -errno.EPIPE)
        except TimeoutError:  # a later answer would be taken for that of the next request
            self.end()
            raise
        source.close()
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        with suppress(BrokenPipeError):  # the process was killed already: its exit code says so
            sink.send((dict(os.environ), sys.path, os.getcwd()))
            sink.send_bytes(process)
        return answer, exit_code


def _can_watch_processes() -> bool:
    """Return True if the kernel has pidfd_open, which containers may forbid."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


# in the server --------------------------------------------------------------------------------------------------------
def _serve(control: socket.socket, main: int) -> NoReturn:
    """Fork a process at each request of main, and report the exit code of each that has ended."""
    die_with_parent(main, signal.SIGKILL, 0)
    set_process_name("fork server")
    gc.freeze()  # a collection in a process would copy the pages of all objects, which the processes share
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    _answer(control, selector, main)
                else:
                    _report_exit(selector, key)


def _answer(control: socket.socket, selector: selectors.BaseSelector, main: int) -> None:
    """Fork one process, and send main its process id, or minus the number of the error."""
    count, request, _, _ = socket.recv_fds(control, 64, MAX_DESCRIPTORS)
    if not count:
        os._exit(0)  # main has ended
    try:
        if len(request) < int(count):
            raise OSError(errno.EMFILE, "not all descriptors arrived")
        answer = _fork(control, selector, main, request)
    except OSError as error:
        answer = -(error.errno or errno.EIO)
    for descriptor in request:
        os.close(descriptor)
    control.send(str(answer).encode())


def _fork(control: socket.socket, selector: selectors.BaseSelector, main: int, request: list[int]) -> int:
    """Return the id of a new process, which is watched from now on."""
    server, report = os.getpid(), Connection(os.dup(request[1]), readable=False)
    if (pid := os.fork()) == 0:
        try:
            report.close()
            control.close()
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
                    key.data[1].close()
            selector.close()
            os._exit(_run(main, server, request))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return pid


def _report_exit(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, report = key.data
    _, status = os.waitpid(pid, 0)
    selector.unregister(key.fileobj)
    os.close(key.fd)
    with suppress(OSError):  # main looks no more
        report.send(os.waitstatus_to_exitcode(status))
    report.close()


# in a process of the server -------------------------------------------------------------------------------------------
def _run(main: int, server: int, request: list[int]) -> int:
    """Run the process that main asked for, and return its exit code."""
    die_with_parent(server, signal.SIGKILL, 1)
    message, report, output, errors, *_received[:] = request
    os.close(report)
    for descriptor, source in ((1, output), (2, errors)):
        os.dup2(source, descriptor)
        os.close(source)
    np.random.seed()  # noqa: NPY002 - from the operating system, as in a new interpreter
    with Connection(message, writable=False) as connection:
        environment, sys.path[:], folder = connection.recv()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        process = connection.recv()
    exit_code: int = process._bootstrap(parent_sentinel=os.pidfd_open(main))
    return exit_code
