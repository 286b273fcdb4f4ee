"""Every example of docs/extending.md works as printed: each is written to a package and trained inline."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from utils.config.command_line import read_options
from utils.config.rows import find_row
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

PROJECT = Path(__file__).resolve().parents[1]
PAGE = (PROJECT / "docs" / "extending.md").read_text()
MODULES = re.findall(r"`mypackage/(\w+)\.py`:\n(?:.*\n)*?\n?```python\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"(?m)^\.venv/bin/python main\.py (.*mypackage.*)$", PAGE)
SHORT = shlex.split(
    "--engine inline --num_actors 1 --num_envs_per_actor 2 --updates 30 --evaluator.episodes 1 --evaluator.max_steps 30"
)
FILLED = ["--rate_limiter.min_replay_size", "100"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "mypackage"
    folder.mkdir()
    for name, text in MODULES:
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


def trained(arguments, root):
    context, agent = create_context(read_options([*arguments, *SHORT, "--root", str(root)]))
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    assert context.counters.updates >= 30
    return context


def test_an_agent_that_ignores_masks_is_refused_where_there_are_some(package, capsys):
    agent = ("--config", "dqn-cartpole", "--agent_type", "mypackage.q_learning:QLearning")
    with pytest.raises(SystemExit):
        read_options([*agent, "--env_type", "tictactoe", "--game", "tictactoe"])
    (sentence,) = capsys.readouterr().err.splitlines()
    assert (
        "would take illegal actions of game=tictactoe, because it does not use masks; agent_type could be" in sentence
    )


def test_the_page_has_an_example_of_each_kind():
    names = "q_learning", "softmax_dqn", "predicting_ppo", "layer_norm", "recent", "richest", "corridor"
    assert tuple(name for name, _ in MODULES) == names and len(COMMANDS) == len(names)


@pytest.mark.slow
def test_the_agents_values_stay_bounded(package, tmp_path):
    """Without a target network they grow to 4,000 on CartPole, whose returns are at most 100 by a discount of 0.99."""
    command = next(command for command in COMMANDS if "QLearning" in command)
    words = [word if word != "30" else "400" for word in [*SHORT, *FILLED]]
    context, agent = create_context(read_options([*shlex.split(command), *words, "--root", str(tmp_path)]))
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    context.parameters.pull(agent.model, 0)
    observations = torch.from_numpy(np.random.default_rng(0).uniform(-0.2, 0.2, (100, 4)).astype(np.float32))
    with torch.no_grad():
        assert agent.values(observations).abs().max() < 150


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_learns_as_printed(package, tmp_path, command):
    trained([*shlex.split(command), *(() if "ppo" in command else FILLED)], tmp_path)


def test_the_replay_strategy_is_restored_with_its_replay(package, tmp_path):
    command = next(command for command in COMMANDS if "Richest" in command)
    memory = trained(shlex.split(command), tmp_path).memories[0]
    richest = memory.strategies[1]
    restored = type(richest)(richest.params, memory)
    restored.load_state_dict(richest.state_dict())
    assert len(restored.places) == len(richest.places) > 0
    np.testing.assert_array_equal(restored.earned, richest.earned)


def test_a_users_own_config_learns(package, tmp_path, monkeypatch):
    block = re.search(r"```python\n( +\{\"name\": \"mine\".*?\}),\n```", PAGE, re.S)
    row = eval(block[1].strip())
    monkeypatch.setattr("utils.config.rows.CONFIGS", [row])
    assert find_row("mine") is row
    trained(["--config", "mine", *FILLED], tmp_path)
