"""Set the arithmetic of a learner's networks: float32, float32 with TF32 products, or bfloat16 by torch's autocast."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from core.common.tree import tree_map
from core.model import Model


def precision_on(device: str, precision: str) -> str:
    """Return the precision, where "auto" is "tf32" on CUDA and "float32" elsewhere."""
    return ("tf32" if device.startswith("cuda") else "float32") if precision == "auto" else precision


def in_bf16(model: Model) -> Model:
    """Run `forward` and `unroll` of the model's networks under bfloat16 autocast, and return the model.

    Weights, gradients and outputs stay float32, so losses and targets are computed as before.
    """
    device_type = next(model.parameters()).device.type
    for network in model.networks():
        for name in ("forward", "unroll"):
            if function := getattr(type(network), name, None):
                # A bound method, so that a copy of the network calls itself.
                setattr(network, name, MethodType(_autocast(function, device_type), network))
    model.precision = "bf16"
    return model


def _autocast(function: Any, device_type: str) -> Any:
    # Without a weight cache, which torch requires under CUDA graph capture.
    def autocast_function(network: nn.Module, *arguments: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False):
            return tree_map(_to_float32, function(network, *arguments))

    return autocast_function


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
