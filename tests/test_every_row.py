"""Every config plays and learns on the inline engine, and every registered class meets its contract."""

import dataclasses

import pytest

from core.agent import Agent
from core.checkpoint import model_file, run_checkpoint
from core.env import Env
from core.memory import Memory
from core.model import Model
from tests.rows import skip_unless_installed
from utils.config.command_line import read_options
from utils.factory import AgentsDict, EnginesDict, EnvsDict, MemoriesDict, ModelsDict, ProcessesDict
from utils.launch import create_context
from utils.options import CONFIGS

CONTRACTS = [(AgentsDict, Agent), (EnvsDict, Env), (MemoriesDict, Memory), (ModelsDict, Model)]


@pytest.mark.parametrize("name", [row["name"] for row in CONFIGS])
def test_every_config_plays_learns_and_saves_a_model(tmp_path, name):
    skip_unless_installed(name)
    memory = next(row for row in CONFIGS if row["name"] == name)["memory_type"]
    options = read_options(
        [
            "--config",
            name,
            "--root",
            str(tmp_path),
            "--engine",
            "inline",
            "--num_actors",
            "1",
            "--num_envs_per_actor",
            "2",
            "--rate_limiter.min_replay_size",
            "20",
            "--rate_limiter.error_buffer",
            "400",
            "--agent.batch_size",
            "4",
            "--updates",
            "3",
            "--evaluator.episodes",
            "1",
            "--evaluator.max_steps",
            "3",
            *([] if memory == "mixed" else ["--memory.capacity", "500"]),
        ]
    )
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict), 1, 1, 1) == 0
    assert context.counters.updates >= 3 and context.counters.agent_steps >= 20
    weights, metadata = model_file.load_weights(context.options.model_path)
    assert weights.keys() == agent.model.state_dict().keys() and metadata["config"] == name
    state, _ = run_checkpoint.load(context.options.checkpoint_folder)
    assert any(not bool((state["agent"]["model"][key] == agent.model.state_dict()[key]).all()) for key in weights)


@pytest.mark.parametrize(
    "factory, contract, name", [(factory, contract, name) for factory, contract in CONTRACTS for name in factory]
)
def test_every_registered_class_meets_its_contract(factory, contract, name):
    chosen = factory[name]
    assert issubclass(chosen, contract)
    assert not getattr(chosen, "__abstractmethods__", ()), f"{name} leaves {chosen.__abstractmethods__} open"
    assert dataclasses.is_dataclass(chosen.Params) and chosen.Params.__dataclass_params__.frozen
    chosen.Params()  # every option has a default
