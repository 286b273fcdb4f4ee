"""Small tasks are solved on the local engine, as a user would run them."""

import json
import shlex

import pytest

from tests.reliability.program import Program


@pytest.mark.learn
@pytest.mark.timeout(1000)
def test_cartpole_is_solved_on_the_local_engine(tmp_path):
    with Program(
        tmp_path, *shlex.split("--config dqn-cartpole --timestamp one --target_score 475 --steps 1000000 --seconds 800")
    ) as program:
        assert program.until_ended(860) == 0, program.output
        means = [row["values"].get("evaluator/episodic_return_mean", 0.0) for row in program.metrics()]
        assert max(means) >= 475
        assert not program.leftovers()
    with Program(tmp_path, "--config", "dqn-cartpole", "--mode", "2", "--episodes", "20") as program:
        assert program.until_ended(60) == 0, program.output
    result = json.loads(next(tmp_path.glob("models/*test*.json")).read_text())
    assert len(result["returns"]) == 20


@pytest.mark.learn
@pytest.mark.timeout(1000)
# random play scores about 20
@pytest.mark.parametrize(("row", "score"), [("rainbow-cartpole", 150), ("r2d2-cartpole", 300)])
def test_rainbow_and_r2d2_learn_cartpole(tmp_path, row, score):
    with Program(
        tmp_path,
        "--config",
        row,
        "--timestamp",
        "one",
        "--target_score",
        str(score),
        *shlex.split("--steps 1000000 --seconds 800"),
    ) as program:
        assert program.until_ended(860) == 0, program.output
        assert max(values["values"].get("evaluator/episodic_return_mean", 0.0) for values in program.metrics()) >= score


@pytest.mark.learn
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("row", ["ddpg-pendulum", "d4pg-pendulum", "td3-pendulum", "sac-pendulum"])
def test_pendulum_is_solved(tmp_path, row):
    """The target is a mean over 20 episodes of at least -200; random play scores about -1,200."""
    with Program(
        tmp_path, "--config", row, "--timestamp", "one", "--target_score", "-200", "--seconds", "1800"
    ) as program:
        assert program.until_ended(1900) == 0, program.output
        assert max(row["values"].get("evaluator/episodic_return_mean", -2_000.0) for row in program.metrics()) >= -200
