"""The Ray actor class whose processes run single-processes, and the checks of a process that is not main's child."""

import hashlib
import os
import select
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from core.common.console import log_to_stderr
from core.common.exit_codes import BAD_OPTIONS, TRAINING_FAILED
from core.common.processes import reuse_freed_memory, set_process_name
from core.device.torch_runtime import use_threads
from core.engines.local import drive
from core.engines.ray.remote_context import RemoteRunInfo, ServerConnection, remote_context
from core.runtime.context import Context, Process

PROJECT = Path(__file__).resolve().parents[3]
PACKAGES = ("core", "utils")


class WritableCopy:
    """Send an object through Ray so that what arrives is the object, whose arrays may be written.

    Ray keeps arrays that it pickles in its store, where they are read-only.
    """

    def __init__(self, value: object):
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (cloudpickle.dumps(self._value),)


class Host(NamedTuple):
    """The process that owns the shared memory of a node: main at home, a `LearnerHost` on another learner's node."""

    node: str  # its id
    pid: int
    # ObjectRef of WritableCopy(context), in a list so that only workers on this node fetch it, who alone can open it.
    context: list[Any]
    server: Any  # handle of the `TrajectoryServer` there; None if no node can join


class Worker:
    """A Ray actor for one role and index. On the node of its host it opens the shared memory, elsewhere a connection.

    The host of an actor is that of its learner, and home that of all but learners and actors.
    """

    def __init__(self, role: str, index: int):
        self._role, self._index = role, index

    def __repr__(self) -> str:
        return f"{self._role} {self._index}"

    def pid_and_address(self) -> tuple[int, str]:
        """Return the process id, and the address of the node."""
        return os.getpid(), ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def run(self, process: Process, host: Host, run_info: RemoteRunInfo, threads: int) -> None:
        """Drive the single-process to its end.

        Args:
            process: generator function of the role.
            host: owner of the shared memory that this process reads and writes.
            run_info: what workers on other nodes than the host's need of the context.
            threads: intra-op threads of torch.
        """
        set_process_name(f"{self._role} {self._index}")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # main alone decides when a run ends
        reuse_freed_memory()
        use_threads(threads)
        if ray.get_runtime_context().get_node_id() == host.node:
            end_with(host.pid)
            if host.server is not None and self._role == "actor":
                # A predecessor on another node may have chunks at the server. It must store no more of them: a ring
                # has one writer.
                ray.get(host.server.register.remote(self._index))
            shared: Context = ray.get(host.context[0])
            drive(process, shared, self._role, self._index)
            return
        check_code(run_info.code, self.pid_and_address()[1])
        connection = ServerConnection(host.server, self._index, run_info.options.ray.chunks_in_flight)
        drive(process, remote_context(run_info, connection), self._role, self._index)
        connection.close()


def end_with(owner: int) -> None:
    """End this process when the owner of its shared memory, main or a learner's host, has ended.

    The owner need not be its parent. Ray would end it with main too, but not if Ray's head has gone.
    """

    def wait() -> None:
        select.select([descriptor], [], [])
        log_to_stderr(f"this process ends, because the owner of its shared memory (pid {owner}) has ended")
        os._exit(TRAINING_FAILED)

    descriptor = os.pidfd_open(owner)
    threading.Thread(target=wait, name="end with owner", daemon=True).start()


class CodeMismatchError(RuntimeError):
    """A node has another version of the project than main."""

    exit_code = BAD_OPTIONS


def code_digests() -> dict[str, str]:
    """Return the digest of each of the project's files, by its path in the project."""
    files = [path for package in PACKAGES for path in (PROJECT / package).rglob("*.py")]
    return {
        str(path.relative_to(PROJECT)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() for path in files
    }


def check_code(expected: Mapping[str, str], node: str) -> None:
    """Compare the files here, on `node`, with main's. Raises CodeMismatchError, which names a file that differs."""
    own = code_digests()
    if differing := sorted(path for path in own.keys() | expected.keys() if own.get(path) != expected.get(path)):
        more = f" and {len(differing) - 1} more files" if len(differing) > 1 else ""
        raise CodeMismatchError(
            f"node {node} has another version of the code than main: {differing[0]}{more} differ in {PROJECT}; "
            "bring that folder to main's version, then continue the run"
        )
