"""Acting on a GPU: the network's answer to an actor's streams, whose number never changes, is one replay of a recording.

Weights change in place between two answers (core/runtime/parameter_store.py), which a recording does not notice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.agent import Agent
from core.common.tree import tree_leaves, tree_map
from core.device.cuda_graph import CudaGraphCallable
from core.model import Model


def with_graphed_forward(agent: Agent, captured: bool) -> Agent:
    """The agent, its network's forward captured if that is wanted and it is on a GPU."""
    if captured and next(agent.model.parameters()).is_cuda:
        capture_forward(agent.model, capture=True)
    return agent


def capture_forward(model: Model, *, capture: bool) -> None:
    """From now on the model's forward works on tensors that stay the same, captured or eager by the same code, and returns copies.

    Each form of what it is given has tensors, and a recording, of its own, and so have training and evaluation.
    """
    known: dict[Any, StaticInputs] = {}
    forward, device = model.forward, next(model.parameters()).device

    def on_fixed_tensors(*arguments: Any) -> Any:
        form = model.training, *((leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments))
        if form not in known:
            known[form] = StaticInputs(forward, arguments, device, capture=capture)
        return known[form](arguments)

    model.forward = on_fixed_tensors  # type: ignore[method-assign, assignment]


class StaticInputs:
    """function(*arguments) for arguments of the form of these, without gradients.

    Whoever asks may be in inference mode. A recording may not: of a generator it keeps tensors, and those of inference mode could not be
    changed by what else is recorded in this process (pytorch issue 166792).
    """

    @torch.inference_mode(False)
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device, *, capture: bool):
        self._function, self._output = function, None
        self._arguments = tree_map(lambda tensor: torch.empty_like(tensor, device=device), arguments)
        self._work = CudaGraphCallable(self._call, device, capture=capture)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        for fixed, given in zip(tree_leaves(self._arguments), tree_leaves(arguments)):
            fixed.copy_(given)
        self._work()
        return tree_map(Tensor.clone, self._output)

    def _call(self) -> None:
        self._output = self._function(*self._arguments)
