"""Every config plays and learns on the inline engine, and every registered class meets its contract."""

import dataclasses
import json
import shlex

import pytest

from core.checkpoint import model_file, run_checkpoint
from tests.rows import PAIRS, SETTINGS, skip_unless_installed
from tests.selection import slow_except
from utils.config.command_line import read_options
from utils.factory import AgentsDict, EnginesDict, EnvsDict, MemoriesDict, ModelsDict, ProcessesDict
from utils.launch import create_context
from utils.options import CONFIGS


# test_command_line.py validates every config; configs that differ in game and numbers alone are played once
@pytest.mark.parametrize("name", slow_except(PAIRS, dict.fromkeys([*PAIRS, *SETTINGS])))
def test_every_config_plays_learns_and_saves_a_model(tmp_path, name):
    skip_unless_installed(name)
    row = next(row for row in CONFIGS if row["name"] == name)
    words = [] if row["memory_type"] in ("mixed", "rollouts") else ["--memory.capacity", "500"]
    if row["memory_type"] == "mixed":
        replays = [{**replay, "capacity": min(replay["capacity"], 500)} for replay in row["memory.replay_parameters"]]
        words += ["--memory.replay_parameters", json.dumps(replays)]
    if row["memory_type"] == "rollouts":
        words += ["--agent.unroll_length", "20", "--agent.epochs", "1"]  # test_inline.py runs several epochs
    if row["agent_type"] in ("impala", "impact"):
        words += ["--agent.unroll_length", "5"]
    if row["memory_type"] in ("shared", "prioritized"):
        words += ["--rate_limiter.samples_per_insert", "4"]  # rows of continuous control want up to 256
    if row["agent_type"] == "r2d2":
        words += ["--agent.burn_in", "2", "--agent.unroll_length", "10", "--agent.sequence_period", "5"]
    num_envs, min_steps = ("4", "1") if row["memory_type"] == "rollouts" else ("2", "20")
    batch_size = "10" if name.startswith("laser90-") else "4"  # nine of ten unrolls are replayed
    options = read_options(
        [
            "--config",
            name,
            "--root",
            str(tmp_path),
            *shlex.split("--engine inline --num_actors 1 --num_envs_per_actor"),
            num_envs,
            "--rate_limiter.min_replay_size",
            min_steps,
            *shlex.split("--rate_limiter.error_buffer 400 --updates 3 --evaluator.episodes 1 --evaluator.max_steps 3"),
            "--agent.batch_size",
            batch_size,
            *words,
        ]
    )
    context, agent = create_context(options)
    assert agent.launch(EnginesDict["inline"](context, ProcessesDict)) == 0
    assert context.counters.updates >= 3 and context.counters.agent_steps >= 20
    weights, metadata = model_file.load_weights(context.options.model_path)
    assert weights.keys() == agent.model.state_dict().keys() and metadata["config"] == name
    state, _ = run_checkpoint.load(context.options.checkpoint_folder)
    assert any(not bool((state["agent"]["model"][key] == agent.model.state_dict()[key]).all()) for key in weights)


FACTORIES = (AgentsDict, EnvsDict, MemoriesDict, ModelsDict)


@pytest.mark.parametrize(("factory", "name"), [(factory, name) for factory in FACTORIES for name in factory])
def test_every_registered_class_meets_its_contract(factory, name):
    chosen = factory[name]  # which checks that it is a class of its kind and leaves no method open
    assert dataclasses.is_dataclass(chosen.Params) and chosen.Params.__dataclass_params__.frozen
    chosen.Params()  # every option has a default
