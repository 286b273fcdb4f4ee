"""Agents and memories are matched by the kinds of windows that they declare, not by names."""

from dataclasses import replace

import gymnasium
import pytest

from core.agents.dqn import DQN
from core.memories.unrolls.queue import QueueMemory
from core.models.dqn import DQNMLP
from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from utils.config.command_line import read_options
from utils.config.validation import environment_spec
from utils.factory import AgentsDict, MemoriesDict

OWN = "tests.utils.config.test_validation:OwnMemory"
PAIRS = {
    "dqn": {"shared", "prioritized"},
    "rainbow": {"shared", "prioritized"},
    "iqn": {"shared", "prioritized"},
    "r2d2": {"shared", "prioritized"},
    "ddpg": {"shared", "prioritized"},
    "d4pg": {"shared", "prioritized"},
    "td3": {"shared", "prioritized"},
    "sac": {"shared", "prioritized"},
    "impala": {"queue", "mixed"},
    "impact": {"queue", "mixed", "circular"},
    "ppo": {"rollouts", "queue", "mixed"},
    "pqn": {"rollouts"},
}


class OwnMemory(QueueMemory):
    """A memory that no agent knows."""


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(MemoriesDict.data, "own", OWN)


@pytest.mark.parametrize("agent", AgentsDict)
def test_each_agent_fits_the_memories_with_its_window_kinds(agent):
    kinds = set(AgentsDict[agent].window_kinds)
    assert {memory for memory in MemoriesDict if kinds & set(MemoriesDict[memory].window_kinds)} == PAIRS[agent]


@pytest.mark.parametrize("name", ["own", OWN])
def test_an_unknown_memory_fits_agents_of_its_window_kinds(root, registered, name):
    for config in ("impala-cartpole", "impact-cartpole"):
        assert read_options(["--config", config, "--memory_type", name, "--root", str(root)]).memory_type == name


@pytest.mark.parametrize("name", ["own", OWN])
def test_a_memory_with_unsuitable_windows_is_refused(refuse, registered, name):
    could_be = "memory_type could be shared or prioritized"
    message = f"memory_type={name} holds unrolls, and agent_type=dqn learns from transitions; {could_be}"
    assert message in refuse("--config", "dqn-cartpole", "--memory_type", name)


def test_r2d2_learns_from_clipped_rewards_only_if_it_is_told(refuse, root):
    words = "--config", "r2d2-cartpole", "--env.reward_clipping", "sign"
    assert "agent_type=r2d2, which learns from raw rewards: set env.reward_clipping=none or" in refuse(*words)
    read_options([*words, "--agent.allow_clipped_rewards", "true", "--root", str(root)])
    read_options(["--config", "dqn-cartpole", *words[2:], "--root", str(root)])


def test_munchausen_needs_quantiles_or_values_and_no_double_q(refuse, root):
    words = "--agent.munchausen_alpha", "0.9"
    assert "agent.munchausen_alpha=0.9 needs agent.distribution=quantile" in refuse(
        "--config", "rainbow-cartpole", *words, "--agent.double_q", "false"
    )
    assert "agent.munchausen_alpha=0.9 needs agent.double_q=False" in refuse("--config", "dqn-cartpole", *words)
    assert "munchausen_alpha" in refuse("--config", "r2d2-cartpole", *words)
    quantiles = "--config", "rainbow-cartpole", "--agent.distribution", "quantile", *words
    assert "agent.munchausen_alpha=0.9 needs agent.double_q=False" in refuse(*quantiles)
    read_options([*quantiles, "--agent.double_q", "false", "--root", str(root)])


def test_options_of_replay_need_replay(refuse, root):
    words = ("--config", "impala-cartpole", "--agent.policy_cloning_cost", "0.01", "--agent.relevance", "kl")
    told = "agent.policy_cloning_cost=0.01 and agent.relevance=kl needs replayed steps, and memory_type=queue gives"
    assert told in refuse(*words)
    alone = '[{"type": "queue", "capacity": 16, "sample_ratio": 1}]'
    assert "memory_type=mixed gives" in refuse(*words, "--memory_type", "mixed", "--memory.replay_parameters", alone)
    both = '[{"type": "queue", "capacity": 16, "sample_ratio": 0.5}, {"type": "standard", "sample_ratio": 0.5}]'
    mixed = ("--memory_type", "mixed", "--memory.replay_parameters", both)
    assert read_options([*words, *mixed, "--root", str(root)]).agent.relevance == "kl"


def test_a_registered_memory_is_named_among_those_that_fit(refuse, registered):
    assert "memory_type could be queue or mixed or own" in refuse(
        "--config", "impala-cartpole", "--memory_type", "shared"
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--supervisor.elastic", "1"), "num_learners=2 is more than supervisor.elastic=1"),
        (("--num_actors", "5"), "num_actors=5 must be a multiple of num_learners=2"),
        (("--ray.learner_placement", "pack"), "needs ray.address and ray.learner_placement=spread"),
        (("--learner.checkpoint_replay", "true"), "supervisor.elastic excludes learner.checkpoint_replay"),
        (("--engine", "local"), "supervisor.elastic=4 needs engine=ray"),
    ],
)
def test_options_that_exclude_an_elastic_run_are_refused(refuse, words, reason):
    assert reason in refuse(
        *("--config", "dqn-cartpole", "--engine", "ray", "--ray.address", "10.0.0.1:6379", "--num_learners", "2"),
        *("--num_actors", "6", "--supervisor.elastic", "4", *words),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ppo-cartpole",), 976.5625),  # 500,000 steps in rollouts of 4 x 128
        (("ppo-cartpole", "--steps", "2000000"), 3_906.25),
        (("ppo-cartpole", "--steps", "2000000", "--updates", "50"), 50),
        (("ppo-cartpole", "--num_actors", "4", "--num_learners", "2"), 244.140625),
        (("ppo-cartpole", "--steps", "10"), 10 / 512),
        (("ppo-cartpole", "--memory_type", "queue", "--agent.batch_size", "2"), 1_953.125),
        (("pqn-cartpole",), 244.140625),  # 32 x 64
        (("impala-cartpole",), 12_500),
        (("impact-cartpole",), 25_000),  # every unroll is learnt from twice
        (("dqn-cartpole", "--rate_limiter.min_replay_size", "1600"), 24_800),
    ],
)
def test_updates_of_a_run_follow_from_its_limits(words, expected, root):
    options = read_options(["--config", *words, "--root", str(root)])
    agent = options.make_agent(environment_spec(options))
    assert agent.params == replace(options.agent, batch_size=options.batch_size)
    assert options.updates_of_run(agent.samples_per_window) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "made", "expected"),
    [
        (("ppo-cartpole",), (512, 0), 0.0),  # rollouts of 4 x 128 of 500,000 steps: the first update
        (("ppo-cartpole",), (250_512, 489), 0.5),
        (("ppo-cartpole",), (499_968, 976), (499_968 - 512) / 500_000),  # the last one
        (("ppo-cartpole", "--steps", "400"), (512, 0), 0.0),
        (("ppo-cartpole", "--updates", "50"), (10_752, 20), 0.4),
        (("ppo-cartpole", "--steps", "None", "--updates", "50"), (999_999, 20), 0.4),
        (("ppo-cartpole", "--num_actors", "4", "--num_learners", "2"), (252_048, 122), 0.5),
        (("impact-cartpole", "--steps", "1000"), (540, 12), 0.5),  # batches of 8 x 10, each learnt from twice
        (("dqn-cartpole", "--steps", "201600", "--rate_limiter.min_replay_size", "1600"), (1_608, 0), 0.0),
        (("dqn-cartpole", "--steps", "201600", "--rate_limiter.min_replay_size", "1600"), (101_608, 12_500), 0.5),
        (("dqn-cartpole", "--steps", "1600", "--rate_limiter.min_replay_size", "1600"), (1_600, 0), 0.0),
        (("dqn-cartpole", "--steps", "None", "--seconds", "9"), (101_608, 12_500), 0.0),
    ],
)
def test_progress_is_the_share_of_learning_that_is_over(words, made, expected, root):
    options = read_options(["--config", *words, "--root", str(root)])
    samples = options.make_agent(environment_spec(options)).samples_per_window
    assert options.progress(*made, samples) == pytest.approx(expected)


def test_an_error_of_a_model_is_told_with_its_place(refuse, monkeypatch):
    def broken(self, params, spec):
        _, _ = (1,)

    monkeypatch.setattr(DQNMLP, "__init__", broken)
    told = refuse("--config", "dqn-cartpole")
    assert "model_type=dqn-mlp cannot be made for game=CartPole-v1: ValueError: not enough values" in told
    assert "test_validation.py, line " in told


class WrongWindow(DQN):
    @property
    def window(self):
        return WindowSpec.transition(self.params.nstep)


class WrongExtras(DQN):
    extras = {"reward": ArraySpec((), "float32")}


class NoSpec(DQN):
    extras = {"bonus": 3}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WrongWindow", "AttributeError: 'DQNParams' object has no attribute 'nstep'"),
        ("WrongExtras", "ValueError: Agent.extras declares reward"),
        ("NoSpec", "AttributeError: 'int' object has no attribute 'shape'"),
    ],
)
def test_an_error_of_an_agent_is_told_with_its_place(refuse, name, message):
    told = refuse("--config", "dqn-cartpole", "--agent_type", f"{__name__}:{name}")
    chosen = f"{name} with memory_type=shared and game=CartPole-v1"
    assert f"{chosen} cannot be used: {message}" in told and ".py, line " in told


class NeverMade(DQN):
    def __init__(self, params, spec, make_model):
        raise RuntimeError("no init")


class NothingToTell(DQN):
    @classmethod
    def problems(cls, params):
        return None


class OneSentence(DQN):
    @classmethod
    def problems(cls, params):
        return "gamma is bad"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NeverMade", f"agent_type={__name__}:NeverMade cannot be made for game=CartPole-v1: RuntimeError: no init"),
        ("NothingToTell", "NothingToTell.problems failed: TypeError: 'NoneType' object is not iterable"),
        ("OneSentence", "error: gamma is bad\n"),
    ],
)
def test_any_error_of_an_own_agent_is_one_sentence(refuse, name, message):
    assert message in refuse("--config", "dqn-cartpole", "--agent_type", f"{__name__}:{name}")


def test_a_mask_that_the_environment_does_not_give_is_refused(refuse):
    told = refuse("--config", "dqn-cartpole", "--env.action_mask", "info")
    assert "action_mask of environment 0 at step 0 is {}, expected 2 zeros and ones" in told


@pytest.mark.parametrize(
    ("action", "shape", "message"),
    [
        (gymnasium.spaces.Discrete(2), (4,), r"action=Discrete\(2\) is none of Discrete, MultiDiscrete, Continuous"),
        (Discrete(0), (4,), "there is nothing to choose"),
        (Discrete(2), (4, 0), "or to learn from"),
    ],
)
def test_a_spec_without_actions_or_observations_is_refused(action, shape, message):
    with pytest.raises(ValueError, match=message):
        EnvSpec("own", ArraySpec(shape, "float32"), 0, action)


def test_a_run_without_an_update_is_refused(refuse):
    message = "steps=999 ends the run before its first update: rate_limiter.min_replay_size=1000"
    assert message in refuse("--config", "dqn-cartpole", "--steps", "999")


def test_a_schedule_without_a_length_is_refused(refuse, root):
    words = "--config", "ppo-cartpole", "--steps", "None"
    assert "agent.lr_schedule=linear needs agent.lr_schedule_updates, or steps or updates" in refuse(*words)
    steps = "--config", "ppo-cartpole", "--agent.lr_schedule", "step"
    assert "agent.lr_schedule=step needs agent.lr_schedule_updates" in refuse(*steps)
    assert "agent.lr_decay=1.5 would raise the rate" in refuse(
        *steps, "--agent.lr_schedule_updates", "9", "--agent.lr_decay", "1.5"
    )
    for more in (("--updates", "9"), ("--agent.lr_schedule_updates", "9"), ("--agent.lr_schedule", "constant")):
        assert read_options([*words, *more, "--root", str(root)])
    told = refuse(*steps, "--agent.lr_schedule_updates", "9", "--agent.lr_end", "0.1")
    assert "agent.lr_end=0.1 would begin above agent.learning_rate=" in told
    words = "--config", "ddpg-pendulum", "--agent.lr_schedule", "step", "--agent.critic_learning_rate", "1e-4"
    told = refuse(*words, "--agent.lr_end", "5e-4")
    assert "agent.lr_end=0.0005 would begin above agent.critic_learning_rate=0.0001" in told


def test_normalised_advantages_need_two_samples_in_a_minibatch(refuse, root):
    words = "--config", "ppo-cartpole", "--model.value_torso", "false", "--agent.minibatches"  # rollouts of 4 x 128
    told = refuse(*words, "257")
    assert "needs 2 samples in each minibatch, and agent.minibatches=257 divides 512" in told
    single = "--model.lstm", "8", "--agent.unroll_length", "1"
    assert "agent.minibatches=3 divides 4" in refuse(*words, "3", *single)
    for more in (
        ("256",),
        ("257", "--agent.normalize_advantages", "false"),
        ("257", "--model.lstm", "8"),
        ("2", *single),
        ("512", "--num_learners", "2", "--num_actors", "2"),
    ):
        assert read_options([*words, *more, "--root", str(root)])
