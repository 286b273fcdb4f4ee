"""Every registered model is exported to ONNX, and onnxruntime's outputs equal torch's for any batch size."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.agent import Agent
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec, Mixed, MultiDiscrete
from utils import export as exporting
from utils.api import Policy
from utils.config.rows import from_row
from utils.errors import ConfigurationError
from utils.export import export, main
from utils.factory import AgentsDict, ModelsDict
from utils.options import Options

onnxruntime = pytest.importorskip("onnxruntime")

SMALL = {"hidden": 16, "lstm": 8, "planes": 4, "atoms": 5, "feature_size": 8}
SPEC = EnvSpec("test", ArraySpec((5,), "float32"), 0, Discrete(3))
BOUND = np.array([2.0], np.float32)
GREEDY = {"mlp-ac": {"evaluation": "greedy"}}
# torch.onnx has no adaptive pooling, so that the export of these is refused
POOLED = ("dqn-resnet", "rainbow-resnet", "iqn-resnet", "r2d2-resnet")
# The head of each is exported on another torso, and its torso with another head.
COMBINED = (
    "dqn-small",
    "dqn-minatar",
    "rainbow-cnn",
    "rainbow-minatar",
    "iqn-cnn",
    "iqn-small",
    "r2d2-cnn",
    "r2d2-minatar",
    "r2d2-small",
)
COMBINED += ("dqn-mlp", "rainbow-mlp", "iqn-mlp", "minatar-ac", "nature-ac", "small-ac")
COMBINED += ("ddpg-cnn", "d4pg-cnn", "d4pg-mlp", "td3-cnn", "td3-mlp", "sac-cnn")


def spec_of(name: str, continuous: bool = False, vector: int = 0) -> EnvSpec:
    """Return a spec that suits this model, with three actions or two numbers, and a vector beside its pictures."""
    model = ModelsDict[name]
    if model.observations == "vector":
        shown = {"frame": ArraySpec((5,), "float32"), "frame_stack": 0}
    elif "minatar" in name:
        shown = {"frame": ArraySpec((10, 10, 4), "uint8"), "frame_stack": 0, "is_image": True}
    else:
        size = 42 if "small" in name else 84
        shown = {"frame": ArraySpec((size, size), "uint8"), "frame_stack": 2, "is_image": True, "max_value": 255.0}
    if vector:
        shape = shown["frame"].shape
        shown |= {"frame": ArraySpec((math.prod(shape) + 4 * vector,), "uint8"), "picture_of_parts": shape}
    action = (
        Continuous(np.array([-2, 0], np.float32), np.array([2, 5], np.float32))
        if continuous or agent_of(name).actions is Continuous
        else Discrete(3)
    )
    return EnvSpec(name="test", action=action, **shown)


def agent_of(name: str):
    return next(
        AgentsDict[agent]
        for agent in AgentsDict
        if AgentsDict[agent].required_output == ModelsDict[name].output_kind
        and (agent in name or not name.startswith(("ddpg", "td3", "sac")))
    )


def small_policy(name: str, lstm: bool = False, continuous: bool = False, vector: int = 0) -> Policy:
    """Return a policy with a small network of this kind and random weights."""
    agent = next(agent for agent in AgentsDict if AgentsDict[agent] is agent_of(name))
    options, problems = from_row(
        {
            "name": "test",
            "agent_type": agent,
            "env_type": "gym",
            "game": "test",
            "memory_type": "shared",
            "model_type": name,
        }
    )
    assert isinstance(options, Options) and not problems
    sizes = {field.name: SMALL[field.name] for field in dataclasses.fields(options.model) if field.name in SMALL}
    if isinstance(options.model.hidden if "hidden" in sizes else 0, tuple):
        sizes["hidden"] = (16, 16)
    if ModelsDict[name].output_kind == "actor-critic" and not lstm:
        sizes.pop("lstm", None)
    options = dataclasses.replace(options, model=dataclasses.replace(options.model, **sizes))
    torch.manual_seed(1)
    return Policy(options, options.make_agent(spec_of(name, continuous, vector)), {"score": 1.0})


def frames(pictures, vectors):
    """Return frames of bytes [..., N] that hold both."""
    return np.concatenate([pictures.reshape(*vectors.shape[:-1], -1), vectors.view(np.uint8)], -1)


def marked(name: str, *parts: bool | int) -> Any:
    return pytest.param(
        name, *parts, marks=pytest.mark.learn if name in COMBINED and parts[-1] == 0 else pytest.mark.slow
    )


@pytest.mark.parametrize(
    "name, lstm, continuous, vector",
    [
        *(marked(name, False, False, 0) for name in ModelsDict if name not in (*POOLED, "mlp-ac")),
        marked("mlp-ac", True, False, 0),
        marked("mlp-ac", False, True, 0),
        *(marked(name, False, False, 3) for name in ("dqn-small", "r2d2-minatar", "sac-cnn")),  # torsos and policies
    ],
)
def test_onnxruntime_gives_what_torch_gives(name, lstm, continuous, vector, tmp_path):
    """The reference is the policy's `act`, which does not know the export.

    `export` itself compared the file with the network.
    """
    policy, path = small_policy(name, lstm, continuous, vector), tmp_path / "model.onnx"
    network = export(policy, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    example = network.example(4, seed=9)
    given = {name: tensor.numpy() for name, tensor in example.items()}
    state = tuple(given[name] for name in given if name.startswith("state_"))
    assert bool(state) == (lstm or policy.agent.required_output == "recurrent-q")
    if "previous_action" in given:
        state = *state, given["previous_action"]
    if policy.agent.required_output == "actor-critic":
        policy.agent.params = dataclasses.replace(policy.agent.params, evaluation="greedy")
    observation = frames(given["picture"], given["vector"]) if vector else given["observation"]
    actions, after = policy.act(observation, state or None, given.get("reward", 0.0))
    found = dict(zip(network.outputs, session.run(network.outputs, given)))
    np.testing.assert_allclose(found["action"], actions, atol=1e-4)
    for index in range(len(network.states)):
        np.testing.assert_allclose(found[f"next_state_{index}"], after[index], atol=1e-4)
    assert [each.name for each in session.get_inputs()] == network.inputs and [path] == list(tmp_path.iterdir())
    assert json.loads(session.get_modelmeta().custom_metadata_map["metadata"]) == {"score": 1.0}


@pytest.mark.parametrize(
    "name, action, spaces",
    [
        ("mlp-ac", MultiDiscrete((2, 3)), {"nvec": [2, 3]}),
        ("mlp-ac", Mixed((2, 3), -BOUND, BOUND), {"nvec": [2, 3], "low": [-2.0], "high": [2.0]}),
        ("dqn-mlp", Discrete(6, (2, 3)), {"nvec": [2, 3], "num_actions": 6}),
    ],
)
def test_the_file_tells_several_choices(name, action, spaces, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "spec_of", lambda *_: dataclasses.replace(SPEC, action=action))
    policy, path = small_policy(name), tmp_path / "model.onnx"
    policy.agent.params = dataclasses.replace(policy.agent.params, **GREEDY.get(name, {}))
    network = export(policy, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    example = network.example(4, seed=9)["observation"].numpy()
    found = session.run(["action"], {"observation": example})[0]
    chosen = np.stack(np.unravel_index(found, (2, 3)), 1) if name == "dqn-mlp" else found
    np.testing.assert_allclose(chosen, policy.act(example)[0], atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["action"]) == spaces


@pytest.mark.parametrize("name", ["dqn-mlp", pytest.param("r2d2-mlp", marks=pytest.mark.slow)])
def test_an_exported_network_takes_the_mask(name, tmp_path, monkeypatch):
    """R2D2 has inputs before and after the mask. Actor-critics are exported with the mask of mixed actions."""
    monkeypatch.setitem(globals(), "spec_of", lambda *_: dataclasses.replace(SPEC, has_action_mask=True))
    policy, path = small_policy(name), tmp_path / "model.onnx"
    network = export(policy, path)
    assert "action_mask" in network.inputs
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for seed in range(5):
        given = {name: tensor.numpy() for name, tensor in network.example(8, seed).items()}
        found = session.run(["action"], given)[0]
        assert given["action_mask"][np.arange(8), found].all()
        if "previous_action" not in given:
            acted = policy.act(given["observation"], action_mask=given["action_mask"])[0]
            np.testing.assert_array_equal(found, acted)


@pytest.mark.slow
def test_an_exported_network_takes_the_mask_of_mixed_actions(tmp_path, monkeypatch):
    spec = dataclasses.replace(SPEC, action=Mixed((2, 3), -BOUND, BOUND), has_action_mask=True)
    monkeypatch.setitem(globals(), "spec_of", lambda *_: spec)
    policy, path = small_policy("mlp-ac"), tmp_path / "model.onnx"
    policy.agent.params = dataclasses.replace(policy.agent.params, **GREEDY["mlp-ac"])
    network = export(policy, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {name: tensor.numpy() for name, tensor in network.example(32, 1).items()}
    found = session.run(["action"], given)[0]
    assert np.take_along_axis(given["action_mask"], found[:, :2].astype(np.int64) + [0, 2], 1).all()
    np.testing.assert_allclose(found, policy.act(given["observation"], action_mask=given["action_mask"])[0], atol=1e-5)


def test_choices_that_differ_are_compared_by_their_logits():
    scores, ours = np.array([[1.0, 1.0, 0.0, 2.0, 2.0]]), np.array([[0, 1]])
    assert exporting._tied(MultiDiscrete((2, 3)), scores, ours, np.array([[1, 2]]))
    assert not exporting._tied(MultiDiscrete((2, 3)), scores, ours, np.array([[0, 0]]))
    assert exporting._tied(Discrete(5), scores, np.array([3]), np.array([4]))
    assert not exporting._tied(Discrete(5), scores, np.array([3]), np.array([0]))


def test_an_export_that_differs_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "differences", lambda *arguments: ["values of 3 observations"])
    with pytest.raises(ConfigurationError, match="differs from torch's: values of 3 observations; nothing was written"):
        export(small_policy("dqn-mlp"), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_other_weights_are_detected(tmp_path):
    policy, path = small_policy("dqn-mlp"), tmp_path / "model.onnx"
    network = export(policy, path)
    assert not exporting.differences(network, path)
    with torch.no_grad():
        next(network.parameters()).mul_(2)
    assert "values of 1 observations" in exporting.differences(network, path)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_refused_with_the_pip_command(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(ConfigurationError, match=r'pip install -e "\.\[onnx\]"'):
        export(small_policy("dqn-mlp"), tmp_path / "model.onnx")


@pytest.mark.parametrize("fault", [NotImplementedError, ZeroDivisionError])
def test_an_agent_whose_network_cannot_be_exported_is_refused(fault, tmp_path, monkeypatch):
    policy = small_policy("dqn-mlp")
    greedy = Agent.greedy if fault is NotImplementedError else lambda *given: 1 / 0
    monkeypatch.setattr(type(policy.agent), "greedy", greedy)
    with pytest.raises(
        ConfigurationError, match=f"model_type=dqn-mlp cannot be exported: {fault.__name__}: "
    ) as refused:
        export(policy, tmp_path / "model.onnx")
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "output, message",
    [
        ("run.pth", "output run.pth exists and does not end in .onnx: choose another name"),
        ("notes.txt", "output notes.txt exists and does not end in .onnx: choose another name"),
        (".", "output . is a folder: name a file in it that ends in .onnx"),
        ("", "output . is a folder: name a file in it that ends in .onnx"),
    ],
)
def test_an_export_overwrites_no_other_file(output, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exporting, "load", lambda model: None)
    for name in ("run.pth", "notes.txt"):
        (tmp_path / name).write_text(name)
    with pytest.raises(SystemExit) as refused:
        main(["run.pth", "--output", output])
    assert refused.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"
    assert all(path.read_text() == path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run.pth", "run"])
def test_an_export_stands_beside_the_model_that_is_found_by_its_name(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "models").mkdir()
    model, made = tmp_path / "models" / "run.pth", tmp_path / "models" / "run.onnx"
    model.touch()
    monkeypatch.setattr(exporting, "PROJECT", tmp_path)
    monkeypatch.setattr(exporting, "load", {model: "the policy"}.__getitem__)
    network, written = SimpleNamespace(inputs=["observation"], outputs=["action", "values"]), []
    monkeypatch.setattr(exporting, "export", lambda *given: (written.append(given), network)[1])
    assert main([name]) == 0 and written == [("the policy", made)]
    said = f"{made}: observation -> action, values; onnxruntime gives the same outputs as torch\n"
    assert capsys.readouterr().out == said


def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "load", lambda model: small_policy("dqn-mlp"))
    with pytest.raises(SystemExit) as refused:
        main(["run.pth", "--output", str(tmp_path / "missing" / "model.onnx")])
    assert refused.value.code == 2 and "model.onnx cannot be written" in capsys.readouterr().err


def test_an_exported_checkpoint_leaves_its_folder_alone(tmp_path, monkeypatch):
    step = tmp_path / "models" / "local_1_checkpoints" / "step_000000001000.2"
    step.mkdir(parents=True)
    written = []
    monkeypatch.setattr(exporting, "load", lambda path: None)
    network = SimpleNamespace(inputs=[], outputs=[])
    monkeypatch.setattr(exporting, "export", lambda policy, path: (written.append(path), network)[1])
    assert main([str(step)]) == 0 and written == [tmp_path / "models" / "local_1_step_000000001000.2.onnx"]


def test_the_command_refuses_a_missing_model_file(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        main([str(tmp_path / "none.pth")])
    assert refused.value.code == 3
    assert capsys.readouterr().err == f"error: model file {tmp_path / 'none.pth'} does not exist\n"
