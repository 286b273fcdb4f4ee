"""Imitate a CUDA graph's rules on CPU tensors, so that capture can be tested without a GPU.

The imitation follows CUDA graphs in these rules:

- capture runs nothing, and a launch repeats operations on the same memory without python;
- random numbers come from registered generators only;
- reading a value is refused;
- memory from before the capture must still exist.

Kernels and the graph's private memory pool are not imitated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from core.device.recorded_work import CudaGraphCallable

LOOKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
}
# a mask as index gives as many elements as are true
INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}


def looks(function: Any, args: Sequence[Any]) -> bool:
    """Return True if python, or the shape of the result, depends on a tensor's value."""
    return function in LOOKS or (
        function in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
    )


def storages(found: Any) -> dict[int, torch.UntypedStorage]:
    return {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage()
        for leaf in tree_leaves(found)
        if isinstance(leaf, Tensor)
    }


class Elsewhere:
    """Refer weakly to a tensor that existed before the capture."""

    def __init__(self, tensor: Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._form = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        if self._storage.expired():
            raise RuntimeError("the recording uses memory that has been freed since")
        dtype, *place = self._form
        return torch.empty(0, dtype=dtype).set_(torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata), *place)


class Recording(TorchDispatchMode):
    """Replace a torch.cuda.CUDAGraph: capture inside the context, and repeat by `replay`."""

    def __init__(self, generators: Sequence[torch.Generator]):
        super().__init__()
        self._generators = generators
        self._operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # by an operation of the capture
        self._constants: dict[int, torch.UntypedStorage] = {}  # python's numbers
        # written though made before the capture, with a copy
        self._before: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if looks(function, args):
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        for generator in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)):
            if generator._cdata not in {registered._cdata for registered in self._generators}:
                raise RuntimeError(f"{function}: a generator that was not registered")
        given = storages((args, kwargs))
        if function is torch.ops.aten.lift_fresh.default:
            self._constants |= given
        if function._schema.is_mutable:
            known = self._made.keys() | {storage.data_ptr() for storage, _ in self._before}
            self._before += [(storage, storage.clone()) for place, storage in given.items() if place not in known]
        result = function(*args, **kwargs)
        self._made |= {place: storage for place, storage in storages(result).items() if place not in given}
        self._operations.append((function, *tree_map_only(Tensor, self._kept, (args, kwargs, result))))
        return result

    def _kept(self, tensor: Tensor) -> Tensor | Elsewhere:
        mine = tensor.untyped_storage().data_ptr() in {0} | self._made.keys() | self._constants.keys()
        return tensor if mine else Elsewhere(tensor)

    def __enter__(self):
        self._states = [torch.get_rng_state(), *(generator.get_state() for generator in self._generators)]
        return super().__enter__()

    def __exit__(self, *error):
        """Restore written memory, and invalidate new memory, because capture runs nothing."""
        super().__exit__(*error)
        for storage, before in self._before:
            storage.copy_(before)
        for storage in self._made.values():
            storage.fill_(255)
        state, *states = self._states
        torch.set_rng_state(state)
        for generator, state in zip(self._generators, states):
            generator.set_state(state)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for function, *recorded in self._operations:
            args, kwargs, result = tree_map_only(Elsewhere, Elsewhere.tensor, recorded)
            given = storages((args, kwargs))
            again = function(*args, **kwargs)
            for (place, storage), new in zip(storages(result).items(), storages(again).values(), strict=True):
                if place not in given:
                    storage.copy_(new)


class Replayed(CudaGraphCallable):
    """Capture work on the CPU."""

    def __init__(self, work, device, generators=()):
        super().__init__(work, torch.device("cuda"), generators)

    def _warm_up(self):
        self._work()

    def _record(self):
        with Recording(self._generators) as recording:
            self._work()
        return recording


def imitate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on the CPU."""
    for module in ("learning.updates", "acting.graphed_inference"):
        monkeypatch.setattr(f"core.{module}.CudaGraphCallable", Replayed)
