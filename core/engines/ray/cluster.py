"""A Ray cluster for the time of one run: made on this machine, closed to everybody else, or joined where `ray.address` says."""

import logging
import math
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from typing import Any

import psutil

from core.runtime.options import RayParams

# Before ray is imported. The first keeps a node on 127.0.0.1, where nothing from outside can reach it.
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
ALWAYS = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0",
          "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # who has no share of a GPU sees none
          "RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}  # else a minute after the head is lost Ray ends main, which may still save
# How often Ray asks the head of a cluster. Where something else answers at its port each time takes 40 seconds, and twenty are usual.
JOINING = {"RAY_gcs_server_port_wait_time_s": "1"}
LONGEST_FOLDER = 30  # characters: Ray's sockets have long paths in it, and 107 are the most
# Should main be killed: as soon as the other end of the sweeper's input is closed, who has files of the run's own folder open goes with it.
# Ray's agents would stay for a minute, to report to what is no more.
SWEEP = """read gone
for again in 1 2 3 4 5 6; do
    find /proc/[0-9]*/fd -lname "$1/*" | cut -d/ -f3 | sort -u | xargs -r kill -9
    rm -rf -- "$1"
    sleep 0.3
done"""


class ClusterError(RuntimeError):
    """The cluster cannot be had, or cannot hold the run."""

    exit_code = 2


class Cluster:
    """`home` is the node of this process, where the learner and its memory are."""

    def __init__(self, params: RayParams, needs: dict[str, dict[str, float]], environment: dict[str, str]):
        """`needs`: of every process of the run, by its name, the CPUs and GPUs. Raises ClusterError."""
        self._params, self._folder = params, ""
        self._sweeper: subprocess.Popen | None = None
        os.environ.update({name: os.environ.get(name, value) for name, value in (ALWAYS | environment).items()})
        if params.address is None:
            self._start(needs)
        else:
            self._join(params.address)
        import ray
        self.home: str = ray.get_runtime_context().get_node_id()

    @property
    def alone(self) -> bool:
        """No node but this one can ever be part of it."""
        return self._params.address is None

    def _start(self, needs: dict[str, dict[str, float]]) -> None:
        os.environ.update(ALONE)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        usual = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="ray_", dir=usual if len(usual) <= LONGEST_FOLDER else "/tmp")
        self._sweeper = subprocess.Popen(["sh", "-c", SWEEP, "sweeper", self._folder], stdin=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
        cpus = math.ceil(sum(need["CPU"] for need in needs.values()))
        self._init(num_cpus=max(cpus, 1), include_dashboard=False, _node_ip_address="127.0.0.1",
                   _temp_dir=self._folder, object_store_memory=self._params.object_store_bytes)

    def _join(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        if colon:
            try:
                socket.create_connection((host, int(port)), self._params.connect_timeout).close()
            except (OSError, ValueError) as error:
                raise ClusterError(f"ray.address={address}: nothing answers there ({error}); is the head up, and the port open?") from None
        os.environ.update({name: os.environ.get(name, value) for name, value in JOINING.items()})
        self._init(address=address)

    def _init(self, **arguments: Any) -> None:
        import ray
        try:
            ray.init(logging_level=logging.ERROR, **arguments)
        except Exception as error:
            where = "Ray on this machine" if self.alone else f"the Ray cluster at ray.address={self._params.address}"
            self.close()
            raise ClusterError(f"{where} cannot be used: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Nothing of Ray that this run started is left."""
        import ray
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        if self._sweeper is not None:
            for process in started:  # Ray leaves its agents behind where the head died before them
                if process.pid != self._sweeper.pid:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._sweeper.kill()
            self._sweeper.wait()
