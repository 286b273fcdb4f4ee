"""Runs are claimed, saved, found and ended on the disk (F25, F31)."""

import json
import os

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


def test_claiming_the_same_options_again_gets_another_folder(options):
    same = options()
    first, second, third = run_registry.claim(same), run_registry.claim(same), run_registry.claim(same)
    assert len({run.signature for run in (first, second, third)}) == 3
    assert all(run.log_folder.is_dir() for run in (first, second, third))


def test_runs_started_in_one_second_get_distinct_timestamps(options, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20300101-000000")
    signatures = [run_registry.claim(options()).signature for _ in range(3)]
    assert signatures == ["local_20300101-000000", "local_20300101-000000-2", "local_20300101-000000-3"]


def test_a_timestamp_taken_during_validation_is_replaced(options, monkeypatch):
    check = validation.problems
    monkeypatch.setattr(
        validation,
        "problems",
        lambda checked, *refused: (checked.log_folder.mkdir(parents=True), check(checked, *refused))[1],
    )
    mine = options()
    assert run_registry.claim(mine).timestamp == f"{mine.timestamp}-2"


def test_a_running_run_cannot_be_resumed(options):
    running = run_registry.claim(options())
    run_registry.save(running, {})
    with pytest.raises(ConfigurationError, match="still running"):
        run_registry.claim(options("--resume", running.signature))


def test_a_runs_options_are_saved_in_run_json(options, root):
    run = run_registry.claim(options("--agent.learning_rate", "0.25"))
    run_registry.save(run, {"seed": 1})
    saved = json.loads((run.log_folder / "run.json").read_text())
    assert (
        saved["options"]["agent"]["learning_rate"] == 0.25
        and saved["config"] == "dqn-cartpole"
        and saved["file"] == {"seed": 1}
    )
    assert run_registry.find(str(root), run.signature).options["agent.learning_rate"] == 0.25
    assert [path.name for path in run.log_folder.iterdir()] == ["run.json"]


def test_the_exit_code_is_saved_and_keeps_the_order_of_starts(options, root):
    first, second = run_registry.claim(options("--timestamp", "1")), run_registry.claim(options("--timestamp", "2"))
    for run, started in ((first, 1_000), (second, 2_000)):
        run_registry.save(run, {})
        os.utime(run.log_folder / "run.json", (started, started))
    assert run_registry.read(first.log_folder).exit_code is None
    run_registry.end(first, 130)
    assert run_registry.read(first.log_folder).exit_code == 130
    assert [run.signature for run in run_registry.all_runs(str(root))] == [second.signature, first.signature]
    run_registry.save(first, {})  # the run is resumed
    assert run_registry.read(first.log_folder).exit_code is None


def test_ending_a_run_removes_its_temporary_files_only(options):
    run = run_registry.claim(options())
    run_registry.save(run, {})
    kept = run_checkpoint.save(run.checkpoint_folder, {"agent": {}}, 1, keep=1)
    (run.checkpoint_folder / f"{files.TEMPORARY}123").mkdir()
    (run.checkpoint_folder / f"{files.TEMPORARY}123" / "agent.pt").touch()
    run_checkpoint.save_parts(run.checkpoint_folder, {"learner_1": {}})
    for name in (run.model_path.name, "another.pth"):
        (run.model_path.parent / f".temporary_{name}").touch()
    run_registry.end(run, 4)
    assert {path.name for path in run.checkpoint_folder.iterdir()} == {kept.name}
    assert [path.name for path in run.model_path.parent.iterdir() if path.is_file()] == [".temporary_another.pth"]


def test_a_damaged_run_json_hides_only_its_own_run(options, root):
    run = run_registry.claim(options())
    run_registry.save(run, {})
    (root / "logs" / "broken_1").mkdir()
    (root / "logs" / "broken_1" / "run.json").write_text("{")
    assert [found.signature for found in run_registry.all_runs(str(root))] == [run.signature]


def test_f25_folders_that_cannot_be_created_exit_with_2(options, root):
    (root / "logs").write_text("a file in the way")
    with pytest.raises(ConfigurationError, match="cannot be made") as refused:
        run_registry.claim(options())
    assert refused.value.code == 2
