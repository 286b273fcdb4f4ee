"""Call work that is the same tensor operations every time: as a CUDA graph, or compiled for the CPU.

- CudaGraphCallable captures the work once. A graph costs one launch, where Python would launch hundreds of kernels. It
  repeats addresses, not Python: the work must always read and write the same tensors, and must not decide by the value
  of a tensor.
- CompiledCallable records the work likewise: one call of it is observed, and what Python did around the operators is
  left out of the later ones. torch's compiler then merges operators, forward and backward passes and the optimiser's
  step alike.
"""

import gc
import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule, Tracer

from core.common.console import log_to_stderr

# Calls before the capture, on a stream of their own, as torch asks for: libraries choose their kernels in them.
WARM_UP = 3


class CudaGraphCallable:
    """A callable that runs work(). The first calls are eager, and all later ones launch a graph."""

    def __init__(self, work: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()):
        """Bind the work.

        Args:
            work: The work, the same operations in each call.
            device: Its device.
            generators: Generators that the work draws from, except torch's global one. Launches continue their
                sequences.

        Raises:
            ValueError: the device is not CUDA.
        """
        if device.type != "cuda":
            raise ValueError(f"only work on a CUDA device can be captured, not on {device}")
        self._work, self._device, self._generators = work, device, generators
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._warm_up()
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _warm_up(self) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._work()
            torch.cuda.current_stream().wait_stream(stream)

    def _record(self) -> torch.cuda.CUDAGraph:
        """Capture the work without running it. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with (
            _nothing_freed(),
            torch.cuda.device(self._device),
            # by default, one stream would serve all devices
            torch.cuda.graph(graph, stream=torch.cuda.Stream(self._device), capture_error_mode="thread_local"),
        ):
            self._work()
        return graph


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Disable garbage collection during capture.

    Collecting an old CUDA graph while capturing would invalidate the new one.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


COMPILERS = ("g++", "clang++", "c++")

POLL_SECONDS = 0.2  # between two calls of keep_waiting
_RECORDING: ContextVar[bool] = ContextVar("recording", default=False)


def is_recording() -> bool:
    """Return True while work is recorded: everything that changes between its calls must then be computed in it."""
    return _RECORDING.get()


def missing_compiler() -> str:
    """Return what torch's compiler lacks on this machine, as the end of a sentence; empty if it has all."""
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else COMPILERS)):
        return f"no C++ compiler ({named or ', '.join(COMPILERS)}) is installed"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h is missing, which is in a package such as python3-dev"
    return ""


class CompiledCallable:
    """A callable that runs work(). The first calls are eager, one is recorded, and later ones run compiled.

    Work whose operations repeat after `cycle` calls is compiled as `cycle` pieces. If the compiler fails, a message
    says so and the work stays eager.

    Args:
        work: The work, which returns nothing: results are written in place.
        cycle: Calls after which the operations repeat.
        cache: Folder of the compiler's files, from which later runs take what they need.
        keep_waiting: The recorded call waits for the compiler, up to a minute. It calls this several times a second
            and leaves the work eager if this returns False.
    """

    def __init__(
        self, work: Callable[[], None], cycle: int, cache: Path, keep_waiting: Callable[[], bool] = lambda: True
    ):
        self._work, self._cache, self._cycle, self._keep_waiting = work, cache, cycle, keep_waiting
        self._pieces: dict[int, Callable[[], None]] = {}
        self._calls = 0

    def __call__(self) -> None:
        """Run the work once."""
        piece, is_warm = self._calls % self._cycle, self._calls >= WARM_UP * self._cycle
        self._calls += 1
        if piece in self._pieces:
            self._pieces[piece]()
        elif is_warm:
            try:
                recorded = record(self._work)
            except Exception as error:
                error.add_note(
                    "an update must not read a tensor's value in Python when it is compiled: learner.compile no runs it"
                )
                raise
            self._pieces[piece] = self._compiled(*recorded)
        else:
            self._work()

    def _compiled(self, graph: GraphModule, tensors: list[Tensor]) -> Callable[[], None]:
        """Return the recorded work compiled, or else the work itself."""
        result: Future[Callable[[], None]] = Future()
        threads = torch.get_num_threads()

        def compile_work() -> None:
            try:
                result.set_result(_compile(graph, tensors, self._cache, threads))
            except Exception as error:
                result.set_exception(error)

        if not self._pieces:
            log_to_stderr("updates are being compiled, which takes a minute or two where the files are not there yet")
        # Eager calls meanwhile would not be faster: they and the compiler would wait for each other's Python.
        threading.Thread(target=compile_work, name="compile", daemon=True).start()
        while not wait([result], POLL_SECONDS).done:
            if not self._keep_waiting():
                return self._work
        try:
            return result.result()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            log_to_stderr(f"updates are not compiled: {type(error).__name__}: {lines[0]}")
            return self._work


def record(work: Callable[[], None]) -> tuple[GraphModule, list[Tensor]]:
    """Run the work once and return its operators, as a function of the tensors that it reads or writes, and these."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy and more, which takes a second

    def nothing_returned() -> tuple[()]:
        work()
        return ()

    token = _RECORDING.set(True)
    try:
        graph = make_fx(nothing_returned, _replacements())()
    finally:
        _RECORDING.reset(token)
    return _with_inputs(graph)


def _replacements() -> dict[Any, Callable[..., Any]]:
    """Return functions of plain operators for operators of many tensors, which the compiler could only call."""
    operators = torch.ops.aten
    return {
        operators._fused_adam_.tensor_lr: _adam,
        operators._foreach_norm.Scalar: _norms,
        operators._foreach_lerp_.List: _lerp,
    }


def _with_inputs(graph: GraphModule) -> tuple[GraphModule, list[Tensor]]:
    """Make the memory that recorded operators found outside inputs of the graph, and return both.

    Tensors that share memory become views of one input, because the compiler must know that they do.
    """
    nodes, first = graph.graph, next(iter(graph.graph.nodes))
    outside = [(node, getattr(graph, node.target)) for node in nodes.nodes if node.op == "get_attr"]
    sharing: dict[int, dict[int, Tensor]] = {}  # memory -> tensors in it
    for _, tensor in outside:
        sharing.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), {})[id(tensor)] = tensor
    inputs = [
        next(iter(tensors.values())).detach() if len(tensors) == 1 else _whole(next(iter(tensors.values())))
        for tensors in sharing.values()
    ]
    replacements: dict[int, torch.fx.Node] = {}
    with nodes.inserting_before(first):
        places = [nodes.placeholder(f"memory_{number}") for number in range(len(inputs))]
        for place, tensors in zip(places, sharing.values()):
            for key, tensor in tensors.items():
                view = (place, tensor.shape, tensor.stride(), tensor.storage_offset())
                is_view = len(tensors) > 1
                replacements[key] = nodes.call_function(torch.ops.aten.as_strided.default, view) if is_view else place
    for node, tensor in outside:
        node.replace_all_uses_with(replacements[id(tensor)])
        nodes.erase_node(node)
    for node in reversed(list(nodes.nodes)):
        if "_record_function_" in str(node.target):  # marks of torch's profiler
            nodes.erase_node(node)
    return GraphModule({}, nodes), inputs


def _whole(tensor: Tensor) -> Tensor:
    """Return all the memory that a tensor is a view of, as a vector."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _compile(graph: GraphModule, tensors: list[Tensor], cache: Path, threads: int) -> Callable[[], None]:
    """Return a function that runs the recorded operators on these tensors.

    Its calls of loops and operators are C++ too, where all operators allow it: other threads run Python meanwhile.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is a semaphore that this process would leave behind
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Random numbers are those of the eager work, and no process of the compiler outlives this one. Precompiled headers
    # would save no time and be left in the folder of temporary files, whatever the cache is.
    settings = {
        "fallback_random": True,
        "compile_threads": 1,
        "cpp.threads": threads,
        "cpp_cache_precompile_headers": False,
    }
    # Operators that have no C interface are called in another way, which has crashed updates (torch 2.13).
    other_way = "generate_fallback_kernel_with_runtime_lookup"
    # A tracer of the compiler takes over calls of modules in all threads, also in one that computes features.
    compiler, call_module = threading.get_ident(), Tracer.call_module

    def call_as_before(tracer: Tracer, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_traced = threading.get_ident() == compiler
        return call_module(tracer, module, forward, args, kwargs) if is_traced else forward(*args, **kwargs)

    def compiled(cpp_wrapper: bool) -> Any:
        # Without an environment of shapes, all static, the compiler would not look for the whole graph in its cache.
        shapes = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True))
        with config.patch(cpp_wrapper=cpp_wrapper), tracing(TracingContext(shapes)):
            return compile_fx(graph, tensors)

    with torch.no_grad(), config.patch(settings), patch.object(Tracer, "call_module", call_as_before):
        try:
            with patch.object(CppWrapperCpu, other_way, side_effect=NotImplementedError):
                function = compiled(cpp_wrapper=True)
        except InductorError:
            function = compiled(cpp_wrapper=False)

    def run() -> None:
        with torch.no_grad():
            function(*tensors)

    return run


def _adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    largest_squares: list[Tensor],
    counts: list[Tensor],
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Take the step of torch's fused Adam operator (1412.6980, algorithm 1) by operators that can be merged."""
    assert not amsgrad and not maximize and grad_scale is None
    kept = torch.zeros((), dtype=torch.bool) if found_inf is None else found_inf.bool()
    for parameter, gradient, mean, square, count in zip(parameters, gradients, means, squares, counts):
        if weight_decay:
            gradient = gradient + weight_decay * parameter
        updates = count.double()
        # The compiler computes a view with strides of its own before the loops over elements, which would else compute
        # both powers anew for every few elements.
        size = (lr / (1 - beta1**updates)).float().as_strided((), ())
        scale = (1 - beta2**updates).sqrt().float().as_strided((), ())
        new_mean = mean.lerp(gradient, 1 - beta1)
        new_square = beta2 * square + (1 - beta2) * gradient * gradient
        moved = parameter - size * new_mean / (new_square.sqrt() / scale + eps)
        for tensor, new in ((parameter, moved), (mean, new_mean), (square, new_square)):
            tensor.copy_(torch.where(kept, tensor, new))


def _norms(tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Compute torch._foreach_norm."""
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _lerp(tensors: list[Tensor], ends: list[Tensor], weights: list[Tensor]) -> None:
    """Compute torch._foreach_lerp_."""
    for tensor, end, weight in zip(tensors, ends, weights):
        tensor.lerp_(end, weight)
