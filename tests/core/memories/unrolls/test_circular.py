"""IMPACT's circular buffer works with an actor simulated step by step; test_unroll_races.py has real processes."""

from collections import Counter

import numpy as np
import pytest

from core.memories.unrolls.circular import CircularMemory, CircularParams
from tests.core.tapes import CodedActor, check_coded_unrolls, coded_spec, unroll_memory

SIZE = 4  # the batch size


def make(
    *,
    capacity: int = 40,
    num_batches: int = 3,
    max_reuse: int = 2,
    on_full: str = "block",
    num_actors: int = 1,
    seed: int = 0,
):
    params = CircularParams(capacity, on_full, num_batches=num_batches, max_reuse=max_reuse)
    memory = unroll_memory(
        CircularMemory, params, coded_spec((2,), 4), batch_size=SIZE, num_actors=num_actors, seed=seed
    )
    return memory, [CodedActor(memory, actor) for actor in range(num_actors)]


def sampled(memory: CircularMemory) -> tuple[list[tuple[int, int]], bool] | None:
    """Return the unrolls of a batch and whether they are given for the first time."""
    batch = memory.sample(SIZE)
    if batch is None:
        return None
    assert len(batch.fresh) == SIZE and len(set(batch.fresh.tolist())) == 1
    return check_coded_unrolls(memory.layout, batch.window), bool(batch.fresh[0])


def part(actor: CodedActor, number: int) -> list[tuple[int, int]]:
    """Return the number-th batch of an actor's unrolls."""
    return actor.unrolls()[number * SIZE : (number + 1) * SIZE]


def test_other_batches_are_reused_until_all_are_used_up():
    memory, (actor,) = make(max_reuse=3)
    actor.write(4)
    expected = [(0, True), (1, True), (0, False), (1, False), (0, False), (1, False)]
    assert [sampled(memory) for _ in expected] == [(part(actor, number), fresh) for number, fresh in expected]
    assert sampled(memory) is None and sampled(memory) is None
    assert memory.statistics()["remaining_reuses"] == 0
    actor.write(1)
    assert sampled(memory) is None  # half a batch
    actor.write(1)
    assert sampled(memory) == (part(actor, 2), True) and memory.statistics()["remaining_reuses"] == 2


def test_one_of_several_actors_may_fill_all_batches():
    memory, (actor, _) = make(capacity=32, num_batches=8, num_actors=2)
    for fresh in (True, False):
        actor.write(16)  # until the queue is full
        assert [sampled(memory) for _ in range(8)] == [(part(actor, number), fresh) for number in range(8)]


@pytest.mark.parametrize("capacity", [1, 6, 40])
@pytest.mark.parametrize(("num_batches", "max_reuse"), [(1, 1), (1, 3), (2, 2), (4, 2), (5, 3)])
def test_every_batch_equals_that_of_a_buffer_of_plain_lists(num_batches, max_reuse, capacity):
    memory, actors = make(num_batches=num_batches, max_reuse=max_reuse, capacity=capacity, num_actors=2)
    generator, uses, first, buffer = np.random.default_rng(0), Counter(), [], [([], 0)] * num_batches
    next_, waited = 0, 0
    for round_ in range(480):
        steps, samples = ((16, 0), (4, 1), (0, 3))[round_ // 20 % 3]
        for _ in range(steps):
            actors[generator.integers(2)].step()
        for _ in range(samples):
            ready = sum(len(actor.unrolls()) for actor in actors) - SIZE * len(first) >= SIZE
            found = sampled(memory)
            if found and found[1]:
                first.append(found[0])
                assert not uses.keys() & set(found[0])
            uses.update(found[0] if found else [])
            waited += found is None
            for _ in range(num_batches):  # the plain buffer receives what comes next and decides when
                number, next_ = next_, (next_ + 1) % num_batches
                batch, left = buffer[number]
                refilled = not left and ready
                if refilled:
                    batch, left = first[-1], max_reuse
                if left:
                    buffer[number] = batch, left - 1
                    assert found == (batch, refilled)
                    break
            else:
                assert found is None
    assert waited and len(first) > 20 and set(uses) <= {unroll for actor in actors for unroll in actor.unrolls()}
    assert max(uses.values()) == max_reuse and all(
        uses[unroll] == max_reuse for batch in first[:-num_batches] for unroll in batch
    )
    statistics = memory.statistics()
    assert statistics["queue_dropped"] == 0
    assert (
        statistics["queue_inserted"]
        == SIZE * len(first) + len(memory.strategies[0]._gathered.env_ids) + statistics["queue_size"]
    )


def test_keep_latest_gives_up_overwritten_batches():
    memory, (actor,) = make(on_full="keep_latest", capacity=4, num_batches=2, max_reuse=5)
    actor.write(2)
    assert sampled(memory) == (part(actor, 0), True)
    for _ in range(3 * memory.layout.ring_length):
        actor.write(1)
        memory._ingest()
    batch, fresh = sampled(memory)
    assert fresh and batch == actor.unrolls()[-4:]
    assert [sampled(memory) for _ in range(4)] == [(batch, False)] * 4  # the other one has no uses left
    assert sampled(memory) is None
    statistics = memory.statistics()
    assert statistics["queue_dropped"] == statistics["queue_inserted"] - 8


def test_keep_latest_counts_steps_lost_before_their_first_use(monkeypatch):
    memory, (actor,) = make(on_full="keep_latest", capacity=40, num_batches=2)
    actor.write(4)
    intact, first = memory.trajectories.still_valid, set(part(actor, 0)[:3])
    monkeypatch.setattr(
        memory.trajectories,
        "still_valid",
        lambda streams, serials: (
            intact(streams, serials) & [unroll not in first for unroll in zip(streams.tolist(), serials.tolist())]
        ),
    )
    batch = memory.sample(SIZE)
    assert batch.fresh.all() and check_coded_unrolls(memory.layout, batch.window) == [
        part(actor, 0)[3],
        *part(actor, 1)[:3],
    ]
    assert memory.statistics()["queue_dropped"] == 3
    actor.write(2)
    assert [sampled(memory) for _ in range(2)] == [(part(actor, 2), True), (part(actor, 1), False)]  # the whole batch


def test_keep_latest_reuses_the_rest_of_an_overwritten_batch(monkeypatch):
    memory, (actor,) = make(on_full="keep_latest", capacity=40, num_batches=2, max_reuse=5)
    actor.write(6)
    assert sampled(memory) == (part(actor, 0), True) and sampled(memory) == (part(actor, 1), True)
    intact, lost = memory.trajectories.still_valid, part(actor, 0)[0]
    monkeypatch.setattr(
        memory.trajectories,
        "still_valid",
        lambda streams, serials: (
            intact(streams, serials) & [unroll != lost for unroll in zip(streams.tolist(), serials.tolist())]
        ),
    )
    batch = memory.sample(SIZE)
    assert (
        check_coded_unrolls(memory.layout, batch.window) == [*part(actor, 0)[1:], part(actor, 1)[0]]
        and not batch.fresh.any()
    )
    assert sampled(memory) == (part(actor, 2), True) and memory.statistics()["queue_dropped"] == 0


@pytest.mark.parametrize("on_full", ["keep_oldest", "alternating"])
def test_policies_that_copy_do_not_suit_a_circular_memory(on_full):
    found = CircularMemory.problems(CircularParams(64, on_full), 4)
    assert len(found) == 1 and f"on_full={on_full} does not suit a circular memory" in found[0]
    assert (
        CircularMemory.problems(CircularParams(1), 64)
        == CircularMemory.problems(CircularParams(1, "keep_latest"), 64)
        == []
    )


@pytest.mark.parametrize("samples", range(9))
def test_sampling_continues_exactly_from_a_state(samples):
    memory, (actor,) = make()
    actor.write(7)  # three batches and a half
    for _ in range(samples):
        sampled(memory)
    resumed, (successor,) = make(seed=4)
    resumed.load_state_dict(memory.state_dict())
    successor.serial = actor.serial
    for _ in range(8):
        assert resumed.unread() == memory.unread() and resumed.statistics() == memory.statistics()
        assert sampled(resumed) == sampled(memory)
    for writer in (actor, successor):
        writer.write(1)
    assert [sampled(resumed) for _ in range(8)] == [sampled(memory) for _ in range(8)]
