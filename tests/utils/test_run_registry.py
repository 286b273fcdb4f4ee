"""Runs are claimed once, and a run that is resumed with wrong options can still be resumed with right ones."""

import dataclasses
from pathlib import Path

import pytest

from utils import run_registry
from utils.config.command_line import read_options
from utils.errors import ConfigurationError


@pytest.fixture
def continued(root):
    """Return a function that resumes a run without run.json as of a config."""

    def start(row):
        (root / "models" / "m_1_checkpoints").mkdir(parents=True, exist_ok=True)
        options = run_registry.claim(read_options(["--root", str(root), "--resume", "m_1", "--config", row]))
        run_registry.save(options, {})
        (options.log_folder / "metrics.jsonl").touch()
        return options

    return start


@pytest.mark.parametrize("exit_code", [2, 3])
def test_options_of_a_wrong_config_do_not_block_the_right_one(continued, alone, exit_code):
    wrong = continued("dqn-minatar-breakout")
    run_registry.end(wrong, exit_code)
    assert [path.name for path in wrong.log_folder.iterdir()] == ["metrics.jsonl"]
    right = continued("dqn-cartpole")
    run_registry.end(right, 130)
    assert (
        run_registry.read(right.log_folder).config == "dqn-cartpole"
        and run_registry.read(right.log_folder).exit_code == 130
    )
    run_registry.save(right, {})  # resumed as of a known config
    run_registry.end(right, exit_code)
    assert run_registry.read(right.log_folder).exit_code == exit_code


@pytest.mark.parametrize("exit_code", [2, 3])
def test_a_refused_continuation_does_not_change_the_options(continued, exit_code):
    run = continued("dqn-cartpole")
    run_registry.end(run, 0)
    other = dataclasses.replace(run, num_actors=2)
    run_registry.save(run, {})  # a part that is killed
    run_registry.save(other, {})
    assert run_registry.read(run.log_folder).options["num_actors"] == 2
    run_registry.end(other, exit_code)
    saved = run_registry.read(run.log_folder)
    assert (saved.options["num_actors"], saved.exit_code) == (1, exit_code)
    assert "before" not in (run.log_folder / "run.json").read_text()


def test_a_named_timestamp_taken_meanwhile_is_refused(root):
    both = [read_options(["--root", str(root), "--config", "dqn-cartpole", "--timestamp", "one"]) for _ in range(2)]
    assert run_registry.claim(both[0]).signature == "local_one"
    with pytest.raises(ConfigurationError, match="run local_one exists: continue it by --resume local_one, or choose"):
        run_registry.claim(both[1])
    assert [path.name for path in (root / "logs").iterdir()] == ["local_one"]


def test_a_run_that_is_named_without_its_machine_is_suggested(continued, root):
    options = continued("dqn-cartpole")
    with pytest.raises(ConfigurationError, match=f"there is no run 1 in .*, did you mean {options.signature}"):
        run_registry.find(str(root), "1")


def test_a_run_that_is_removed_while_runs_are_listed_is_left_out(continued, root, monkeypatch):
    options = continued("dqn-cartpole")
    listed = [options.log_folder / "run.json", root / "logs" / "refused" / "run.json"]
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: listed)
    assert [run.signature for run in run_registry.all_runs(str(root))] == [options.signature]


def test_a_model_is_named_by_its_path_its_file_or_its_run(root, tmp_path):
    model = root / "models" / "local_1.pth"
    model.parent.mkdir(exist_ok=True)
    model.touch()
    for path in (model, "local_1.pth", "local_1"):
        assert run_registry.find_model(path, str(root)) == model
        words = ["--root", str(root), "--config", "dqn-cartpole", "--model_file", str(path)]
        assert read_options(words).model_file == str(model.resolve())
    for path in ("/none", "~nobody-here/none.pth"):
        assert str(run_registry.find_model(path, str(root))) == path
    assert str(run_registry.find_model("/", str(root))) == "/"


def test_a_run_is_named_by_its_signature_its_folders_or_its_newest_checkpoint(tmp_path):
    folder = tmp_path / "models" / "local_one_checkpoints"
    for step in ("step_000000000007", "step_000000000020"):
        (folder / step).mkdir(parents=True)
    for value in ("local_one", "logs/local_one", str(folder), str(folder / "step_000000000020")):
        assert run_registry.signature_of(value) == "local_one"
    with pytest.raises(ConfigurationError, match="from its newest checkpoint, step_000000000020"):
        run_registry.signature_of(str(folder / "step_000000000007"))
    for number in (9, 10):
        (folder / f"step_000000000020.{number}").mkdir()
    assert run_registry.signature_of(str(folder / "step_000000000020.10")) == "local_one"
    with pytest.raises(ConfigurationError, match="--resume local_one continues its run, --model_file"):
        run_registry.signature_of("models/local_one.pth")
