"""What is left of a run's settings when they were lost, and it is continued as of a row that may be another's."""

import pytest

from utils import run_registry
from utils.config.command_line import read_options


@pytest.fixture
def continued(root):
    """A run whose settings were lost, continued as of a row."""
    def start(row):
        (root / "models" / "m_1_checkpoints").mkdir(parents=True, exist_ok=True)
        options = run_registry.claim(read_options(["--root", str(root), "--resume", "m_1", "--config", row]))
        run_registry.save(options, {})
        (options.log_folder / "metrics.jsonl").touch()
        return options

    return start


@pytest.mark.parametrize("exit_code", [2, 3])
def test_settings_of_a_row_that_proved_wrong_do_not_stand_in_the_way_of_the_right_one(continued, monkeypatch, exit_code):
    monkeypatch.setattr("core.common.files.fcntl.flock", lambda descriptor, operation: None)  # as if it had ended
    wrong = continued("dqn-minatar-breakout")
    run_registry.end(wrong, exit_code)
    assert [path.name for path in wrong.log_folder.iterdir()] == ["metrics.jsonl"]
    right = continued("dqn-cartpole")
    run_registry.end(right, 130)
    assert run_registry.read(right.log_folder).config == "dqn-cartpole" and run_registry.read(right.log_folder).exit_code == 130
    run_registry.save(right, {})  # goes on, of a row that is known
    run_registry.end(right, exit_code)
    assert run_registry.read(right.log_folder).exit_code == exit_code
