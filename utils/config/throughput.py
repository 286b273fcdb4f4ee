"""Measure what a step and an update cost on this machine, without the replay buffer and without processes.

For num_envs_per_actor=0, try numbers of environments before any process starts.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from core.acting.graphed_inference import with_graphed_forward
from core.agent import Agent, Exploration, LearnerOutput
from core.common.console import log_to_stderr
from core.common.system import usable_cores
from core.engines.supervisor import learner_threads
from core.env import Env
from core.runtime.log_buffers import check_names
from core.runtime.options import make_env
from core.single_processes.actor import DoubleBufferedEnvs
from core.specs import EnvSpec
from core.trajectory.ring_buffer import STORAGE, Trajectories
from core.trajectory.writer import ChunkWriter, single_actor_layout
from core.types import Batch, SampleIds
from utils.config import memory_budget, validation
from utils.errors import ConfigurationError, describe_exception
from utils.options import Options

TRIAL_SECONDS = 1.0  # Duration of the trial of one number of environments.
FIRST_STEPS = 4  # Uncounted first steps, which include lazy initialisation and the capture of a CUDA graph.
FIRST_SECONDS = 1.0  # Limit of the uncounted steps.
FILL_SECONDS = 1.5  # Extra time for completing a window; afterwards the last step is repeated.
SLOW_STEP = 0.5  # Seconds of a step of all environments above which larger numbers are not tried.
GAIN = 1.1  # Factor of agent steps a second that a larger number must bring.
WINDOWS = 10  # Windows, such as rollouts, that each environment of a larger number must make in the run's steps.
PATIENCE = 2  # Larger numbers in a row without that gain, after which the search ends.
HasEnough = Callable[[Trajectories, Agent], bool]


class StepCosts(NamedTuple):
    """Measured costs of acting and learning."""

    act: float  # Core seconds per agent step: environment, network and storing.
    update: float  # Seconds per update of the learner, with its threads.
    sound: bool  # An update had finite loss and gradient, so that it changed parameters.
    cores: int  # Cores that this process may use.
    threads: int  # Threads of torch in an update.


def measure(options: Options, spec: EnvSpec, seconds: float) -> tuple[StepCosts, Agent, LearnerOutput, Batch]:
    """Act for `seconds`, and longer until there is a whole window, then learn from that window for `seconds`.

    Returns:
        The costs, the agent that has learnt, what its last update returned, and the batch.
    """
    batches: list[Batch] = []

    def has_window(trajectories: Trajectories, agent: Agent) -> bool:
        if not batches and trajectories.written()[0] > agent.window.length - (agent.window.stride > 0):
            batches.append(_batch(trajectories, agent, options))
        return bool(batches)

    threads = 1 if options.engine == "inline" else learner_threads(options)
    torch.set_num_threads(1)
    act = _acting(options, spec, seconds, has_window)
    torch.set_num_threads(threads)
    agent = options.make_agent(spec, options.device, options.learner.precision)
    update, sound, output = _updating(agent, batches[0], seconds)
    return StepCosts(act, update, sound, usable_cores(), threads), agent, output, batches[0]


def resolve_num_envs(options: Options, seconds: float = TRIAL_SECONDS) -> Options:
    """Return the options with a measured `num_envs_per_actor`.

    The result is the smallest number of environments that is about as fast as the fastest for one actor alone. Numbers
    that the other options do not allow are not tried, nor those that leave an environment fewer than WINDOWS windows.

    Raises:
        ConfigurationError: the environments cannot be played.
    """
    spec, counts = validation.environment_spec(options), validation.env_counts(options)
    window = dataclasses.replace(options, num_envs_per_actor=counts[0]).make_agent(spec).window
    steps = WINDOWS * (window.stride or window.length) * options.num_actors  # that an environment should make

    def rates() -> Iterator[tuple[int, float]]:
        for count in counts:
            candidate = dataclasses.replace(options, num_envs_per_actor=count)
            if validation.problems(candidate):
                continue
            if options.steps is not None and count > max(options.steps // steps, counts[0]):
                return
            cost = _acting(candidate, spec, seconds)
            yield count, 1 / cost
            if cost * count > SLOW_STEP:
                return

    try:
        torch.set_num_threads(1)
        best, measured = choose(rates())
    except Exception as error:  # User classes may raise anything.
        problem = f"num_envs_per_actor=0: environments cannot be tried out: {describe_exception(error)}"
        raise ConfigurationError(problem) from error
    listed = ", ".join(f"{count}: {rate:,.0f}" for count, rate in measured.items())
    log_to_stderr(f"num_envs_per_actor={best} of those tried out, with an actor's agent steps/s: {listed}")
    return dataclasses.replace(options, num_envs_per_actor=best)


def choose(rates: Iterable[tuple[int, float]]) -> tuple[int, dict[int, float]]:
    """Return the smallest count that larger ones hardly beat, and all measured rates by count.

    Counts and agent steps a second are taken one by one until the search ends.
    """
    measured: dict[int, float] = {}
    best, without_gain = 0, 0
    for count, rate in rates:
        measured[count] = rate
        better = not best or rate >= GAIN * measured[best]
        best, without_gain = (count, 0) if better else (best, without_gain + 1)
        if without_gain == PATIENCE:
            break
    return best, measured


def steps_per_second(options: Options, costs: StepCosts, samples_per_window: int) -> float:
    """Return the agent steps per second that actors, learners and their shared cores allow without any overhead."""
    # Seconds, and core seconds, per agent step.
    update = costs.update * options.samples_per_step / (options.batch_size * samples_per_window)
    busy = costs.act + (0 if options.device.startswith("cuda") else update * costs.threads)
    if options.engine == "inline":
        return 1 / (costs.act + update)
    if options.memory_class.on_policy:  # Actors and learners take turns.
        return min(1 / (costs.act / options.num_actors + update / options.num_learners), costs.cores / busy)
    return min(options.num_actors / costs.act, options.num_learners / update, costs.cores / busy)


def _acting(options: Options, spec: EnvSpec, seconds: float, has_enough: HasEnough = lambda *steps: True) -> float:
    """Return the seconds per agent step of one actor.

    The actor plays for `seconds`, and longer until `has_enough` steps are stored. FILL_SECONDS later, slow environments
    repeat their last step in place of the missing ones.

    Raises:
        ValueError: the name of a statistic of the exploration is too long to be logged.
    """
    params, num_envs, splits = options.actor, options.num_envs_per_actor, options.actor.num_env_splits
    agent = with_graphed_forward(options.make_agent(spec, params.device, params.precision), params.cuda_graph)
    generator = np.random.default_rng(options.seed)
    raw = dataclasses.replace(memory_budget.layout(options, agent), storage=STORAGE, arena_bytes=0)
    trajectories = Trajectories(single_actor_layout(raw, agent.window.length))
    writer = ChunkWriter(trajectories, 0, agent.window, agent.initial_priorities)

    def create_env(count: int, first: int) -> Env:
        return make_env(options, count, training=True, num_threads=params.env_threads)

    def exploration(split: int) -> Exploration:
        return agent.exploration(split, options.num_actors * splits, num_envs // splits, generator)

    with closing(DoubleBufferedEnvs(agent, create_env, exploration, options.seed, splits, num_envs)) as envs:
        steps, started = -FIRST_STEPS, time.perf_counter()
        while (
            steps < 1
            or (passed := time.perf_counter() - started) < seconds
            or (not has_enough(trajectories, agent) and passed < seconds + FILL_SECONDS)
        ):
            if -FIRST_STEPS < steps < 0 and time.perf_counter() - started > FIRST_SECONDS:
                steps = 0
            if not steps:
                started = time.perf_counter()
            timestep, output, next_timestep, state = envs.step(max(steps, 0) * num_envs, max(steps, 0) * num_envs)
            writer.append(timestep, output.action, next_timestep, output.extras, state)
            steps += 1
        passed = time.perf_counter() - started
        check_names(f"actor/{name}" for name in envs.statistics())  # An actor reports them only after a while.
        while not has_enough(trajectories, agent):
            writer.append(timestep, output.action, next_timestep, output.extras, state)
        return passed / (steps * num_envs)


def _batch(trajectories: Trajectories, agent: Agent, options: Options) -> Batch:
    """Return a batch of the first window of each environment, repeated; half of them count as replayed, if any may."""
    count, on_policy = options.batch_size, options.memory_class.on_policy
    keys = SampleIds(np.arange(count) % trajectories.layout.num_envs, np.zeros(count, np.int64))
    fresh = (torch.arange(count) % 2 == 0) | on_policy
    return Batch(trajectories.gather(*keys, agent.window), keys, torch.ones(count), fresh, on_policy)


def _updating(agent: Agent, batch: Batch, seconds: float) -> tuple[float, bool, LearnerOutput]:
    """Return the seconds per update, True if any update changed parameters, and what the last one returned.

    The first update is not counted, unless it takes `seconds` or longer.
    """
    agent.init_learner()
    sound, updates, started = False, -1, time.perf_counter()
    while updates < 1 or time.perf_counter() - started < seconds:
        output = agent.learn(batch)
        sound = sound or not output.skipped
        updates += 1
        if not updates:
            _wait_for(output)
            if 0 < seconds < time.perf_counter() - started:
                return time.perf_counter() - started, sound, output
            started = time.perf_counter()
    _wait_for(output)
    return (time.perf_counter() - started) / updates, sound, output


def _wait_for(output: LearnerOutput) -> None:
    """Wait until the device has computed the statistics of this update."""
    for value in output.statistics.values():
        value.item()
