"""A run's output is not read by anybody (F52)."""

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest

from tests.reliability.program import PROJECT, SLOW, Program
from tests.reliability.test_faulty_code import FAULTY, INLINE, faults

PRINTING = faults({"kind": "print"})


def full_pipe():
    """Return both ends of a pipe that has no room for another line."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"-" * 4096)
    return reader, writer


@pytest.mark.slow
def test_f52_a_run_whose_output_is_not_read_trains_and_ends(tmp_path):
    reader, writer = full_pipe()
    words = shlex.split(
        "--num_actors 1 --steps 100000000 --learner.checkpoint_period 0.5 "
        "--supervisor.heartbeat_timeout 5 --evaluator.period 1e9"
    )
    checkpoints = tmp_path / "models" / "test_one_checkpoints"
    with Program(tmp_path, *FAULTY, *words, environment=PRINTING, output=writer) as program:
        program.until_training(200)
        program.until(lambda: [*checkpoints.glob("step_*")], 20 * SLOW, "the first checkpoint")
        logger, actor, began = program.children()["logger 0"], program.kill("actor 0"), time.monotonic()
        program.until(lambda: program.children().get("actor 0", actor) != actor, 10 * SLOW, "the actor to be replaced")
        saved = max(checkpoints.glob("step_*"))
        program.until(
            lambda: time.monotonic() > began + 7 and max(checkpoints.glob("step_*")) != saved, 20 * SLOW, "a checkpoint"
        )
        program.until_training(program.agent_steps() + 100)
        assert program.children()["logger 0"] == logger
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(15 * SLOW) == 130 and not program.leftovers()
    assert os.read(reader, 1 << 16).strip(b"-") == b""
    os.close(reader), os.close(writer)


@pytest.mark.slow
def test_f52_a_late_reader_sees_the_dropped_count_and_the_end(tmp_path):
    terminal, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, b"\x28\x00\x64\x00\x00\x00\x00\x00")  # 40 lines of 100 columns
    seen = []

    def read():
        try:
            while block := os.read(terminal, 1 << 16):
                seen.append(block)
        except OSError:  # the program has ended
            pass

    words = ("--seconds", "8", "--logger.period", "0.2")
    with Program(tmp_path, *FAULTY, *INLINE, *words, environment=PRINTING, output=side) as program:
        os.close(side)
        program.until(lambda: len(program.metrics()) > 5, 60, "several periods")
        reading = threading.Thread(target=read)
        reading.start()
        assert program.until_ended(30 * SLOW) == 0
        reading.join(10)
    os.close(terminal)
    output = b"".join(seen).decode()
    assert "lines were dropped here: nobody read them" in output
    progress, best = output.rstrip().splitlines()[-2:]
    assert progress.startswith("steps ") and "left 0:00:0" in progress and best.startswith("best model: ")
    live = [line for line in output.splitlines(keepends=True) if line.startswith("steps") and line.endswith("\r")]
    assert live and {len(line) for line in live} == {100}  # one less than the terminal is wide


@pytest.mark.faults
def test_f52_a_sweep_whose_output_is_not_read_finishes(tmp_path):
    reader, writer = full_pipe()
    words = (
        "--root",
        str(tmp_path),
        *shlex.split("--configs dqn-cartpole --seeds 1 2 --"),
        *INLINE,
        *shlex.split("--updates 10 --rate_limiter.min_replay_size 50 --evaluator.episodes 1"),
    )
    sweep = subprocess.Popen([sys.executable, "-m", "utils.sweep", *words], stdout=writer, stderr=writer, cwd=PROJECT)
    try:
        sweep.wait(40 * SLOW)
        assert len(list(tmp_path.glob("logs/*/table.csv"))) == 1 and len(list(tmp_path.glob("models/*.pth"))) == 2
    finally:
        sweep.terminate(), sweep.wait()
        os.close(reader), os.close(writer)
