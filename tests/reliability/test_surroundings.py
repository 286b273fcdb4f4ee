"""The program runs in unusual surroundings (F04, F23, F29, F30, F33, F35, F59, F60, F62).

They are limits, closed descriptors, odd paths, kills and clocks.
"""

import itertools
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from core.checkpoint import run_checkpoint
from tests.reliability.program import PROJECT, Program

CARTPOLE = shlex.split(
    "--config dqn-cartpole --timestamp one --rate_limiter.min_replay_size 100 --num_envs_per_actor 2 "
    "--agent.batch_size 16 --evaluator.episodes 1 --evaluator.max_steps 30 --logger.period 0.5"
)
INLINE = (*CARTPOLE, "--engine", "inline")


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
    """Whichever module is imported first opens them; that of the last case imports torch, which takes seconds."""
    script = LOOK.format(numbers=numbers, module="utils.config.rows" if numbers == CLOSED[-1] else "utils.errors")
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


@pytest.mark.slow
def test_f60_a_run_without_standard_descriptors_trains_and_saves(tmp_path):
    with Program(tmp_path, *CARTPOLE, "--updates", "30", before=lambda: close((0, 1, 2))) as program:
        assert program.until_ended(90) == 0 and not program.leftovers()
    state, path = run_checkpoint.load(tmp_path / "models" / "test_one_checkpoints")
    steps = sum(state["clock"]["agent_steps"])
    assert 100 <= steps < 10_000 and path.name == f"step_{steps:012d}" and max(state["clock"]["updates"]) >= 30


def limited(what, amount):
    return lambda: resource.setrlimit(what, (amount, amount))


@pytest.mark.slow
def test_f62_a_file_size_limit_is_refused_in_one_line(tmp_path):
    with Program(tmp_path, *CARTPOLE, before=limited(resource.RLIMIT_FSIZE, 1 << 20)) as program:
        assert program.until_ended(90) == 2
        assert "ulimit -f, which counts shared memory too" in program.output and program.output.count("\n") == 1
    assert_nothing_was_made(program)


def assert_nothing_was_made(program):
    assert not [path for path in program.root.rglob("*") if path != program.output_path and path.is_file()]
    assert not (program.root / "logs").exists()


@pytest.mark.slow
def test_f04_f29_f35_f62_odd_paths_and_as_few_descriptors_as_asked_for(tmp_path):
    project = tmp_path / "a clone é 漢字 'of' \"it\""
    for name in ("core", "utils"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "main.py", project)
    root = tmp_path / "runs $HOME; ü"
    with Program(root, *CARTPOLE, project=project, before=limited(resource.RLIMIT_NOFILE, 24)) as refused:
        assert refused.until_ended(90) == 2
        assert "are allowed: raise the limit by ulimit -n" in refused.output and refused.output.count("\n") == 1
        assert_nothing_was_made(refused)
    needed = int(refused.output.partition(" open files")[0].rpartition(" ")[2])
    assert needed <= 64
    words = ("--updates", "20", "--agent.double_q", "False", "--render=false", "--record", "0")
    with Program(root, *CARTPOLE, *words, project=project, before=limited(resource.RLIMIT_NOFILE, needed)) as program:
        assert program.until_ended(90) == 0 and not program.leftovers()
        folder = program.root / "logs" / "test_one"
        assert program.agent_steps() >= 100 and "Traceback" not in program.output and "\x1b" not in program.output
    options = json.loads((folder / "options.json").read_text())
    assert (options["agent"]["double_q"], options["render"], options["record"]) == (False, False, False)
    assert (program.root / "models" / "test_one.pth").exists()


@pytest.mark.slow
def test_f59_wall_clock_jumps_do_not_affect_metric_times(tmp_path):
    """The clock of these processes jumps four times a second: python imports `sitecustomize` before the program."""
    (tmp_path / "sitecustomize.py").write_text("""
import time
clock = time.time
time.time = lambda: clock() - 3e8 * (int(4 * time.monotonic()) % 2)""")
    with Program(tmp_path, *INLINE, "--logger.period", "0.1", environment={"PYTHONPATH": str(tmp_path)}) as program:
        program.until(lambda: (program.metrics() or [{"seconds": 0}])[-1]["seconds"] > 2, 60, "two seconds")
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(60) == 130
        rows = program.metrics()
    moments, seconds = (
        [row["time"] for row in rows],
        [row["seconds"] for row in rows if "global/agent_steps" in row["values"]],
    )
    assert len(seconds) > 5 and max(moments) - min(moments) < 60
    assert seconds == sorted(seconds) and seconds[0] >= 0 and seconds[-1] < 60
    assert all(0 <= row["values"].get("global/wall_seconds", 0) < 60 for row in rows)


def killed_while_it_saves(root, kills, generator):
    """Kill a run that saves every few steps, repeatedly; the newest checkpoint always loads and its steps grow."""
    steps, words = 0, (*INLINE, "--learner.checkpoint_steps", "10", "--learner.checkpoint_replay")
    folder = root / "models" / "test_one_checkpoints"

    def newest():
        return max((path.name for path in folder.glob("step_*")), default="")

    for number in range(kills):
        before = newest()
        with Program(root, *(("--resume", "test_one", "--engine", "inline") if number else words)) as program:
            program.until(lambda before=before: newest() > before, 60, "a newer checkpoint")
            time.sleep(generator.uniform(0, 0.3))
            program.process.kill()
            program.process.wait()
        state, path = run_checkpoint.load(root / "models" / "test_one_checkpoints")
        now = sum(state["clock"]["agent_steps"])
        assert now > steps and path.name.startswith(f"step_{now:012d}")
        steps = now


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_f23_the_newest_checkpoint_loads_after_many_random_kills(tmp_path, capsys):
    killed_while_it_saves(tmp_path, 25, random.Random(1))
    assert "damaged" not in capsys.readouterr().err


STARTS_AND_STOPS = """
import os, sys
import psutil
from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

def held():
    shared = sum(os.fstat(int(name)).st_size for name in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{name}") and "memfd" in os.readlink(f"/proc/self/fd/{name}"))
    return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True)), shared

if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        context, agent = create_context(read_options([*sys.argv[2:], "--timestamp", str(number)]))
        code = agent.launch(EnginesDict[context.options.engine](context, ProcessesDict))
        del context, agent
        print(code, *held(), flush=True)
"""


def starts_and_stops(folder, times, seconds, *words):
    (folder / "script.py").write_text(STARTS_AND_STOPS)
    command = [sys.executable, str(folder / "script.py"), str(times), "--root", str(folder), *words, "--updates", "5"]
    program = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=PROJECT, env={**os.environ, "PYTHONPATH": "."}
    )
    lines = [tuple(map(int, line.split())) for line in program.stdout.splitlines() if line[:2] == "0 "]
    assert len(lines) == times, program.stdout + program.stderr
    return lines


@pytest.mark.slow
def test_f30_inline_starts_and_stops_leak_nothing(tmp_path):
    lines = starts_and_stops(tmp_path, 6, 100, *INLINE)
    assert set(lines[1:]) <= {lines[1]} and lines[-1][2:] == (0, 0)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_f30_twenty_starts_and_stops_leak_nothing(tmp_path):
    lines = starts_and_stops(tmp_path, 20, 880, *CARTPOLE)
    # the one child is multiprocessing's resource tracker
    assert lines[-1][1] <= lines[1][1] and lines[-1][2] <= 1 and lines[-1][3] == 0


# rates -------------------------------------------------------------------------------------------------------------
def cpu_share(program, name, seconds):
    """Return the share of a core that a process uses."""
    process = psutil.Process(program.children()[name])
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began)


def run_with(tmp_path, slow, *words, environment=None):
    """Run with one side about a hundred times slower; return the other side's share of a core, and metrics."""
    words = (
        *CARTPOLE,
        *shlex.split(
            "--steps 100000000 --evaluator.period 1e9 --rate_limiter.error_buffer 200 "
            "--rate_limiter.samples_per_insert 4 --memory.capacity 5000"
        ),
        *words,
    )
    with Program(tmp_path, *words, environment=environment or {}) as program:
        program.until_training(200, seconds=120)
        program.until(
            lambda: any(row["values"].get("learner/loss") is not None for row in program.metrics()), 60, "updates"
        )
        share = cpu_share(program, {"learner 0": "actor 0", "actor 0": "learner 0"}[slow], 8)
        rows = program.metrics()
        program.process.send_signal(signal.SIGINT)
        assert program.until_ended(30) == 130 and not program.leftovers()
    return share, {
        name: [row["values"][name] for row in rows if name in row["values"]]
        for name in ("global/samples_per_insert", "global/rss_mb", "global/replay_steps")
    }


@pytest.mark.faults
@pytest.mark.parametrize("slow", ["learner 0", "actor 0"])
def test_f33_the_faster_side_waits_idle_and_the_ratio_holds(tmp_path, slow):
    agents = "tests.reliability.faults:SlowLearner"
    environment = {"FAULTS": json.dumps([{"kind": "slow"}])} if slow == "actor 0" else {}
    game = ("--env_type", "gym", "--game", "tests.reliability.faults:Faulty-v0")
    share, values = run_with(
        tmp_path, slow, *game, *(("--agent_type", agents) if slow == "learner 0" else ()), environment=environment
    )
    assert share < 0.25
    memory = values["global/rss_mb"]
    assert max(memory[len(memory) // 2 :]) < 1.1 * max(memory[: len(memory) // 2 + 1])
    assert max(values["global/replay_steps"]) <= 5_000 + 200
    assert values["global/samples_per_insert"][-1] <= 4.2
    if slow == "actor 0":
        assert values["global/samples_per_insert"][-1] > 3.5
