"""Every environment of gymnasium plays, or is refused with a sentence, as docs/environments.md says."""

import re
from pathlib import Path

import gymnasium as gym
import pytest

from core.acting.validated_env import play_randomly
from core.runtime.options import make_env
from core.specs import Discrete
from utils.config import validation
from utils.config.check import describe
from utils.config.command_line import read
from utils.errors import ConfigurationError
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "environments.md").read_text()
LINES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
PLAYED = {name: line[1:] for line in LINES if len(line) == 4 for name in re.findall("`(.+?)`", line[0])}
REFUSED: dict[str, list[str]] = {}
for line in LINES:
    if len(line) == 2:
        for name in re.findall("`(.+?)`", line[0]):
            REFUSED.setdefault(name, []).append(line[1].replace("ID", name))
SMALL = {
    "engine": "inline",
    "num_actors": "1",
    "num_envs_per_actor": "2",
    "agent.batch_size": "4",
    "memory.capacity": "400",
    "rate_limiter.min_replay_size": "20",
    "rate_limiter.error_buffer": "400",
    "rate_limiter.samples_per_insert": "1",
    "evaluator.episodes": "1",
    "evaluator.max_steps": "3",
    "steps": "200",
}
# one whose observations are one-hot, and vectors with each kind of actions; of others only the sizes differ
KINDS = ("Blackjack-v1", "Acrobot-v1", "MountainCarContinuous-v0")


def test_every_environment_of_gymnasium_is_in_the_tables():
    own = {name for name, spec in gym.registry.items() if is_gymnasiums(spec.entry_point)}
    assert len(own) > 50 and own == PLAYED.keys() | REFUSED.keys()


def is_gymnasiums(entry_point):
    module = entry_point if isinstance(entry_point, str) else entry_point.__module__
    return module.startswith("gymnasium.envs")


@pytest.mark.filterwarnings("ignore")  # old versions of environments are deprecated
@pytest.mark.parametrize("name", sorted(PLAYED.keys() | REFUSED.keys()))
def test_an_environment_plays_with_the_documented_spaces_or_is_refused_with_the_reason(name, root):
    observation, action, row = PLAYED.get(name, ("", "", "`dqn-cartpole`"))
    try:
        options = read(["--config", row.strip("`"), "--game", name, "--root", str(root)])
    except ConfigurationError as error:
        assert [problem.partition(": ")[2] for problem in error.problems] in [[why] for why in REFUSED.get(name, ())]
        return
    spec = validation.environment_spec(options)
    stack = f", {spec.frame_stack} frames" if spec.frame_stack else ""
    assert describe(spec.frame) + stack == observation
    bounds = "" if isinstance(spec.action, Discrete) else f"{describe(spec.action.array)} "
    assert bounds + spec.action.description == action
    env = make_env(options, 2, training=True)
    assert play_randomly(env, 2, 100, 1)[0] == []
    env.close()


@pytest.mark.parametrize("name", KINDS)
def test_an_environment_of_each_kind_trains_for_200_steps(name, root):
    words = [f"--{option}={value}" for option, value in SMALL.items()]
    options = read(["--config", PLAYED[name][2].strip("`"), "--game", name, "--root", str(root), *words])
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    assert context.counters.agent_steps >= 200 and context.counters.updates >= 20
