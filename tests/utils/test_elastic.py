"""An elastic run is continued with the learners for which nodes have room."""

import dataclasses

import pytest

import main
from core.common.exit_codes import BAD_OPTIONS, DONE, TRAINING_FAILED
from utils import launch, run_registry
from utils.config.command_line import read_options
from utils.launch import ElasticRun


@pytest.fixture
def options(root, monkeypatch):
    words = ("--config", "dqn-cartpole", "--engine", "ray", "--ray.address", "10.0.0.1:6379", "--seconds", "100")
    words += ("--num_learners", "2", "--num_actors", "6", "--supervisor.elastic", "4", "--supervisor.max_restarts", "2")
    options = read_options(["--root", str(root), "--timestamp", "one", *words])
    (options.checkpoint_folder / "step_000000000001").mkdir(parents=True)
    return options


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        seconds = 50.0

        def monotonic(self):
            return self.seconds

    clock = Clock()
    monkeypatch.setattr(launch, "time", clock)
    return clock


def test_the_next_part_has_as_many_actors_a_learner_and_the_seconds_that_are_left(options, clock):
    run = ElasticRun(options)
    clock.seconds += 30
    part = run.next_options(options, TRAINING_FAILED, 1)
    assert (part.num_learners, part.num_actors, part.resume, part.seconds) == (1, 3, options.signature, 70)
    clock.seconds += 30
    part = run.next_options(part, DONE, 4)
    assert (part.num_learners, part.num_actors, part.seconds, part.supervisor.elastic) == (4, 12, 40, 4)


def test_a_run_that_the_engine_ends_or_that_has_no_checkpoint_has_no_next_part(options, clock, capsys):
    assert ElasticRun(options).next_options(options, DONE, None) is None
    (options.checkpoint_folder / "step_000000000001").rmdir()
    assert ElasticRun(options).next_options(options, TRAINING_FAILED, 1) is None
    assert "this run has no checkpoint" in capsys.readouterr().err


def test_too_many_losses_within_the_window_end_the_run(options, clock, capsys):
    run = ElasticRun(options)
    for _ in range(2):
        assert run.next_options(options, TRAINING_FAILED, 1) is not None
        assert run.next_options(options, DONE, 2) is not None  # a node joined, which is no loss
    assert run.next_options(options, TRAINING_FAILED, 1) is None
    assert "lost 3 times within 3600 s" in capsys.readouterr().err
    clock.seconds += 3_600
    assert run.next_options(options, TRAINING_FAILED, 1) is not None


def test_learners_that_could_not_be_taken_in_are_not_tried_again(options, clock):
    run = ElasticRun(options)
    larger = run.next_options(options, DONE, 4)
    part = run.next_options(larger, BAD_OPTIONS, 3)
    assert (part.num_learners, part.supervisor.elastic) == (3, 2)


def test_a_part_that_could_not_start_on_a_lost_node_may_grow_again(options, clock):
    run = ElasticRun(options)
    again = run.next_options(options, TRAINING_FAILED, 2)
    part = run.next_options(again, BAD_OPTIONS, 1)
    assert (part.num_learners, part.supervisor.elastic) == (1, 4)


def test_a_run_that_has_trained_ends_with_4_and_its_command_if_no_part_follows(options, clock, capsys):
    run = ElasticRun(options)
    assert run.next_options(options, BAD_OPTIONS, None) is None and run.exit_code(BAD_OPTIONS) == BAD_OPTIONS
    assert not capsys.readouterr().err
    part = run.next_options(options, TRAINING_FAILED, 1)
    assert run.next_options(part, BAD_OPTIONS, None) is None and run.exit_code(BAD_OPTIONS) == TRAINING_FAILED
    assert f"--resume {options.signature}" in capsys.readouterr().err
    assert [run.exit_code(code) for code in (DONE, TRAINING_FAILED, 130)] == [DONE, TRAINING_FAILED, 130]


def test_options_stay_those_of_the_run(options, clock):
    part = ElasticRun(options).next_options(options, TRAINING_FAILED, 1)
    changed = {"resume", "num_learners", "num_actors", "seconds"}
    for field in dataclasses.fields(options):
        assert field.name in changed or getattr(part, field.name) == getattr(options, field.name)


@pytest.mark.parametrize("exit_code, learners, stored", [(DONE, 3, None), (DONE, None, 0), (TRAINING_FAILED, 1, 4)])
def test_a_run_whose_next_part_takes_in_learners_does_not_count_as_done(
    options, exit_code, learners, stored, monkeypatch
):
    """Sweeps and `--resume` read the exit code, and main may be killed before the next part begins."""

    class Engine:
        next_learners = learners

        def __init__(self, context, processes):
            pass

        def run(self):
            return exit_code

    monkeypatch.setattr(main, "EnginesDict", {"ray": Engine})
    options.checkpoint_folder.joinpath("step_000000000001").rmdir()
    options.checkpoint_folder.rmdir()
    assert main.run_part(options, None)[::2] == (exit_code, learners)
    assert run_registry.read(options.log_folder).exit_code == stored
