"""Actor: pull parameters, act, step, write rows."""

import os
import time
from collections.abc import Iterator

import numpy as np

from core.acting.env_groups import DoubleBufferedEnvs
from core.acting.episode_statistics import Tally
from core.acting.graphed_inference import with_graphed_forward
from core.agent import Exploration
from core.env import Env
from core.metrics.profiler import Profile
from core.runtime.context import Context


def actor(context: Context, index: int) -> Iterator[bool]:
    """Yields True after a step of all its streams, False while it waits for parameters or for the learner."""
    options, clock = context.options, context.clock
    if options.engine != "inline":
        os.nice(options.actor.niceness)
    salt = clock.agent_steps
    generator, seed = context.seed_everything("actor", index, salt), context.seed("actor", index, salt)
    try:
        yield from _play(context, index, generator, seed)
    except Exception as error:
        error.add_note(f"actor {index}, its environments seeded with {seed}")
        raise


def _play(context: Context, index: int, generator: np.random.Generator, seed: int) -> Iterator[bool]:
    options, clock, num_envs, count = context.options, context.clock, context.options.num_envs_per_actor, context.options.actor.groups
    agent = with_graphed_forward(context.make_agent(context.device_of_actor(index)), options.actor.captured)
    memory, number = context.memory_of(index)
    tally, profile = Tally(num_envs), Profile(context, "actor", index)

    def make_env(streams: int, first: int) -> Env:
        env = context.make_env(streams, training=True, num_threads=options.actor.env_threads)
        env.set_activity_marker(clock.activity_marker(context.process_ind("actor", index)), first)
        return env

    def exploration(group: int) -> Exploration:
        return agent.exploration(index * count + group, options.num_actors * count, num_envs // count, generator)

    groups = DoubleBufferedEnvs(agent, make_env, exploration, seed, count, num_envs, profile.lap)
    try:
        version, until_refresh = 0, 0
        while not context.parameters.version and not clock.stopped:
            yield False  # the learner is still restoring rows and weights
        writer = memory.writer(number, agent.initial_priorities)
        reported, steps, published_before = time.monotonic(), 0, 0
        while not clock.stopped:
            profile.lap("wait")
            if not ((clock.can_insert() or writer.short) and (writer.has_room() or clock.is_warming_up)):
                yield False
                continue
            if until_refresh <= 0:
                version, until_refresh = context.parameters.pull(agent.model, version), options.actor.refresh_period
                profile.lap("pull")
            before, output, after, state = groups.step(clock.agent_steps)
            published = writer.append(before, output.action, after, output.extras, state)
            profile.lap("write")
            until_refresh -= num_envs
            steps += published
            clock.count_agent_steps(index, published, tally.add(after))
            if tally.finished:
                for episode in tally.take():
                    context.report("actor", index, episode)
            if time.monotonic() - reported >= options.actor.log_period:
                seconds, reported = time.monotonic() - reported, time.monotonic()
                context.report("actor", index, {
                    **groups.statistics(), "policy_lag": float(context.parameters.version - version),
                    "agent_steps_per_second": (steps - published_before) / seconds})
                published_before = steps
                profile.report()
            profile.lap("report")
            yield True
    finally:
        groups.close()
        profile.close()
