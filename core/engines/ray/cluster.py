"""A Ray cluster for the time of one run: started on this machine for the run alone, or joined at `ray.address`.

A thread asks the head of the cluster for its nodes, and a shell removes its folder however main ends.
"""

import logging
import math
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from core.common.exit_codes import BAD_OPTIONS
from core.runtime.options import RayParams

Needs = dict[str, dict[str, float]]  # name of a process -> CPUs and GPUs
Nodes = dict[str, dict[str, Any]]  # node id -> Ray's entry of the node

# Variables that Ray reads when it is imported. LOCAL_VARIABLES are for a node that is started here: it stays on
# 127.0.0.1, where no other machine reaches it, and its workers have the niceness that the run gives them.
LOCAL_VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
}
VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a late query of the head would start another Ray after the shutdown
    # A process without a share of a GPU sees no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # By default Ray ends main a minute after the head is lost, while main may still save.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
# Period of Ray's queries of the head while it joins. If something else answers at the head's port, each query takes
# 40 s, and Ray makes twenty by default.
JOIN_VARIABLES = {"RAY_gcs_server_port_wait_time_s": "1"}
MAX_PARENT_LENGTH = 30  # characters: this folder is part of the paths of Ray's sockets, which may have 107
PRINT_SECONDS = 1.0  # Ray prints what its processes wrote a moment later, and drops at shutdown what is left
QUERY_PERIOD = 2.0  # seconds between two queries of the head
# Seconds that one call of `silence` adds at most, because time in which main itself was stopped does not count.
MAX_SILENCE_STEP = 1.0
# The input of this shell closes when the owner ends. Then every process that has a file of the folder open is killed,
# because Ray's agents would stay for a minute to report to what is gone. If the folder is gone, nothing is left to do.
# The shell is no child of the owner, because Ray kills the children of its processes together with them.
SWEEP = """exec 3<&0
(
    read gone <&3
    for again in 1 2 3 4 5 6; do
        [ -d "$1" ] || [ "$again" -gt 1 ] || exit
        find /proc/[0-9]*/fd -lname "$1/*" | cut -d/ -f3 | sort -u | xargs -r kill -9
        rm -rf -- "$1"
        sleep 0.3
    done
) 3<&3 &"""


class ClusterError(RuntimeError):
    """The cluster cannot be used, or cannot hold the run."""

    exit_code = BAD_OPTIONS


class Cluster:
    """The cluster of a run. `home` is the id of the node of this process, and if `is_local` no other node can join."""

    def __init__(self, params: RayParams, needs: Needs):
        """Start or join the cluster.

        Args:
            needs: CPUs and GPUs of every process of the run, by its name.

        Raises:
            ClusterError: the cluster cannot be used.
        """
        self._sweeper: Sweeper | None = None  # of the folder of a cluster that is started here
        self.is_local = params.address is None
        os.environ.update(VARIABLES | os.environ)  # those that are set already stay
        if params.address is None:
            name = "Ray on this machine"
            arguments = self._prepare_start(math.ceil(sum(need["CPU"] for need in needs.values())), params)
        else:
            name, arguments = f"the Ray cluster at ray.address={params.address}", {"address": params.address}
            os.environ.update(JOIN_VARIABLES | os.environ)
            _try_to_connect(params.address, params.connect_timeout)
        import ray

        try:
            ray.init(logging_level=logging.ERROR, **arguments)
        except Exception as error:
            self.close()
            raise ClusterError(f"{name} cannot be used: {type(error).__name__}: {error}") from None
        self.home: str = ray.get_runtime_context().get_node_id()

    def _prepare_start(self, num_cpus: int, params: RayParams) -> dict[str, Any]:
        """Make the folder of a cluster on this machine, and return the arguments of ray.init."""
        os.environ.update(LOCAL_VARIABLES)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        parent = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="ray_", dir=parent if len(parent) <= MAX_PARENT_LENGTH else "/tmp")
        self._sweeper = Sweeper(folder)
        return {
            "address": "local",  # even if the environment has RAY_ADDRESS
            "num_cpus": max(num_cpus, 1),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": folder,
            "object_store_memory": params.object_store_bytes,
        }

    def close(self) -> None:
        """Leave the cluster. Of a cluster that was started here, end every process and remove the folder."""
        import ray

        children = psutil.Process().children(recursive=True)
        if ray.is_initialized():
            time.sleep(PRINT_SECONDS)
        ray.shutdown()
        if self._sweeper is not None:
            for process in children:  # if the head ended before its agents, Ray leaves them behind
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._sweeper.close()


def _try_to_connect(address: str, timeout: float) -> None:
    """Raise ClusterError if nothing answers at host:port. Another address, such as auto, is left to Ray."""
    host, colon, port = address.rpartition(":")
    if colon:
        try:
            socket.create_connection((host, int(port)), timeout).close()
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"ray.address={address}: nothing answers there ({error}); is the head up, and the port open?"
            ) from None


class Sweeper:
    """A shell that removes a folder when this process has ended, however that happens."""

    def __init__(self, folder: str):
        """Start the shell. It also kills the processes that have files of the folder open."""
        shell = subprocess.Popen(
            ["sh", "-c", SWEEP, "sweeper", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        shell.wait()
        assert shell.stdin is not None
        self._folder, self._pipe = folder, shell.stdin

    def close(self) -> None:
        """Remove the folder and end the shell, which removes what is left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._pipe.close()


# the head -------------------------------------------------------------------------------------------------------------
def alive_nodes() -> Nodes:
    """Return the nodes of the cluster that are alive."""
    import ray

    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def free_resources() -> Needs:
    """Return what each node has left now, by its id."""
    from ray._private.state import available_resources_per_node

    return {node: dict(free) for node, free in available_resources_per_node().items()}


class Answer(NamedTuple):
    """The newest answer of the head."""

    time: float  # of the query, in monotonic seconds
    nodes: Nodes  # those that are alive
    bundles: dict[int, str]  # number of a bundle of the placement group -> id of its node, of bundles that have one
    free: Needs  # what each node has left, by its id


class Head:
    """A thread that queries nodes and bundles until `close`. `answer` is None before the first answer.

    It is a thread, because a call to a head that is gone never returns.
    """

    def __init__(self, placement_group: Any):
        self.answer: Answer | None = None
        self._placement_group, self._closed = placement_group, threading.Event()
        self._last_answer: Answer | None = None
        self._last_check, self._silence = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._query, name="head", daemon=True)
        self._thread.start()

    def silence(self) -> float:
        """Return the seconds without an answer, as counted at the calls of this method."""
        now = time.monotonic()
        self._silence += min(now - self._last_check, MAX_SILENCE_STEP)
        if self.answer is not self._last_answer:
            self._silence = 0.0
        self._last_answer, self._last_check = self.answer, now
        return self._silence

    def fresh_answer(self, timeout: float) -> Answer | None:
        """Wait for the answer to a query from now on. Return None after `timeout` seconds of silence."""
        begin = time.monotonic()
        while self.answer is None or self.answer.time < begin:
            if self.silence() > timeout:
                return None
            time.sleep(0.1)
        return self.answer

    def close(self) -> None:
        """End the thread. Must be called before Ray is shut down, because Ray would start again for a query."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def _query(self) -> None:
        from ray.util import placement_group_table

        while not self._closed.is_set():
            begin = time.monotonic()
            with suppress(Exception):  # the errors for a head that is gone vary; its silence is what counts
                nodes = alive_nodes()
                table = {} if self._placement_group is None else placement_group_table(self._placement_group)
                bundle_nodes = table.get("bundles_to_node_id", {})
                bundles = {number: node for number, node in bundle_nodes.items() if node in nodes}
                free = {node: left for node, left in free_resources().items() if node in nodes}
                self.answer = Answer(begin, nodes, bundles, free)
            self._closed.wait(QUERY_PERIOD)
