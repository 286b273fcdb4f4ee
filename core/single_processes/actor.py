"""Run an actor: pull parameters, choose actions, step environments, write to the replay."""

import os
import time
from collections.abc import Iterator

import numpy as np

from core.acting.double_buffered_envs import DoubleBufferedEnvs
from core.acting.graphed_inference import with_graphed_forward
from core.agent import Exploration
from core.env import Env
from core.metrics.profiler import Profile
from core.runtime.context import Context
from core.types import TimeStep


class EpisodeStatistics:
    """Add up the raw return and the length of each environment's episode."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._finished: list[dict[str, float]] = []

    def add(self, timestep: TimeStep) -> int:
        """Count a step of every environment. Return the number of episodes that it ended."""
        self._returns += timestep.raw_reward
        self._lengths += ~timestep.first
        if not timestep.last.any():  # as after nearly every step
            return 0
        ended = np.flatnonzero(timestep.last)
        self._finished += [
            {"episodic_return": float(self._returns[env]), "episodic_length": float(self._lengths[env])}
            for env in ended
        ]
        self._returns[ended] = 0
        self._lengths[ended] = 0
        return len(ended)

    def take(self) -> list[dict[str, float]]:
        """Return the statistics of the episodes that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished


def actor(context: Context, index: int) -> Iterator[bool]:
    """Yield True after a step of all environments, False while waiting for parameters or for the learner."""
    options, salt = context.options, context.counters.agent_steps
    if options.engine != "inline":
        os.nice(options.actor.niceness)
    generator, seed = context.seed_everything("actor", index, salt), context.seed("actor", index, salt)
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
    try:
        version, steps_until_pull = 0, 0
        while not context.parameters.version and not run_state.stopped:
            yield False  # the learner still restores the replay and the parameters
        writer = memory.writer(number, agent.initial_priorities)
        reported_at, steps, reported_steps = time.monotonic(), 0, 0
        while not run_state.stopped:
            profile.mark("wait")
            may_insert = rate_limiter.can_insert() or writer.short
            if not (may_insert and (writer.has_room() or rate_limiter.is_warming_up)):
                yield False
                continue
            if steps_until_pull <= 0 or (memory_class.on_policy and writer.begins_chunk):
                version = context.parameters.pull(agent.model, version)
                steps_until_pull = options.actor.parameter_pull_period
                profile.mark("pull")
            agent_steps = counters.agent_steps
            before, output, after, state = envs.step(agent_steps, rate_limiter.learning_steps(agent_steps))
            published = writer.append(before, output.action, after, output.extras, state)
            profile.mark("write")
            steps_until_pull -= num_envs
            steps += published
            counters.count_agent_steps(index, published, episodes.add(after))
            for episode in episodes.take():
                context.report("actor", index, episode)
            now = time.monotonic()
            if now - reported_at >= options.actor.log_period:
                context.report(
                    "actor",
                    index,
                    {
                        **envs.statistics(),
                        "policy_lag": float(context.parameters.version - version),
                        "agent_steps_per_second": (steps - reported_steps) / (now - reported_at),
                    },
                )
                reported_at, reported_steps = now, steps
                profile.report()
            profile.mark("report")
            yield True
    finally:
        envs.close()
        profile.close()
