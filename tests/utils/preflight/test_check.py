"""--check: every row passes, nothing is left behind, and what is wrong is said."""

import multiprocessing
import os
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from core.common.shared_arrays import SharedArrays
from core.envs.catch import CatchEnv
from core.memory import Memory
from main import main
from tests.rows import skip_unless_installed
from utils.config import memory_budget, validation
from utils.config.command_line import read_options
from utils.errors import ConfigurationError
from utils.options import CONFIGS
from utils.preflight import throughput
from utils.preflight.check import check
from utils.preflight.throughput import StepCosts

SMALL = ("--num_actors", "1", "--num_envs_per_actor", "1", "--agent.batch_size", "4", "--clock.tolerance", "400")

SHORT = ("--agent.burn_in", "2", "--agent.unroll_length", "10", "--agent.stride", "5")


@pytest.fixture
def options(root):
    return lambda *words: read_options(["--root", str(root), "--check", *words])


@pytest.fixture
def allocated(monkeypatch):
    """Bytes of every SharedArrays made; a memory is never."""
    made = []
    original = SharedArrays.__init__

    def noted(self, specs):
        original(self, specs)
        made.append(sum(array.nbytes for array in self._arrays.values()))

    monkeypatch.setattr(SharedArrays, "__init__", noted)
    monkeypatch.setattr(Memory, "__init__", lambda *arguments: pytest.fail("the replay was made"))
    return made


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_every_row_passes_and_leaves_nothing(row, options, root, allocated, monkeypatch, capsys):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 10**12)
    skip_unless_installed(row["name"])
    descriptors = set(os.listdir("/proc/self/fd"))
    short = (*(SHORT if row["agent_type"] == "r2d2" else ()), "--actor.groups", "1")
    check(options("--config", row["name"], *SMALL, *short), seconds=0)
    printed = capsys.readouterr().out
    assert f"{row['name']}: no problem found" in printed and "shapes, dtypes, values, ends are right" in printed
    assert "agent steps/s an actor" in printed and "time" in printed
    assert list(root.iterdir()) == [] and multiprocessing.active_children() == []
    assert sum(allocated) < 2e8  # bytes: the replay of the row is only computed
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1


def test_the_options_are_printed_with_the_defaults_they_differ_from(options, capsys):
    check(options("--config", "dqn-cartpole", *SMALL, "--agent.lr", "0.25"), seconds=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["agent.lr", "0.25", "0.0001"] in lines and ["agent.gamma", "0.99"] in lines and ["agent.batch_size", "4", "32"] in lines


def test_the_memory_is_what_the_start_would_ask_for(options, monkeypatch, capsys):
    chosen = options("--config", "dqn-pong-uniform", *SMALL, "--memory.capacity", "1000")
    check(chosen, seconds=0)
    printed = " ".join(capsys.readouterr().out.split())
    needed = int(printed.partition(" bytes needed")[0].rpartition(" ")[2].replace(",", ""))
    assert needed > 1000 * 84 * 84
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: needed)
    assert validation.problems(chosen) == []
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: needed - 1)
    assert f"needs {needed:,} bytes" in validation.problems(chosen)[0]


@pytest.mark.parametrize("learners", ["1", "2"])
def test_the_memory_has_room_for_the_copy_of_the_replay_that_a_checkpoint_is_made_of(options, learners):
    words = ("--config", "dqn-pong-uniform", *SMALL, "--memory.capacity", "1000", "--num_learners", learners, "--num_actors", learners)
    chosen, copied = options(*words), options(*words, "--learner.checkpoint_replay", "true")
    spec = validation.environment_spec(chosen)
    agent = chosen.make_agent(spec)
    rings = memory_budget.layouts(chosen, spec, agent)
    assert len(rings) == int(learners)
    without, having = (memory_budget.stored_bytes(each, rings, agent.window) for each in (chosen, copied))
    assert having - without == sum(rows.nbytes for rows in rings) > 0


def test_main_says_0_for_a_sound_row_and_2_with_every_problem_for_another(root, capsys):
    words = ["--root", str(root), "--check", "--config", "dqn-cartpole", *SMALL]
    assert main(words) == 0
    with pytest.raises(SystemExit) as refused:
        main([*words, "--agent.lr", "-1", "--mode", "2", "--model_file", "none.pth"])
    assert refused.value.code == 2 and list(root.iterdir()) == []
    said = capsys.readouterr().err
    assert "agent.lr=-1.0 must be greater than 0" in said and "check looks at a training" in said


class Faulty(gym.Env):
    """Observations leave their space after a while, or are NaN."""

    def __init__(self, wrong):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
        self.wrong = wrong

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(3, self.wrong, np.float32), 0.0, self.steps == 20, False, {}


@pytest.fixture
def faulty(monkeypatch, options):
    """Options of a row on an environment that returns this wrong number."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))

    def registered(wrong):
        gym.register("Faulty-v0", Faulty, kwargs={"wrong": wrong})
        return options("--config", "dqn-cartpole", "--game", "Faulty-v0", *SMALL)

    return registered


def test_everything_that_is_wrong_with_an_environment_is_said(faulty, capsys):
    with pytest.raises(ConfigurationError) as refused:
        check(faulty(np.nan), seconds=0)
    messages = ["random play: ValueError: observation of stream 0 at step 1", "speed: ValueError"]
    assert "warning: gymnasium's checker: " in capsys.readouterr().out
    assert len(refused.value.problems) == len(messages)
    for problem, message in zip(refused.value.problems, messages):
        assert problem.startswith(message)


def test_warnings_of_gymnasiums_checker_are_shown(faulty, capsys):
    check(faulty(5.0), seconds=0)
    assert "not within the observation space" in " ".join(capsys.readouterr().out.split())


class Unreproducible(gym.Env):
    """Trains, though gymnasium's checker complains: the same seed gives other observations."""

    observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), 0.0, self.steps == 20, False, {}


class Unlabelled(CatchEnv):
    """Trains, though it breaks a clause: no observation is the first of an episode."""

    def step(self, action):
        return super().step(action)._replace(first=np.zeros(self._num_envs, bool))


def test_what_trains_passes_with_a_warning(options, monkeypatch, capsys):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Unreproducible-v0", Unreproducible)
    check(options("--config", "dqn-cartpole", "--game", "Unreproducible-v0", *SMALL), seconds=0)
    printed = capsys.readouterr().out
    assert "warning: gymnasium's checker: AssertionError: " in printed and "no problem found, 1 warnings" in printed
    words = "--env_type", "tests.utils.preflight.test_check:Unlabelled", "--game", "catch"
    check(options("--config", "dqn-minatar-breakout", *words, *SMALL), seconds=0)
    assert "warning: step 10 of random play: first is wrong in streams 0: " in capsys.readouterr().out


class Slow(gym.Env):
    observation_space, action_space, seconds = spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 0.25

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        time.sleep(self.seconds)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        return np.zeros(3, np.float32), 0.0, False, False, {}


def test_an_environment_of_four_steps_a_second_is_checked_within_20_seconds(options, monkeypatch, capsys):
    """A sequence of R2D2's is 125 rows: half a minute of one such environment."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Slow-v0", Slow)
    chosen = options("--config", "r2d2-cartpole", "--game", "Slow-v0", "--agent.burn_in", "40", "--agent.unroll_length", "80")
    began = time.monotonic()
    check(chosen)
    assert time.monotonic() - began < 20
    printed = " ".join(capsys.readouterr().out.split())
    assert "its checker is left out: a reset takes 0.25 s and a step 0.25 s" in printed and "speed 4 agent steps/s an actor" in printed


def test_a_loss_that_is_not_finite_is_a_problem(options, monkeypatch):
    measured = throughput.measure
    monkeypatch.setattr(throughput, "measure", lambda *arguments: measured(*arguments)._replace(sound=False))
    with pytest.raises(ConfigurationError, match="not finite"):
        check(options("--config", "dqn-cartpole", *SMALL), seconds=0)


def test_an_update_that_changes_nothing_is_not_sound(options):
    chosen = options("--config", "impala-cartpole", *SMALL)
    object.__setattr__(chosen.agent, "baseline_cost", 9e299)  # far beyond its bounds
    assert not throughput.measure(chosen, validation.environment_spec(chosen), 0).sound


@pytest.mark.parametrize(("words", "expected"), [
    (("dqn-cartpole",), 8.0), (("impala-cartpole",), 1.0), (("impact-cartpole",), 2.0), (("replay-minatar-breakout",), 2.0),
    (("laser-minatar-breakout",), 4.0), (("impact-cartpole", "--memory.times", "3"), 3.0)])
def test_samples_of_a_step_are_those_that_the_clock_or_the_rule_asks_for(words, expected, options):
    assert throughput.samples_per_step(options("--config", *words)) == pytest.approx(expected)


@pytest.mark.parametrize(("words", "costs", "expected"), [
    # 8 samples a step and 64 a batch: an eighth of an update for each step
    ((), StepCosts(1e-3, 8e-4, True, 2, 1), 1_000),                           # one actor is slowest
    (("--num_actors", "4"), StepCosts(1e-3, 8e-3, True, 8, 1), 1_000),        # the learner is
    (("--num_actors", "4"), StepCosts(1e-3, 8e-4, True, 2, 1), 2 / 1.1e-3),   # the cores are
    (("--num_actors", "4"), StepCosts(1e-3, 4e-3, True, 2, 2), 1_000),        # the learner's threads count
    (("--engine", "inline"), StepCosts(1e-3, 8e-3, True, 2, 1), 500)])        # one after the other
def test_the_estimate_is_the_least_of_the_bounds(words, costs, expected, options):
    chosen = options("--config", "dqn-cartpole", *words)
    assert throughput.steps_per_second(chosen, costs, 1) == pytest.approx(expected)


@pytest.mark.parametrize(("words", "told"), [
    (("--steps", "3000"), "about 0:00:03 (3,000 agent steps)"),       # 1,000 to fill and 2,000 more at 1,000 a second
    (("--updates", "500"), "about 0:00:05 (500 updates)"),            # 4,000 steps of samples
    (("--steps", "3000", "--seconds", "2"), "about 0:00:02 (as asked)"),
    (("--steps", "none"), "a million agent steps take about 0:16:40")])
def test_the_time_to_the_budget_is_the_shortest(words, told, options, monkeypatch, capsys):
    monkeypatch.setattr(throughput, "measure", lambda *arguments: StepCosts(1e-3, 8e-4, True, 8, 1))
    check(options("--config", "dqn-cartpole", *words))
    assert told in capsys.readouterr().out
