"""Run an actor: pull parameters, choose actions, step environments, write to the replay.

An actor steps its environments in splits that take turns: while one split is emulated, the network chooses actions for
another. This is the double-buffered sampling of Sample Factory (Petrenko et al. 2020).
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.acting.graphed_inference import with_graphed_forward
from core.agent import ActorOutput, Agent, Exploration
from core.env import Env
from core.metrics.profiler import Profile
from core.runtime.context import Context
from core.runtime.log_buffers import MIN_RATE_SECONDS
from core.runtime.run_state import Schedule
from core.types import State, TimeStep, restart, tree_map


def actor(context: Context, index: int) -> Iterator[bool]:
    """Yield True after a step of all environments, False while waiting for parameters or for the learner."""
    # Restarts count too: an actor that failed within its first chunk has published no step, and would fail again.
    options, salt = context.options, context.counters.agent_steps + context.run_state.restarts
    if options.engine != "inline":
        os.nice(options.actor.niceness)
    generator = context.seed_everything("actor", index, salt)
    seed = int(generator.integers(2**31))  # of the environments, which may make the same kind of generator of it
    try:
        yield from _play(context, index, generator, seed)
    except Exception as error:
        error.add_note(f"actor {index}, its environments seeded with {seed}")
        raise


def _play(context: Context, index: int, generator: np.random.Generator, seed: int) -> Iterator[bool]:
    options, counters, rate_limiter = context.options, context.counters, context.rate_limiter
    run_state, num_envs, num_splits = context.run_state, options.num_envs_per_actor, options.actor.num_env_splits
    agent = context.make_agent(context.device_of_actor(index), options.actor.precision)
    agent = with_graphed_forward(agent, options.actor.cuda_graph)
    (memory, number), memory_class = context.memory_of(index), options.memory_class
    episodes, profile = EpisodeStatistics(num_envs), Profile(context, "actor", index)

    def make_env(size: int, first: int) -> Env:
        env = context.make_env(size, training=True, num_threads=options.actor.env_threads)
        env.set_activity_marker(run_state.activity_marker(context.process_ind("actor", index)), first)
        return env

    def exploration(split: int) -> Exploration:
        return agent.exploration(
            index * num_splits + split, options.num_actors * num_splits, num_envs // num_splits, generator
        )

    envs = DoubleBufferedEnvs(agent, make_env, exploration, seed, num_splits, num_envs, profile.mark)
    max_steps = math.inf if options.steps is None else options.steps
    version = steps_until_pull = steps = timed_steps = 0
    timed_at, reports = time.monotonic(), Schedule(options.logger.period, options.logger.steps, counters.agent_steps)

    def report() -> None:
        """Report the exploration and, unless too little time has passed since it was last measured, the speed."""
        nonlocal timed_at, timed_steps
        now = time.monotonic()
        values = {**envs.statistics(), "policy_lag": float(context.parameters.version - version)}
        if now - timed_at >= MIN_RATE_SECONDS:
            values["agent_steps_per_second"] = (steps - timed_steps) / (now - timed_at)
            timed_at, timed_steps = now, steps
        context.report("actor", index, values)
        reports.start(counters.agent_steps)

    try:
        while not context.parameters.version and not run_state.stopped:
            yield False  # the learner still restores the replay and the parameters
        writer = memory.writer(number, agent.initial_priorities)
        timed_at = time.monotonic()
        reports.start_period()
        while not run_state.stopped:
            profile.mark("wait")
            agent_steps = counters.agent_steps
            if agent_steps >= max_steps:
                yield False  # until the engine stops the run
                continue
            may_insert = rate_limiter.can_insert() or writer.lacks_windows
            if not (may_insert and (writer.has_room() or rate_limiter.is_warming_up)):
                yield False
                continue
            if steps_until_pull <= 0 or (memory_class.on_policy and writer.begins_chunk):
                version = context.parameters.pull(agent.model, version)
                steps_until_pull = options.actor.parameter_pull_period
                profile.mark("pull")
            before, output, after, state = envs.step(agent_steps, rate_limiter.learning_steps(agent_steps))
            published = writer.append(before, output.action, after, output.extras, state)
            profile.mark("write")
            steps_until_pull -= num_envs
            steps += published
            ended = episodes.add(after)
            counters.count_agent_steps(index, published, len(ended))
            for episode in ended:
                context.report("actor", index, episode)
            if reports.due(counters.agent_steps):
                report()
                profile.report()
            profile.mark("report")
            yield True
    finally:
        if steps:
            report()  # the run may be shorter than a period
        envs.close()
        profile.close()


class EnvStep(NamedTuple):
    """One step of all environments, those of the first split first."""

    before: TimeStep  # of a stack of frames the newest one only
    output: ActorOutput
    after: TimeStep
    state: State  # the recurrent state that the actions were chosen with


class EnvSplit:
    """Some of an actor's environments.

    `send_actions` chooses actions and sends them; `receive_steps` waits for the steps that they lead to.
    """

    def __init__(
        self, agent: Agent, env: Env, exploration: Exploration, timestep: TimeStep, mark_phase: Callable[[str], None]
    ):
        self._agent, self._env, self.exploration, self._mark_phase = agent, env, exploration, mark_phase
        self._timestep, self._initial_state = timestep, agent.initial_state(len(timestep.first))
        self._state = self._initial_state

    def send_actions(self) -> None:
        timestep = self._timestep
        with torch.inference_mode():
            state = restart(self._state, timestep.first, self._initial_state)
            output = self._agent.act(timestep, state, self.exploration)
        self._sent = _stored_copy(timestep, bool(self._env.spec.frame_stack)), output, state
        self._mark_phase("forward")
        self._env.send(output.action)
        self._mark_phase("environment")

    def receive_steps(self) -> EnvStep:
        before, output, state = self._sent
        self._timestep, self._state = self._env.recv(), output.state
        self._mark_phase("environment")
        return EnvStep(before, output, self._timestep, state)


class DoubleBufferedEnvs:
    """An actor's environments in `num_splits` splits of equal size, seeded one after another.

    With one split, `step` chooses actions, takes them and returns the result. With more, `step` returns the result of
    the actions that the previous call sent, and sends the next ones. Its parameters are therefore one step older.

    Args:
        make_env: makes the environments of a split from their number and the index of the first one among the actor's.
        exploration: function of a split's index.
        mark_phase: is called with the name of each finished phase (core/metrics/profiler.py).
    """

    def __init__(
        self,
        agent: Agent,
        make_env: Callable[[int, int], Env],
        exploration: Callable[[int], Exploration],
        seed: int,
        num_splits: int,
        num_envs: int,
        mark_phase: Callable[[str], None] = lambda phase: None,
    ):
        size = num_envs // num_splits
        self._envs = [make_env(size, split * size) for split in range(num_splits)]
        self._splits = [
            EnvSplit(agent, env, exploration(split), env.reset(seed + split), mark_phase)
            for split, env in enumerate(self._envs)
        ]
        self._has_sent = False

    def step(self, agent_steps: int, learning_steps: int) -> EnvStep:
        """Step every environment once. Explorations follow the steps of the run, as `Exploration.update` has them."""
        for split in self._splits:
            split.exploration.update(agent_steps, learning_steps)
        if len(self._splits) == 1:
            self._splits[0].send_actions()
            return self._splits[0].receive_steps()
        if not self._has_sent:
            for split in self._splits:
                split.send_actions()
            self._has_sent = True
        steps = []
        for split in self._splits:
            step = split.receive_steps()
            steps.append(step._replace(output=_copied(step.output)))
            split.send_actions()
        whole: EnvStep = tree_map(_concatenated, *steps)
        return whole

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def statistics(self) -> dict[str, float]:
        """Return the means of the splits' exploration statistics, each over the splits that report it."""
        reported: dict[str, list[float]] = {}
        for split in self._splits:
            for name, value in split.exploration.statistics().items():
                reported.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in reported.items()}


def _stored_copy(timestep: TimeStep, is_stacked: bool) -> TimeStep:
    """Copy what the memory stores of a time step, because the environment may reuse its arrays in the next step."""
    stored = timestep._replace(observation=timestep.observation[:, -1:]) if is_stacked else timestep
    return TimeStep._make(None if field is None else field.copy() for field in stored)


def _copied(output: ActorOutput) -> ActorOutput:
    """Copy what the memory stores of an agent's output, because the next `act` may change its arrays."""
    extras = {name: np.array(values) for name, values in output.extras.items()}
    return output._replace(action=np.array(output.action), extras=extras)


def _concatenated(*parts: Any) -> Any:
    """Concatenate arrays or tensors along the environments."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)


class EpisodeStatistics:
    """Add up the raw return and the length of each environment's episode."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def add(self, timestep: TimeStep) -> list[dict[str, float]]:
        """Count a step of every environment. Return the statistics of the episodes that it ended."""
        self._returns += timestep.raw_reward
        self._lengths += ~timestep.first
        if not timestep.last.any():  # as after nearly every step
            return []
        ended = np.flatnonzero(timestep.last)
        pairs = zip(self._returns[ended].tolist(), self._lengths[ended].tolist())
        finished = [{"episodic_return": total, "episodic_length": float(length)} for total, length in pairs]
        self._returns[ended] = self._lengths[ended] = 0
        return finished
