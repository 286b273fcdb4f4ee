"""--help and wrong words are answered without torch; everything else is left to main."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.config.options_page import help_text, page
from utils.config.rows import find_row, from_row

PROJECT = Path(__file__).resolve().parents[3]
PAGE = """
import sys
from utils.config import early_answer
sys.meta_path.insert(0, early_answer._Finder)
from utils.config.options_page import page
assert isinstance(sys.modules["torch"], early_answer._Module)
print(page(), end="")
"""

STUCK = """
import os, time
from utils.config import early_answer
early_answer.PATIENCE = 0.2
early_answer._answer = lambda arguments: time.sleep(100)
early_answer.EarlyAnswer(["--config", "dqn-cartpole"]).wait()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("main goes on alone")
"""


@pytest.fixture
def without_torch(tmp_path):
    """Return a function that runs a program where importing torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('this is no torch')")
    path = os.pathsep.join([str(tmp_path), str(PROJECT)])

    def run(*words):
        return subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
        )

    return run


def test_help_needs_no_torch(without_torch):
    answer = without_torch(PROJECT / "main.py", "--config", "sac-pendulum", "--help", "agent")
    options, _ = from_row(find_row("sac-pendulum"))
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, help_text(options, "agent") + "\n", "")


def test_help_ends_quietly_when_its_reader_ends(tmp_path):
    command = f"set -o pipefail; '{sys.executable}' '{PROJECT}/main.py' --help | head -1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (answer.returncode, answer.stdout.split(":")[0], answer.stderr) == (0, "usage", "")


def test_a_fork_that_hangs_is_killed(without_torch):
    answer = without_torch("-c", STUCK)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "main goes on alone\n", "")


def test_wrong_words_are_refused_without_torch(without_torch, tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")  # what main imports when the answer comes
    words = ("--config", "dqn-cartpole", "--agent.batch_size", "0", "--num_actors", "0", "--agent.gama", "1")
    answer = without_torch(PROJECT / "main.py", *words)
    assert answer.returncode == 2 and answer.stdout == ""
    lines = answer.stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "did you mean --agent.gamma" in lines[0]
    assert {line.partition("=")[0] for line in lines[1:]} == {"error: agent.batch_size", "error: num_actors"}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--agent_type", "nowhere:Agent", "--agent.gama", "1"),
        ("--resume", "newest", "--agent.gama", "1"),
        ("--mode", "2", "--help"),
    ],
    ids=["right words", "a class of a user", "a saved run", "the options of a saved run"],
)
def test_main_judges_the_rest_with_torch(without_torch, words):
    answer = without_torch(PROJECT / "main.py", "--config", "dqn-cartpole", *words)
    assert answer.returncode == 1 and "this is no torch" in answer.stderr


def test_every_declaration_is_the_same_without_torch(without_torch):
    answer = without_torch("-c", PAGE)
    assert answer.stdout == page(), answer.stderr
