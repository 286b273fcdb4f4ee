"""Unroll memories work with real writer processes; each test starts them once for several memories."""

import itertools
import json
import time
from collections import Counter

import numpy as np
import pytest

from core.memories.unrolls.circular import CircularMemory, CircularParams
from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.memories.unrolls.queue import QueueMemory, QueueParams
from core.memories.unrolls.unroll_memory import UnrollMemory
from core.trajectory.ring_buffer import Trajectories
from tests.core.tapes import (
    CODED_FEATURES,
    CodedActor,
    check_coded_unrolls,
    coded_features,
    coded_spec,
    started,
    unroll_memory,
)

ACTORS, ENVS, LENGTH = 2, 3, 4
SECONDS = 60  # a test without progress for so long reports a deadlock
pytestmark = pytest.mark.timeout(400)


def make(memory_type: type[UnrollMemory], params, batch_size: int, frame_shape: tuple[int, ...] = (2,)):
    memory = unroll_memory(
        memory_type,
        params,
        coded_spec(frame_shape, 4),
        batch_size=batch_size,
        length=LENGTH,
        num_actors=ACTORS,
        num_envs=ENVS,
        extras=CODED_FEATURES,
    )
    memory.features_of = coded_features
    return memory


# actors that wait for room ----------------------------------------------------------------------------------------
def write_while_there_is_room(memories: list[UnrollMemory], actor_ind: int, chunks: int, ready) -> None:
    """Write `chunks` chunks to one memory after the other."""
    actors = [CodedActor(memory, actor_ind) for memory in memories]
    ready.set()
    for actor in actors:
        while actor.serial < chunks * LENGTH:
            if not actor.step():
                time.sleep(0.0002)
    time.sleep(600)


def drawn_by_a_moody_sampler(
    memory: UnrollMemory, batch_size: int, share: int, chunks: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Return all fresh unrolls in order, and how often the queue was full and how often it had no batch."""
    fresh, full, dry, end = [], 0, 0, time.monotonic() + SECONDS
    room, total = memory.strategies[0].params.capacity, chunks * ACTORS * ENVS
    for attempt in itertools.count():
        assert time.monotonic() < end, f"{len(fresh)} unrolls and no more"
        if attempt % 20 > 15:  # sleep until actors can write no more
            time.sleep(0.004)
            while (
                memory.unread() < room and len(fresh) + memory.unread() + batch_size < total and time.monotonic() < end
            ):
                time.sleep(0.001)
        unread = memory.unread()
        assert unread <= room - 1 + ACTORS * ENVS
        full += unread >= room
        batch = memory.sample(batch_size)
        if batch is None:
            dry += 1
            continue
        unrolls = check_coded_unrolls(memory.layout, batch.window)
        fresh += [unroll for unroll, first in zip(unrolls, batch.fresh.tolist()) if first]
        assert int(batch.fresh.sum()) == share
        if len(fresh) == total:
            return fresh, full, dry
    raise AssertionError


@pytest.mark.slow
def test_block_gives_every_unroll_exactly_once_and_in_order():
    chunks = 160
    replay = [
        {"type": "queue", "capacity": 3, "sample_ratio": 0.5},
        {"type": "standard", "capacity": 40, "sample_ratio": 0.5},
    ]
    cases = [
        (make(QueueMemory, QueueParams(1), 16), 16, 16),
        (make(QueueMemory, QueueParams(8), 4), 4, 4),
        (make(MixedMemory, MixedParams(json.dumps(replay)), 8), 8, 4),
    ]
    memories = [memory for memory, _, _ in cases]
    with (
        started(write_while_there_is_room, memories, 0, chunks),
        started(write_while_there_is_room, memories, 1, chunks),
    ):
        for memory, batch_size, share in cases:
            fresh, full, dry = drawn_by_a_moody_sampler(memory, batch_size, share, chunks)
            for stream in range(ACTORS * ENVS):
                assert [serial for other, serial in fresh if other == stream] == list(range(0, chunks * LENGTH, LENGTH))
            assert memory.sample(batch_size) is None and memory.unread() == 0
            assert memory.statistics()["queue_dropped"] == 0 and memory.statistics()["queue_inserted"] == len(fresh)
            assert full > 5 and (dry > 5 or batch_size < 16)  # both sides have waited


# actors that never wait -------------------------------------------------------------------------------------------
def write_without_end(memories: list[UnrollMemory], actor_ind: int, ready) -> None:
    actors = [CodedActor(memory, actor_ind) for memory in memories]
    while True:
        for actor in actors:
            actor.write(1)
        if actors[0].serial == 2 * LENGTH:
            ready.set()


@pytest.mark.slow
def test_unrolls_are_never_torn_or_stale_while_writers_overwrite(monkeypatch):
    kinds = {"queue": {"on_full": "keep_latest"}, "standard": {}, "attentive": {}, "reservoir": {}, "elite": {}}
    replay = [{"type": kind, "capacity": 60, "sample_ratio": 0.2, **settings} for kind, settings in kinds.items()]
    memories = [
        make(MixedMemory, MixedParams(json.dumps(replay)), 10, (16, 16)),
        make(CircularMemory, CircularParams(10, "keep_latest", num_batches=2, max_reuse=3), 10, (16, 16)),
        make(QueueMemory, QueueParams(20, "alternating"), 10, (16, 16)),
    ]
    lapped, intact, gather = Counter(), Trajectories.still_valid, Trajectories.gather

    def slowly(self, streams, serials, spec):
        time.sleep(0.001)  # lets writers reach what was valid when it was drawn
        return gather(self, streams, serials, spec)

    def counting(self, streams, serials):
        found = intact(self, streams, serials)
        lapped[id(self)] += int((~found).sum())
        return found

    monkeypatch.setattr(Trajectories, "still_valid", counting)
    monkeypatch.setattr(Trajectories, "gather", slowly)
    given: list[Counter] = [Counter() for _ in memories]
    batches, end = Counter(), time.monotonic() + 20
    with started(write_without_end, memories, 0), started(write_without_end, memories, 1):
        while (
            min(batches[number] for number in range(3)) < 60 or len(lapped) < 3 or not all(lapped.values())
        ) and time.monotonic() < end:
            for number, memory in enumerate(memories):
                batch = memory.sample(10)
                if batch is None:
                    continue
                batches[number] += 1
                unrolls = check_coded_unrolls(memory.layout, batch.window)
                given[number].update(
                    unroll for unroll, first in zip(unrolls, batch.fresh.tolist()) if first or number == 1
                )
    # the race did happen
    assert min(batches[number] for number in range(3)) >= 20 and len(lapped) == 3 and all(lapped.values())
    assert all(max(counter.values()) <= most for counter, most in zip(given, (1, 3, 1)))
    for number in (0, 2):
        statistics = memories[number].statistics()
        held = sum(int(held.fresh.sum()) for held in memories[number]._pending)
        assert (
            statistics["queue_inserted"]
            == given[number].total() + held + statistics["queue_size"] + statistics["queue_dropped"]
        )
    assert all((memory.trajectories.written() > 3 * memory.layout.ring_length).all() for memory in memories)
    assert np.isfinite(memories[0].statistics()["candidate_multiplier"])
