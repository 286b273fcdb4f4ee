"""Learner: sample, learn, update priorities, publish parameters, save checkpoints when asked."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput, joined
from core.context import Context
from core.device import device_random_state, set_device_random_state, use_tf32
from core.memory import Batch, Memory, batch_size, piece
from core.precision import PRECISIONS
from core.prefetch import Prefetcher
from core.resident import Refreshed, ResidentMemory, ResidentUpdates
from core.settings import setting
from core.trajectory import Window
from utils import checkpoint


@dataclass(frozen=True)
class LearnerParams:
    threads: int = setting(0, low=0)                     # of torch; 0: all cores up to 4, then what the actors leave
    prefetch: int = setting(4, low=0)                    # most batches prepared ahead in a thread; the inline engine always uses 0
    memory_device: str = setting("cpu", choices=("cpu", "learner"))  # where batches are drawn: learner: rows are copied to its device
    updates_per_replay: int = setting(1, low=1)          # updates in a row that python starts as one; with memory_device learner
    captured: str = setting("auto", choices=("auto", "yes", "no"))  # record them as a CUDA graph and replay it; auto: where possible
    precision: str = setting("float32", choices=PRECISIONS)  # of products: tf32 on GPUs; bf16: of the networks, the rest stays as it is
    shrink_batch: bool = setting(False)                  # out of GPU memory: go on with batches in pieces that fit
    publish_period: int = setting(10, low=1)             # updates between publications of the parameters
    log_period: float = setting(2.0, above=0)            # seconds between reports
    max_bad_updates: int = setting(10, low=1)            # updates in a row with a non-finite loss before the run is given up
    checkpoint_period: float = setting(600.0, above=0)   # seconds between full checkpoints; one more is written at the end
    checkpoint_steps: int = setting(0, low=0)            # agent steps between full checkpoints; 0: by seconds only
    checkpoint_keep: int = setting(2, low=1)             # newest full checkpoints kept
    checkpoint_replay: bool = setting(False)             # store the replay too: an exact continuation, large files


class TrainingDiverged(RuntimeError):
    """Too many updates in a row were not finite."""


def learner(context: Context, index: int) -> Iterator[bool]:
    """Yields True after an update, False while it waits for the actors. Its last act is a full checkpoint."""
    options, clock = context.options, context.clock
    context.seed_everything("learner", index)
    use_tf32(options.learner.precision != "float32")
    agent = context.make_agent(options.device, options.learner.precision)
    assert context.memory is not None
    if context.memory.feature_dtype(options.memory):
        context.memory.features_of = _feature_source(context)
    memory = _memory(context)
    _restore(context, agent, memory)
    prefetcher, learn = _updates(context, agent, memory)
    statistics = Statistics()
    samples = options.agent.batch_size * agent.samples_per_window
    bad_updates, reported = 0, time.monotonic()
    try:
        while not clock.stopped:
            if clock.checkpoint_due:
                _save(context, agent, memory, prefetcher)
            batch = prefetcher.get(timeout=0.1) if clock.may_learn(samples * learn.count) else None
            if batch is None:
                yield False
                continue
            output = learn(batch)
            if output.priorities is not None:
                prefetcher.update_priorities(batch.keys, output.priorities.cpu().numpy())
            for _ in range(learn.count):
                clock.learnt(index, samples)
            if clock.updates % options.learner.publish_period < learn.count:
                context.parameters.publish(agent.model)
            bad_updates = max(bad_updates + 1 if output.skipped else 0, learn.bad)
            if bad_updates >= options.learner.max_bad_updates:
                raise TrainingDiverged(f"the loss was not finite in {bad_updates} updates in a row; the last checkpoint is sound. "
                                       "A smaller agent.lr or agent.clip_norm may help")
            statistics.add(output.statistics, bool(output.skipped))
            if time.monotonic() - reported >= options.learner.log_period:
                reported = time.monotonic()
                context.report("learner", index, {**statistics.take(), **learn.statistics(), **prefetcher.statistics(),
                                                  **prefetcher.call(memory.statistics)})
            yield True
        context.parameters.publish(agent.model)
        _save(context, agent, memory, prefetcher)
    finally:
        prefetcher.close()


class Pieces:
    """An agent's `learn`, on the whole batch or, once that did not fit into the GPU's memory, on pieces of it one after another."""

    def __init__(self, agent: Agent, shrink: bool):
        self._agent, self._shrink, self._size = agent, shrink, 0
        self.count, self.bad = 1, 0  # updates a call; in a row that were not finite before the one in hand

    def __call__(self, batch: Batch) -> LearnerOutput:
        total, start, outputs = batch_size(batch), 0, []
        self._size = self._size or total
        while start < total:
            part = batch if self._size >= total else piece(batch, slice(start, start + self._size))
            try:
                outputs.append(self._agent.learn(part))
            except torch.OutOfMemoryError:
                if not self._shrink or self._size == 1:
                    raise
            else:
                start += self._size
                continue
            self._halve(total)  # the error is forgotten, and with it the tensors of its frames
        return outputs[0] if len(outputs) == 1 else joined(outputs)

    def _halve(self, total: int) -> None:
        self._size = -(-self._size // 2)
        torch.cuda.empty_cache()
        print(f"out of GPU memory: batches of {total} are learnt in pieces of {self._size} from now on", file=sys.stderr, flush=True)

    def statistics(self) -> dict[str, float]:
        return {"batch_size": float(self._size)} if self._shrink else {}


class Statistics:
    """Running sums of an agent's statistics, left as tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = self._skipped = 0

    def add(self, statistics: Mapping[str, Tensor], skipped: bool) -> None:
        self._skipped += skipped
        if not skipped:
            self._sums = {name: self._sums[name] + value if name in self._sums else value for name, value in statistics.items()}
            self._count += 1

    def take(self) -> dict[str, float]:
        """Means since the last call, and the number of skipped updates so far."""
        means = {name: float(total) / self._count for name, total in self._sums.items()} if self._count else {}
        self._sums, self._count = {}, 0
        return {**means, "skipped_updates": float(self._skipped)}


def _feature_source(context: Context) -> Callable[[Window], Tensor]:
    """A second network for the thread that samples: it follows the published parameters, so that nobody reads weights in the making.

    It is made at once: that draws from torch's random state, which is the learner's.
    """
    scout, version = context.make_agent(context.options.device), 0
    model = scout.model

    def features_of(window: Window) -> Tensor:
        nonlocal version
        version = context.parameters.pull(model, version)
        return scout.features(window)

    return features_of


def _memory(context: Context) -> Memory | ResidentMemory:
    """What the learner samples from: the shared rows, or their copy on its device."""
    memory, options = context.memory, context.options
    assert memory is not None
    return memory.Resident(memory, torch.device(options.device)) if options.learner.memory_device == "learner" else memory


def _updates(context: Context, agent: Agent, memory: Memory | ResidentMemory) -> tuple[Any, Any]:
    """What gives batches, and what learns them."""
    options = context.options
    if isinstance(memory, ResidentMemory):
        device = torch.device(options.device)
        capture = agent.captures and device.type == "cuda" and options.learner.captured != "no"
        count = options.learner.updates_per_replay
        return Refreshed(memory), ResidentUpdates(agent, memory, options.agent.batch_size, count, device, capture=capture)
    depth = 0 if options.engine == "inline" else options.learner.prefetch
    return Prefetcher(memory, options.agent.batch_size, depth), Pieces(agent, options.learner.shrink_batch)


def _restore(context: Context, agent: Agent, memory: Memory | ResidentMemory) -> None:
    """Weights, optimiser, memory and random state of the run to continue; or weights only; then the first publication."""
    version = 1
    if context.resume_from is not None:
        state = checkpoint.load(context.resume_from)[0]
        agent.load_state_dict(state["agent"])
        if "memory" in state:
            memory.load_state_dict(state["memory"])
        torch.set_rng_state(state["learner"]["torch_rng"])
        set_device_random_state(torch.device(context.options.device), state["learner"].get("device_rng"))
        version = state["learner"]["version"]
    elif context.initial_weights is not None:
        weights, _ = checkpoint.load_weights(context.initial_weights)
        checkpoint.load_into(agent.model, weights, context.initial_weights)
    context.parameters.publish(agent.model, version)


def _save(context: Context, agent: Agent, memory: Memory | ResidentMemory, prefetcher: Any) -> None:
    """Publish, then write a full checkpoint. A full disk is reported and counted; training goes on."""
    options = context.options
    version = context.parameters.publish(agent.model)
    try:
        checkpoint.save(options.checkpoint_folder, _state(context, agent, memory, prefetcher, version), context.clock.agent_steps,
                        options.learner.checkpoint_keep)
    except checkpoint.CheckpointError as error:
        print(f"checkpoint not written, training goes on: {error}", file=sys.stderr, flush=True)
        context.report("learner", 0, {"checkpoint_errors": 1.0})
    context.clock.checkpoint_written()


def _state(context: Context, agent: Agent, memory: Memory | ResidentMemory, prefetcher: Any, version: int) -> dict[str, Any]:
    with_replay = context.options.learner.checkpoint_replay
    state: dict[str, Any] = {"agent": agent.state_dict(), "clock": context.clock.state_dict(),
                             "learner": {"torch_rng": torch.get_rng_state(), "version": version,
                                         "device_rng": device_random_state(torch.device(context.options.device))}}
    if with_replay:
        state["memory"] = prefetcher.call(lambda: memory.state_dict(with_rows=True))
    return state
