"""What a learner samples from, and what learns: the shared rows ahead of it in a thread, or their copy on its device; captured or not."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput, samples_of
from core.learning.graphed_update import Refreshed, ResidentMemory, ResidentUpdates, can_be_captured
from core.learning.microbatches import Pieces, in_pieces
from core.learning.prefetcher import Prefetcher
from core.memory import Batch, Keys, Memory, batch_size
from core.runtime.context import Context
from core.staged import StagedUpdates
from core.types import Window

LearnersMemory = Memory | ResidentMemory


class Batches(Protocol):
    """What is learnt from next, as a Prefetcher gives it."""

    starved: bool           # rows had to be waited for before the last `get`
    takes_priorities: bool  # else what an update says of its windows is not asked for

    def get(self, timeout: float) -> Any: ...

    def update_priorities(self, keys: Keys, priorities: np.ndarray) -> None: ...

    def put_back(self, batch: Any, /) -> None: ...

    def drawn(self) -> list[Batch]: ...

    def call(self, function: Callable[[], Any]) -> Any: ...

    def statistics(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


class Learn(Protocol):
    """Learns from what a Batches gives: `count` updates a call; `bad` of them in a row were not finite before the last one."""

    count: int
    bad: int

    def __call__(self, batch: Any, /) -> LearnerOutput: ...

    def samples(self, batch: Any, /) -> int:
        """Return the agent steps that a call with this batch learnt from."""

    def statistics(self) -> Mapping[str, float]: ...


def learners_memory(context: Context, index: int) -> LearnersMemory:
    """The shared rows, or their copy on its device."""
    memory = context.memories[index]
    if context.options.learner.memory_device != "learner":
        return memory
    assert memory.Resident is not None  # else the settings are refused
    return memory.Resident(memory, torch.device(context.device_of(index)))


def updates(context: Context, agent: Agent, memory: LearnersMemory, index: int, drawn: Sequence[Batch]) -> tuple[Batches, Learn]:
    """What the learner learns from and how. Of `drawn`, which a checkpoint had, those go first that fit what is learnt from now."""
    options, device = context.options, torch.device(context.device_of(index))
    captured, on_gpu = options.learner.captured, device.type == "cuda"
    if isinstance(memory, ResidentMemory):
        count = options.learner.updates_per_replay
        capture = on_gpu and captured != "no" and options.num_learners == 1 and can_be_captured(type(agent), agent.params, count)
        return Refreshed(memory), ResidentUpdates(agent, memory, options.agent.batch_size, count, device, capture=capture)
    depth = 0 if options.engine == "inline" else options.learner.prefetch
    drawn = [batch for batch in drawn if batch_size(batch) == options.agent.batch_size and memory.window.fits(batch.window)]
    batches = Prefetcher(memory, options.agent.batch_size, depth, options.learner.batches_per_draw, drawn)
    return batches, StagedUpdates(agent, device, capture=on_gpu) if captured == "yes" else EagerUpdates(agent, options.learner.shrink_batch)


class EagerUpdates:
    """An agent's `learn`; with `shrink`, gradients of batches that do not fit into the GPU's memory are taken of pieces that do."""

    def __init__(self, agent: Agent, shrink: bool):
        self._agent, self._pieces = agent, Pieces() if shrink else None
        self.count, self.bad = 1, 0  # updates a call; in a row that were not finite before the one in hand

    def __call__(self, batch: Batch) -> LearnerOutput:
        if self._pieces is None:
            return self._agent.learn(batch)
        with in_pieces(self._pieces):
            return self._agent.learn(batch)

    def samples(self, batch: Batch) -> int:
        return samples_of(self._agent, batch)

    def statistics(self) -> dict[str, float]:
        """batch_size: windows whose gradient is taken at once."""
        return {} if self._pieces is None else {"batch_size": float(self._pieces.size)}


def feature_source(context: Context, device: str) -> Callable[[Window], Tensor]:
    """A second network for the thread that samples: it follows the published parameters, so that nobody reads weights in the making.

    It is made at once: that draws from torch's random state, which is the learner's.
    """
    scout, version = context.make_agent(device), 0
    model = scout.model

    def features_of(window: Window) -> Tensor:
        nonlocal version
        version = context.parameters.pull(model, version)
        return scout.features(window)

    return features_of
