"""How exactly a learner's networks compute: float32, float32 with factors rounded to TF32, or bfloat16 where torch's autocast trusts it."""

from typing import Any

import torch
from torch import Tensor

from core.model import Model, mapped

PRECISIONS = ("float32", "tf32", "bf16")


def in_bf16(model: Model) -> Model:
    """The model, with forward and unroll under autocast. Weights and gradients stay float32, and so does what it returns: losses and
    targets are computed as before."""
    device_type = next(model.parameters()).device.type
    for name in ("forward", "unroll"):
        setattr(model, name, _autocast(getattr(model, name), device_type))
    return model


def _autocast(function: Any, device_type: str) -> Any:
    """Without a cache of weights, as torch asks for where a graph is captured."""
    def computed(*arguments: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False):
            return mapped(_float32, function(*arguments))

    return computed


def _float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
