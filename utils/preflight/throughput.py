"""What a step and an update of these options cost on this machine: a few of each, without the replay and without processes."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from core.acting.env_groups import DoubleBufferedEnvs
from core.acting.graphed_inference import with_graphed_forward
from core.agent import Agent, Exploration, LearnerOutput
from core.common.console import log_to_stderr
from core.engines.supervisor import learner_threads
from core.env import Env
from core.runtime.options import make_env
from core.specs import EnvSpec
from core.trajectory.layout import STORAGE, Layout
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Batch, SampleIds
from utils.config import env_count_search, memory_budget, validation
from utils.errors import ConfigurationError, describe_exception
from utils.options import Options

TRIAL_SECONDS = 1.0  # of each number of environments
FIRST_STEPS = 4      # that are not counted: what is made on first use is made in them, a recording too
FIRST_SECONDS = 1.0  # after which no more of these are taken
FILL_SECONDS = 1.5   # after the seconds of acting, in which a window may still become whole; its last step is repeated then
SLOW_STEP = 0.5      # seconds of a step of all environments, from which larger numbers of them are not tried out


class StepCosts(NamedTuple):
    act: float      # seconds of a core for an agent step: environment, network, row
    update: float   # seconds for an update of the learner, with its threads
    sound: bool     # an update changed something: loss and gradient were finite
    cores: int      # that this process may use
    threads: int    # of torch in an update


def measure(options: Options, spec: EnvSpec, seconds: float) -> StepCosts:
    """Play an actor's environments for `seconds`, and a little longer until a window is there, then learn from it for `seconds`."""
    batches: list[Batch] = []

    def has_window(trajectories: Trajectories, agent: Agent) -> bool:
        if not batches and trajectories.written()[0] > agent.window.length - (agent.window.stride > 0):
            batches.append(_batch(trajectories, agent, options.agent.batch_size))
        return bool(batches)

    threads = 1 if options.engine == "inline" else learner_threads(options)
    with _threads(1):
        act = _acting(options, spec, seconds, has_window)
    with _threads(threads):
        update, sound = _updating(options.make_agent(spec, options.device), batches[0], seconds)
    return StepCosts(act, update, sound, len(os.sched_getaffinity(0)), threads)


def resolve_num_envs(options: Options, seconds: float = TRIAL_SECONDS) -> Options:
    """With the number of environments that an actor alone plays fastest where it is 0, the smallest of those that are about as fast.

    Those that the other settings do not allow are not tried. Raises Refused where they cannot be played.
    """
    if options.num_envs_per_actor:
        return options
    spec = validation.environment_spec(options)
    allowed = (chosen for chosen in map(partial(env_count_search.with_count, options), env_count_search.counts(options))
               if not validation.problems(chosen))

    def rates() -> Iterator[tuple[int, float]]:
        for chosen in allowed:
            cost = _acting(chosen, spec, seconds)
            yield chosen.num_envs_per_actor, 1 / cost
            if cost * chosen.num_envs_per_actor > SLOW_STEP:
                return

    try:
        with _threads(1):
            best, seen = env_count_search.choose(rates())
    except Exception as error:  # environments, models and agents may be anybody's
        raise ConfigurationError([f"num_envs_per_actor=0: environments cannot be tried out: {describe_exception(error)}"]) from error
    listed = ", ".join(f"{count}: {rate:,.0f}" for count, rate in seen.items())
    log_to_stderr(f"num_envs_per_actor={best} of those tried out, with an actor's agent steps/s: {listed}")
    return env_count_search.with_count(options, best)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def samples_per_step(options: Options) -> float:
    """Samples learnt from for each agent step, as the clock or the memory's rule paces the run."""
    limited = options.clock.samples_per_insert
    return limited if limited is not None else options.memory_class.samples_per_step(options.memory)


def steps_per_second(options: Options, costs: StepCosts, samples_per_window: int) -> float:
    """Agent steps a second if nothing were lost: actors, learners and the cores they share each set a bound."""
    update = costs.update * samples_per_step(options) / (options.agent.batch_size * samples_per_window)  # seconds an agent step
    if options.engine == "inline":
        return 1 / (costs.act + update)
    busy = costs.act + (0 if options.device.startswith("cuda") else update * costs.threads)  # core-seconds an agent step
    return min(options.num_actors / costs.act, options.num_learners / update, costs.cores / busy)


def _acting(options: Options, spec: EnvSpec, seconds: float,
            has_enough: Callable[[Trajectories, Agent], bool] = lambda trajectories, agent: True) -> float:
    """Return the seconds that an agent step of one actor takes, played for so long, and on until `has_enough` of its rows.

    Slow environments do not get there: after FILL_SECONDS more their last step stands for those that are missing.
    """
    params, num_envs, count = options.actor, options.num_envs_per_actor, options.actor.groups
    agent = with_graphed_forward(options.make_agent(spec, params.device), params.captured)
    generator = np.random.default_rng(options.seed)
    trajectories = Trajectories(_small(memory_budget.layout(options, spec, agent), agent))
    writer = ChunkWriter(trajectories, 0, agent.window, agent.initial_priorities)

    def made(streams: int, first: int) -> Env:
        return make_env(options, streams, training=True, num_threads=params.env_threads)

    def exploration(group: int) -> Exploration:
        return agent.exploration(group, options.num_actors * count, num_envs // count, generator)

    with closing(DoubleBufferedEnvs(agent, made, exploration, options.seed, count, num_envs)) as groups:
        steps, started = -FIRST_STEPS, time.perf_counter()
        while steps < 1 or (passed := time.perf_counter() - started) < seconds \
                or (not has_enough(trajectories, agent) and passed < seconds + FILL_SECONDS):
            if -FIRST_STEPS < steps < 0 and time.perf_counter() - started > FIRST_SECONDS:
                steps = 0
            if not steps:
                started = time.perf_counter()
            before, output, after, state = groups.step(max(steps, 0) * num_envs)
            writer.append(before, output.action, after, output.extras, state)
            steps += 1
        passed = time.perf_counter() - started
        while not has_enough(trajectories, agent):
            writer.append(before, output.action, after, output.extras, state)
        return passed / (steps * num_envs)


def _small(layout: Layout, agent: Agent) -> Layout:
    """The same rows of one actor, in a ring that holds a window and no more; raw."""
    chunks = -(-(agent.window.length + 1 + layout.frame_stack) // layout.chunk_length) + 4
    return dataclasses.replace(layout, num_actors=1, rows=chunks * layout.chunk_length, storage=STORAGE, arena_bytes=0)


def _batch(trajectories: Trajectories, agent: Agent, batch_size: int) -> Batch:
    """The first window of each stream, over and over; half of them count as replayed."""
    keys = SampleIds(np.arange(batch_size) % trajectories.layout.num_envs, np.zeros(batch_size, np.int64))
    window = trajectories.gather(*keys, agent.window)
    return Batch(window, keys, torch.ones(batch_size), torch.arange(batch_size) % 2 == 0)


def _updating(agent: Agent, batch: Batch, seconds: float) -> tuple[float, bool]:
    """Return the seconds that an update takes, and whether any changed something. The first is not counted, unless it takes `seconds`."""
    sound, updates, started = False, -1, time.perf_counter()
    while updates < 1 or time.perf_counter() - started < seconds:
        output = agent.learn(batch)
        sound = sound or not output.skipped
        updates += 1
        if not updates:
            _wait_for(output)
            if 0 < seconds < time.perf_counter() - started:
                return time.perf_counter() - started, sound
            started = time.perf_counter()
    _wait_for(output)
    return (time.perf_counter() - started) / updates, sound


def _wait_for(output: LearnerOutput) -> None:
    """Until the device has done it."""
    for value in output.statistics.values():
        value.item()
