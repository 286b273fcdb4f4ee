"""The Ray actor class whose processes run single-processes."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ray

from core.common.processes import set_process_name
from core.device.torch_runtime import use_threads
from core.engines import process_main
from core.engines.ray.code_version import check_code
from core.engines.ray.connection import ServerConnection
from core.engines.ray.remote_context import RemoteRunInfo, remote_context
from core.runtime.context import Context


class Host(NamedTuple):
    """The process that owns the shared memory of a node: main at home, a `LearnerHost` on another learner's node."""

    node: str  # its id
    pid: int
    context: list[Any]  # an ObjectRef, in a list so that only workers on this node fetch it, who alone can open it
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

    def run(
        self, process: Callable[[Context, int], Iterator[bool]], host: Host, run_info: RemoteRunInfo, threads: int
    ) -> None:
        """Drive the single-process to its end.

        Args:
            process: generator function of the role.
            host: owner of the shared memory that this process reads and writes.
            run_info: what workers on other nodes than the host's need of the context.
            threads: intra-op threads of torch.
        """
        set_process_name(f"{self._role} {self._index}")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # main alone decides when a run ends
        use_threads(threads)
        if ray.get_runtime_context().get_node_id() == host.node:
            process_main.end_with(host.pid)
            if host.server is not None and self._role == "actor":
                # A predecessor on another node may have chunks at the server. It must store no more of them: a ring
                # has one writer.
                ray.get(host.server.register.remote(self._index))
            shared: Context = ray.get(host.context[0])
            process_main.drive(process(shared, self._index), shared, shared.process_ind(self._role, self._index))
            return
        check_code(run_info.code, self.pid_and_address()[1])
        connection = ServerConnection(host.server, self._index, run_info.options.ray.chunks_in_flight)
        remote = remote_context(run_info, connection)
        process_main.drive(process(remote, self._index), remote, remote.process_ind(self._role, self._index))
        connection.close()
