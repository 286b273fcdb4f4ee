"""Programs start without some of the descriptors 0, 1 and 2, or with few descriptors (F60, F62)."""

import itertools
import os
import resource
import subprocess
import sys

import pytest

from core.checkpoint import run_checkpoint
from tests.reliability.program import PROJECT, Program

CARTPOLE = (
    "--config",
    "dqn-cartpole",
    "--timestamp",
    "one",
    "--rate_limiter.min_replay_size",
    "100",
    "--num_envs_per_actor",
    "2",
    "--agent.batch_size",
    "16",
    "--evaluator.episodes",
    "1",
    "--evaluator.max_steps",
    "30",
)
CLOSED = [numbers for count in (1, 2, 3) for numbers in itertools.combinations((0, 1, 2), count)]
LOOK = """
import sys
import {module}
import os
import resource
said = [os.memfd_create("shared") > 2, *(os.readlink(f"/proc/self/fd/{{number}}") for number in {numbers}),
        *(os.get_inheritable(number) for number in range(3))]
print(input() if 0 not in {numbers} else sys.stdin.read())
print("shown", file=sys.stderr)
open(sys.argv[1], "w").write(repr(said))
"""


def close(numbers):
    for number in numbers:
        os.close(number)


@pytest.mark.parametrize("numbers", CLOSED, ids=str)
def test_f60_closed_standard_descriptors_become_dev_null(tmp_path, numbers):
    """Whichever module is imported first opens them."""
    script = LOOK.format(numbers=numbers, module=("utils.errors", "utils.config.dotted_settings")[len(numbers) % 2])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "said")],
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PROJECT,
        preexec_fn=lambda: close(numbers),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == repr([True, *["/dev/null"] * len(numbers), *[True] * 3])
    assert done.stdout.strip() == ("typed" if not {0, 1} & {*numbers} else "") and ("shown" in done.stderr) is (
        2 not in numbers
    )


def test_f60_a_run_without_standard_descriptors_trains_and_saves(tmp_path):
    with Program(tmp_path, *CARTPOLE, "--updates", "30", before=lambda: close((0, 1, 2))) as program:
        assert program.until_ended(90) == 0 and not program.leftovers()
    state, path = run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
    steps = sum(state["clock"]["agent_steps"])
    assert 100 <= steps < 10_000 and path.name == f"step_{steps:012d}" and max(state["clock"]["updates"]) >= 30


def limited(what, amount):
    return lambda: resource.setrlimit(what, (amount, amount))


@pytest.mark.parametrize(
    ("limit", "part"),
    [
        (limited(resource.RLIMIT_NOFILE, 24), "are allowed: raise the limit by ulimit -n"),
        (limited(resource.RLIMIT_FSIZE, 1 << 20), "ulimit -f, which counts shared memory too"),
    ],
    ids=["n", "f"],
)
def test_f62_limits_that_are_too_low_are_refused_in_one_line(tmp_path, limit, part):
    with Program(tmp_path, *CARTPOLE, before=limit) as program:
        assert program.until_ended(90) == 2
        assert part in program.output and program.output.count("\n") == 1, program.output
    assert not [path for path in tmp_path.rglob("*") if path != program.output_path and path.is_file()]
    assert not (tmp_path / "logs").exists()


def test_f62_a_run_works_with_the_descriptors_it_asks_for(tmp_path):
    with Program(tmp_path, *CARTPOLE, before=limited(resource.RLIMIT_NOFILE, 24)) as refused:
        refused.until_ended(90)
    needed = int(refused.output.partition(" open files")[0].rpartition(" ")[2])
    with Program(tmp_path, *CARTPOLE, "--updates", "10", before=limited(resource.RLIMIT_NOFILE, needed)) as program:
        assert program.until_ended(90) == 0 and "Traceback" not in program.output
