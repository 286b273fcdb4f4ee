"""Set the arithmetic of networks: float32, float32 with TF32 products, or bfloat16.

- In bfloat16, the layers of a network compute with copies of their weights. A copy is made once after each change of
  the weights, so once an update, and not at every forward pass.
- The weights themselves stay float32. Autograd turns the gradients of the copies into float32 gradients of the weights,
  so optimisers, checkpoints and published parameters are those of float32.
- What a network returns is float32, so losses, targets and priorities are computed in float32.
- Layers marked by `keep_float32` (core/model.py) are left out: output layers and recurrent cores. So are layers with
  statistics, such as BatchNorm, and parameters of the network itself, such as the deviations of a policy.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from core.device.recorded_work import is_recording
from core.model import Model
from core.specs import EnvSpec
from core.types import tree_map

# Height and width from which convolutions are faster in bfloat16 (docs/results/arithmetic.md).
MIN_IMAGE_SIZE = 42
# Multiplications of a layer from which oneDNN is faster than MKL on processors that are not Intel's (the same page).
MIN_PRODUCTS = 1 << 22


def precision_on(device: str, precision: str, spec: EnvSpec) -> str:
    """Return the precision of a process on a device, with "auto" resolved.

    On CUDA, "auto" is "tf32". On a CPU, it is "bf16" if the CPU multiplies bfloat16 natively and observations are
    images of at least 42x42, else "float32": smaller networks are faster or slower in bfloat16 from case to case.
    """
    if precision != "auto":
        return precision
    if device.startswith("cuda"):
        return "tf32"
    return "bf16" if has_large_images(spec) and has_native_bf16() else "float32"


def use_tf32(enabled: bool) -> None:
    """Set if GPUs may round the factors of float32 products and convolutions to TF32's 10 bits, in this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = enabled


def use_onednn_products(enabled: bool) -> bool:
    """Let oneDNN in place of MKL multiply large float32 matrices in this process, and return True if it does.

    MKL leaves half of the arithmetic of processors with AVX-512 idle if they are not Intel's. torch asks oneDNN where
    products may be rounded to bfloat16. oneDNN rounds them only on processors with AMX, so the setting stays only where
    products have all of float32's bits.
    """
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    products.fp32_precision = "bf16" if enabled and not _is_intel() else "ieee"
    factor = torch.full((64, 64), 1 + 2.0**-20)
    if not torch.equal(factor @ torch.eye(64), factor):
        products.fp32_precision = "ieee"
    return bool(products.fp32_precision == "bf16")


def _is_intel() -> bool:
    with suppress(OSError):
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return False


def has_large_images(spec: EnvSpec) -> bool:
    """Return True if observations are images of at least 42x42."""
    return spec.is_image and min(spec.picture_shape[:2]) >= MIN_IMAGE_SIZE


def has_native_bf16() -> bool:
    """Return True if torch reports that this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def has_large_products(model: nn.Module, rows: int) -> bool:
    """Return True if a linear layer multiplies at least MIN_PRODUCTS pairs of numbers for this number of rows."""
    sizes = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
    return rows * max(sizes, default=0) >= MIN_PRODUCTS


def in_bf16(model: Model) -> Model:
    """Run `forward` and `unroll` of the model's networks in bfloat16, and return the model."""
    for network in model.networks():
        for layer in _layers(network):
            layer.register_forward_pre_hook(_convert_inputs)
        network.bf16_weights = Bfloat16Weights(_layers_in_bf16(network))  # type: ignore[assignment]
        for name in ("forward", "unroll"):
            if function := getattr(type(network), name, None):
                # A bound method, so that a copy of the network calls itself.
                setattr(network, name, MethodType(_with_bf16_weights(function), network))
    model.precision, model.image_dtype = "bf16", torch.bfloat16
    return model


class Bfloat16Weights:
    """bfloat16 copies of float32 weights, which take the weights' place in their layers while a network computes.

    torch counts the changes of a tensor (`_version`). An optimiser whose step is not counted calls
    `torch.autograd.graph.increment_version`.

    Args:
        layers: The parameters of each layer by name, as the layer itself holds them.
    """

    def __init__(self, layers: list[dict[str, nn.Parameter | None]]):
        self._layers = layers
        self._weights, self._versions = list[Tensor](), list[int]()
        self._copies: list[Tensor] = []
        self._in_use = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bfloat16Weights":
        return Bfloat16Weights(copy.deepcopy(self._layers, memo))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the layers hold the copies. Within another `swapped_in` this does nothing."""
        if self._in_use:
            yield
            return
        slots = [(layer, name) for layer in self._layers for name, weight in layer.items() if weight is not None]
        weights: list[Any] = [layer[name] for layer, name in slots]
        copies: list[Any] = self._copies_of(weights)
        self._in_use = True
        try:
            for (layer, name), tensor in zip(slots, copies):
                layer[name] = tensor
            yield
        finally:
            for (layer, name), tensor in zip(slots, weights):
                layer[name] = tensor
            self._in_use = False

    def _copies_of(self, weights: list[Tensor]) -> list[Tensor]:
        versions = [weight._version for weight in weights]
        unchanged = versions == self._versions and all(old is new for old, new in zip(self._weights, weights))
        # Graph launches and compiled updates change weights without Python: each forward pass must contain the copy.
        if not unchanged or is_recording() or any(weight.is_cuda for weight in weights):
            # Later calls use the copies with and without gradients, whatever the mode of this one is.
            self._copies = []  # before new ones: their graphs keep gradient accumulators, which belong to a stream
            with torch.inference_mode(False), torch.enable_grad():
                self._copies = [weight.to(torch.bfloat16) for weight in weights]
            self._weights, self._versions = weights, versions
        return self._copies


def _layers(network: nn.Module) -> list[nn.Module]:
    """Return the modules with numbers. The network itself is none: its own parameters are part of its output."""
    return [module for module in network.modules() if _numbers(module) and module is not network]


def _numbers(layer: nn.Module) -> list[Tensor]:
    """Return a layer's own parameters, then its own floating-point buffers, such as the statistics of BatchNorm."""
    tensors = [each for each in (*layer._parameters.values(), *layer._buffers.values()) if each is not None]
    return [each for each in tensors if each.is_floating_point()]


def _layers_in_bf16(network: nn.Module) -> list[Any]:
    """Return the parameters of each layer without statistics that is not in one marked by `keep_float32`."""
    kept = [module for module in network.modules() if getattr(module, "keeps_float32", False)]
    kept += [layer for layer in _layers(network) if _has_statistics(layer)]
    excluded = {part for module in kept for part in module.modules()}
    return [layer._parameters for layer in _layers(network) if layer not in excluded]


def _has_statistics(layer: nn.Module) -> bool:
    """Return True if checkpoints store floating-point buffers of the layer or of its parts."""
    return any(
        buffer is not None and buffer.is_floating_point() and name not in part._non_persistent_buffers_set
        for part in layer.modules()
        for name, buffer in part._buffers.items()
    )


def _with_bf16_weights(function: Any) -> Any:
    def function_in_bf16(network: Any, *arguments: Any, **named: Any) -> Any:
        with network.bf16_weights.swapped_in():
            return tree_map(_to_float32, function(network, *arguments, **named))

    return function_in_bf16


def _convert_inputs(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the inputs of a layer to the dtype of its numbers."""
    dtype = _numbers(layer)[0].dtype
    return tuple(each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
