"""How exactly a learner's networks compute: float32, float32 with factors rounded to TF32, or bfloat16 where torch's autocast trusts it."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from core.common.tree import tree_map
from core.model import Model


def precision_on(device: str, wanted: str) -> str:
    """What is wanted there; auto is tf32 on a GPU and float32 elsewhere."""
    return ("tf32" if device.startswith("cuda") else "float32") if wanted == "auto" else wanted


def in_bf16(model: Model) -> Model:
    """The model, its networks' forward and unroll under autocast. Weights and gradients stay float32, and so does what they return:
    losses and targets are computed as before."""
    device_type = next(model.parameters()).device.type
    for network in model.networks():
        for name in ("forward", "unroll"):
            if function := getattr(type(network), name, None):
                setattr(network, name, MethodType(_autocast(function, device_type), network))  # so a copy of the network calls itself
    model.precision = "bf16"
    return model


def _autocast(function: Any, device_type: str) -> Any:
    """Without a cache of weights, as torch asks for where a graph is captured."""
    def computed(network: nn.Module, *arguments: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False):
            return tree_map(_float32, function(network, *arguments))

    return computed


def _float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
