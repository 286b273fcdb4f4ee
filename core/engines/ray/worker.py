"""What runs in a process that Ray started: the driver of one single-process."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import ray

from core.common.processes import set_process_name
from core.device.torch_runtime import use_threads
from core.engines import process_main
from core.engines.ray.code_version import check_code
from core.engines.ray.connection import ServerConnection
from core.engines.ray.remote_context import RemoteRunInfo, remote_context
from core.runtime.context import Context


class Worker:
    """A Ray actor for one place of the run's table. Beside the learner it opens the shared memory itself; elsewhere it has a Link."""

    def __init__(self, role: str, index: int):
        self._role, self._index = role, index

    def __repr__(self) -> str:
        return f"{self._role} {self._index}"

    def where(self) -> tuple[int, str]:
        """Process number, and address of the node."""
        return os.getpid(), ray.util.get_node_ip_address()

    def run(self, process: Callable[[Context, int], Iterator[bool]], home: str, main: int, context: list[Any], facts: RemoteRunInfo,
            ingest: Any, threads: int) -> None:
        """Drive the single-process to its end. `home` is the node of `main`, a process number, which has the memory behind the
        `context`, an ObjectRef in a list."""
        set_process_name(f"{self._role} {self._index}")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # main alone decides when a run ends
        use_threads(threads)
        if ray.get_runtime_context().get_node_id() == home:
            process_main.end_with(main)
            if ingest is not None and self._role == "actor":  # a life elsewhere may have chunks there: the ring has one writer
                ray.get(ingest.hello.remote(self._index))
            shared: Context = ray.get(context[0])
            process_main.drive(process(shared, self._index), shared, shared.process_ind(self._role, self._index))
            return
        check_code(facts.code, ray.util.get_node_ip_address())
        link = ServerConnection(ingest, self._index, facts.options.ray.chunks_in_flight)
        apart = remote_context(facts, link)
        process_main.drive(process(apart, self._index), apart, apart.process_ind(self._role, self._index))
        link.close()
