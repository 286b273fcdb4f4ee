"""Two learners of the real program: one is killed, the run is continued, and both stop together (F11, F37)."""

import os
import signal

import psutil

from tests.reliability.program import Program
from utils import checkpoint

ENDLESS = ("--config", "dqn-cartpole", "--logger.period", "0.5", "--timestamp", "one", "--num_learners", "2", "--num_actors", "2",
           "--steps", "100000000", "--learner.compare_period", "10")


def test_f11_f37_a_killed_learner_ends_the_run_with_its_state_saved_and_the_run_goes_on_with_two(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(1_500)
        program.until(lambda: program.updates() > 0, 60, "updates")
        learners = [pid for name, pid in program.children().items() if name.startswith("learner")]
        listening = [port.laddr.ip for pid in learners for port in psutil.Process(pid).net_connections("inet") if port.status == "LISTEN"]
        assert len(learners) == 2 and set(listening) == {"127.0.0.1"}
        seen = program.agent_steps()
        program.kill("learner 1")
        assert program.until_ended(20) == 4
        assert "learner 1" in program.output and "--resume test_one" in program.output
        assert not program.leftovers()
        steps = program.agent_steps()
    state, _ = checkpoint.load(tmp_path / "models/test_one_checkpoints")
    assert state["clock"]["updates"][0] > 0 and sum(state["clock"]["agent_steps"]) >= seen  # it was saved when the other one died
    with Program(tmp_path, "--config", "dqn-cartpole", "--resume", "test_one") as program:
        program.until_training(steps + 1_000)
        program.until(lambda: program.updates() > state["clock"]["updates"][0], 60, "updates")
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(20) == 130
        assert not program.leftovers()
    later, _ = checkpoint.load(tmp_path / "models/test_one_checkpoints")
    assert later["clock"]["updates"][0] == later["clock"]["updates"][1] > state["clock"]["updates"][0]


def test_f11_a_learner_that_fails_alone_says_why_and_nobody_waits_for_ever(tmp_path):
    with Program(tmp_path, *ENDLESS, "--agent_type", "tests.reliability.faults:FailsAlone") as program:
        assert program.until_ended(60) == 4
        assert "learner 1" in program.output and "ValueError: a fault of this learner alone" in program.output
        assert "in learn" in program.output and "did not end within" not in program.output and not program.leftovers()
