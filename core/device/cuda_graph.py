"""Calls of work that is the same tensor operations every time, eagerly or as a CUDA graph that is captured once.

A graph costs one launch, where Python would launch hundreds of kernels. A graph repeats addresses, not Python: the work
must always read and write the same tensors, and must not decide by the value of a tensor.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

# Calls before the capture, on a stream of their own, as torch asks for: libraries choose their kernels in them.
WARM_UP = 3


class CudaGraphCallable:
    """A callable that runs work(). With `capture`, the first calls are eager and all later ones launch a graph."""

    def __init__(
        self,
        work: Callable[[], None],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
        *,
        capture: bool,
    ):
        """Bind the work.

        Args:
            work: The work, the same operations in each call.
            device: Its device.
            generators: Generators that the work draws from, except torch's global one. Launches continue their
                sequences.
            capture: True to capture a graph. Raises ValueError for a device that is not CUDA.
        """
        if capture and device.type != "cuda":
            raise ValueError(f"only work on a CUDA device can be captured, not on {device}")
        self._work, self._device, self._generators, self._capture = work, device, generators, capture
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if not self._capture:
            self._work()
        elif self._calls <= WARM_UP:
            self._warm_up()
        else:
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
        """Capture the work, which runs nothing. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with (
            _nothing_freed(),
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
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
