"""Queues work with actors simulated step by step; test_unroll_races.py has real processes."""

import itertools

import numpy as np
import pytest

from core.memories.unrolls.queue import QueueMemory, QueueParams
from tests.core.tapes import (
    CODE,
    CodedActor,
    RandomPlay,
    assert_unroll_equals_twin,
    check_coded_unrolls,
    coded_spec,
    unroll_memory,
)


def make(
    *,
    capacity: int = 4,
    on_full: str = "block",
    batch_size: int = 4,
    num_actors: int = 1,
    frame_stack: int = 4,
    **options,
):
    memory = unroll_memory(
        QueueMemory,
        QueueParams(capacity, on_full),
        coded_spec((2,), frame_stack),
        batch_size=batch_size,
        num_actors=num_actors,
        **options,
    )
    return memory, [CodedActor(memory, actor) for actor in range(num_actors)]


def sampled(memory: QueueMemory, batch_size: int) -> list[tuple[int, int]] | None:
    """Return the unrolls of a batch after checking every element, or None if there is no batch."""
    batch = memory.sample(batch_size)
    if batch is None:
        return None
    assert batch.fresh is not None and batch.fresh.all() and len(batch.fresh) == len(batch.weights) == batch_size
    assert batch.weights.eq(1).all()
    found = check_coded_unrolls(memory.layout, batch.window)
    assert len(found) == batch_size and found == list(zip(*map(np.ndarray.tolist, batch.keys)))
    return found


def all_that_waits(memory: QueueMemory) -> list[tuple[int, int]]:
    found = []
    while (batch := sampled(memory, 1)) is not None:
        found += batch
    return found


def check_counts(memory: QueueMemory, given: int) -> None:
    """Assert that every unroll that arrived was given or dropped, or is still waiting."""
    statistics = memory.statistics()
    held = sum(len(held.fresh) for held in memory._pending)
    assert statistics["queue_inserted"] == given + held + statistics["queue_dropped"] + statistics["queue_size"]


# block ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("capacity", "batch_size", "num_actors", "num_envs", "length", "frame_stack"),
    [
        (1, 1, 1, 1, 1, 0),
        (1, 1, 1, 1, 1, 4),
        (1, 1, 1, 1, 5, 0),
        (1, 1, 1, 1, 5, 4),
        (1, 16, 2, 2, 5, 4),
        (1, 16, 1, 5, 4, 0),
        (7, 3, 2, 3, 4, 1),
        (32, 8, 2, 8, 2, 0),
        (2, 5, 3, 1, 3, 4),
        (100, 1, 1, 2, 4, 0),
    ],
)
def test_every_unroll_is_given_once_and_in_order(capacity, batch_size, num_actors, num_envs, length, frame_stack):
    memory, actors = make(
        capacity=capacity,
        batch_size=batch_size,
        num_actors=num_actors,
        num_envs=num_envs,
        length=length,
        frame_stack=frame_stack,
    )
    generator, given, refused, dry, most = np.random.default_rng(0), [], 0, 0, 0
    for round_ in itertools.count():
        steps, samples = ((2, 0), (1, 1), (0, 4))[round_ // 60 % 3]  # actors and learner are faster in turn
        for _ in range(steps * length * num_actors):
            refused += not actors[generator.integers(num_actors)].step()
            most = max(most, memory.unread())
        for _ in range(samples):
            batch = sampled(memory, batch_size)
            given, dry = given + (batch or []), dry + (batch is None)
            check_counts(memory, len(given))
        if len(given) >= 12 * batch_size * num_actors and round_ > 400:
            break
        assert round_ < 20_000, "nobody goes on"
    for actor in actors:
        for env in range(num_envs):
            stream = actor.actor_ind * num_envs + env
            found = [unroll for unroll in given if unroll[0] == stream]
            assert found == [unroll for unroll in actor.unrolls() if unroll[0] == stream][: len(found)] and found
    assert memory.statistics()["queue_dropped"] == 0 and refused and dry  # both sides waited for the other
    assert capacity <= most <= capacity - 1 + num_actors * num_envs


def test_a_full_queue_lets_actors_finish_their_chunks_only():
    memory, (first, second) = make(capacity=2, num_actors=2, num_envs=3)
    assert second.step() and all(first.step() for _ in range(4)) and memory.unread() == 3
    assert not first.step()
    assert all(second.step() for _ in range(3)) and memory.unread() == 6
    assert not first.step() and not second.step()
    assert sampled(memory, 4) and memory.unread() == 2 and not first.step()
    assert sampled(memory, 1) and memory.unread() == 1 and first.step()


def test_a_batch_larger_than_the_queue_is_gathered_in_parts():
    memory, (actor,) = make(capacity=1, batch_size=6, num_envs=2)
    for _ in range(2):
        actor.write(1)
        assert not actor.writer.has_room() and sampled(memory, 6) is None
        assert actor.writer.has_room()
        check_counts(memory, 0)
    actor.write(1)
    assert sampled(memory, 6) == actor.unrolls()


def test_smaller_batches_drop_what_was_gathered_for_a_larger_one():
    memory, (actor,) = make(batch_size=8, num_envs=2)
    actor.write(3)
    assert sampled(memory, 8) is None
    assert sampled(memory, 4) == actor.unrolls()[:4]
    assert memory.statistics()["queue_dropped"] == 2
    check_counts(memory, 4)


# without a learner ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("overflow", "capacity", "kept"), [("block", 5, 5 + 4), ("keep_latest", 5, 5)])
@pytest.mark.parametrize("chunks", [1, 3, 10, 97])
def test_without_sampling_actors_continue_and_the_newest_stay(overflow, capacity, kept, chunks):
    memory, actors = make(capacity=capacity, on_full=overflow, num_actors=2, num_envs=2, batch_size=2)
    for _ in range(chunks):  # before min_replay_size has_room is not consulted
        for actor in actors:
            actor.write(1)
    found = all_that_waits(memory)
    assert len(found) == min(kept, 4 * chunks) and len(set(found)) == len(found)
    statistics = memory.statistics()
    assert (statistics["queue_inserted"], statistics["queue_dropped"]) == (4 * chunks, 4 * chunks - len(found))
    for actor in actors:
        mine = [unroll for unroll in found if unroll[0] // 2 == actor.actor_ind]
        # no older unroll is left without the newer ones
        assert mine == actor.unrolls()[len(actor.unrolls()) - len(mine) :]
    assert memory.unread() == 0 and all(actor.step() for actor in actors)


def test_after_learn_start_actors_wait_until_the_queue_drains():
    memory, (actor,) = make(capacity=4, num_envs=2)
    actor.write(50)
    assert not actor.step()
    assert len(all_that_waits(memory)) == 6 and actor.step()


def test_a_ring_that_is_always_overwritten_gives_no_batch(monkeypatch):
    memory, (actor,) = make()
    actor.write(2)
    monkeypatch.setattr(memory.trajectories, "still_valid", lambda streams, serials: np.zeros(len(serials), bool))
    assert memory.sample(4) is None and memory.statistics()["queue_dropped"] == 4


def test_unrolls_overwritten_while_being_read_are_replaced(monkeypatch):
    memory, (actor,) = make(capacity=8, batch_size=4)
    actor.write(3)
    intact, reads = memory.trajectories.still_valid, []

    def once(streams, serials):
        reads.append(len(serials))
        # call 1 is made for the draw, calls 2 and 3 for the read
        return intact(streams, serials) & ((np.arange(len(serials)) != 1) | (len(reads) not in (2, 3)))

    monkeypatch.setattr(memory.trajectories, "still_valid", once)
    unrolls = actor.unrolls()
    assert sampled(memory, 4) == [unrolls[0], *unrolls[2:5]] and memory.statistics()["queue_dropped"] == 1
    check_counts(memory, 4)


# overflow ---------------------------------------------------------------------------------------------------------
def twin(
    overflow: str, capacity: int, arrivals: list[tuple[int, int]], waiting: list[tuple[int, int]], turn: list[int]
) -> int:
    """Update a queue of plain lists with these arrivals and return the number of dropped unrolls."""
    dropped = 0
    for unroll in arrivals:
        if len(waiting) < capacity:
            waiting.append(unroll)
            continue
        dropped += 1
        if overflow == "alternating":
            turn[0] += 1
        if overflow == "keep_latest" or turn[0] % 2 == 1:
            waiting.pop(0)
            waiting.append(unroll)
    return dropped


@pytest.mark.parametrize("overflow", ["block", "keep_latest", "keep_oldest", "alternating"])
def test_unrolls_of_several_actors_wait_in_publishing_order(overflow):
    """The plain queue sees every chunk when it is published, the memory only what was published since its last call."""
    capacity, options, given = 9, {"on_full": overflow, "num_actors": 4, "num_envs": 2, "batch_size": 3}, []
    memory, actors = make(capacity=capacity, **options)
    generator, waiting, turn = np.random.default_rng(2), [], [0]
    for round_ in range(60):
        for number in generator.integers(4, size=generator.integers(8)):
            if actors[number].writer.has_room():
                actors[number].write(1)
                twin(
                    "keep_oldest" if overflow == "block" else overflow,
                    100 if overflow == "block" else capacity,
                    actors[number].unrolls()[-2:],
                    waiting,
                    turn,
                )
        if round_ % 10 == 9:  # before some of the chunks were shown to the strategy
            state = memory.state_dict()
            memory, successors = make(capacity=capacity, **options)
            memory.load_state_dict(state)
            for actor, successor in zip(actors, successors):
                successor.serial, successor.writer = actor.serial, memory.writer(actor.actor_ind)
            actors = successors
        else:
            memory._ingest()
        if waiting and generator.random() < 0.3:
            streams, serials = np.divmod(memory.sample(len(waiting)).window.actions[0].numpy(), CODE)
            assert list(zip((streams - 1).tolist(), serials.tolist())) == waiting
            given, waiting = given + waiting, []
    assert {stream for stream, _ in given} == set(range(8))


@pytest.mark.parametrize("overflow", ["keep_latest", "keep_oldest", "alternating"])
@pytest.mark.parametrize(("capacity", "batch_size"), [(1, 1), (3, 2), (4, 4), (9, 2)])
def test_each_overflow_policy_keeps_and_drops_what_it_should(overflow, capacity, batch_size):
    memory, (actor,) = make(capacity=capacity, on_full=overflow, batch_size=batch_size)
    generator, waiting, turn, dropped, given, seen = np.random.default_rng(1), [], [0], 0, 0, 0
    for _ in range(150):
        assert actor.writer.has_room()  # these policies never block an actor
        actor.write(int(generator.integers(0, 3)))
        dropped += twin(overflow, capacity, actor.unrolls()[seen:], waiting, turn)
        seen = len(actor.unrolls())
        for _ in range(generator.integers(0, 3)):
            expected = waiting[:batch_size] if len(waiting) >= batch_size else None
            if expected is None and overflow == "keep_latest":
                continue  # it would gather what there is
            found = memory.sample(batch_size)
            assert (found and check_coded_unrolls(memory.layout, found.window)) == expected
            if expected:
                del waiting[:batch_size]
                given += batch_size
        memory._ingest()
        statistics = memory.statistics()
        assert (statistics["queue_size"], statistics["queue_dropped"]) == (len(waiting), dropped)
        check_counts(memory, given)
    assert dropped > 20 and given > 20


@pytest.mark.parametrize("overflow", ["keep_oldest", "alternating"])
def test_copied_unrolls_survive_an_overwritten_ring(overflow):
    plays = [RandomPlay(seed, 2) for seed in (1, 2)]
    for play in plays:
        play.with_states = True
    memory = unroll_memory(
        QueueMemory,
        QueueParams(6, overflow),
        plays[0].spec,
        batch_size=6,
        num_actors=2,
        extras=RandomPlay.extras,
        states=RandomPlay.states,
    )
    writers = [memory.writer(actor) for actor in range(2)]
    for play, writer in zip(plays, writers):
        play.play(writer, 4)
    memory._ingest()
    for _ in range(3 * memory.layout.ring_length):
        for play, writer in zip(plays, writers):
            play.play(writer, 4)
        if overflow == "keep_oldest":
            memory._ingest()
    for play, writer in zip(plays, writers):
        play.play(writer, 1)  # one actor is in the middle of a chunk
    batch = memory.sample(6)
    unrolls = [(actor, env, 0) for actor in range(2) for env in range(2)]
    if overflow == "keep_oldest":
        unrolls += [(0, 0, 4), (0, 1, 4)]  # two slots were left when the second chunks arrived
    else:
        unrolls = [identified(batch.window, column, plays) for column in range(6)]
        assert len(set(unrolls)) == 6
    for column, (actor, env, serial) in enumerate(unrolls):
        assert_unroll_equals_twin(batch.window, column, plays[actor], env, serial)


def identified(window, column: int, plays: list[RandomPlay]) -> tuple[int, int, int]:
    """Return the actor, environment and step of these features."""
    features = window.extras["features"][0, column].numpy()
    return next(
        (actor, env, serial)
        for actor, play in enumerate(plays)
        for env in range(2)
        for serial, row in enumerate(play.rows[env])
        if (row.features == features).all()
    )


def test_copies_are_not_overwritten_before_they_are_read():
    memory, (actor,) = make(capacity=2, on_full="alternating", batch_size=2, num_envs=1)
    actor.write(2)
    memory._ingest()
    drawn = memory.strategies[0].draw(2)  # drawn and not read yet
    actor.write(5)
    memory._ingest()
    window = memory.strategies[0].store.gather(*drawn.keys, memory.window)
    assert check_coded_unrolls(memory.layout, window) == actor.unrolls()[:2]
    assert memory.statistics()["queue_dropped"] == 5
    memory.strategies[0].on_batch_complete()
    actor.write(1)
    memory._ingest()
    assert memory.statistics()["queue_size"] == 1


@pytest.mark.parametrize("overflow", ["keep_oldest", "alternating"])
def test_a_queue_of_copies_must_hold_a_batch(overflow):
    assert QueueMemory.problems(QueueParams(3, overflow), 4) == [
        f"a queue with on_full={overflow} must hold its share of a batch: capacity=3 is below 4"
    ]
    assert QueueMemory.problems(QueueParams(4, overflow), 4) == []


@pytest.mark.parametrize("overflow", ["block", "keep_latest"])
def test_a_queue_in_the_rings_may_be_smaller_than_a_batch(overflow):
    assert QueueMemory.problems(QueueParams(1, overflow), 64) == []


# checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("overflow", ["block", "keep_latest", "keep_oldest", "alternating"])
@pytest.mark.parametrize("chunks", [1, 3, 40])
def test_a_queue_continues_exactly_from_a_state(overflow, chunks):
    memory, (actor,) = make(capacity=7, on_full=overflow, batch_size=5)
    actor.write(1)
    assert memory.sample(5) is None  # part of a batch is held
    actor.write(chunks)
    if chunks == 40:
        memory.sample(5)
    resumed, (successor,) = make(capacity=7, on_full=overflow, batch_size=5, seed=5)
    resumed.load_state_dict(memory.state_dict())
    successor.serial = actor.serial
    assert resumed.unread() == memory.unread()
    for batch_size in (5, 1, 1, 1, 5, 5, 1, 1, 1):
        assert (sampled_state(memory, batch_size)) == sampled_state(resumed, batch_size)
        for writer in (actor, successor):
            writer.write(3)
    assert resumed.statistics() == memory.statistics()


def sampled_state(memory: QueueMemory, batch_size: int):
    batch = memory.sample(batch_size)
    return batch and (
        check_coded_unrolls(memory.layout, batch.window),
        batch.fresh.tolist(),
        memory.unread(),
        memory.statistics(),
    )


def test_steps_overwritten_during_a_checkpoint_are_dropped():
    memory, (actor,) = make(capacity=8, on_full="keep_latest", num_envs=1, frame_stack=0, batch_size=2)
    actor.write(4)
    memory._ingest()
    state = memory.state_dict()
    state["trajectories"]["oldest"][0, 0] = 5  # the writer had reached steps 0 .. 4
    state["trajectories"]["frame"][0, :5] = -1
    resumed, _ = make(capacity=8, on_full="keep_latest", num_envs=1, frame_stack=0, batch_size=2)
    resumed.load_state_dict(state)
    assert sampled(resumed, 2) == actor.unrolls()[2:4] and resumed.statistics()["queue_dropped"] == 2
