"""Runs whose files cannot be written are refused at the start or end with 4 (F61)."""

import ctypes
import dataclasses
import errno
import os
import resource
import shlex
import signal
import sys
from pathlib import Path

import pytest

from core.checkpoint import run_checkpoint
from core.checkpoint.run_checkpoint import CheckpointError
from core.engines.run_end import best_model_hint, resume_command_hint
from core.runtime.run_state import RunState
from tests.reliability.program import SLOW, Program
from tests.reliability.test_deaths import ENDLESS
from tests.reliability.test_inline import CARTPOLE
from utils import run_registry
from utils.config.command_line import read_options
from utils.errors import ConfigurationError
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

CLONE_NEWNS, MS_PRIVATE_OF_ALL = 0x00020000, (1 << 18) | (1 << 14)
UNWRITABLE = Path("/proc/sys")  # a folder in which nobody, not even root, can create a file


def small_file_system(folder):
    """Mount a file system of 16 kB at `folder`, visible to this process and its children only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_PRIVATE_OF_ALL, None)
        or libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=16k")
    ):
        raise OSError(ctypes.get_errno(), "no file system can be mounted here")


def can_mount(folder):
    pid = os.fork()
    if pid == 0:
        try:
            small_file_system(folder)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


# at the start ------------------------------------------------------------------------------------------------------
def test_f61_an_unwritable_models_folder_is_refused(start_here, tmp_path):
    (tmp_path / "models").symlink_to(UNWRITABLE)
    refused = start_here(tmp_path, *CARTPOLE)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(f"error: models cannot be saved in {tmp_path / 'models'}, where ")
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_f61_a_disk_with_a_few_kilobytes_is_refused(tmp_path):
    (tmp_path / "models").mkdir()
    if not can_mount(tmp_path / "models"):
        pytest.skip("needs the right to mount a file system")
    with Program(tmp_path, *CARTPOLE, before=lambda: small_file_system(tmp_path / "models")) as program:
        assert program.until_ended(90) == 2
        assert "(No space left on device): make room" in program.output and program.output.count("\n") == 1
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_f61_claim_checks_the_room_for_a_first_checkpoint(root, monkeypatch, resumed):
    tried = []

    def allocate(descriptor, offset, size):
        tried.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = read_options([*CARTPOLE, "--root", str(root)])
    if resumed:
        first = run_registry.claim(options)
        run_registry.save(first, {})
        os.close(run_registry.locks.pop(first.log_folder))
        options = read_options(["--root", str(root), "--config", "dqn-cartpole", "--resume", first.signature])
    before = sorted(root.rglob("*"))
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        run_registry.claim(options, 12_345)
    assert tried == [12_345 + run_registry.RESERVED_BYTES] and sorted(root.rglob("*"))[: len(before)] == before
    assert not list((root / "models").iterdir()) and (root / "logs").exists() is resumed


@pytest.mark.parametrize("words", [("--timestamp",), ("--machine",), ("--mode", "2", "--timestamp"), ("--resume",)])
def test_f61_a_signature_too_long_for_a_file_name_is_refused(root, capsys, words):
    with pytest.raises(SystemExit) as exit:
        read_options(["--root", str(root), *CARTPOLE, *words, "é" * 200])
    said = capsys.readouterr().err
    assert exit.value.code in (2, 3) and all(line.startswith("error: ") for line in said.splitlines())
    assert "no file system takes more than 255: shorten them" in said or "there is no run é" in said


def test_f61_the_longest_allowed_signature_can_be_saved(root):
    length = 255 - len(run_registry.longest_name("test_"))
    words = ["--root", str(root), *CARTPOLE, "--timestamp"]
    claimed = run_registry.claim(read_options([*words, "t" * length]))
    run_checkpoint.save(claimed.checkpoint_folder, {"agent": {}}, 1, keep=1)
    with pytest.raises(SystemExit):
        read_options([*words, "t" * (length + 1)])


def train(root, *words):
    """Train on the inline engine and return the exit code."""
    options = read_options(["--root", str(root), *words])
    context, agent = create_context(options)
    return agent.launch(EnginesDict["inline"](context, ProcessesDict))


# at the end --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("resumed", [False, True])
def test_f61_a_last_checkpoint_that_is_not_written_exits_4(root, alone, monkeypatch, capsys, resumed):
    if resumed:
        assert train(root, *CARTPOLE, "--timestamp", "one", "--updates", "2") == 0

    def full(*arguments):
        raise CheckpointError("no space left")

    monkeypatch.setattr(run_checkpoint, "save", full)
    words = ("--resume", "test_one", "--engine", "inline", "--updates", "4")
    assert train(root, *(words if resumed else (*CARTPOLE, "--timestamp", "one", "--updates", "2"))) == 4
    said = capsys.readouterr().err
    assert "the last write of learner 0 failed: not all that this run made is on disk" in said
    assert (
        f"continue this run with: {shlex.quote(sys.orig_argv[0])} main.py --config dqn-cartpole --resume test_one"
        if resumed
        else "this run has no checkpoint (one is due at the end) and cannot be continued"
    ) in said


@pytest.mark.slow
def test_f61_an_interrupted_run_that_saves_nothing_exits_4(tmp_path):
    """The limit acts like a full disk on the checkpoint, the best model and the metrics."""
    with Program(tmp_path, *ENDLESS, "--learner.checkpoint_period", "1000") as program:
        program.until_training(1_200)
        for pid in program.children().values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(15 * SLOW) == 4
        assert "the last write of logger 0, learner 0" in program.output and "Traceback" not in program.output
        assert "this run has no checkpoint (one is due every 1000 s" in program.output and not program.leftovers()


def test_a_later_successful_write_clears_a_failed_one():
    run_state = RunState(3)
    run_state.record_write(2, False)
    assert run_state.failed_writers == [2]
    run_state.record_write(2, True)
    assert run_state.failed_writers == []


def test_a_finished_run_tells_the_command_that_tests_its_model(root):
    options = read_options(["--root", str(root), "--config", "dqn-cartpole", "--machine", "box", "--timestamp", "one"])
    said = best_model_hint(options)
    assert said.startswith(f"best model: {root}/models/box_one.pth; test it with: ")
    assert said.endswith(f" main.py --config dqn-cartpole --mode 2 --machine box --timestamp one --root '{root}'")
    assert "--config 'my row' --mode 2" in best_model_hint(dataclasses.replace(options, config="my row"))


def test_the_resume_hint_says_when_checkpoints_are_due(root):
    def said(*words):
        return resume_command_hint(read_options(["--root", str(root), "--config", "dqn-cartpole", *words]))

    assert "every 60 s" not in said("--engine", "inline") and "(one is due at the end)" in said("--engine", "inline")
    assert (
        "(one is due every 500 agent steps, learner.checkpoint_steps; every 60 s, "
        "learner.checkpoint_period; at the end)" in said("--learner.checkpoint_steps", "500")
    )
