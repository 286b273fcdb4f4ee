"""The commands of README and docs/running.md run as printed (F41), and TensorBoard is private (F37)."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from tests.reliability.program import PROJECT, start
from tests.test_documented_examples import MODULES

PAGES = "".join((PROJECT / path).read_text() for path in ("README.md", "docs/running.md"))
COMMANDS = re.findall(r"(?m)^```(?:bash)?\n((?:make|\.venv/bin/python) .*)\n```$", PAGES)
LIMITS = shlex.split(
    "--updates 5 --rate_limiter.min_replay_size 100 --num_envs_per_actor 2 "
    "--evaluator.episodes 1 --evaluator.max_steps 20"
)
STAND_IN = """#!/bin/sh
# Note the words of a program, each before a zero byte, and run TensorBoard only.
case "$1 $2" in
    "-m tensorboard.main") exec "{python}" "$@" ;;
    *) printf '%s\\0' "$@" >> noted.txt && echo >> noted.txt ;;
esac
"""
EXTRAS = ("minatar", "mujoco", "video")
NOTED = [
    "-m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10",
    "-m ruff check .",
    "-m ruff format --check .",
    "-m mypy",
    "-m codespell_lib",
    "-m pytest -q tests/test_prose.py",
    "-m benchmarks.speed",
    "-m benchmarks.onpolicy",
    *(f"-m pip install -e .[{extra}]" for extra in EXTRAS),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a folder with the project's Makefile and a script in place of its virtual environment's python."""
    copy = tmp_path_factory.mktemp("project")
    for path in (PROJECT / "Makefile", PROJECT / "pyproject.toml", *PROJECT.glob("requirements*.lock")):
        shutil.copy(path, copy)
    (copy / "mypackage").mkdir()
    (copy / "mypackage" / "q_learning.py").write_text(dict(MODULES)["q_learning"])
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    for stamp in (".torch", ".installed", ".installed-test", ".installed-dev", ".installed-bench"):
        (copy / ".venv" / stamp).touch()
    return copy


def noted(project: Path) -> list[list[str]]:
    """Run the commands that end and return the words of each program that they start."""
    environment = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKELEVEL")}
    for command in COMMANDS:
        if "tensorboard" not in command:
            done = subprocess.run(["bash", "-c", command], cwd=project, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return [line.split("\0")[:-1] for line in (project / "noted.txt").read_text().splitlines()]


@pytest.mark.slow
def test_f41_every_command_of_the_readme_runs_as_printed(project, start_here, alone, monkeypatch):
    """main.py runs under small limits; what would install, or run other tests, is noted only."""
    assert sum("tensorboard" in command for command in COMMANDS) == 1 and len(COMMANDS) >= 16
    programs = noted(project)
    assert sorted(" ".join(words) for words in programs if words[0] != "main.py") == sorted(NOTED)
    assert set(EXTRAS) <= set(
        tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    monkeypatch.syspath_prepend(project)
    for words in programs:
        if words[0] == "main.py":
            run, engine = (start, "local") if "--num_learners" in words else (start_here, "inline")
            ended = run(project, *words[1:], *LIMITS, "--engine", engine)
            assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
    assert list(project.glob("models/*_test.mp4")) and len(list(project.glob("models/*_test.json"))) >= 2


@pytest.mark.slow
def test_f37_tensorboard_listens_on_loopback_only(project):
    command = next(command for command in COMMANDS if "tensorboard" in command)
    with subprocess.Popen(
        ["bash", "-c", f'{command} ARGS="--port 0"'],
        cwd=project,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as program:
        try:
            deadline, addresses = time.monotonic() + 60, set()
            while not addresses and time.monotonic() < deadline:
                time.sleep(0.1)
                addresses = {
                    socket.laddr.ip
                    for process in psutil.Process(program.pid).children(recursive=True)
                    for socket in process.net_connections("inet")
                    if socket.status == psutil.CONN_LISTEN
                }
            assert addresses == {"127.0.0.1"}
        finally:
            os.killpg(program.pid, 9)
