"""The real program, run from outside: started, watched, signalled, killed."""

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
SLOW = 2.0  # what the limits of the fault table are multiplied by: the machine of the tests runs other things too
NO_ENVIRONMENT: Mapping[str, str] = {}


def start(root: Path, *arguments: str, environment: Mapping[str, str] = NO_ENVIRONMENT) -> subprocess.CompletedProcess:
    """`python main.py` to its end, which must be soon; stdout and stderr as text."""
    command = [sys.executable, str(PROJECT / "main.py"), "--root", str(root), "--machine", "test", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=root, timeout=100,
                          env={**os.environ, **environment})


class Program:
    """`python main.py` with its files under `root`. Use as a context manager: whatever happens, nothing is left running."""

    def __init__(self, root: Path, *arguments: str, project: Path = PROJECT, environment: Mapping[str, str] = NO_ENVIRONMENT,
                 before: Callable[[], object] | None = None, output: int | None = None):
        """`environment` is added to this process's own; `before` is called in the new process before the program (limits). `output` is a
        descriptor that it prints to in place of a file."""
        self.root, self._named = root, set()
        root.mkdir(parents=True, exist_ok=True)
        self.output_path = root / f"output_{time.time_ns()}.txt"
        self._output = self.output_path.open("w")
        command = [sys.executable, str(project / "main.py"), "--root", str(root), "--machine", "test", *arguments]
        self.process = subprocess.Popen(command, stdout=self._output if output is None else output, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL, start_new_session=True, cwd=root, env={**os.environ, **environment},
                                        preexec_fn=before)
        self.family: dict[int, psutil.Process] = {}

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        """With a test that fails, what the program said is shown."""
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
        """Name (as "actor 0") -> pid of the single-processes running now."""
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
                names.setdefault(name, member.pid)  # its forks have its name too
        return names

    def leftovers(self, seconds: float = 3) -> list[str]:
        """What of this program outlives it and a moment of grace: processes (which hold every open port), named shared memory,
        temporary files."""
        deadline = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return running + [str(path) for path in (*self._named, *self.root.rglob(".temporary_*")) if path.exists()]

    def _running(self) -> list[str]:
        return [str(member) for member in self.family.values()
                if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]

    def strays(self) -> dict[int, list[psutil.Process]]:
        """Number of a process -> what its environment started and still runs, as `faults` notes it."""
        found = {}
        for path in self.root.glob("strays_*"):
            with suppress(ValueError):  # being written
                pids = [pid for pid in json.loads(path.read_text()) if psutil.pid_exists(pid)]
                started = [psutil.Process(pid) for pid in pids]
                self.family |= {process.pid: process for process in started}
                found[int(path.name.partition("_")[2])] = [process for process in started if process.status() != psutil.STATUS_ZOMBIE]
        return found

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait for a condition; fail with the program's output when it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.output}"
            time.sleep(0.05)

    def until_ended(self, seconds: float) -> int:
        self.until(lambda: (self.children(), self.process.poll() is not None)[1], seconds, "the end of the program")
        return self.process.returncode

    def until_training(self, steps: int = 1, seconds: float = 60) -> None:
        """Wait until the metrics show this many agent steps."""
        self.until(lambda: (self.children(), self.agent_steps() >= steps)[1], seconds, f"{steps} agent steps")
        self._note_shared_memory()

    def _note_shared_memory(self) -> None:
        """What of /dev/shm the processes of this program have mapped now."""
        for pid in self.family:
            with suppress(OSError):
                self._named |= {Path(path) for path in re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())}

    def sockets(self) -> list[str]:
        """Sockets that any process of this program listens on."""
        self.children()
        processes = [psutil.Process(self.process.pid), *self.family.values()]
        return [str(socket) for process in processes if process.is_running() for socket in process.net_connections("inet")
                if socket.status == psutil.CONN_LISTEN]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signal a single-process by name; returns the pid it had."""
        self.until(lambda: name in self.children(), 30, f"{name} to run")
        pid = self.children()[name]
        os.kill(pid, number)
        return pid

    def metrics(self) -> list[dict]:
        lines = [line for path in sorted(self.root.glob("logs/*/metrics.jsonl")) for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        """Agent steps of the run, one entry a logging period."""
        return [int(row["values"]["global/agent_steps"]) for row in self.metrics() if "global/agent_steps" in row["values"]]

    def agent_steps(self) -> int:
        return (self.steps() or [0])[-1]

    def updates(self) -> int:
        """Of one learner; several make them in step."""
        return int(([row["values"]["global/updates"] for row in self.metrics() if "global/updates" in row["values"]] or [0])[-1])
