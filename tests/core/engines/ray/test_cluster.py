"""A folder is removed when its owner has ended, however that happens."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from core.engines.ray.cluster import Sweeper

OWNER = """
import sys
import psutil
from core.engines.ray.cluster import Sweeper
sweeper = Sweeper(sys.argv[1])
print(len(psutil.Process().children()), flush=True)
input()
"""


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp())
    (path / "inner").mkdir()
    (path / "inner" / "file").touch()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shells(folder: Path) -> list[psutil.Process]:
    """Return the running sweepers of this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-2:] == ["sweeper", str(folder)]:
                found.append(process)
    return found


def test_a_killed_owners_folder_and_the_processes_in_it_go(folder):
    """Ray kills the children of a process with it, so that the shell must be none."""
    with open(folder / "inner" / "file") as file:
        user = subprocess.Popen(["sleep", "60"], stdin=file)
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout.readline() == "0\n" and shells(folder) and user.poll() is None
            owner.kill()
            assert user.wait(30) < 0
            until(lambda: not folder.exists() and not shells(folder))
        finally:
            owner.kill()
            user.kill()


def test_a_closed_sweeper_leaves_no_shell(folder):
    sweeper = Sweeper(str(folder))
    assert len(shells(folder)) == 1 and os.getpgid(shells(folder)[0].pid) != os.getpgid(0)
    sweeper.close()
    assert not folder.exists()
    until(lambda: not shells(folder))
