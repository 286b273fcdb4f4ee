"""`num_envs_per_actor=0` tries numbers, chooses the best, and the run keeps it."""

import dataclasses
import json
import shlex

import pytest

from main import main
from utils.config import throughput, validation
from utils.config.command_line import read_options
from utils.errors import ConfigurationError
from utils.launch import create_context
from utils.sweep.subprocess_run import ChildRun

ROW = shlex.split("--config dqn-cartpole --engine inline --machine test --timestamp one --num_envs_per_actor 0")


@pytest.fixture
def options(root):
    return lambda *words: read_options([*ROW, "--root", str(root), *words])


@pytest.fixture
def tried(monkeypatch):
    """Record the numbers tried; agent steps a second grow with the environments up to 32 and not beyond."""
    found = []

    def acting(options, spec, seconds):
        found.append(options.num_envs_per_actor)
        return 1e-3 / min(found[-1], 32)

    monkeypatch.setattr(throughput, "_acting", acting)
    return found


@pytest.mark.parametrize(
    ("rates", "best", "needed"),
    [
        ([100, 190, 350, 360, 370, 1_000], 16, 5),  # two in a row gain less than a tenth over 350
        ([100, 105, 190, 195, 205, 210], 16, 5),  # one small gain is not the end
        ([100, 120, 140, 160, 180, 200, 230, 260], 512, 8),  # never enough
        ([100, 50, 20], 4, 3),
        ([7], 4, 1),
    ],
)
def test_the_smallest_number_hardly_beaten_by_larger_is_taken(rates, best, needed):
    taken = iter(zip(validation.COUNTS, rates))
    found, seen = throughput.choose(taken)
    assert found == best and list(seen.values()) == rates[:needed] and len(list(taken)) == len(rates) - needed


def test_every_split_has_equally_many_environments(options):
    assert validation.env_counts(options("--actor.num_env_splits", "3")) == [6, 9, 18, 33, 66, 129, 258, 513]
    assert validation.env_counts(options("--actor.num_env_splits", "8")) == [8, 16, 32, 64, 128, 256, 512]


def test_a_run_takes_the_number_found_and_reports_the_others(options, tried, capsys):
    context, _ = create_context(options())
    assert (
        tried == [4, 8, 16, 32, 64, 128]
        and context.options.num_envs_per_actor == context.memories[0].layout.num_envs == 32
    )
    assert json.loads((context.options.log_folder / "run.json").read_text())["options"]["num_envs_per_actor"] == 32
    assert (
        "num_envs_per_actor=32 of those tried out, with an actor's agent steps/s: "
        "4: 4,000, 8: 8,000, 16: 16,000, 32: 32,000" in capsys.readouterr().err
    )


def test_a_given_number_is_not_tried(options, tried):
    assert create_context(options("--num_envs_per_actor", "5"))[0].options.num_envs_per_actor == 5 and tried == []


def test_no_larger_number_is_tried_after_a_slow_step(options, tried, monkeypatch):
    monkeypatch.setattr(
        throughput, "_acting", lambda options, spec, seconds: tried.append(options.num_envs_per_actor) or 0.25
    )
    assert create_context(options())[0].options.num_envs_per_actor == 4 and tried == [4]


def test_numbers_that_other_options_forbid_are_not_tried(options, tried):
    context, _ = create_context(options("--memory.capacity", "50"))
    assert tried == [4, 8] and context.options.num_envs_per_actor == 8


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (
            ("--steps", "500", "--rate_limiter.min_replay_size", "99"),
            [4, 8, 16],
        ),  # ten windows of three steps for each environment
        (("--config", "ppo-cartpole", "--steps", "4000"), [4]),  # seven rollouts of 128 steps
        (("--config", "ppo-cartpole", "--steps", "12000"), [4, 8]),
    ],
)
def test_numbers_that_leave_too_few_windows_are_not_tried(options, tried, words, numbers):
    create_context(options(*words))
    assert tried == numbers


def test_options_wrong_for_any_number_are_refused_first(options, tried, capsys):
    with pytest.raises(SystemExit) as refused:
        options("--memory.capacity", "10")
    # 4 environments of 5 steps
    assert refused.value.code == 2 and tried == [] and "at least 20" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options("--num_envs_per_actor", "-1")
    assert "num_envs_per_actor=-1 must be at least 0" in capsys.readouterr().err


def test_environments_that_cannot_be_played_are_refused(options, monkeypatch):
    monkeypatch.setattr("core.envs.gym.GymEnv.step", lambda self, action: 1 / 0)
    with pytest.raises(
        ConfigurationError, match="num_envs_per_actor=0: environments cannot be tried out: ZeroDivisionError"
    ):
        create_context(options())


def test_a_trial_plays_splits_as_an_actor_does_and_closes_them(options, monkeypatch):
    monkeypatch.setattr(validation, "COUNTS", (4, 8))
    made, closed = [], []
    original = throughput.DoubleBufferedEnvs.__init__
    monkeypatch.setattr(
        throughput.DoubleBufferedEnvs,
        "__init__",
        lambda self, *rest: (made.append(rest[-2:]), original(self, *rest))[1],
    )
    monkeypatch.setattr(
        throughput.DoubleBufferedEnvs, "close", lambda self: closed.append([env.spec.name for env in self._envs])
    )
    found = throughput.resolve_num_envs(options("--actor.num_env_splits", "2"), seconds=0.05).num_envs_per_actor
    assert made == [(2, 4), (2, 8)] and closed == [["CartPole-v1"] * 2] * 2 and found in (4, 8)


def test_a_resumed_run_keeps_the_number_it_found(options, tried, root, alone):
    create_context(options())
    words = ["--root", str(root), "--resume", "test_one"]
    assert (
        read_options(words).num_envs_per_actor
        == read_options([*words, "--num_envs_per_actor", "0"]).num_envs_per_actor
        == 32
    )
    asked = dataclasses.replace(options("--timestamp", "two"), timestamp="one")
    ChildRun(asked, [], root / "output").check()
    with pytest.raises(ConfigurationError, match="num_envs_per_actor=32 there and 16 here"):
        ChildRun(dataclasses.replace(asked, num_envs_per_actor=16), [], root / "output").check()


def test_check_tries_numbers_too(options, tried, root, monkeypatch, capsys):
    monkeypatch.setattr("utils.config.check._speed", lambda *arguments: ("", []))
    assert main([*ROW, "--root", str(root), "--check"]) == 0
    printed = capsys.readouterr()
    assert "1 x 32 environments" in printed.out and "num_envs_per_actor=32" in printed.err
