"""Run the real program from outside: start, watch, signal and kill it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[2]
SLOW = 2.0  # factor on the time limits of the fault table, because the test machine runs other jobs too
NO_ENVIRONMENT: Mapping[str, str] = {}


def start(root: Path, *arguments: str, environment: Mapping[str, str] = NO_ENVIRONMENT) -> subprocess.CompletedProcess:
    """Run `python main.py` to its end, at most 100 s, and capture stdout and stderr as text."""
    command = [sys.executable, str(PROJECT / "main.py"), "--root", str(root), "--machine", "test", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=root,
        timeout=100,
        env={**os.environ, **environment},
    )


class Program:
    """Run `python main.py` with its files below `root`; as a context manager it leaves no process behind."""

    def __init__(
        self,
        root: Path,
        *arguments: str,
        project: Path = PROJECT,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
        before: Callable[[], object] | None = None,
        output: int | None = None,
    ):
        """Start the program.

        Args:
            root: The folder of the run's files, created if absent.
            arguments: Words of the command line.
            project: The folder of main.py.
            environment: Variables added to those of this process.
            before: Called in the new process before the program, for example to set limits.
            output: A file descriptor that replaces the output file.
        """
        self.root, self._named = root, set()
        root.mkdir(parents=True, exist_ok=True)
        self.output_path = root / f"output_{time.time_ns()}.txt"
        self._output = self.output_path.open("w")
        command = [sys.executable, str(project / "main.py"), "--root", str(root), "--machine", "test", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=self._output if output is None else output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=root,
            env={**os.environ, **environment},
            preexec_fn=before,
        )
        self.family: dict[int, psutil.Process] = {}

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what still runs; print the program's output if the test failed."""
        if any(error):
            print(self.output)
        self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in self.family.values():
            if child.is_running():
                child.kill()
        self._output.close()

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def children(self) -> dict[str, int]:
        """Return the running single-processes as a mapping from name, such as "actor 0", to pid."""
        try:
            members = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            members = []
        self.family |= {member.pid: member for member in members}
        names = {}
        for member in members:
            try:
                name = Path(f"/proc/{member.pid}/comm").read_text().strip()
            except OSError:
                continue
            if name.split(" ")[0] in ("actor", "learner", "evaluator", "logger", "tester"):
                # the first match is the process itself: its forks have the same name
                names.setdefault(name, member.pid)
        return names

    def fork_server(self) -> int:
        """Return the pid of the process that starts the single-processes."""
        self.children()
        (server,) = {
            pid for pid, member in self.family.items() if member.is_running() and member.name() == "fork server"
        }
        return server

    def leftovers(self, seconds: float = 3, was_killed: bool = False) -> list[str]:
        """Return what outlives the program: processes, named shared memory and temporary files.

        Ports need no check of their own, because only a process can hold one open.

        Args:
            seconds: How long processes may take to end.
            was_killed: Main was killed, and its children with it. Temporary files do not count then, because a killed
                process cannot remove the file that it was writing.
        """
        deadline = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        temporary = () if was_killed else self.root.rglob(".temporary_*")
        return running + [str(path) for path in (*self._named, *temporary) if path.exists()]

    def _running(self) -> list[str]:
        return [
            str(member)
            for member in self.family.values()
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE
        ]

    def strays(self) -> dict[int, list[psutil.Process]]:
        """Return the running processes that environments started, by the pid of the single-process that they ran in."""
        found = {}
        for path in self.root.glob("strays_*"):
            with suppress(ValueError):  # the file may be half-written
                pids = [pid for pid in json.loads(path.read_text()) if psutil.pid_exists(pid)]
                started = [psutil.Process(pid) for pid in pids]
                self.family |= {process.pid: process for process in started}
                found[int(path.name.partition("_")[2])] = [
                    process for process in started if process.status() != psutil.STATUS_ZOMBIE
                ]
        return found

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until `condition` holds; fail with the program's output after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.output}"
            time.sleep(0.05)

    def until_ended(self, seconds: float) -> int:
        self.until(lambda: (self.children(), self.process.poll() is not None)[1], seconds, "the end of the program")
        return self.process.returncode

    def until_training(self, steps: int = 1, seconds: float = 60) -> None:
        """Wait until the metrics show at least this many agent steps."""
        self.until(lambda: (self.children(), self.agent_steps() >= steps)[1], seconds, f"{steps} agent steps")
        self._note_shared_memory()

    def _note_shared_memory(self) -> None:
        """Record the files of /dev/shm that processes of this program have mapped."""
        for pid in self.family:
            with suppress(OSError):
                self._named |= {
                    Path(path) for path in re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())
                }

    def sockets(self) -> list[str]:
        """Return the sockets on which any process of this program listens."""
        self.children()
        processes = [psutil.Process(self.process.pid), *self.family.values()]
        return [
            str(socket)
            for process in processes
            if process.is_running()
            for socket in process.net_connections("inet")
            if socket.status == psutil.CONN_LISTEN
        ]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a single-process by name and return its pid."""
        self.until(lambda: name in self.children(), 30, f"{name} to run")
        pid = self.children()[name]
        os.kill(pid, number)
        return pid

    def metrics(self) -> list[dict]:
        lines = [
            line for path in sorted(self.root.glob("logs/*/metrics.jsonl")) for line in path.read_text().splitlines()
        ]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        """Return the run's agent steps, one entry per logging period."""
        return [
            int(row["values"]["global/agent_steps"]) for row in self.metrics() if "global/agent_steps" in row["values"]
        ]

    def agent_steps(self) -> int:
        return (self.steps() or [0])[-1]

    def updates(self) -> int:
        """Return the updates of one learner; several learners update in lockstep."""
        return int(
            ([row["values"]["global/updates"] for row in self.metrics() if "global/updates" in row["values"]] or [0])[
                -1
            ]
        )
