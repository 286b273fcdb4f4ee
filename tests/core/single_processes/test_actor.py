"""The actor resets states at episode starts and waits while the memory has no room."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.agent import ActorOutput
from core.agents.base.actor_critic import Sampling
from core.agents.impala import Impala
from core.envs.recall import RecallEnv, RecallParams
from core.memories.unrolls.queue import QueueMemory, QueueParams
from core.models.actor_critic import MLPAC, MLPACParams
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings
from core.runtime.options import ActorParams, LoggerParams
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RateLimiter, RateLimiterParams, RunCounters, RunState
from core.single_processes import actor as actor_module
from core.single_processes.actor import DoubleBufferedEnvs, EpisodeStatistics, actor
from core.specs import ArraySpec
from core.trajectory.ring_buffer import Layout
from core.types import TimeStep

LENGTH, ENVS, UNITS = 5, 2, 4


class Watched(Impala):
    """Record where episodes start, and the state given and returned, at each step."""

    steps: list  # shared by all agents of the run

    def act(self, timestep, state, exploration):
        output = super().act(timestep, state, exploration)
        self.steps.append(
            (timestep.first.copy(), [part.clone() for part in state], [part.clone() for part in output.state])
        )
        return output


@pytest.fixture
def context(monkeypatch):
    """Return a run of recall, whose episodes have 4 steps, with an LSTM and a queue of 2 unrolls."""
    monkeypatch.setattr(Watched, "steps", [], raising=False)
    env = RecallParams(delay=2)
    spec = RecallEnv(env, "recall", 1).spec
    options = SimpleNamespace(
        memory_class=QueueMemory,
        engine="inline",
        device="cpu",
        num_actors=1,
        num_learners=1,
        num_envs_per_actor=ENVS,
        seed=1,
        steps=None,
        game="recall",
        env=env,
        env_class=RecallEnv,
        actor=ActorParams(),
        logger=LoggerParams(),
        profile=False,
        profile_trace=0,
        rate_limiter=RateLimiterParams(samples_per_insert=None, min_replay_size=30),
        log_folder=None,
        make_agent=make_agent,
    )
    memory = QueueMemory(
        QueueParams(capacity=ENVS),
        Layout.of(
            spec,
            make_agent(spec).extras,
            capacity=20 * LENGTH * ENVS,
            num_actors=1,
            num_envs=ENVS,
            chunk_length=LENGTH,
            with_priority=False,
            states=(ArraySpec((UNITS,), "float32"),) * 2,
        ),
        make_agent(spec).window,
        0,
    )
    context = Context(
        options,
        spec,
        (("actor", 0),),
        {0: memory},
        ParameterStore(ParameterStore.size_of(make_agent(spec).model)),
        RunCounters(1, 1),
        RunState(1),
        LogRings(1),
    )
    context.parameters.publish(make_agent(spec).model)
    return context


def make_agent(spec, device="cpu", precision="float32"):
    return Watched(
        Watched.Params(unroll_length=LENGTH, batch_size=1),
        spec,
        partial(MLPAC, MLPACParams(lstm=UNITS, hidden=8), spec),
    )


@pytest.mark.parametrize(("engine", "asked"), [("local", [7]), ("inline", [])])
def test_an_actor_lowers_its_priority_in_its_own_process_only(context, monkeypatch, engine, asked):
    nices = []
    monkeypatch.setattr("os.nice", nices.append)
    context.options.engine, context.options.actor = engine, ActorParams(niceness=7)
    next(actor(context, 0))
    assert nices == asked


def test_parameters_are_pulled_every_so_many_steps_of_the_actor(context, monkeypatch):
    played, pulls, threads, make_env = [], [], [], Context.make_env

    def pull(store, model, version):
        pulls.append(len(played))
        return store.version

    def make_watched_env(context, *args, num_threads, **named):
        threads.append(num_threads)
        return make_env(context, *args, num_threads=num_threads, **named)

    monkeypatch.setattr(ParameterStore, "pull", pull)
    monkeypatch.setattr(Context, "make_env", make_watched_env)
    context.options.actor = ActorParams(parameter_pull_period=4 * ENVS, env_threads=3)
    running = actor(context, 0)
    for _ in range(12):
        played.append(next(running))
    assert all(played) and pulls == [0, 4, 8] and threads == [3]
    running.close()


@pytest.mark.parametrize(
    ("device", "of_actors", "expected"),
    [
        ("cuda", "cuda", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cpu", "cuda", ["cuda"] * 3),
        ("cuda", "cpu", ["cpu"] * 3),
        ("cuda", "cuda:1", ["cuda:1"] * 3),
    ],
)
def test_an_actors_network_is_on_its_learners_gpu(context, device, of_actors, expected):
    context.options.num_learners = 2
    context.options.device, context.options.actor = device, ActorParams(device=of_actors)
    assert [context.device_of_actor(index) for index in range(3)] == expected


def test_the_recurrent_state_is_passed_on_and_reset_at_starts(context):
    running = actor(context, 0)
    assert all(next(running) for _ in range(12))
    starts = 0
    for (first, given, _), (_, _, returned) in zip(context.make_agent().steps[1:], context.make_agent().steps):
        for stream in range(ENVS):
            starts += int(first[stream])
            for part, before in zip(given, returned):
                assert before[stream].any()
                assert torch.equal(part[stream], torch.zeros(UNITS) if first[stream] else before[stream])
    assert starts == 2 * ENVS
    running.close()


def test_explorations_follow_the_steps_since_learning_started(context, monkeypatch):
    seen = []
    monkeypatch.setattr(Sampling, "update", lambda self, *steps: seen.append(steps))
    monkeypatch.setattr(RateLimiter, "is_warming_up", True)  # so that the actor does not wait for a learner
    context.options.rate_limiter = RateLimiterParams(samples_per_insert=None, min_replay_size=7)
    running = actor(context, 0)
    for _ in range(40):
        next(running)
    running.close()
    assert seen[0] == (0, 0) and seen[-1][0] > 7
    assert all(learning_steps == max(agent_steps - 7, 0) for agent_steps, learning_steps in seen)


def test_explorations_are_numbered_over_the_splits_of_all_actors(context, monkeypatch):
    numbers = []
    monkeypatch.setattr(Watched, "exploration", lambda self, *args: (numbers.append(args[:3]), Sampling(args[3]))[1])
    context.options.actor, context.options.num_actors = ActorParams(num_env_splits=2), 3
    context.roles, context.run_state = tuple(("actor", index) for index in range(3)), RunState(3)
    monkeypatch.setattr(ParameterStore, "version", 0)  # so that the actors wait and write nothing
    for index in range(3):
        next(actor(context, index))
    assert numbers == [(number, 6, 1) for number in range(6)]


class Counting:
    """Stands in for an agent whose `act` returns arrays that its exploration changes in the next step."""

    def initial_state(self, batch_size):
        return ()

    def act(self, timestep, state, exploration):
        exploration.count += 1
        return ActorOutput(np.zeros(ENVS, np.int64), {"count": exploration.count}, state)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_act_returned_is_stored_as_it_was(num_splits):
    envs = DoubleBufferedEnvs(
        Counting(),
        lambda num_envs, first: RecallEnv(RecallParams(), "recall", num_envs),
        lambda split: SimpleNamespace(count=np.zeros(ENVS, np.int64), update=lambda *steps: None),
        seed=0,
        num_splits=num_splits,
        num_envs=num_splits * ENVS,
    )
    for number in range(1, 4):
        assert (envs.step(0, 0).output.extras["count"] == number).all()


def test_statistics_are_those_of_each_environments_whole_episode():
    """A step where an episode starts is its reset. Returns are those of the game, not the clipped ones."""
    statistics, ended = EpisodeStatistics(2), []
    for first, last, raw in (
        ([1, 1], [0, 0], [0, 0]),
        ([0, 0], [0, 1], [5, 7]),
        ([0, 1], [1, 0], [6, 0]),
        ([1, 0], [0, 0], [0, 2]),
        ([0, 0], [0, 1], [1, 3]),
    ):
        first, last, raw = np.array(first, bool), np.array(last, bool), np.array(raw, np.float32)
        ended.append(statistics.add(TimeStep(np.zeros(2), raw.clip(-1, 1), np.ones(2), first, last, raw)))
    episodes = [[(each["episodic_return"], each["episodic_length"]) for each in step] for step in ended]
    assert episodes == [[], [(7, 1)], [(11, 2)], [], [(5, 2)]]


def test_an_actor_makes_no_more_than_the_runs_steps(context):
    """The engine stops the run later if the machine is busy."""
    context.options.steps = 3 * LENGTH * ENVS // 2
    running = actor(context, 0)
    worked = [next(running) for _ in range(6 * LENGTH)]
    assert worked == [True] * (2 * LENGTH) + [False] * (4 * LENGTH)
    assert context.options.steps <= context.counters.agent_steps <= 2 * LENGTH * ENVS


def test_a_chunk_stores_the_state_of_its_first_action(context):
    running = actor(context, 0)
    assert all(next(running) for _ in range(3 * LENGTH))
    for chunk in range(3):
        given = context.make_agent().steps[chunk * LENGTH][1]
        stored = [context.memories[0].trajectories.arrays[f"state {number}"][0, chunk] for number in range(2)]
        assert all((part.numpy() == array).all() for part, array in zip(given, stored))
    running.close()


def test_the_actor_waits_for_room_except_while_warming_up(context):
    running, memory = actor(context, 0), context.memories[0]
    steps = 0
    while next(running):
        steps += 1
        assert context.rate_limiter.is_warming_up or steps % LENGTH == 0
    written = memory.trajectories.written()[0]
    # it filled the queue
    assert steps == written and steps % LENGTH == 0 and written * ENVS > memory.params.capacity * LENGTH
    assert 30 <= context.counters.inserted < 30 + LENGTH * ENVS
    assert not any(next(running) for _ in range(5)) and memory.trajectories.written()[0] == written
    while memory.unread() >= memory.params.capacity:
        assert memory.sample(1) is not None
    assert [next(running) for _ in range(LENGTH + 3)] == [True] * LENGTH + [False] * 3  # a started chunk is finished
    running.close()


def test_an_actor_that_restarts_before_its_first_chunk_has_other_seeds(context, monkeypatch):
    seeds = []

    def play(context, index, generator, seed):
        seeds.append((seed, int(generator.integers(2**31))))
        yield from ()

    monkeypatch.setattr(actor_module, "_play", play)
    for _ in range(2):
        list(actor_module.actor(context, 0))
        context.run_state.count_restart()
    assert seeds[0][0] != seeds[1][0] and seeds[0][1] != seeds[1][1]


def test_environments_do_not_draw_the_numbers_of_the_exploration(context, monkeypatch):
    """Environments such as Catch make a generator of their seed, as extending.md shows."""
    streams = []

    def play(context, index, generator, seed):
        streams.extend(each.bit_generator.state["state"]["inc"] for each in (generator, np.random.default_rng(seed)))
        yield from ()

    monkeypatch.setattr(actor_module, "_play", play)
    list(actor_module.actor(context, 0))
    assert streams[0] != streams[1]


def test_the_actor_waits_for_the_first_parameters(context):
    context.parameters = ParameterStore(ParameterStore.size_of(context.make_agent().model))
    running = actor(context, 0)
    assert not any(next(running) for _ in range(3)) and not context.make_agent().steps
    context.parameters.publish(context.make_agent().model)
    assert next(running)
    running.close()


def test_a_stopped_run_ends_the_actor_even_while_it_waits(context):
    running = actor(context, 0)
    while next(running):
        pass
    context.run_state.stop()
    assert list(running) == []
