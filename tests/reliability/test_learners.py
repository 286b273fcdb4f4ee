"""Two learners of the real program are killed, stopped, resumed and ended together (F11, F37, F67, F68)."""

import json
import os
import shlex
import signal

import psutil
import pytest

from core.checkpoint import run_checkpoint
from tests.reliability.program import Program

ENDLESS = shlex.split(
    "--config dqn-cartpole --logger.period 0.5 --timestamp one --num_learners 2 --num_actors 2 "
    "--steps 100000000 --learner.sync_check_period 10"
)


@pytest.mark.slow
def test_f11_f37_a_killed_learner_of_two_ends_a_resumable_run(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(1_500)
        program.until(lambda: program.updates() > 0, 60, "updates")
        learners = [pid for name, pid in program.children().items() if name.startswith("learner")]
        listening = [
            port.laddr.ip
            for pid in learners
            for port in psutil.Process(pid).net_connections("inet")
            if port.status == "LISTEN"
        ]
        assert len(learners) == 2 and set(listening) == {"127.0.0.1"}
        seen = program.agent_steps()
        program.kill("learner 1")
        assert program.until_ended(20) == 4
        assert "learner 1" in program.output and "--resume test_one" in program.output
        assert not program.leftovers()
        steps = program.agent_steps()
    state, _ = run_checkpoint.load(tmp_path / "models/test_one_checkpoints")
    sampled, inserted = (sum(state["clock"][name]) for name in ("sampled", "inserted"))
    assert sampled <= (inserted - 1_000) * 8  # never ahead of the actors, for both learners together
    # saved after the other one died
    assert state["clock"]["updates"][0] > 0 and sum(state["clock"]["agent_steps"]) >= seen
    with Program(tmp_path, "--config", "dqn-cartpole", "--resume", "test_one") as program:
        program.until_training(steps + 1_000)
        program.until(lambda: program.updates() > state["clock"]["updates"][0], 60, "updates")
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(20) == 130
        assert not program.leftovers()
    later, _ = run_checkpoint.load(tmp_path / "models/test_one_checkpoints")
    assert later["clock"]["updates"][0] == later["clock"]["updates"][1] > state["clock"]["updates"][0]


@pytest.mark.slow
def test_f11_a_learner_that_fails_alone_ends_the_run_with_4(tmp_path):
    with Program(tmp_path, *ENDLESS, "--agent_type", "tests.reliability.faults:FailsAlone") as program:
        assert program.until_ended(60) == 4
        assert "learner 1" in program.output and "ValueError: a fault of this learner alone" in program.output
        assert "in learn" in program.output and "did not end within" not in program.output and not program.leftovers()


@pytest.mark.slow
def test_learners_that_are_not_alike_end_the_run_and_save_nothing(tmp_path):
    with Program(
        tmp_path, *ENDLESS, "--agent_type", "tests.reliability.faults:Drifts", "--learner.sync_check_period", "1"
    ) as program:
        assert program.until_ended(60) == 4
        assert "after 3 updates the learners are not alike any more: digest of learners 0 to 1" in program.output
        assert not program.leftovers() and not list(tmp_path.glob("models/*/step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.faults)])
def test_f67_the_stopped_learner_is_named_and_the_state_saved(tmp_path, stopped):
    faults = json.dumps([{"kind": "stop", "where": f"learner {stopped}", "at": 150}])
    with Program(
        tmp_path,
        *ENDLESS,
        *shlex.split("--agent_type tests.reliability.faults:Stops --supervisor.heartbeat_timeout 6"),
        environment={"FAULTS": faults},
    ) as program:
        assert program.until_ended(80) == 4
        assert f"learner {stopped} (pid" in program.output and f"learner {1 - stopped} (pid" not in program.output
        assert "sent no heartbeat for 6 s" in program.output and not program.leftovers()
    state, _ = run_checkpoint.load(tmp_path / "models/test_one_checkpoints")
    assert max(state["clock"]["updates"]) == 149


@pytest.mark.faults
@pytest.mark.parametrize("killed", [0, 1])
def test_f68_a_learner_killed_in_an_update_leaves_a_whole_state(tmp_path, killed):
    faults = json.dumps([{"kind": "kill", "where": f"learner {killed}", "at": 40}])
    with Program(
        tmp_path,
        "--config",
        "sac-pendulum",
        *ENDLESS[2:],
        *shlex.split("--agent_type tests.reliability.faults:HalfAnUpdate --rate_limiter.min_replay_size 500"),
        environment={"FAULTS": faults},
    ) as program:
        assert program.until_ended(80) == 4
    state, _ = run_checkpoint.load(tmp_path / "models/test_one_checkpoints")
    made = {
        state["agent"][name]["updates"] for name in ("policy_optimizer", "critic_optimizer", "temperature_optimizer")
    }
    assert made == {state["agent"]["updates"]} == {max(state["clock"]["updates"])} == {40}
