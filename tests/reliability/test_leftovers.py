"""Refused starts, full disks and finished runs leave nothing behind (F43)."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.checkpoint import run_checkpoint
from core.common import files
from tests.reliability.program import start
from tests.reliability.test_inline import CARTPOLE
from utils import run_registry
from utils.config.command_line import read_options

# Fill the disk when run.json is written; a full disk still creates the file's directory entry.
FULL_DISK = """
import os, resource, sys
def fill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("run.json") and "w" in str(arguments[1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))
sys.addaudithook(fill)
"""


@pytest.mark.slow
def test_f43_starts_and_runs_leave_only_their_results(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FULL_DISK)
    cases = {
        "full": (("--config", "dqn-cartpole", "--timestamp", "one"), {"PYTHONPATH": str(tmp_path / "site")}),
        "lost": (("--config", "dqn-cartpole", "--resume", "test_one"), {}),  # its checkpoints and options are gone
        "done": ((*CARTPOLE, "--timestamp", "one", "--steps", "200"), {}),
    }
    (tmp_path / "lost" / "models" / "test_one_checkpoints").mkdir(parents=True)
    for name in cases:
        (tmp_path / f"temporary {name}").mkdir()
        (tmp_path / name).mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        futures = {
            name: pool.submit(
                start,
                tmp_path / name,
                *words,
                environment={**environment, "TMPDIR": str(tmp_path / f"temporary {name}")},
            )
            for name, (words, environment) in cases.items()
        }
    ended = {name: future.result() for name, future in futures.items()}
    told = [(ended[name].returncode, ended[name].stderr.count("\n")) for name in cases]
    assert told == [(2, 1), (3, 1), (0, 0)], [program.stderr for program in ended.values()]
    assert (
        "the run's folder cannot be written" in ended["full"].stderr
        and "there is no checkpoint" in ended["lost"].stderr
    )
    for name in ("full", "lost"):
        assert not list((tmp_path / name).glob("logs/*")), name  # the timestamp can be used again
    for name in cases:
        assert not list((tmp_path / f"temporary {name}").iterdir()), name
        assert not [path for path in (tmp_path / name).rglob("*") if path.name.startswith(".")], name


@pytest.fixture
def full(monkeypatch):
    """Fail every write after its file was created."""

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("core.common.files.os.fsync", fail)


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
