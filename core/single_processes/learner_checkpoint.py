"""What learners carry from one life of a run to the next: all of them together write one checkpoint, and each finds its part in it.

Learner 0 writes the agent, which all have alike, the clock, and its own part: random state and, if asked, its memory. The others' parts
are named by their index.
"""

import fcntl
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from core.agent import Agent
from core.checkpoint import model_file, run_checkpoint, tensor_file
from core.common.console import log_to_stderr
from core.device.torch_runtime import device_random_state, set_device_random_state
from core.distributed.learner_group import LearnerGroup, SingleLearner
from core.learning.batch_source import Batches
from core.memory import batch_of, batch_state
from core.runtime.context import Context
from core.single_processes.learner_setup import LearnersMemory
from core.types import Batch


def restore(context: Context, agent: Agent, memory: LearnersMemory, index: int) -> tuple[int, list[Batch]]:
    """Weights, optimiser, memory and random state of the run to continue, if there is one.

    Returns the version of the parameters, and the batches that had been drawn from the memory and not learnt from.
    """
    version, drawn = 1, list[Batch]()
    if context.resume_from is not None:
        own = _own(index)
        state, found = run_checkpoint.load(context.resume_from, ("agent", "learner", *own))
        try:
            agent.load_state_dict(state["agent"])
            if own[1] in state:
                memory.load_state_dict(state[own[1]])
                drawn = [batch_of(stored) for stored in state[own[1]].get("drawn", ())]
            else:
                memory.continue_at(context.clock.updates)
            if own[0] in state:
                torch.set_rng_state(state[own[0]]["torch_rng"])
                set_device_random_state(torch.device(context.device_of(index)), state[own[0]].get("device_rng"))
            version = state["learner"]["version"]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # it is intact, but not what such a run wrote
            problem = f"checkpoint {found} does not fit this run ({type(error).__name__}: {error}): start a new one"
            raise tensor_file.CheckpointError(problem) from error
    return version, drawn


def load_initial(agent: Agent, path: Path) -> None:
    """Load the weights of a model file into an agent, before `init_learner` copies them to its target."""
    model_file.load_into(agent.model, model_file.load_weights(path)[0], path)


def save(context: Context, agent: Agent, memory: LearnersMemory, batches: Batches, group: LearnerGroup) -> Generator[bool, None, None]:
    """Publish, then write a full checkpoint. A full disk is reported and counted; training goes on."""
    options, index, parts = context.options, group.index, dict[str, Any]()

    def write_own() -> None:
        parts.update(_parts(context, agent, memory, batches, index))
        if index:
            run_checkpoint.save_parts(options.checkpoint_folder, parts)

    written = _written(write_own)
    all_written = all(row[0] for row in (yield from group.gather([written])))
    if index:
        return
    version = context.parameters.publish(agent.model)

    def write_all() -> None:
        parts["learner"]["version"] = version
        others = [name for learner in range(1, group.size) for name in _own(learner)[:len(parts)]]
        state = {"agent": agent.state_dict(), "clock": context.clock.state_dict(), **parts}
        run_checkpoint.save(options.checkpoint_folder, state, context.clock.agent_steps, options.learner.checkpoint_keep, others)

    saved = all_written and _written(write_all)
    context.clock.note_written(context.process_ind("learner", index), saved)
    if not saved:
        context.report("learner", index, {"checkpoint_errors": 1.0})
    context.clock.checkpoint_written()


def save_alone(context: Context, agent: Agent, memory: LearnersMemory, batches: Batches) -> None:
    """Save what is left when another learner is gone, whose memory is gone too. All have learnt alike, so the first to come does it."""
    if context.options.learner.checkpoint_replay:
        return
    with _first_to_come(context.options.checkpoint_folder) as first:
        for _ in save(context, agent, memory, batches, SingleLearner()) if first else ():
            """Alone it does not wait."""


@contextmanager
def _first_to_come(folder: Path) -> Iterator[bool]:
    """Yield True unless another process is within this for the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # which the save reports
        yield True
        return
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _own(index: int) -> tuple[str, str]:
    """Names of a learner's files: its own, and its memory's."""
    suffix = f"_{index}" if index else ""
    return f"learner{suffix}", f"memory{suffix}"


def _parts(context: Context, agent: Agent, memory: LearnersMemory, batches: Batches, index: int) -> dict[str, Any]:
    names, device = _own(index), next(agent.model.parameters()).device
    parts: dict[str, Any] = {names[0]: {"torch_rng": torch.get_rng_state(), "device_rng": device_random_state(device)}}
    if context.options.learner.checkpoint_replay:
        parts[names[1]] = batches.call(lambda: {**memory.state_dict(), "drawn": [batch_state(batch) for batch in batches.drawn()]})
    return parts


def _written(write: Callable[[], Any]) -> bool:
    try:
        write()
    except (tensor_file.CheckpointError, MemoryError) as error:
        log_to_stderr(f"checkpoint not written, those that are there stay as they were: {error}")
        return False
    return True
