"""Every environment of gymnasium trains, or is refused with a sentence, as docs/environments.md says."""

import re
from pathlib import Path

import gymnasium as gym
import pytest

from core.specs import Discrete
from tests.selection import slow_except
from utils.config import validation
from utils.config.check import describe
from utils.config.command_line import read
from utils.errors import ConfigurationError
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "environments.md").read_text()
LINES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
TRAINED = {name: line[1:] for line in LINES if len(line) == 4 for name in re.findall("`(.+?)`", line[0])}
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
QUICK = ("Blackjack-v1", "Acrobot-v1", "MountainCarContinuous-v0")


def test_every_environment_of_gymnasium_is_in_the_tables():
    own = {name for name, spec in gym.registry.items() if is_gymnasiums(spec.entry_point)}
    assert len(own) > 50 and own == TRAINED.keys() | REFUSED.keys()


def is_gymnasiums(entry_point):
    module = entry_point if isinstance(entry_point, str) else entry_point.__module__
    return module.startswith("gymnasium.envs")


@pytest.mark.filterwarnings("ignore")  # old versions of environments are deprecated
@pytest.mark.parametrize("name", sorted(TRAINED.keys() | REFUSED.keys()))
def test_spaces_or_the_reason_are_as_documented(name, root):
    observation, action, row = TRAINED.get(name, ("", "", "`dqn-cartpole`"))
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_except(QUICK, sorted(TRAINED)))
def test_what_is_documented_as_playable_trains_for_200_steps(name, root):
    words = [f"--{option}={value}" for option, value in SMALL.items()]
    try:
        options = read(["--config", TRAINED[name][2].strip("`"), "--game", name, "--root", str(root), *words])
    except ConfigurationError as error:
        pytest.skip(str(error))  # the test above compares the reason
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict), 1, 1, 1) == 0
    assert context.counters.agent_steps >= 200 and context.counters.updates >= 20
