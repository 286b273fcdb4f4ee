"""A learner compiles its updates where that pays, and says in one line if one thing alone prevents it."""

import pytest

from core.agents.dqn import DQN
from core.single_processes import learner
from utils.config.command_line import read_options
from utils.config.validation import environment_spec


class Own(DQN):
    """It may compute in Python what a recorded update would repeat."""


class OwnTensors(DQN):
    supports_cuda_graphs = True


@pytest.fixture
def chosen(root, monkeypatch, capsys):
    """Return a function that says if the learner of a row compiles, and what it printed."""

    def choose(*words, reason=""):
        monkeypatch.setattr(learner, "missing_compiler", lambda: reason)
        options = read_options(["--root", str(root), "--learner.compile", "auto", *words])
        compiles = learner.compiles_updates(options, options.make_agent(environment_spec(options)))
        return compiles, capsys.readouterr().err

    return choose


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--config", "dqn-minatar-breakout"), True),
        (("--config", "dqn-minatar-breakout", "--steps", "150000"), False),  # 36,250 updates
        (("--config", "dqn-minatar-breakout", "--engine", "inline"), False),
        (("--config", "dqn-minatar-breakout", "--learner.compile", "no"), False),
        (("--config", "dqn-minatar-breakout", "--agent_type", f"{__name__}:OwnTensors"), True),
        (("--config", "dqn-cartpole"), False),
        (("--config", "dqn-cartpole", "--learner.compile", "yes"), True),
        (("--config", "dqn-pong-small"), False),
        (("--config", "ddpg-halfcheetah"), True),
        (("--config", "ddpg-inverted-pendulum"), False),
        (("--config", "sac-halfcheetah"), True),
        (("--config", "ppo-halfcheetah"), True),  # 488 updates of 320 minibatches
        (("--config", "ppo-halfcheetah", "--steps", "200000"), False),
        (("--config", "ppo-pong"), False),
        (("--config", "pqn-minatar-breakout"), True),
        (("--config", "ppo-minatar-breakout"), False),
        (("--config", "rainbow-minatar-breakout"), True),  # 48,750 updates
        (("--config", "rainbow-no-noisy-minatar-breakout"), False),
        (("--config", "laser-minatar-breakout"), True),
        (("--config", "replay-minatar-breakout"), True),  # 50,000 updates
        (("--config", "impala-minatar-breakout"), False),
        (("--config", "ppo-lstm-recall", "--steps", "1000000000"), False),
        (("--config", "r2d2-minatar-breakout", "--steps", "1000000000"), False),
        (("--config", "dqn-minatar-breakout", "--num_learners", "2", "--num_actors", "2"), False),
    ],
)
def test_auto_compiles_long_runs_of_small_networks(chosen, words, expected):
    assert chosen(*words) == (expected, "")


def test_auto_says_that_a_compiler_is_missing_and_goes_on(chosen):
    told = "updates are not compiled, which would be faster: no g++ (learner.compile no hides this line)\n"
    assert chosen("--config", "dqn-minatar-breakout", reason="no g++") == (False, told)
    assert chosen("--config", "dqn-cartpole", reason="no g++") == (False, "")


def test_auto_says_that_an_agent_does_not_ask_to_be_compiled(chosen):
    told = (
        "updates are not compiled, which would be faster: Own does not itself set supports_cuda_graphs "
        "(learner.compile no hides this line)\n"
    )
    assert chosen("--config", "dqn-minatar-breakout", "--agent_type", f"{__name__}:Own") == (False, told)
