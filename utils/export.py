"""Export the acting network of a model file to ONNX: python -m utils.export models/<signature>.pth.

- Inputs: `observation` [N, ...] in its stored dtype, or `picture` and `vector` where it has both; for R2D2 also
  `previous_action` and `reward`; for recurrent networks `state_0`, ..., which are zeros at the start of an episode. N
  may be any number.
- Outputs: the greedy `action` [N, ...] of the action space; `values`, or `logits` and `value`, from which the action
  follows; for recurrent networks `next_state_0`, `next_state_1`, ...
- onnxruntime runs the file, and its outputs are compared with torch's, before the file takes its final name.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.agent import Agent
from core.checkpoint.model_file import file_beside
from core.checkpoint.run_checkpoint import CheckpointError
from core.common.exit_codes import BAD_CHECKPOINT
from core.common.files import replace_atomically
from core.model import disable_host_sync
from core.specs import ActionSpec, Continuous, Discrete, Mixed, MultiDiscrete
from core.types import ACTION_MASK, OARInputs, PictureAndVector, State
from utils import run_registry
from utils.api import Policy, load
from utils.config.command_line import refusing
from utils.errors import ConfigurationError, describe_exception, import_extra
from utils.options import PROJECT

TOLERANCE = 1e-4  # Allowed difference of torch and onnxruntime, relative to the largest number.
BATCHES = 1, 3  # Batch sizes for which outputs are compared.
TRACED_BATCH = 2  # Batch size of the trace. The exporter would take 1 for a constant.


class ActingNetwork(nn.Module):
    """A network with the agent's greedy action, from tensors to tensors in the order of `inputs` and `outputs`."""

    def __init__(self, agent: Agent):
        super().__init__()
        self.model = agent.model.eval()
        self._agent, self._recurrent_q = agent, agent.required_output == "recurrent-q"
        disable_host_sync(self.model)
        example = self.example(TRACED_BATCH)
        self.states = [name for name in example if name.startswith("state_")]
        with torch.no_grad():
            names = list(self._compute(*example.values())[0])
        self.inputs, self.outputs = list(example), [*names, *(f"next_{name}" for name in self.states)]
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for the inputs, both in the order of their names."""
        outputs, state = self._compute(*tensors)
        return *outputs.values(), *state

    def _compute(self, *tensors: Tensor) -> tuple[dict[str, Tensor], State]:
        rest = iter(tensors)
        observation: Any = PictureAndVector(next(rest), next(rest)) if self.model.spec.vector_size else next(rest)
        inputs = OARInputs(observation, next(rest), next(rest)) if self._recurrent_q else observation
        masks = [next(rest)] if self.model.spec.has_action_mask else []
        output, state = self.model(inputs, tuple(rest))
        return self._agent.greedy(output, *masks), state

    def example(self, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
        """Return random inputs by name."""
        spec, generator = self.model.spec, np.random.default_rng(seed)
        dtype = np.dtype(spec.frame.dtype)
        stack = (spec.frame_stack,) if spec.frame_stack else ()
        shape = batch_size, *stack, *(spec.picture_shape if spec.is_image else spec.frame.shape)
        pixels = dtype == np.uint8
        observation = generator.integers(0, int(spec.max_value) + 1, shape) if pixels else generator.normal(size=shape)
        inputs = {"picture" if spec.vector_size else "observation": torch.from_numpy(observation.astype(dtype))}
        if spec.vector_size:
            vector = generator.normal(size=(batch_size, *stack, spec.vector_size))
            inputs["vector"] = torch.from_numpy(vector.astype(np.float32))
        if self._recurrent_q:
            num_actions = spec.action.num_actions  # type: ignore[union-attr]
            inputs["previous_action"] = torch.from_numpy(generator.integers(-1, num_actions, batch_size))
            inputs["reward"] = torch.from_numpy(generator.normal(size=batch_size).astype(np.float32))
        if spec.action_mask:
            begins = np.cumsum(spec.action.choice_sizes) - spec.action.choice_sizes  # type: ignore[union-attr]
            mask = generator.random((batch_size, *spec.action_mask.shape)) < 0.5
            mask[:, begins] = True  # an action of each choice
            inputs[ACTION_MASK] = torch.from_numpy(mask)
        state = self.model.initial_state(batch_size)
        return inputs | {
            f"state_{index}": torch.from_numpy(generator.normal(size=part.shape).astype(np.float32) / 4).to(part.dtype)
            for index, part in enumerate(state)
        }


def export(policy: Policy, path: Path) -> ActingNetwork:
    """Write the network to `path` and return it, after onnxruntime has given the same outputs as torch.

    Raises:
        ConfigurationError: a package is missing, the path is a folder or a file of another kind, or the network cannot
            be exported or written.
    """
    if os.path.isdir(path):
        raise ConfigurationError(f"output {path} is a folder: name a file in it that ends in .onnx")
    if os.path.exists(path) and path.suffix != ".onnx":
        raise ConfigurationError(f"output {path} exists and does not end in .onnx: choose another name")
    onnx, *_ = [import_extra("export", package, "onnx") for package in ("onnx", "onnxruntime", "onnxscript")]
    agent = policy.options.make_agent(policy.spec)  # A copy, which the export changes.
    agent.model.load_state_dict(policy.agent.model.state_dict())
    try:
        network = ActingNetwork(agent)
        example = network.example(TRACED_BATCH)
        batch = torch.export.Dim("N", min=1)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # It warns of its own parts and of optional packages.
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                network,
                tuple(example.values()),
                dynamo=True,
                input_names=network.inputs,
                verbose=False,
                output_names=network.outputs,
                dynamic_shapes=(tuple({0: batch} for _ in example),),
            )
        assert program is not None
        program.model.metadata_props.update(_metadata(policy))
        with replace_atomically(path) as temporary:
            program.save(str(temporary), external_data=False)
            onnx.checker.check_model(str(temporary))
            if wrong := differences(network, temporary):
                raise ConfigurationError(
                    [f"the exported network differs from torch's: {output}; nothing was written" for output in wrong]
                )
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from None
    except ConfigurationError:
        raise
    except Exception as error:  # The agent, the network and the exporter may fail in any way.
        raise ConfigurationError(
            f"the network of model_type={policy.options.model_type} cannot be exported: {describe_exception(error)}"
        ) from error
    return network


def _metadata(policy: Policy) -> dict[str, str]:
    """Return the metadata of the ONNX file."""
    options, action = policy.options, policy.spec.action
    nvec = () if isinstance(action, Continuous) else action.nvec
    bounds: dict[str, Any] = {"nvec": list(nvec)} if nvec else {}
    if isinstance(action, Continuous | Mixed):
        bounds |= {"low": action.low.tolist(), "high": action.high.tolist()}
    if isinstance(action, Discrete):
        bounds["num_actions"] = action.num_actions
    return {
        **{name: getattr(options, name) for name in ("config", "agent_type", "model_type", "env_type")},
        "game": policy.spec.name,
        "action": json.dumps(bounds),
        "metadata": json.dumps(policy.metadata, default=str),
    }


def differences(network: ActingNetwork, path: Path) -> list[str]:
    """Return the outputs in which onnxruntime and torch differ for random inputs; empty if they agree."""
    import onnxruntime

    session, differing = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]), []
    names = {each.name for each in session.get_inputs()}
    for batch_size in BATCHES:
        example = network.example(batch_size, seed=batch_size)
        with torch.no_grad():
            expected = [tensor.numpy() for tensor in network(*example.values())]
        inputs = {name: tensor.numpy() for name, tensor in example.items() if name in names}
        outputs: list[Any] = session.run(network.outputs, inputs)
        for name, ours, theirs in zip(network.outputs, expected, outputs):
            if ours.shape == theirs.shape and _close(ours, theirs, np.abs(ours).max()):
                continue
            action = network.model.spec.action
            if not (name == "action" and ours.dtype.kind == "i" and _tied(action, expected[1], ours, theirs)):
                differing.append(f"{name} of {batch_size} observations")
    return differing


def _close(ours: np.ndarray, theirs: np.ndarray, scale: float) -> bool:
    return np.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * max(scale, 1))


def _tied(action: ActionSpec, scores: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Return True if the actions differ only where values or logits [N, A] are equal up to rounding."""
    nvec = np.array(action.nvec if isinstance(action, MultiDiscrete) else [0])
    places = (each.reshape(len(scores), -1) + np.cumsum(nvec) - nvec for each in (ours, theirs))  # [N, choices]
    scores_of_ours, scores_of_theirs = (np.take_along_axis(scores, each, 1) for each in places)
    return _close(scores_of_ours, scores_of_theirs, np.abs(scores).max())


@refusing()
def main(arguments: Sequence[str]) -> int:
    """Export a model file and return exit code 0; exit with 2 if that is impossible, 3 without a usable model file."""
    description = "Export the acting network of a model file to ONNX."
    parser = argparse.ArgumentParser(prog="python -m utils.export", description=description)
    parser.add_argument("model_file", type=Path, help="models/<signature>.pth")
    parser.add_argument("--output", type=Path, help="file to write; by default in the model's folder, with .onnx")
    options = parser.parse_args(arguments)
    model = run_registry.find_model(options.model_file, PROJECT)
    path = options.output or file_beside(model, ".onnx")
    try:
        network = export(load(model), path)
    except CheckpointError as error:
        raise ConfigurationError(str(error), BAD_CHECKPOINT) from None
    names = f"{', '.join(network.inputs)} -> {', '.join(network.outputs)}"
    print(f"{path}: {names}; onnxruntime gives the same outputs as torch")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
