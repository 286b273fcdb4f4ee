"""The commands of README and docs/running.md run as printed in a copy (F41), and TensorBoard is private (F37)."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.reliability.program import PROJECT
from tests.test_documented_examples import MODULES

PAGES = "".join((PROJECT / path).read_text() for path in ("README.md", "docs/running.md"))
COMMANDS = re.findall(r"(?m)^```(?:bash)?\n((?:make|\.venv/bin/python) .*)\n```$", PAGES)
LIMITS = (
    "--updates 5 --rate_limiter.min_replay_size 100 --num_envs_per_actor 2 "
    "--evaluator.episodes 1 --evaluator.max_steps 20"
)
STAND_IN = """#!/bin/sh
# Programs run under small limits; what would install, or run other tests, is noted only.
case "$*" in
    *--num_learners*) engine=local ;;
    *) engine=inline ;;
esac
case "$1 $2" in
    "main.py "*) exec "{python}" "$@" {limits} --engine $engine ;;
    "-m tensorboard.main") exec "{python}" "$@" ;;
    *) echo "$*" >> noted.txt ;;
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
    """Copy the project, with a script in place of its virtual environment's python."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("core", "utils"):
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (
        PROJECT / "main.py",
        PROJECT / "Makefile",
        PROJECT / "pyproject.toml",
        *PROJECT.glob("requirements*.lock"),
    ):
        shutil.copy(path, copy)
    (copy / "mypackage").mkdir()
    (copy / "mypackage" / "q_learning.py").write_text(dict(MODULES)["q_learning"])
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(python=sys.executable, limits=LIMITS))
    python.chmod(0o755)
    for stamp in (".torch", ".installed", ".installed-test", ".installed-dev", ".installed-bench"):
        (copy / ".venv" / stamp).touch()
    return copy


def run(project: Path, commands: list[str]) -> list[subprocess.CompletedProcess]:
    """Run the commands one after another."""
    environment = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKELEVEL")}
    return [
        subprocess.run(
            ["bash", "-c", command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=110,
        )
        for command in commands
    ]


@pytest.mark.slow
def test_f41_every_command_of_the_readme_runs_as_printed(project):
    waits = [command for command in COMMANDS if "tensorboard" in command]
    assert len(waits) == 1 and len(COMMANDS) >= 16
    ends = [command for command in COMMANDS if command not in waits]
    chains = [[command for command in ends if ("cartpole" in command) is cartpole] for cartpole in (True, False)]
    with ThreadPoolExecutor(2) as pool:
        for program in (
            program for chain in pool.map(lambda commands: run(project, commands), chains) for program in chain
        ):
            assert program.returncode == 0, f"{program.args[-1]}\n{program.stdout}{program.stderr}"
    noted = (project / "noted.txt").read_text().splitlines()
    assert sorted(line.strip() for line in noted) == sorted(NOTED)
    assert set(EXTRAS) <= set(
        tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
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
