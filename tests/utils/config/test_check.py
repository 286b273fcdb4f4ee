"""`--check` passes every config, leaves nothing behind and reports problems."""

import dataclasses
import multiprocessing
import os
import re
import shlex
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from core.agents.base.action_values import EpsilonGreedy
from core.agents.dqn import DQN
from core.agents.impala import Impala
from core.agents.rainbow import Rainbow
from core.common.shared_arrays import SharedArrays
from core.envs.catch import CatchEnv
from core.memory import Memory
from core.models.dqn import DQNMinAtar
from core.models.r2d2 import R2D2MLP
from core.specs import ArraySpec, Discrete, EnvSpec, ObservationPart
from core.trajectory.frame_compression import StorageParams
from main import main
from tests.rows import PAIRS, skip_unless_installed
from tests.selection import slow_except
from utils.config import memory_budget, throughput, validation
from utils.config.check import Pace, _budget, check, table, wide_console
from utils.config.command_line import read_options
from utils.config.throughput import StepCosts
from utils.errors import ConfigurationError
from utils.options import CONFIGS

SMALL = shlex.split("--num_actors 1 --num_envs_per_actor 1 --agent.batch_size 4 --rate_limiter.error_buffer 400")

SMALL_ROWS = (  # one of each kind of environment and memory
    "dqn-cartpole",
    "r2d2-recall",
    "rainbow-minatar-breakout",
    "replay-minatar-breakout",
    "impact-cartpole",
    "sac-pendulum",
    "dqn-pong-small",
)
SHORT = ("--agent.burn_in", "2", "--agent.unroll_length", "10", "--agent.sequence_period", "5")


@pytest.fixture
def options(root):
    return lambda *words: read_options(["--root", str(root), "--check", *words])


@pytest.fixture
def allocated(monkeypatch):
    """Record the bytes of every SharedArrays; fail if a memory is made."""
    made = []
    original = SharedArrays.__init__

    def noted(self, specs):
        original(self, specs)
        made.append(sum(array.nbytes for array in self.values()))

    monkeypatch.setattr(SharedArrays, "__init__", noted)
    monkeypatch.setattr(Memory, "__init__", lambda *arguments: pytest.fail("the replay was made"))
    return made


@pytest.mark.parametrize(
    "name", slow_except(SMALL_ROWS, dict.fromkeys((*PAIRS, *SMALL_ROWS, "dqn-tictactoe", "btr-pong")))
)
def test_a_config_of_every_agent_and_memory_passes_and_leaves_no_file(
    name, options, root, allocated, monkeypatch, capsys
):
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 10**12)
    skip_unless_installed(name)
    descriptors, children = set(os.listdir("/proc/self/fd")), multiprocessing.active_children()
    short = (*(SHORT if "r2d2" in name else ()), "--actor.num_env_splits", "1")
    if next(row for row in CONFIGS if row["name"] == name)["memory_type"] == "rollouts":
        # 0: one unroll of each environment
        short = (*short, "--agent.batch_size", "0", "--agent.unroll_length", "20", "--agent.epochs", "1")
    check(options("--config", name, *SMALL, *short), seconds=0)
    printed = capsys.readouterr().out
    assert f"{name}: no problem found" in printed and "shapes, dtypes, values" in printed
    assert ("ends are right" in printed) != (" 0 episodes ended" in printed)
    assert "agent steps/s an actor" in printed and "time" in printed
    assert list(root.iterdir()) == [] and multiprocessing.active_children() == children
    assert sum(allocated) < 2e8  # the replay is only computed
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1


def test_it_is_told_that_updates_will_be_compiled(options, capsys):
    check(options("--config", "dqn-cartpole", *SMALL, "--learner.compile", "yes"), seconds=0)
    assert "updates will be compiled" in capsys.readouterr().out


def test_choices_are_printed_and_options_that_differ_from_their_defaults(options, capsys):
    check(options("--config", "dqn-cartpole", *SMALL, "--agent.learning_rate", "0.25"), seconds=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in ("agent_type dqn", "game CartPole-v1", "agent.learning_rate 0.25 0.0001", "agent.batch_size 4 32"):
        assert line.split() in lines
    assert not [line for line in lines if line[:1] == ["agent.gamma"]]


def test_the_reported_memory_is_what_a_start_needs(options, monkeypatch, capsys):
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
def test_the_memory_budget_includes_a_checkpoints_replay_copy(options, learners):
    words = (
        "--config",
        "dqn-pong-uniform",
        *SMALL,
        "--memory.capacity",
        "1000",
        "--num_learners",
        learners,
        "--num_actors",
        learners,
    )
    chosen, copied = options(*words), options(*words, "--learner.checkpoint_replay", "true")
    spec = validation.environment_spec(chosen)
    agent = chosen.make_agent(spec)
    rings = memory_budget.layouts(chosen, agent)
    assert len(rings) == int(learners)
    without, having = (memory_budget.stored_bytes(each, rings, agent.window) for each in (chosen, copied))
    assert having - without == sum(rows.nbytes for rows in rings) > 0


@pytest.mark.parametrize(
    "words",
    [
        ("dqn-pong-uniform", "--num_envs_per_actor", "32", "--num_actors", "2"),
        ("r2d2-recall", "--num_envs_per_actor", "2"),
        ("impala-cartpole", "--num_envs_per_actor", "3"),
        ("replay-minatar-breakout",),
        ("dqn-cartpole", "--actor.chunk_length", "1"),
        ("ppo-cartpole",),
    ],
)
def test_frames_never_take_more_than_their_accepted_limit(words, options):
    chosen = options("--config", *words)
    spec = validation.environment_spec(chosen)
    agent = chosen.make_agent(spec)

    def limited(limit: int):
        changed = dataclasses.replace(chosen, replay=StorageParams(max_frame_bytes=limit))
        layout = memory_budget.layout(changed, agent)
        return layout, memory_budget._storage(changed, spec, layout, agent.window.length)

    (refusal,) = limited(1)[1]
    least = int(refusal.rpartition(" ")[2])
    assert limited(least - 1)[1] == [refusal.replace("=1 ", f"={least - 1} ")]
    for limit in (least, least + 1, 3 * least // 2, 5 * least, 10**12):
        layout, refused = limited(limit)
        assert not refused and layout.num_slots * spec.frame.nbytes <= limit
    chosen.memory_class(chosen.memory, limited(least)[0], agent.window, 0)  # windows fit, else an error


@pytest.mark.parametrize("option", ["prefetch", "batches_per_sample"])
def test_the_memory_budget_includes_batches_held_by_learners(option, options, monkeypatch):
    words = "--config", "dqn-pong-uniform", *SMALL, "--memory.capacity", "1000"
    few, many = options(*words), options(*words, f"--learner.{option}", "200")
    on_device = options(*words, f"--learner.{option}", "200", "--learner.replay_device", "learner")
    spec = validation.environment_spec(few)
    agent = few.make_agent(spec)
    (rows,) = rings = memory_budget.layouts(few, agent)
    having, without = (memory_budget.stored_bytes(each, rings, agent.window) for each in (many, few))
    assert having - without >= 190 * few.batch_size * 2 * 4 * 84 * 84  # two stacks of four frames a window
    needed = memory_budget.needed_bytes(few, spec, without)
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: needed)
    assert validation.problems(few) == [] and f"learner.{option}" in validation.problems(many)[0]
    assert memory_budget.batch_bytes(on_device, rows, agent.window) == 0


def test_main_exits_0_for_a_valid_config_and_2_with_all_problems(root, capsys):
    words = ["--root", str(root), "--check", "--config", "dqn-cartpole", *SMALL]
    assert main(words) == 0
    with pytest.raises(SystemExit) as refused:
        main([*words, "--agent.learning_rate", "-1", "--mode", "2", "--model_file", "none.pth"])
    assert refused.value.code == 2 and list(root.iterdir()) == []
    said = capsys.readouterr().err
    assert "agent.learning_rate=-1.0 must be greater than 0" in said and "check looks at a training" in said


class Faulty(gym.Env):
    """Return observations outside the space, or NaN."""

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
    """Return a function that makes options for an environment with this wrong observation."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))

    def registered(wrong):
        gym.register("Faulty-v0", Faulty, kwargs={"wrong": wrong})
        return options("--config", "dqn-cartpole", "--game", "Faulty-v0", *SMALL)

    return registered


def test_every_problem_of_an_environment_is_reported(faulty, capsys):
    with pytest.raises(ConfigurationError) as refused:
        check(faulty(np.nan), seconds=0)
    messages = ["random play: ValueError: observation of environment 0 at step 1", "speed: ValueError"]
    assert "warning: gymnasium's checker: " in capsys.readouterr().out
    assert len(refused.value.problems) == len(messages)
    for problem, message in zip(refused.value.problems, messages):
        assert problem.startswith(message)


def test_warnings_of_gymnasiums_checker_are_shown(faulty, capsys):
    check(faulty(5.0), seconds=0)
    assert "not within the observation space" in " ".join(capsys.readouterr().out.split())


class Unreproducible(gym.Env):
    """Break the checker's rule that a seed reproduces observations; training works nevertheless."""

    observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(3, np.float32), 0.0, self.steps == 20, False, {}


class Unlabelled(CatchEnv):
    """Break the contract: no step is the first of an episode; training works nevertheless."""

    def step(self, action):
        return super().step(action)._replace(first=np.zeros(self._num_envs, bool))


def test_an_imperfect_environment_passes_with_a_warning(options, monkeypatch, capsys):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Unreproducible-v0", Unreproducible)
    check(options("--config", "dqn-cartpole", "--game", "Unreproducible-v0", *SMALL), seconds=0)
    printed = capsys.readouterr().out
    assert "warning: gymnasium's checker: AssertionError: " in printed and "no problem found, 1 warnings" in printed
    words = "--env_type", "tests.utils.config.test_check:Unlabelled", "--game", "catch"
    check(options("--config", "dqn-minatar-breakout", *words, *SMALL), seconds=0)
    assert "warning: step 10 of random play: first is wrong in environments 0: " in capsys.readouterr().out


class Masked(Unreproducible):
    """Allow action 1 alone, and note the actions that were taken."""

    taken: list[int] = []

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": [0, 1]}

    def step(self, action):
        self.taken.append(int(action))
        return *super().step(action)[:4], {"action_mask": [0, 1]}


def test_no_illegal_action_is_taken(options, monkeypatch, capsys):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Masked-v0", Masked)
    words = "--game", "Masked-v0", "--env.action_mask", "info"
    check(options("--config", "dqn-cartpole", *words, *SMALL), seconds=0)
    assert set(Masked.taken) == {1}
    assert "its checker is left out: it takes illegal actions" in " ".join(capsys.readouterr().out.split())


class Counting(R2D2MLP):
    """Keep a number of steps and a flag beside the state of the LSTM."""

    def initial_state(self, batch_size):
        steps = torch.zeros(batch_size, dtype=torch.int64)
        return *super().initial_state(batch_size), steps, steps.bool()

    def forward(self, observation, state):
        values, core = super().forward(observation, state[:2])
        return values, (*core, state[2] + 1, ~state[3])

    def unroll(self, observations, firsts, state):
        assert state[3].dtype == torch.bool
        values, core = super().unroll(observations, firsts, state[:2])
        return values, (*core, state[2] + len(firsts), ~state[3])


def test_states_are_stored_in_their_dtypes(options, capsys):
    words = "--model_type", "tests.utils.config.test_check:Counting"
    check(options("--config", "r2d2-recall", *words, *SMALL), seconds=0)
    printed = " ".join(capsys.readouterr().out.split())
    assert "float32 [64], float32 [64], int64, bool, int64" in printed


class PicturesAlone(DQNMinAtar):
    reads_vectors = False


class Parts(Unreproducible):
    """Observe nested parts of several kinds, or one that has no fixed size."""

    def __init__(self, fixed):
        goal = spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)])
        kinds = {"goal": goal, "map": spaces.Box(0, 255, (4, 4, 3), np.uint8), "words": spaces.Text(5)}
        self.observation_space = spaces.Dict(kinds if fixed else {"steps": spaces.Sequence(spaces.Discrete(2))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), *super().step(action)[1:]


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Parts-v0", Parts, kwargs={"fixed": True})
    gym.register("Endless-v0", Parts, kwargs={"fixed": False})


def lines_of(printed):
    return [" ".join(line.split()) for line in printed.splitlines()]


def test_every_part_says_what_it_became(parts, options, capsys):
    check(options("--config", "dqn-cartpole", "--game", "Parts-v0", "--model_type", "dqn-minatar", *SMALL), seconds=0)
    lines = lines_of(capsys.readouterr().out)
    assert "goal.0 MultiDiscrete([2 3]) one-hot float32 [5] Linear 64" in lines
    assert "goal.1 MultiBinary(2) vector float32 [2] Linear 64" in lines
    assert "map Box(0, 255, (4, 4, 3), uint8) picture uint8 [4, 4, 3] Conv2d 16 3x3/1" in lines
    assert any(line.startswith("words Text(1, 5") and line.endswith("text not stored") for line in lines)
    assert "action discrete int64 2 actions" in lines


def test_brackets_of_a_space_are_printed(capsys):
    space = str(spaces.Box(np.float32([-np.inf, 0]), np.float32([np.inf, 1])))
    parts = (ObservationPart("state", space, "vector", (2,)), ObservationPart("a[/b]", "Text", "text", ()))
    wide_console().print(table(EnvSpec("game", ArraySpec((2,), "float32"), 0, Discrete(2), parts=parts), None))
    printed = capsys.readouterr().out
    assert space == "Box([-inf   0.], [inf  1.], (2,), float32)" and space in printed and "a[/b]" in printed


def test_a_picture_says_its_stored_size_and_its_convolutions(parts, options, capsys):
    words = ("--env.observation_keys", "map", "--env.grayscale", "--env.frame_stack", "2", "--env.resolution", "10")
    model = ("--model_type", "dqn-minatar", "--model.planes", "8")
    check(options("--config", "dqn-cartpole", "--game", "Parts-v0", *words, *model, *SMALL), seconds=0)
    lines = lines_of(capsys.readouterr().out)
    assert "map Box(0, 255, (4, 4, 3), uint8) picture uint8 [10, 10], 2 seen together Conv2d 8 3x3/1" in lines
    assert "goal.1 MultiBinary(2) left out not stored" in lines


@pytest.mark.parametrize(
    "words, line, why",
    [
        (("--game", "Endless-v0"), "", "steps of the observations of Sequence(Discrete(2), stack=False) have no fixed"),
        (("--game", "Pendulum-v1"), "action continuous float32 [1] in -2 .. 2", "cannot take the continuous actions"),
        (("--game", "Parts-v0", "--model_type", f"{__name__}:PicturesAlone"), "", "has 7 numbers beside them: keep"),
        (("--game", "Parts-v0"), "action discrete int64 2 actions", "model_type=dqn-mlp takes vector observations"),
    ],
)
def test_what_is_refused_is_told_with_the_table(parts, options, capsys, words, line, why):
    with pytest.raises(SystemExit) as refused:
        options("--config", "dqn-cartpole", *words, *SMALL)
    printed = capsys.readouterr()
    assert refused.value.code == 2 and why in printed.err
    assert line in lines_of(printed.out) or not line


class Slow(gym.Env):
    observation_space, action_space, seconds = spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 0.25

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        time.sleep(self.seconds)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        return np.zeros(3, np.float32), 0.0, False, False, {}


@pytest.mark.slow
def test_a_slow_environment_is_checked_within_20_seconds(options, monkeypatch, capsys):
    """An R2D2 sequence has 125 steps, which take this environment half a minute."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Slow-v0", Slow)
    chosen = options(
        "--config", "r2d2-cartpole", "--game", "Slow-v0", "--agent.burn_in", "40", "--agent.unroll_length", "80"
    )
    began = time.monotonic()
    check(chosen)
    assert time.monotonic() - began < 20
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"its checker is left out: a reset takes 0\.\d+ s and a step 0\.\d+ s", printed)
    assert re.search(r"speed [1-4] agent steps/s an actor", printed)


def test_a_non_finite_loss_is_a_problem(options, monkeypatch):
    measured = throughput.measure

    def unsound(*arguments):
        costs, *rest = measured(*arguments)
        return costs._replace(sound=False), *rest

    monkeypatch.setattr(throughput, "measure", unsound)
    with pytest.raises(ConfigurationError, match="not finite"):
        check(options("--config", "dqn-cartpole", *SMALL), seconds=0)


def test_an_update_that_changes_nothing_is_unsound(options):
    chosen = options("--config", "impala-cartpole", "--agent.lr_schedule_updates", "9", *SMALL)
    object.__setattr__(chosen.agent, "baseline_cost", 9e299)  # far beyond its bounds
    assert not throughput.measure(chosen, validation.environment_spec(chosen), 0)[0].sound


def test_an_agent_that_a_checkpoint_does_not_restore_is_a_problem(options, monkeypatch):
    chosen = options("--config", "dqn-cartpole", *SMALL)
    parts = DQN.checkpoint_parts
    monkeypatch.setattr(DQN, "checkpoint_parts", lambda self: {**parts(self), "target": Forgetful(self.target)})
    with pytest.raises(ConfigurationError, match=r"after it is restored from its checkpoint: agent\.target"):
        check(chosen, seconds=0)
    monkeypatch.setattr(DQN, "state_dict", lambda self: {"largest": np.float32(1)})
    with pytest.raises(ConfigurationError, match=r"agent\.largest is a float32: only tensors and plain values"):
        check(chosen, seconds=0)
    monkeypatch.setattr(DQN, "state_dict", lambda self: {})
    with pytest.raises(ConfigurationError, match=r"dqn cannot be restored from its checkpoint: .*model"):
        check(chosen, seconds=0)


def test_a_checkpoint_that_lacks_what_the_next_update_needs_is_a_warning(options, monkeypatch, capsys):
    parts = DQN.checkpoint_parts
    monkeypatch.setattr(DQN, "checkpoint_parts", lambda self: {**parts(self), "optimizer": self.target})
    check(options("--config", "dqn-cartpole", *SMALL), seconds=0)
    printed = capsys.readouterr().out
    assert (
        "the first update after a resume would differ (update.state.model" in printed
        and "no problem found, 1 warnings" in printed
    )


class Orphans(Impala):
    """A user's agent whose learnt scalar is a parameter of the agent, which its optimiser does not know."""

    def init_learner(self):
        super().init_learner()
        self.scalars = {"eta": nn.Parameter(torch.ones(())), "constant": nn.Parameter(torch.ones(()))}

    def loss(self, batch):
        loss = super().loss(batch)
        return loss._replace(loss=loss.loss + self.scalars["eta"].square())


def test_a_parameter_that_no_optimiser_changes_is_a_warning(options, capsys):
    name = f"{__name__}:Orphans"
    check(options("--config", "impala-cartpole", "--agent_type", name, *SMALL), seconds=0)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"no optimiser changes {name}.scalars.eta, of which the loss is a function" in printed
    check(options("--config", "impala-cartpole", *SMALL), seconds=0)
    assert "no optimiser" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"half": 0.5}, "statistic 'half' of an update is of <class 'float'>, expected"),
        ({"half": torch.ones(2)}, "statistic 'half' of an update is a tensor of shape [2], expected"),
        ({57 * "m": torch.ones(())}, "longer than 64 bytes"),
    ],
)
def test_a_statistic_that_cannot_be_reported_is_named(statistics, message, options, monkeypatch):
    loss_of = DQN.loss

    def changed(self, batch):
        loss = loss_of(self, batch)
        return loss._replace(statistics={**loss.statistics, **statistics})

    monkeypatch.setattr(DQN, "loss", changed)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check(options("--config", "dqn-cartpole", *SMALL), seconds=0)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (lambda self: {59 * "m": 0.5}, "longer than 64 bytes"),
        (lambda self: {"rate": None}, "TypeError"),
        (None, "TypeError: 'NoneType' object is not callable"),
    ],
)
def test_statistics_of_an_exploration_that_an_actor_cannot_report_are_a_problem(
    statistics, message, options, monkeypatch
):
    monkeypatch.setattr(EpsilonGreedy, "statistics", statistics)
    with pytest.raises(ConfigurationError, match=message):
        check(options("--config", "dqn-cartpole", *SMALL), seconds=0)


def test_a_learning_rate_that_falls_is_no_difference_after_a_checkpoint(options):
    check(options("--config", "impala-cartpole", *SMALL, "--agent.lr_schedule", "linear"), seconds=0)


class Forgetful:
    """A network whose stored weights are not loaded."""

    def __init__(self, network):
        self.state_dict, self.load_state_dict = network.state_dict, lambda state: None


@pytest.mark.parametrize(
    ("priorities", "found"),
    [
        (lambda given: None, "none"),
        (lambda given: given[:, None], "some"),
        (lambda given: -1 - given, "some that are negative"),
        (lambda given: given / 0, "some that are negative or not finite"),
    ],
)
def test_an_agent_without_the_priorities_that_its_memory_needs_is_a_problem(priorities, found, options, monkeypatch):
    learn = Rainbow.learn

    def changed(self, batch):
        output = learn(self, batch)
        return output._replace(priorities=priorities(output.priorities))

    monkeypatch.setattr(Rainbow, "learn", changed)
    with pytest.raises(ConfigurationError, match=rf"prioritized needs priorities \[4\] of an update.*{found}"):
        check(options("--config", "rainbow-cartpole", *SMALL), seconds=0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("dqn-cartpole",), 8.0),
        (("impala-cartpole",), 1.0),
        (("impact-cartpole",), 2.0),
        (("replay-minatar-breakout",), 2.0),
        (("laser-minatar-breakout",), 4.0),
        (("impact-cartpole", "--memory.max_reuse", "3"), 3.0),
    ],
)
def test_samples_per_step_follow_the_rate_limiter_or_strategy(words, expected, options):
    assert options("--config", *words).samples_per_step == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "costs", "expected"),
    [
        # With 8 samples per step and batches of 64, each step needs an eighth of an update.
        ((), StepCosts(1e-3, 8e-4, True, 2, 1), 1_000),  # one actor is slowest
        (("--num_actors", "4"), StepCosts(1e-3, 8e-3, True, 8, 1), 1_000),  # the learner is slowest
        (("--num_actors", "4"), StepCosts(1e-3, 8e-4, True, 2, 1), 2 / 1.1e-3),  # the cores limit
        (("--num_actors", "4"), StepCosts(1e-3, 4e-3, True, 2, 2), 1_000),  # the learner's threads count
        (("--engine", "inline"), StepCosts(1e-3, 8e-3, True, 2, 1), 500),
    ],
)  # inline: one after the other
def test_the_estimate_is_the_smallest_bound(words, costs, expected, options):
    chosen = options("--config", "dqn-cartpole", *words)
    assert throughput.steps_per_second(chosen, costs, 1) == pytest.approx(expected)


@pytest.mark.parametrize(("memory_type", "on_policy"), [("rollouts", True), ("queue", False)])
def test_an_update_is_tried_with_data_as_the_memory_gives_it(memory_type, on_policy, options):
    chosen = options("--config", "ppo-cartpole", "--memory_type", memory_type)
    *_, batch = throughput.measure(chosen, validation.environment_spec(chosen), 0)
    assert batch.on_policy == on_policy and batch.fresh.all() == on_policy


def test_the_estimate_of_synchronous_collection_adds_up_what_takes_turns(options):
    chosen = options("--config", "ppo-cartpole", "--num_actors", "2")  # 8 environments
    costs = StepCosts(1e-3, 4e-3, True, 8, 1)
    assert throughput.steps_per_second(chosen, costs, 10) == pytest.approx(1 / (1e-3 / 2 + 4e-3 / 80))


def test_an_update_costs_as_much_as_the_whole_batch_where_fewer_environments_are_played(options, monkeypatch, capsys):
    costs, measured = StepCosts(1e-3, 1e-3, True, 8, 1), throughput.measure
    monkeypatch.setattr(throughput, "measure", lambda *arguments: (costs, *measured(*arguments)[1:]))
    monkeypatch.setattr(Pace, "num_envs", lambda *_: 1)
    check(options("--config", "ppo-cartpole"), seconds=0)  # whose batch has the steps of four environments
    assert "250.0 updates/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--steps", "3000"), "about 0:00:03 (3,000 agent steps)"),  # 1,000 to fill and 2,000 more at 1,000 a second
        (("--updates", "500"), "about 0:00:05 (500 updates)"),  # the samples of 4,000 steps
        # 1,000 steps to fill and 9,600 more, because each of two learners has a batch of its own, at 2,000 a second
        (("--updates", "600", "--num_learners", "2", "--num_actors", "2"), "about 0:00:05 (600 updates)"),
        # without a rate limiter the updates wait for no steps
        (("--updates", "5000", "--rate_limiter.samples_per_insert", "none"), "about 0:00:04 (5,000 updates)"),
        (("--steps", "3000", "--seconds", "2"), "about 0:00:02 (as asked)"),
        (("--steps", "none"), "a million agent steps take about 0:16:40"),
    ],
)
def test_the_estimated_time_is_that_of_the_first_limit_reached(words, told, options):
    chosen, costs = options("--config", "dqn-cartpole", *words), StepCosts(1e-3, 8e-4, True, 8, 1)
    agent = chosen.make_agent(validation.environment_spec(chosen))
    rate = throughput.steps_per_second(chosen, costs, agent.samples_per_window)
    assert told in _budget(chosen, costs, rate, agent)
