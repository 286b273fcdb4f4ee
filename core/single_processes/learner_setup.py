"""What a learner samples from, and what learns: the shared rows ahead of it in a thread, or their copy on its device; captured or not."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.agent import Agent
from core.learning.batch_source import Batches, EagerUpdates, InPlaceBatchSource, Learn
from core.learning.graphed_update import GraphedDeviceUpdate, GraphedUpdate, can_be_captured
from core.learning.prefetcher import Prefetcher
from core.memory import DeviceMemory, Memory
from core.runtime.context import Context
from core.types import Batch, Window, batch_size

LearnersMemory = Memory | DeviceMemory


def learners_memory(context: Context, index: int) -> LearnersMemory:
    """The shared rows, or their copy on its device."""
    memory = context.memories[index]
    if context.options.learner.memory_device != "learner":
        return memory
    assert memory.device_class is not None  # else the settings are refused
    return memory.device_class(memory, torch.device(context.device_of(index)))


def updates(context: Context, agent: Agent, memory: LearnersMemory, index: int, drawn: Sequence[Batch]) -> tuple[Batches, Learn]:
    """What the learner learns from and how. Of `drawn`, which a checkpoint had, those go first that fit what is learnt from now."""
    options, device = context.options, torch.device(context.device_of(index))
    captured, on_gpu = options.learner.captured, device.type == "cuda"
    if isinstance(memory, DeviceMemory):
        count = options.learner.updates_per_replay
        capture = on_gpu and captured != "no" and options.num_learners == 1 and can_be_captured(type(agent), agent.params, count)
        return InPlaceBatchSource(memory), GraphedDeviceUpdate(agent, memory, options.agent.batch_size, count, device, capture=capture)
    depth = 0 if options.engine == "inline" else options.learner.prefetch
    drawn = [batch for batch in drawn if batch_size(batch) == options.agent.batch_size and memory.window.fits(batch.window)]
    batches = Prefetcher(memory, options.agent.batch_size, depth, options.learner.batches_per_draw, drawn)
    return batches, GraphedUpdate(agent, device, capture=on_gpu) if captured == "yes" else EagerUpdates(agent, options.learner.shrink_batch)


def feature_source(context: Context, device: str) -> Callable[[Window], Tensor]:
    """A second network for the thread that samples: it follows the published parameters, so that nobody reads weights in the making.

    It is made at once: that draws from torch's random state, which is the learner's.
    """
    shadow_agent, version = context.make_agent(device), 0
    model = shadow_agent.model

    def features_of(window: Window) -> Tensor:
        nonlocal version
        version = context.parameters.pull(model, version)
        return shadow_agent.features(window)

    return features_of
