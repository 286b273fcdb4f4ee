"""Value agents act in MultiDiscrete spaces by every combination of choices, up to a limit that is told."""

import numpy as np
import pytest

from core.acting.validated_env import JointActionsEnv, split_joint_actions
from core.env import Env, reset_timestep
from core.runtime.options import make_env
from core.specs import ArraySpec, Discrete, EnvSpec, MultiDiscrete
from tests.choices import NVEC
from tests.reliability.test_inline import CHOICES, RUNS, train
from utils.api import load
from utils.config import validation
from utils.config.command_line import read_options
from utils.factory import AgentsDict

AGENTS = [("--config", "dqn-cartpole"), ("--config", "r2d2-cartpole"), ("--config", "iqn-cartpole")]


def refusal(capsys, words):
    """Return the one sentence by which these words are refused."""
    with pytest.raises(SystemExit):
        read_options(words)
    (sentence,) = capsys.readouterr().err.splitlines()
    return sentence


@pytest.mark.parametrize("in_background", [False, True])
def test_joint_actions_are_the_combinations_in_order(in_background):
    options = read_options([*AGENTS[0], *CHOICES])
    env = make_env(options, 24, training=True)
    assert env.spec.action == Discrete(24, NVEC) and validation.environment_spec(options) == env.spec
    shown = env.reset(1).observation
    joint = np.arange(24)
    if in_background:
        env.send(joint)
        timestep = env.recv()
    else:
        timestep = env.step(joint)
    named = np.array(list(np.ndindex(*NVEC)))  # the last choice fastest
    places = named + np.cumsum(NVEC) - NVEC
    np.testing.assert_allclose(timestep.raw_reward, np.take_along_axis(shown, places, 1).mean(1))
    assert split_joint_actions(MultiDiscrete(NVEC), named) is named


class Masked(Env):
    """Return masks of two choices."""

    spec = EnvSpec("masked", ArraySpec((1,), "float32"), 0, MultiDiscrete((2, 3)), has_action_mask=True)

    def __init__(self, masks):
        self.masks = masks

    def reset(self, seed):
        return reset_timestep(np.zeros((len(self.masks), 1), np.float32), self.masks)

    def step(self, action):
        return self.reset(0)


def test_a_combination_is_legal_if_each_choice_is():
    masks = np.random.default_rng(1).random((40, 5)) < 0.6
    masks[:, 1] |= ~masks[:, :2].any(1)
    masks[:, 2] |= ~masks[:, 2:].any(1)
    env = JointActionsEnv(Masked(masks), 40)
    expected = [[bool(row[i] and row[2 + j]) for i in range(2) for j in range(3)] for row in masks]
    assert env.reset(1).action_mask.tolist() == env.step(np.zeros(40, np.int64)).action_mask.tolist() == expected
    masks[7, 2:] = False  # legal actions of the first choice only
    with pytest.raises(ValueError, match="action_mask of environment 7 of masked at step 1 has no legal action"):
        env.reset(1)


@pytest.mark.parametrize("agent", AgentsDict)
def test_every_agent_takes_several_choices_or_refuses_them_in_a_sentence(agent, capsys):
    rows = {"d4pg": "d4pg-pendulum", "ddpg": "ddpg-pendulum", "td3": "td3-pendulum", "sac": "sac-pendulum"}
    words = ["--config", rows.get(agent, f"{agent}-cartpole"), *CHOICES]
    if agent not in rows:
        assert validation.environment_spec(read_options(words)).action in (Discrete(24, NVEC), MultiDiscrete(NVEC))
        return
    sentence = refusal(capsys, words)
    taken = "4 choices at once among 2 x 3 x 2 x 2 of game=tests.choices:Choices-v0; agent_type could be"
    assert sentence.startswith(f"error: agent_type={agent} cannot take the {taken} impala or impact or ppo")


@pytest.mark.parametrize("words", AGENTS)
def test_too_many_joint_actions_are_refused_with_their_number(words, capsys):
    sentence = refusal(capsys, [*words, *CHOICES, "--agent.max_joint_actions", "23"])
    assert "as 24 joint actions, more than agent.max_joint_actions=23: raise it, or agent_type could be" in sentence


@pytest.mark.parametrize("kind", ["shared", "r2d2", "impala with LSTM"])
def test_a_loaded_policy_returns_the_choices(tmp_path, kind):
    context = train(tmp_path, *RUNS[kind], *CHOICES, "--steps", "200", "--timestamp", "one")
    policy = load(context.options.model_path)
    actions, _ = policy.act(np.zeros((5, 9), np.float32))
    assert actions.shape == (5, 4) and ((actions >= 0) & (actions < NVEC)).all()
    assert policy.act(np.zeros(9, np.float32))[0].shape == (4,)
    assert (policy.evaluate(episodes=2).lengths == 5).all()
