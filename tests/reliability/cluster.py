"""Run a Ray cluster of several nodes on this machine, in a process of its own.

The cluster is made by Ray's `cluster_utils`:

    python -m tests.reliability.cluster FOLDER HEAD_CPUS NODE_CPUS...

The process prints the cluster's address when it is up, then reads commands from its input: `add CPUS` adds a node,
`kill` removes the newest node abruptly, like a power failure, and `mount OTHER FOLDER` replaces a folder for later
nodes.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOKEN = "a-token-of-the-tests-" + "0" * 16
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
PROJECT = Path(__file__).resolve().parents[2]


class Nodes:
    """Control the cluster's process; use as a context manager, which ends the processes and removes the folder."""

    def __init__(self, *cpus: int):
        # short, because Ray puts Unix sockets below it and their paths are limited to 107 bytes
        self.folder = tempfile.mkdtemp(prefix="rc_", dir="/tmp")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.cluster", self.folder, *map(str, cpus)],
            cwd=PROJECT,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        self._say("kill")

    def add(self, cpus: int) -> None:
        self._say(f"add {cpus}")

    def mount(self, other: Path, folder: Path) -> None:
        """Let nodes that are added from now on see `other` in place of `folder`. This needs root."""
        self._say(f"mount {other} {folder}")

    def _say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        line = self.process.stdout.readline().strip()
        assert line, "the cluster's process has ended"
        return line


def main(folder: str, cpus: list[int]) -> None:
    os.environ["RAY_TMPDIR"] = folder
    os.makedirs(os.path.join(folder, "ray"))
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False, **common})
    nodes = [cluster.add_node(num_cpus=count, **common) for count in cpus[1:]]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, *values = line.split()
        if word == "add":
            nodes.append(cluster.add_node(num_cpus=int(values[0]), **common))
        elif word == "mount":
            mount(*values)
        else:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


def mount(other: str, folder: str) -> None:
    """Put a folder in place of another, for this process and those that it starts from now on."""
    libc, new_mounts, all_private, bind = ctypes.CDLL(None, use_errno=True), 0x20000, 0x44000, 0x1000
    if (
        libc.unshare(new_mounts)
        or libc.mount(b"none", b"/", None, all_private, None)
        or libc.mount(os.fsencode(other), os.fsencode(folder), None, bind, None)
    ):
        raise OSError(ctypes.get_errno(), f"{other} cannot be mounted on {folder}")


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2:])))
