"""Death of any process of a run, seen from outside (F09-F13, F20-F22)."""

import os
import signal
import time

import pytest

from tests.reliability.program import Program

CARTPOLE = ("--config", "dqn-cartpole", "--logger.period", "0.5", "--timestamp", "one")
ENDLESS = (*CARTPOLE, "--steps", "100000000")


@pytest.mark.parametrize("name", ["actor 0", "evaluator 0", "logger 0"])
def test_a_killed_process_is_named_and_restarted_and_training_goes_on(tmp_path, name):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(1_500)
        pid = program.kill(name)
        program.until(lambda: program.children().get(name, pid) != pid, 10, f"{name} to be replaced")
        assert f"{name} (pid {pid}) was killed by signal 9" in program.output
        program.until_training(program.agent_steps() + 1_000)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(20) == 130
        assert program.steps() == sorted(program.steps())
        assert not program.leftovers()


def test_an_actor_that_dies_too_often_ends_the_run_with_its_state_saved(tmp_path):
    with Program(tmp_path, *ENDLESS, "--supervisor.max_restarts", "1") as program:
        program.until_training(500)
        first = program.kill("actor 0")
        program.until(lambda: program.children().get("actor 0", first) != first, 15, "the actor to be replaced")
        program.kill("actor 0")
        assert program.until_ended(30) == 4
        assert "supervisor.max_restarts" in program.output
        assert list(tmp_path.glob("models/*_checkpoints/step_*/manifest.json"))
        assert not program.leftovers()


def test_a_killed_learner_ends_the_run_and_says_how_to_go_on(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(1_500)
        program.kill("learner 0")
        assert program.until_ended(15) == 4
        assert "learner 0" in program.output and "--resume test_one" in program.output
        assert not program.leftovers()


def test_when_main_is_killed_its_children_go_with_it(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(500)
        program.children()
        os.kill(program.process.pid, signal.SIGKILL)
        assert not program.leftovers(seconds=3)


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_and_can_be_resumed(tmp_path, number, exit_code):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(2_000)
        os.kill(program.process.pid, number)
        assert program.until_ended(15) == exit_code
        assert not program.leftovers()
        steps = program.agent_steps()
    again = ("--config", "dqn-cartpole", "--resume", "test_one", "--steps", str(steps + 1_500))
    with Program(tmp_path, *again) as program:
        assert program.until_ended(90) == 0, program.output
        assert program.agent_steps() >= steps + 1_500
        assert program.steps() == sorted(program.steps())


def test_an_interrupt_during_start_up_leaves_nothing(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until(lambda: program.children(), 30, "the first child")
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(15) == 130
        assert not program.leftovers()


def test_a_second_interrupt_leaves_at_once(tmp_path):
    with Program(tmp_path, *ENDLESS) as program:
        program.until_training(500)
        os.kill(program.children()["learner 0"], signal.SIGSTOP)  # it cannot save now
        os.kill(program.process.pid, signal.SIGINT)
        time.sleep(1)
        os.kill(program.process.pid, signal.SIGINT)
        assert program.until_ended(3) == 130
        assert not program.leftovers()
