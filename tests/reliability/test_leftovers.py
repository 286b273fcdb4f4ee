"""Refused starts, full disks and finished runs leave nothing behind (F43)."""

import errno
import os
from pathlib import Path

import pytest

from core.checkpoint import run_checkpoint
from core.common import files
from tests.reliability.program import start
from tests.reliability.test_inline import CARTPOLE
from utils import run_registry
from utils.config.command_line import read_options


def hidden(folder):
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


@pytest.fixture
def full(monkeypatch):
    """Fail every write after its file was created."""

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("core.common.files.os.fsync", fail)


def test_f43_a_start_that_is_refused_leaves_no_folder(tmp_path, start_here, full):
    """The disk is full when run.json is written. The checkpoints and options of another run are gone."""
    (tmp_path / "models" / "test_lost_checkpoints").mkdir(parents=True)
    for words, code, problem in (
        (("--timestamp", "one"), 2, "the run's folder cannot be written"),
        (("--resume", "test_lost"), 3, "there is no checkpoint"),
    ):
        refused = start_here(tmp_path, "--config", "dqn-cartpole", *words)
        assert refused.returncode == code and problem in refused.stderr and refused.stderr.count("\n") == 1
        assert not list(tmp_path.glob("logs/*")) and not hidden(tmp_path)  # the timestamp can be used again


@pytest.mark.slow
def test_f43_a_run_leaves_its_results_only(tmp_path):
    temporary, root = tmp_path / "temporary", tmp_path / "root"
    temporary.mkdir(), root.mkdir()
    words = (*CARTPOLE, "--timestamp", "one", "--steps", "200")
    done = start(root, *words, environment={"TMPDIR": str(temporary)})
    assert (done.returncode, done.stderr) == (0, "") and not list(temporary.iterdir()) and not hidden(root)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, full):
    (tmp_path / "latest").write_text("old")
    with pytest.raises(OSError):
        files.write_atomically(tmp_path / "latest", b"new")
    with pytest.raises(run_checkpoint.CheckpointError):
        run_checkpoint.save_parts(tmp_path, {"learner_1": {}, "memory_1": {}})
    with pytest.raises(run_checkpoint.CheckpointError):
        run_checkpoint.save(tmp_path, {"agent": {}}, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"] and (tmp_path / "latest").read_text() == "old"


def test_ending_a_run_without_saves_removes_empty_folders(root):
    run = run_registry.claim(read_options(["--root", str(root), "--config", "dqn-cartpole"]))
    run_registry.save(run, {})
    run.checkpoint_folder.mkdir()
    (run.log_folder / "metrics.jsonl").touch()
    for path in (run.log_folder / ".temporary_metrics.csv", run.checkpoint_folder / ".temporary_latest"):
        path.touch()
    run_registry.end(run, 4)
    assert not run.checkpoint_folder.exists()
    assert {path.name for path in run.log_folder.iterdir()} == {"metrics.jsonl", "run.json"}


def test_a_failed_claim_is_undone_but_resumed_runs_keep_files(root, monkeypatch):
    options = read_options(["--root", str(root), "--config", "dqn-cartpole"])

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("core.common.files.fcntl.flock", no_locks)
    with pytest.raises(run_registry.ConfigurationError, match="cannot be made"):
        run_registry.claim(options)
    assert not list((root / "logs").iterdir()) and options.log_folder not in run_registry.locks
    options.log_folder.mkdir()
    Path(options.log_folder / "metrics.jsonl").touch()
    run_registry.abandon(options)
    assert (options.log_folder / "metrics.jsonl").exists()
