"""Save and restore the learners' part of a checkpoint.

Learner 0 writes the agent, which all learners have alike, the counters, and its own files: random state and, if asked,
its memory. The files of the other learners are named by their index.
"""

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from core.agent import Agent
from core.checkpoint import model_file, run_checkpoint
from core.checkpoint.run_checkpoint import CheckpointError, storable
from core.common.console import log_to_stderr
from core.common.files import folder_lock
from core.device.torch_runtime import device_random_state, set_device_random_state
from core.distributed.learner_group import LearnerGroup, SingleLearner
from core.learning.batch_source import BatchSource
from core.memory import DeviceMemory, Memory, batch_of, batch_state
from core.runtime.context import Context
from core.runtime.run_state import COUNTS
from core.types import Batch

LOSS_TIMEOUT = 10.0  # seconds until a learner on another node must know which learner was lost


def restore(
    context: Context, agent: Agent, memory: Memory | DeviceMemory, group: LearnerGroup
) -> Generator[bool, None, tuple[int, list[Batch]]]:
    """Restore agent, memory and random state if the run continues another.

    Learner 0 reads the agent and sends it to the others, each of which reads only its own files. The weights of a
    model file, with which learner 0 has made its agent, are sent likewise.

    Returns:
        The version of the parameters, and the batches that were sampled but not learned from.

    Raises:
        CheckpointError: the checkpoint is intact but not of such a run.
    """
    if context.resume_from is None:
        if context.initial_weights is not None and group.size > 1:
            agent.load_state_dict((yield from group.broadcast(storable(agent.state_dict(), "agent"))))
        return 1, []
    learner_file, memory_file = _files_of(group.index)
    shared = ("agent", "learner") if group.index == 0 else ()
    state = run_checkpoint.read_verified(context.resume_from, (*shared, learner_file, memory_file))
    sent = {"agent": state.pop("agent"), "version": state["learner"]["version"]} if shared else None
    sent = yield from group.broadcast(sent)
    ready_batches: list[Batch] = []
    try:
        agent.load_state_dict(sent["agent"])
        if memory_file in state:
            memory.load_state_dict(state[memory_file])
            ready_batches = [batch_of(stored) for stored in state[memory_file].get("drawn", ())]
        else:
            memory.continue_at(context.counters.updates)
        if learner_file in state:
            torch.set_rng_state(state[learner_file]["torch_rng"])
            device = torch.device(context.device_of(group.index))
            set_device_random_state(device, state[learner_file].get("device_rng"))
        return sent["version"], ready_batches
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = (
            f"checkpoint {context.resume_from} does not fit this run ({type(error).__name__}: {error}): start a new one"
        )
        raise CheckpointError(problem) from error


def load_initial(agent: Agent, path: Path) -> None:
    """Load the weights of a model file into an agent, before `init_learner` copies them to its target."""
    model_file.load_into(agent.model, model_file.reload_weights(path)[0], path)


def save(
    context: Context, agent: Agent, memory: Memory | DeviceMemory, batches: BatchSource, group: LearnerGroup
) -> Generator[bool, None, None]:
    """Publish the parameters, then write a full checkpoint. A full disk is reported and counted; training continues."""
    folder, index, own_parts = context.options.checkpoint_folder, group.index, dict[str, Any]()
    learner_file, memory_file = _files_of(index)

    def write_own() -> None:
        device = next(agent.model.parameters()).device
        own_parts[learner_file] = {"torch_rng": torch.get_rng_state(), "device_rng": device_random_state(device)}
        if context.options.learner.checkpoint_replay:
            own_parts[memory_file] = batches.call(
                lambda: {**memory.state_dict(), "drawn": [batch_state(batch) for batch in batches.ready_batches()]}
            )
        if index:
            for path in run_checkpoint.save_parts(folder, own_parts):
                send_home(path)

    def send_home(path: Path) -> None:
        if context.send_home is not None:
            context.send_home(path)

    written = _try_to_write(write_own)
    rows = yield from group.gather([written, *context.counters.totals()[index].values()])
    all_written = all(row[0] for row in rows)
    elsewhere = {
        learner: dict(zip(COUNTS, row[1:]))
        for learner, row in enumerate(rows)
        if group.size > 1 and learner not in context.memories
    }
    if context.publishes(index):
        context.parameters.publish(agent.model)
    if index:
        return

    def write_all() -> None:
        own_parts["learner"]["version"] = context.parameters.version
        others = [name for learner in range(1, group.size) for name in _files_of(learner)[: len(own_parts)]]
        counters = {**context.counters.state_dict(elsewhere), **context.rate_limiter.state_dict()}
        checkpoint = run_checkpoint.save(
            folder,
            {"agent": agent.state_dict(), "clock": counters, **own_parts},
            context.counters.agent_steps,
            context.options.learner.checkpoint_keep,
            others,
        )
        send_home(checkpoint)

    saved = all_written and _try_to_write(write_all)
    context.run_state.record_write(context.process_ind("learner", index), saved)
    if not saved:
        context.report("learner", index, {"checkpoint_errors": 1.0})
    context.run_state.confirm_checkpoint()


def save_alone(
    context: Context, agent: Agent, memory: Memory | DeviceMemory, batches: BatchSource
) -> Generator[bool, None, None]:
    """Save a checkpoint after another learner was lost. All learners are alike, so the first one to come saves.

    A learner on another node than learner 0 saves only if that one is lost, and waits until this is known. With
    learner.checkpoint_replay nothing is saved, because the memory of the lost learner is lost, too.
    """
    if context.options.learner.checkpoint_replay:
        return
    if 0 not in context.memories:
        deadline = time.monotonic() + LOSS_TIMEOUT
        while (lost := context.run_state.lost_learner) is None and time.monotonic() < deadline:
            yield False
        if lost != 0:
            return
    folder, first = context.options.checkpoint_folder, True
    with ExitStack() as stack:
        with suppress(OSError):  # `save` reports it
            folder.mkdir(parents=True, exist_ok=True)
            first = stack.enter_context(folder_lock(folder))
        if first:
            yield from save(context, agent, memory, batches, SingleLearner())


def _files_of(index: int) -> tuple[str, str]:
    """Return the names of a learner's own file and of its memory's."""
    suffix = f"_{index}" if index else ""
    return f"learner{suffix}", f"memory{suffix}"


def _try_to_write(write: Callable[[], None]) -> bool:
    try:
        write()
    except (CheckpointError, MemoryError) as error:
        log_to_stderr(f"checkpoint not written, those that are there stay as they were: {error}")
        return False
    return True
