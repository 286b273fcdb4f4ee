"""`create_context` builds the context of a run."""

import dataclasses
import pickle
import resource

import pytest
import torch

from core.checkpoint import model_file, run_checkpoint
from core.memories.uniform import UniformMemory
from utils import run_registry
from utils.config import validation
from utils.config.command_line import read_options
from utils.errors import ConfigurationError
from utils.launch import _initial_weights, _try_test_files, create_context


@pytest.fixture
def options(root):
    return lambda *words: read_options(["--root", str(root), "--config", "dqn-cartpole", "--num_actors", "2", *words])


def test_the_context_counts_every_process_of_the_run(options, capsys):
    context, _ = create_context(options())
    assert f"training run {context.options.signature}: " in capsys.readouterr().out
    assert context.roles == (("logger", 0), ("actor", 0), ("actor", 1), ("learner", 0), ("evaluator", 0))
    assert context.memories[0].layout.total_envs == 2 * context.options.num_envs_per_actor
    assert context.options.log_folder.is_dir()


class NeverMade(UniformMemory):
    def __init__(self, params, layout, window, seed):
        raise RuntimeError("no memory")


def test_a_memory_that_cannot_be_made_is_one_sentence_and_leaves_nothing(options, root):
    chosen = options("--memory_type", f"{__name__}:NeverMade")
    with pytest.raises(ConfigurationError, match=r"NeverMade cannot be made: RuntimeError: no memory \(.*test_launch"):
        create_context(chosen)
    assert list(root.iterdir()) == []


def test_mode_2_claims_no_folder_and_needs_no_memory(options, root, tmp_path):
    chosen = options("--mode", "2", "--model_file", str(tmp_path / "model.pth"))
    model_file.save_weights(
        tmp_path / "model.pth", chosen.make_agent(validation.environment_spec(chosen)).model.state_dict(), {}
    )
    context, _ = create_context(chosen)
    assert context.roles == (("tester", 0),) and context.memories == {}
    assert context.initial_weights == tmp_path / "model.pth"
    assert list(root.iterdir()) == []


def test_options_that_decide_what_weights_mean_are_told_where_the_training_had_others(options, tmp_path, capsys):
    file = tmp_path / "model.pth"
    chosen = options("--mode", "2", "--model_file", str(file))
    trained = options("--mode", "2", "--model_file", str(file), "--env.max_steps", "7", "--agent.learning_rate", "1")
    weights = chosen.make_agent(validation.environment_spec(chosen)).model.state_dict()
    model_file.save_weights(file, weights, {"options": trained.to_dict()})
    capsys.readouterr()
    create_context(chosen)
    assert capsys.readouterr().out.splitlines()[1:] == ["model.pth is used with env.max_steps=None (was 7)"]


@pytest.mark.parametrize("name", ["model_test.json", "model_test.mp4", "too long", "full"])
def test_f45_mode_2_tries_its_files_before_it_plays(options, tmp_path, name):
    file = tmp_path / (f"{'m' * 234}.pth" if name == "too long" else "model.pth")
    chosen = dataclasses.replace(options("--mode", "2", "--model_file", str(file)), record=True)
    model_file.save_weights(file, chosen.make_agent(validation.environment_spec(chosen)).model.state_dict(), {})
    (tmp_path / "model_test.json").write_text("what an earlier test found")
    if name.startswith("model"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000 if name == "full" else limits[0], limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"mode 2 cannot write .*_test.(json|mp4) ") as refused:
            weights_and_files(chosen) if name == "full" else create_context(chosen)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.code == 2 and sorted(tmp_path.rglob("*")) == before


def weights_and_files(chosen):
    """Do what `create_context` does in mode 2, without shared memory, to which a limit of file sizes applies too."""
    agent = chosen.make_agent(validation.environment_spec(chosen))
    _try_test_files(chosen, _initial_weights(chosen, agent))


@pytest.mark.parametrize("mode", ["1", "2"])
def test_an_unsuitable_model_file_exits_3_and_makes_no_file(mode, options, root, tmp_path):
    file = tmp_path / "model.pth"
    chosen = options("--mode", mode, "--model_file", str(file))
    for message in ("does not exist", "another architecture"):
        with pytest.raises(ConfigurationError, match=message) as refused:
            create_context(chosen)
        assert refused.value.code == 3 and list(root.iterdir()) == []
        model_file.save_weights(file, {"weight": torch.zeros(1)}, {})


def test_the_disk_must_have_room_for_a_replay_in_checkpoints(options, monkeypatch):
    tried, claim = [], run_registry.claim
    monkeypatch.setattr(run_registry, "claim", lambda chosen, size: (tried.append(size), claim(chosen, size))[1])
    for stored in ("false", "true"):
        context, _ = create_context(options("--learner.checkpoint_replay", stored))
    assert tried[1] - tried[0] == context.memories[0].layout.nbytes > 0


def test_a_run_is_resumed_from_its_newest_checkpoint_only(options, alone, capsys):
    started, _ = create_context(options())
    chosen = options("--resume", started.options.signature)
    with pytest.raises(ConfigurationError, match="there is no checkpoint") as refused:
        create_context(chosen)
    assert refused.value.code == 3
    clock = {**started.counters.state_dict(), **started.rate_limiter.state_dict()}
    clock |= {"agent_steps": [30, 10], "updates": [7]}
    for state, message in (
        ({}, "has no agent and no clock and no learner"),
        ({"agent": {}, "clock": [1, 2], "learner": {}}, "counters of"),
    ):
        run_checkpoint.save(chosen.checkpoint_folder, state, step=40, keep=1)
        with pytest.raises(ConfigurationError, match=f"{message}.* not of a run.*; start a new run") as refused:
            create_context(chosen)
        assert refused.value.code == 3
    saved = run_checkpoint.save(chosen.checkpoint_folder, {"agent": {}, "clock": clock, "learner": {}}, step=40, keep=1)
    context, _ = create_context(chosen)
    assert context.counters.agent_steps == 40 and context.resume_from == saved
    assert "already" not in capsys.readouterr().out
    del context  # and with it the lock
    create_context(options("--resume", started.options.signature, "--updates", "7"))
    assert "has updates=7 already: set a higher limit" in capsys.readouterr().out


def test_an_agent_is_made_on_its_device_and_its_maker_pickles(options):
    _, agent = create_context(options())
    again = pickle.loads(pickle.dumps(agent._make_model))()
    assert {parameter.device.type for parameter in again.parameters()} == {"cpu"}
    assert type(again) is type(agent.model)
