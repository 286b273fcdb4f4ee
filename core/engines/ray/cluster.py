"""A Ray cluster for the time of one run: started on this machine for the run alone, or joined at `ray.address`."""

import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from core.engines.ray.sweeper import Sweeper
from core.runtime.options import RayParams

# Variables that Ray reads when it is imported. Those of LOCAL_VARIABLES keep a node on 127.0.0.1, where no other
# machine reaches it.
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
    # A process without a share of a GPU sees no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # By default Ray ends main a minute after the head is lost, while main may still save.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
# Period of Ray's queries of the head while it joins. If something else answers at the head's port, each query takes
# 40 s, and Ray makes twenty by default.
JOIN_VARIABLES = {"RAY_gcs_server_port_wait_time_s": "1"}
MAX_PARENT_LENGTH = 30  # characters: this folder is part of the paths of Ray's sockets, which may have 107


class ClusterError(RuntimeError):
    """The cluster cannot be used, or cannot hold the run."""

    exit_code = 2


class Cluster:
    """The cluster of a run. `home` is the id of the node of this process."""

    def __init__(self, params: RayParams, needs: Mapping[str, Mapping[str, float]], environment: Mapping[str, str]):
        """Start or join the cluster.

        Args:
            params: options of the engine.
            needs: CPUs and GPUs of every process of the run, by its name.
            environment: variables for all processes, unless the user has set them.

        Raises:
            ClusterError: the cluster cannot be used.
        """
        self._params, self._folder = params, ""
        self._sweeper: Sweeper | None = None
        _set_variables({**VARIABLES, **environment})
        if params.address is None:
            self._start(math.ceil(sum(need["CPU"] for need in needs.values())))
        else:
            self._join(params.address)
        import ray

        self.home: str = ray.get_runtime_context().get_node_id()

    @property
    def is_local(self) -> bool:
        """True if the cluster is this machine and no node can join."""
        return self._params.address is None

    def _start(self, num_cpus: int) -> None:
        os.environ.update(LOCAL_VARIABLES)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        parent = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="ray_", dir=parent if len(parent) <= MAX_PARENT_LENGTH else "/tmp")
        self._sweeper = Sweeper(self._folder)
        self._init(
            "Ray on this machine",
            num_cpus=max(num_cpus, 1),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=self._folder,
            object_store_memory=self._params.object_store_bytes,
        )

    def _join(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        if colon:
            try:
                socket.create_connection((host, int(port)), self._params.connect_timeout).close()
            except (OSError, ValueError) as error:
                raise ClusterError(
                    f"ray.address={address}: nothing answers there ({error}); is the head up, and the port open?"
                ) from None
        _set_variables(JOIN_VARIABLES)
        self._init(f"the Ray cluster at ray.address={address}", address=address)

    def _init(self, name: str, **arguments: Any) -> None:
        import ray

        try:
            ray.init(logging_level=logging.ERROR, **arguments)
        except Exception as error:
            self.close()
            raise ClusterError(f"{name} cannot be used: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Leave the cluster. Of a cluster that was started here, end every process and remove the folder."""
        import ray

        children = psutil.Process().children(recursive=True)
        ray.shutdown()
        if self._sweeper is not None:
            for process in children:  # if the head ended before its agents, Ray leaves them behind
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._sweeper.close()


def _set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables that are not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
