"""Runs on the disk (F31, and the folders of F25)."""

import json
import os
import stat

import pytest

from core.checkpoint import run_checkpoint
from core.common import files
from utils import run_registry
from utils.config import validation
from utils.config.command_line import read_options
from utils.errors import ConfigurationError


@pytest.fixture
def options(root):
    return lambda *words: read_options(["--root", str(root), "--config", "dqn-cartpole", *words])


def test_two_runs_of_one_second_get_two_folders(options):
    same = options()
    first, second, third = run_registry.claim(same), run_registry.claim(same), run_registry.claim(same)
    assert len({run.signature for run in (first, second, third)}) == 3
    assert all(run.log_folder.is_dir() for run in (first, second, third))


def test_a_start_in_the_second_of_another_takes_a_timestamp_of_its_own(options, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20300101-000000")
    signatures = [run_registry.claim(options()).signature for _ in range(3)]
    assert signatures == ["local_20300101-000000", "local_20300101-000000-2", "local_20300101-000000-3"]


def test_a_start_whose_timestamp_is_taken_while_it_is_checked_is_not_refused(options, monkeypatch):
    check = validation.problems
    monkeypatch.setattr(validation, "problems", lambda checked: (checked.log_folder.mkdir(parents=True), check(checked))[1])
    mine = options()
    assert run_registry.claim(mine).timestamp == f"{mine.timestamp}-2"


def test_a_run_that_still_runs_cannot_be_continued_a_second_time(options):
    running = run_registry.claim(options())
    run_registry.save(running, {})
    with pytest.raises(ConfigurationError, match="still running"):
        run_registry.claim(options("--resume", running.signature))


def test_what_a_run_was_told_is_kept_with_it(options, root):
    run = run_registry.claim(options("--agent.lr", "0.25"))
    run_registry.save(run, {"seed": 1})
    saved = json.loads((run.log_folder / "run.json").read_text())
    assert saved["options"]["agent"]["lr"] == 0.25 and saved["config"] == "dqn-cartpole" and saved["file"] == {"seed": 1}
    assert run_registry.find(str(root), run.signature).options["agent.lr"] == 0.25
    assert [path.name for path in run.log_folder.iterdir()] == ["run.json"]


def test_how_a_run_ended_is_kept_with_it_and_newest_stays_the_one_started_last(options, root):
    first, second = run_registry.claim(options("--timestamp", "1")), run_registry.claim(options("--timestamp", "2"))
    for run, started in ((first, 1_000), (second, 2_000)):
        run_registry.save(run, {})
        os.utime(run.log_folder / "run.json", (started, started))
    assert run_registry.read(first.log_folder).exit_code is None
    run_registry.end(first, 130)
    assert run_registry.read(first.log_folder).exit_code == 130
    assert [run.signature for run in run_registry.all_runs(str(root))] == [second.signature, first.signature]
    run_registry.save(first, {})  # goes on
    assert run_registry.read(first.log_folder).exit_code is None


def test_what_killed_processes_were_writing_goes_when_the_run_ends_and_nothing_else_does(options):
    run = run_registry.claim(options())
    run_registry.save(run, {})
    kept = run_checkpoint.save(run.checkpoint_folder, {"agent": {}}, 1, keep=1)
    (run.checkpoint_folder / f"{files.TEMPORARY}123").mkdir()
    (run.checkpoint_folder / f"{files.TEMPORARY}123" / "agent.pt").touch()
    run_checkpoint.save_parts(run.checkpoint_folder, {"learner_1": {}})
    for name in (run.model_path.name, "another.pth"):
        (run.model_path.parent / f".temporary_{name}").touch()
    run_registry.end(run, 4)
    assert {path.name for path in run.checkpoint_folder.iterdir()} == {kept.name, "latest"}
    assert [path.name for path in run.model_path.parent.iterdir() if path.is_file()] == [".temporary_another.pth"]


def test_a_damaged_settings_file_hides_its_run_and_no_other(options, root):
    run = run_registry.claim(options())
    run_registry.save(run, {})
    (root / "logs" / "broken_1").mkdir()
    (root / "logs" / "broken_1" / "run.json").write_text("{")
    assert [found.signature for found in run_registry.all_runs(str(root))] == [run.signature]


def test_folders_that_cannot_be_made_are_a_bad_environment(options, root):
    (root / "logs").write_text("a file in the way")
    with pytest.raises(ConfigurationError, match="cannot be made") as refused:
        run_registry.claim(options())
    assert refused.value.code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_folder_is_a_bad_environment(options, root):
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ConfigurationError, match="Permission denied"):
        run_registry.claim(options())
    root.chmod(stat.S_IRWXU)
