"""What a step and an update of these options cost on this machine: a few of each, without the replay and without processes."""

import dataclasses
import os
import time
from typing import NamedTuple

import numpy as np
import torch

from core.agent import Agent, LearnerOutput
from core.env import Env
from core.memory import Batch, Keys
from core.model import restart
from core.trajectory import STORAGE, Layout, Trajectories
from core.writer import ChunkWriter
from utils import validation
from utils.options import Options


class Costs(NamedTuple):
    act: float      # seconds of a core for an agent step: environment, network, row
    update: float   # seconds for an update of the learner, with its threads
    sound: bool     # the updates changed something: loss and gradient were finite
    cores: int      # that this process may use
    threads: int    # of torch in an update


def measure(options: Options, env: Env, seconds: float) -> Costs:
    """Plays an actor's environments for `seconds`, at least until a window is there, then learns from it for `seconds`, at least twice."""
    threads, before = learner_threads(options), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        act, batch = _acting(options, env, seconds)
        torch.set_num_threads(threads)
        update, sound = _updating(options.make_agent(env.spec, options.device), batch, seconds)
    finally:
        torch.set_num_threads(before)
    return Costs(act, update, sound, len(os.sched_getaffinity(0)), threads)


def learner_threads(options: Options) -> int:
    """On the inline engine and beside actors."""
    cores = len(os.sched_getaffinity(0))
    if options.engine == "inline":
        return 1
    left = cores if cores <= 4 else max(cores - options.num_actors - 1, cores // 2)
    return options.learner.threads or max(left // options.num_learners, 1)


def samples_per_step(options: Options) -> float:
    """Samples learnt from for each agent step, as the clock or the memory's rule paces the run."""
    limited = options.clock.samples_per_insert
    return limited if limited is not None else options.memory_class.samples_per_step(options.memory)


def steps_per_second(options: Options, costs: Costs, samples_per_window: int) -> float:
    """Agent steps a second if nothing were lost: actors, learners and the cores they share each set a bound."""
    update = costs.update * samples_per_step(options) / (options.agent.batch_size * samples_per_window)  # seconds an agent step
    if options.engine == "inline":
        return 1 / (costs.act + update)
    busy = costs.act + (0 if options.device.startswith("cuda") else update * costs.threads)  # core-seconds an agent step
    return min(options.num_actors / costs.act, options.num_learners / update, costs.cores / busy)


def _acting(options: Options, env: Env, seconds: float) -> tuple[float, Batch]:
    """Seconds an agent step of one actor takes, and a batch of the first windows it wrote."""
    agent, num_envs = options.make_agent(env.spec), options.num_envs_per_actor
    exploration = agent.exploration(0, options.num_actors, num_envs, np.random.default_rng(options.seed))
    trajectories = Trajectories(_small(validation.layout(options, env.spec, agent), agent))
    writer = ChunkWriter(trajectories, 0, agent.window, agent.initial_priorities)
    timestep, batch, steps = env.reset(options.seed), None, 0
    initial = state = agent.initial_state(num_envs)
    started = time.perf_counter()
    while batch is None or time.perf_counter() - started < seconds:
        if steps == 1:
            started = time.perf_counter()  # what is made on first use is not counted
        state = restart(state, timestep.first, initial)
        output = agent.act(timestep, state, exploration)
        after = env.step(output.action)
        writer.append(timestep, output.action, after, output.extras, state)
        timestep, state, steps = after, output.state, steps + 1
        if batch is None and trajectories.written()[0] > agent.window.length - (agent.window.stride > 0):
            batch = _batch(trajectories, agent, options.agent.batch_size)
    return (time.perf_counter() - started) / (max(steps - 1, 1) * num_envs), batch


def _small(layout: Layout, agent: Agent) -> Layout:
    """The same rows of one actor, in a ring that holds a window and no more; raw."""
    chunks = -(-(agent.window.length + 1 + layout.frame_stack) // layout.chunk_length) + 4
    return dataclasses.replace(layout, num_actors=1, rows=chunks * layout.chunk_length, storage=STORAGE, arena_bytes=0)


def _batch(trajectories: Trajectories, agent: Agent, batch_size: int) -> Batch:
    """The first window of each stream, over and over; half of them count as replayed."""
    keys = Keys(np.arange(batch_size) % trajectories.layout.num_envs, np.zeros(batch_size, np.int64))
    window = trajectories.gather(*keys, agent.window)
    return Batch(window, keys, torch.ones(batch_size), torch.arange(batch_size) % 2 == 0)


def _updating(agent: Agent, batch: Batch, seconds: float) -> tuple[float, bool]:
    """Seconds an update takes, the first one not counted, and whether all were sound."""
    sound, updates, started = True, -1, time.perf_counter()
    while updates < 1 or time.perf_counter() - started < seconds:
        output = agent.learn(batch)
        sound = sound and not output.skipped
        updates += 1
        if not updates:
            _wait_for(output)
            started = time.perf_counter()
    _wait_for(output)
    return (time.perf_counter() - started) / updates, sound


def _wait_for(output: LearnerOutput) -> None:
    """Until the device has done it."""
    for value in output.statistics.values():
        value.item()
