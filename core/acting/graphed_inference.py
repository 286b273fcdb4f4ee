"""Run an acting network's forward pass as a CUDA graph.

An actor's number of environments never changes, so the shapes of a graph stay valid.
Parameters are refreshed in place (core/runtime/parameter_store.py), so a graph launch reads the newest ones.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from core.agent import Agent
from core.device.recorded_work import CudaGraphCallable
from core.model import Model
from core.types import tree_leaves, tree_map


def with_graphed_forward(agent: Agent, cuda_graph: Literal["auto", "on", "off"]) -> Agent:
    """Return the agent, whose forward pass runs as a CUDA graph unless `cuda_graph` is off or its network on a CPU."""
    if cuda_graph != "off" and next(agent.model.parameters()).is_cuda:
        capture_forward(agent.model, capture=True)
    return agent


def capture_forward(model: Model, *, capture: bool) -> None:
    """Replace the model's `forward` by one that computes on static tensors and returns copies.

    Each combination of input shapes and dtypes has static tensors and a graph of its own. So have training and
    evaluation mode.

    If `capture` is false, the same code runs eagerly, on any device.
    """
    graphs: dict[Any, StaticInputs] = {}
    forward, device = model.forward, next(model.parameters()).device

    def graphed_forward(*inputs: Any) -> Any:
        key = model.training, *((leaf.shape, leaf.dtype) for leaf in tree_leaves(inputs))
        if key not in graphs:
            graphs[key] = StaticInputs(forward, inputs, device, capture=capture)
        return graphs[key](inputs)

    model.forward = graphed_forward  # type: ignore[method-assign, assignment]


class StaticInputs:
    """Call a function without gradients on static copies of its inputs, which all have the structure of the first ones.

    Callers may be in inference mode, but graph capture must not be. Capture stores generator-state tensors; if they
    were created in inference mode, later captures could not update them (pytorch issue 166792).
    """

    @torch.inference_mode(False)
    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], device: torch.device, *, capture: bool):
        self._function, self._output = function, None
        self._inputs = tree_map(lambda tensor: torch.empty_like(tensor, device=device), inputs)
        self._launch = CudaGraphCallable(self._call, device) if capture else self._call

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        for static, tensor in zip(tree_leaves(self._inputs), tree_leaves(inputs)):
            static.copy_(tensor)
        self._launch()
        return tree_map(Tensor.clone, self._output)

    def _call(self) -> None:
        self._output = self._function(*self._inputs)
