"""Export the acting network of a model file to ONNX: python -m utils.export models/<signature>.pth

- Inputs: `observation` [N, ...] in its stored type; for R2D2 the `previous_action` and `reward` that led to it; `state_0`, ...
  of recurrent networks, zeros where an episode starts. N may be any number.
- Outputs: the greedy `action` [N, ...] as the action space wants it; the `values`, or `logits` and `value`, that it follows from;
  `next_state_0`, `next_state_1`, ... of recurrent networks.
- The file is run by onnxruntime and compared with torch before it takes its place.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.agent import Agent
from core.checkpoint.tensor_file import CheckpointError
from core.model import disable_host_sync
from core.specs import Discrete, EnvSpec
from core.types import OARInputs, State
from utils.api import Policy, load
from utils.errors import ConfigurationError, describe_exception

TOLERANCE = 1e-4         # of what torch and onnxruntime give, relative to the largest number
BATCHES = 1, 3           # numbers of observations that both are asked for
TRACED = 2               # number of observations that is traced: 1 would be taken for a constant
PACKAGES = 'export needs packages that are not installed: pip install -e ".[onnx]"'


class ActingNetwork(nn.Module):
    """A network as it acts: from tensors to tensors, in the order of `inputs` and of `outputs`."""

    def __init__(self, agent: Agent, spec: EnvSpec):
        super().__init__()
        self.model = agent.model.eval()
        self._agent, self._recurrent_q = agent, agent.required_output == "recurrent-q"
        disable_host_sync(self.model)
        example = self.example(spec, TRACED)
        self.states = [name for name in example if name.startswith("state_")]
        with torch.no_grad():
            names = list(self._answer(*example.values())[0])
        self.inputs, self.outputs = list(example), [*names, *(f"next_{name}" for name in self.states)]
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        answer, state = self._answer(*tensors)
        return *answer.values(), *state

    def _answer(self, *tensors: Tensor) -> tuple[dict[str, Tensor], State]:
        own = 3 if self._recurrent_q else 1
        output, state = self.model(OARInputs(*tensors[:own]) if self._recurrent_q else tensors[0], tensors[own:])
        return self._agent.greedy(output), state

    def example(self, spec: EnvSpec, number: int, seed: int = 0) -> dict[str, Tensor]:
        """Return random inputs by name."""
        generator, dtype = np.random.default_rng(seed), np.dtype(spec.frame.dtype)
        shape = number, *spec.observation_shape
        drawn = generator.integers(0, int(spec.max_value) + 1, shape) if dtype == np.uint8 else generator.normal(size=shape)
        found = {"observation": torch.from_numpy(drawn.astype(dtype))}
        if self._recurrent_q:
            found["previous_action"] = torch.from_numpy(generator.integers(-1, spec.action.num_actions, number))  # type: ignore[union-attr]
            found["reward"] = torch.from_numpy(generator.normal(size=number).astype(np.float32))
        state = self.model.initial_state(number)
        return found | {f"state_{index}": torch.from_numpy(generator.normal(size=part.shape).astype(np.float32) / 4)
                        for index, part in enumerate(state)}


def export(policy: Policy, path: Path) -> ActingNetwork:
    """Write the network to `path` and return it, once onnxruntime gives what torch gives. Raises Refused where that is impossible."""
    try:
        import onnx
        import onnxruntime  # noqa: F401  asked for before seconds of work
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigurationError([PACKAGES]) from None
    spec, agent = policy.spec, policy.options.make_agent(policy.spec)  # of its own: it is changed for the export
    agent.model.load_state_dict(policy.agent.model.state_dict())
    network = ActingNetwork(agent, spec)
    example = network.example(spec, TRACED)
    temporary = path.with_name(f".temporary_{path.name}")
    try:
        batch = torch.export.Dim("N", min=1)
        with _quiet():
            program = torch.onnx.export(network, tuple(example.values()), dynamo=True, input_names=network.inputs, verbose=False,
                                        output_names=network.outputs, dynamic_shapes=(tuple({0: batch} for _ in example),))
        assert program is not None
        for name, value in _facts(policy).items():
            program.model.metadata_props[name] = value
        program.save(str(temporary), external_data=False)
        onnx.checker.check_model(str(temporary))
        wrong = differences(network, spec, temporary)
        if wrong:
            raise ConfigurationError([f"the exported network differs from torch's: {problem}; nothing was written" for problem in wrong])
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError([f"{path} cannot be written: {error}"]) from None
    except ConfigurationError:
        raise
    except Exception as error:  # the exporter's, of a network that it does not understand
        raise ConfigurationError(
            [f"the network of model_type={policy.options.model_type} cannot be exported: {describe_exception(error)}"]) from error
    finally:
        temporary.unlink(missing_ok=True)
    return network


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch's exporter says of its own parts and of packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _facts(policy: Policy) -> dict[str, str]:
    """Return what the file says of itself."""
    options, action = policy.options, policy.spec.action
    bounds: dict[str, Any] = {"num_actions": action.num_actions} if isinstance(action, Discrete) \
        else {"low": action.low.tolist(), "high": action.high.tolist()}
    return {"config": options.config, "agent_type": options.agent_type, "model_type": options.model_type, "env_type": options.env_type,
            "game": policy.spec.name, "action": json.dumps(bounds), "metadata": json.dumps(policy.metadata, default=str)}


def differences(network: ActingNetwork, spec: EnvSpec, path: Path) -> list[str]:
    """Return how the outputs of onnxruntime and torch differ for random inputs, one sentence an output; empty when they agree."""
    import onnxruntime

    session, found = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]), []
    for number in BATCHES:
        example = network.example(spec, number, seed=number)
        with torch.no_grad():
            ours = [tensor.numpy() for tensor in network(*example.values())]
        theirs: list[Any] = session.run(network.outputs, {name: tensor.numpy() for name, tensor in example.items()
                                                          if name in {each.name for each in session.get_inputs()}})
        for name, mine, other in zip(network.outputs, ours, theirs):
            far = mine.shape != other.shape or not np.allclose(mine, other, rtol=TOLERANCE, atol=TOLERANCE * max(np.abs(mine).max(), 1))
            if far and not (name == "action" and mine.dtype.kind == "i" and _tied(ours[1], mine, other)):
                found.append(f"{name} of {number} observations")
    return found


def _tied(scores: np.ndarray, mine: np.ndarray, other: np.ndarray) -> bool:
    """Return True if actions differ only where values or logits [N, A] are equal but for rounding."""
    taken, others = (np.take_along_axis(scores, each[:, None], 1)[:, 0] for each in (mine, other))
    return np.allclose(taken, others, rtol=TOLERANCE, atol=TOLERANCE * max(np.abs(scores).max(), 1))


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 written, 2 not possible, 3 no usable model file."""
    parser = argparse.ArgumentParser(prog="python -m utils.export", description="Export the acting network of a model file to ONNX.")
    parser.add_argument("model_file", type=Path, help="models/<signature>.pth")
    parser.add_argument("--output", type=Path, help="file to write; by default the model file's name with .onnx")
    options = parser.parse_args(arguments)
    path = options.output or options.model_file.with_suffix(".onnx")
    try:
        network = export(load(options.model_file), path)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except ConfigurationError as refused:
        for problem in refused.problems:
            print(f"error: {problem}", file=sys.stderr)
        return refused.code
    print(f"{path}: {', '.join(network.inputs)} -> {', '.join(network.outputs)}; onnxruntime gives what torch gives")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
