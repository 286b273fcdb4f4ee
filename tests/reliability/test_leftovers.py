"""What starts that are refused, disks that are full, and runs that end must not leave behind (F43)."""

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

# A disk that is full when run.json is written: of the new file's name the folder keeps an entry
FULL_DISK = """
import os, resource, sys
def fill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("run.json") and "w" in str(arguments[1]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))
sys.addaudithook(fill)
"""


def test_f43_neither_refused_starts_nor_full_disks_nor_runs_leave_anything_beside_their_results(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FULL_DISK)
    cases = {"full": (("--config", "dqn-cartpole", "--timestamp", "one"), {"PYTHONPATH": str(tmp_path / "site")}),
             "lost": (("--config", "dqn-cartpole", "--resume", "test_one"), {}),  # its checkpoints and settings are gone
             "done": ((*CARTPOLE, "--timestamp", "one", "--steps", "200"), {})}
    (tmp_path / "lost" / "models" / "test_one_checkpoints").mkdir(parents=True)
    for name in cases:
        (tmp_path / f"temporary {name}").mkdir()
        (tmp_path / name).mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(start, tmp_path / name, *words,
                                     environment={**environment, "TMPDIR": str(tmp_path / f"temporary {name}")})
                   for name, (words, environment) in cases.items()}
    ended = {name: future.result() for name, future in futures.items()}
    told = [(ended[name].returncode, ended[name].stderr.count("\n")) for name in cases]
    assert told == [(2, 1), (3, 1), (0, 0)], [program.stderr for program in ended.values()]
    assert "the run's folder cannot be written" in ended["full"].stderr and "there is no checkpoint" in ended["lost"].stderr
    for name in ("full", "lost"):
        assert not list((tmp_path / name).glob("logs/*")), name  # the timestamp is free
    for name in cases:
        assert not list((tmp_path / f"temporary {name}").iterdir()), name
        assert not [path for path in (tmp_path / name).rglob("*") if path.name.startswith(".")], name


@pytest.fixture
def full(monkeypatch):
    """Every write fails after the file was made."""
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("core.common.files.os.fsync", fail)


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path, full):
    (tmp_path / "latest").write_text("old")
    with pytest.raises(OSError):
        files.write_atomically(tmp_path / "latest", b"new")
    with pytest.raises(run_checkpoint.CheckpointError):
        run_checkpoint.save_parts(tmp_path, {"learner_1": {}, "memory_1": {}})
    with pytest.raises(run_checkpoint.CheckpointError):
        run_checkpoint.save(tmp_path, {"agent": {}}, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"] and (tmp_path / "latest").read_text() == "old"


def test_a_run_that_could_save_nothing_leaves_no_empty_folder_and_no_part_of_a_file(root):
    run = run_registry.claim(read_options(["--root", str(root), "--config", "dqn-cartpole"]))
    run_registry.save(run, {})
    run.checkpoint_folder.mkdir()
    (run.log_folder / "metrics.jsonl").touch()
    for path in (run.log_folder / ".temporary_metrics.csv", run.checkpoint_folder / ".temporary_latest"):
        path.touch()
    run_registry.end(run, 4)
    assert not run.checkpoint_folder.exists()
    assert {path.name for path in run.log_folder.iterdir()} == {"metrics.jsonl", "run.json"}


def test_a_claim_that_fails_is_undone_and_one_of_a_run_that_goes_on_touches_nothing(root, monkeypatch):
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
