"""Work that is the same tensor operations every time: called eagerly, or recorded once as a CUDA graph and replayed.

A replay costs one launch where python would launch hundreds of kernels. It repeats addresses, not python: what the work reads and writes
must stay the same tensors, and no decision in it may depend on a tensor's value.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

WARM_UP = 3  # calls before the recording, on a stream of their own, as torch asks for: libraries choose their kernels in them


class CudaGraphCallable:
    """Calls work(). With capture the first calls are eager, all later ones replay the recording of one: the same work each time.

    `generators` are those that the work draws from, torch's global one aside: a replay goes on in their sequences.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = (), *, capture: bool):
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
        """Recording runs nothing. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        with _nothing_freed(), torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._work()
        return graph


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Python's collector of cycles rests: an older recording that it finds meanwhile would, as it goes, spoil this one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
