"""Settings of torch for one process: threads, TF32, free memory of a device."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from core.common.system import available_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


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


def use_threads(count: int) -> None:
    """Set the threads of an operator for this thread, and flush denormal numbers to zero.

    Numbers below float32's normal range take a processor a hundred times as long. Adam's moments get there once a
    unit's gradient stays zero. Threads that are started later inherit the setting. torch.set_flush_denormal(False) ends
    it.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(count)
