"""Uniform replay keeps the newest unrolls, and reservoirs keep a uniform sample of all."""

import json

import numpy as np
import pytest

from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.trajectory.frame_compression import StorageParams
from core.types import SampleIds
from tests.core.tapes import CodedActor, RandomPlay, check_coded_unrolls, coded_spec, unroll_memory


def make(kind: str, *, capacity: int = 10, batch_size: int = 8, num_actors: int = 1, **options):
    params = MixedParams(json.dumps([{"type": kind, "capacity": capacity, "sample_ratio": 1.0}]))
    memory = unroll_memory(
        MixedMemory, params, coded_spec((2,), 4), batch_size=batch_size, num_actors=num_actors, **options
    )
    return memory, [CodedActor(memory, actor) for actor in range(num_actors)]


def sampled(memory: MixedMemory, batch_size: int = 8) -> list[tuple[int, int]]:
    batch = memory.sample(batch_size)
    assert batch is not None and not batch.fresh.any() and len(batch.fresh) == batch_size and batch.weights.eq(1).all()
    return check_coded_unrolls(memory.layout, batch.window)


def assert_equally_often(drawn: list[tuple[int, int]], expected: set[tuple[int, int]]) -> None:
    counts = dict.fromkeys(expected, 0)
    for unroll in drawn:
        counts[unroll] += 1  # a KeyError here means an unexpected unroll
    mean = len(drawn) / len(counts)
    chi_square, freedom = sum((count - mean) ** 2 / mean for count in counts.values()), len(counts) - 1
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("kind", ["standard", "reservoir"])
def test_there_is_no_batch_before_the_first_unroll(kind):
    memory, (actor,) = make(kind)
    for _ in range(4):
        assert memory.sample(8) is None
        actor.step()
    assert set(sampled(memory)) <= {(0, 0), (1, 0)}  # fewer than the batch: some are drawn more than once


@pytest.mark.parametrize("capacity", [1, 7, 10])
def test_standard_draws_the_newest_unrolls_equally_often(capacity):
    memory, (actor,) = make("standard", capacity=capacity)
    for chunks in (1, 3, 40):
        for _ in range(chunks):
            actor.write(1)
            memory._ingest()
        newest = set(actor.unrolls()[-capacity:])
        assert_equally_often([unroll for _ in range(100) for unroll in sampled(memory)], newest)
        assert memory.statistics()["standard_size"] == len(newest) == min(capacity, len(actor.unrolls()))


def test_steps_overwritten_by_a_faster_actor_are_not_drawn():
    memory, (fast, slow) = make("standard", capacity=60, num_actors=2)
    slow.write(2)
    for _ in range(60):
        fast.write(1)
        memory._ingest()
    drawn = {unroll for _ in range(50) for unroll in sampled(memory)}
    newest = fast.unrolls()[-60:]
    lost = {unroll for unroll in newest if not memory.trajectories.still_valid(*np.array([unroll]).T)[0]}
    assert lost and drawn == {*newest} - lost


def test_a_wholly_overwritten_replay_gives_no_batch(monkeypatch):
    memory, (actor,) = make("standard")
    actor.write(3)
    monkeypatch.setattr(memory.trajectories, "still_valid", lambda streams, serials: np.zeros(len(serials), bool))
    assert memory.sample(8) is None


# reservoir --------------------------------------------------------------------------------------------------------
def contents(memory: MixedMemory) -> list[tuple[int, int]]:
    rule = memory.strategies[0]
    keys = rule._copies.keys(np.arange(len(rule)))
    return check_coded_unrolls(memory.layout, rule.store.gather(*keys, memory.window))


def test_a_reservoir_is_a_uniform_sample_of_all_unrolls():
    memory, (actor,) = make("reservoir", capacity=5, batch_size=16)
    actor.write(10)
    keys, rule, runs = SampleIds(*np.array(actor.unrolls()).T), memory.strategies[0], 1_000
    counts = dict.fromkeys(actor.unrolls(), 0)
    for _ in range(runs):
        rule._seen = 0
        rule.insert(keys)
        rows = rule.store.arrays["action"][:, -2, 0] // (1 << 32), rule.store.arrays["action"][:, 3, 0] % (1 << 32)
        kept = list(zip((rows[0] - 1).tolist(), rows[1].tolist()))
        assert len(set(kept)) == 5
        for unroll in kept:
            counts[unroll] += 1
    share, freedom = 5 / 20, 20 - 1
    chi_square = (
        sum((count - runs * share) ** 2 for count in counts.values()) / (runs * share * (1 - share)) * freedom / 20
    )
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_reservoir_keeps_its_capacity_and_outlives_the_ring():
    memory, (actor,) = make("reservoir", capacity=6)
    for chunk in range(200):
        actor.write(1)
        memory._ingest()
        kept = contents(memory)
        assert len(kept) == len(set(kept)) == min(6, 2 * (chunk + 1)) and set(kept) <= set(actor.unrolls())
    statistics = memory.statistics()
    assert (statistics["reservoir_size"], statistics["reservoir_inserted"]) == (6, 400)
    assert min(serial for _, serial in kept) < actor.serial - memory.layout.ring_length
    assert_equally_often([unroll for _ in range(100) for unroll in sampled(memory)], set(kept))


def test_unrolls_overwritten_before_being_copied_leave_no_gap(monkeypatch):
    memory, (actor,) = make("reservoir", capacity=4)
    actor.write(2)
    intact, asked = memory.trajectories.still_valid, []

    def failing(streams, serials):
        asked.append(len(serials))
        return intact(streams, serials) & (len(asked) % 2 == 0)

    monkeypatch.setattr(memory.trajectories, "still_valid", failing)
    memory._ingest()
    assert memory.statistics()["reservoir_size"] == 2 and contents(memory) == [actor.unrolls()[1], actor.unrolls()[3]]
    monkeypatch.setattr(memory.trajectories, "still_valid", intact)
    actor.write(1)
    memory._ingest()
    full = contents(memory)
    monkeypatch.setattr(memory.trajectories, "still_valid", lambda streams, serials: np.zeros(len(serials), bool))
    actor.write(4)
    memory._ingest()
    assert len(full) == 4 and contents(memory) == full


def test_a_full_reservoir_does_not_prefer_compressible_unrolls():
    params, shares_of_noise = MixedParams('[{"type": "reservoir", "capacity": 200, "sample_ratio": 1.0}]'), []
    for seed in range(4):
        play = RandomPlay(seed, 2, frame_shape=(16, 16), frame_stack=1, end=0.0)
        sizes = {"batch_size": 4, "extras": play.extras, "seed": seed, "storage": StorageParams("lz4")}
        memory = unroll_memory(MixedMemory, params, play.spec, **sizes)
        writer, rule, noise = memory.writer(0), memory.strategies[0], play._frame
        play._frame = lambda play=play: np.full((16, 16), play.generator.integers(1, 256), np.uint8)
        for number in range(600):
            if number == 300:
                play._frame = noise
            play.play(writer, 4)
            memory._ingest()
        frames = rule.store.frames
        assert len(rule) == rule._copies.capacity < 200 and sorted(frames._blocks) == list(range(len(rule)))
        assert frames.used == sum(len(block) for block, _ in frames._blocks.values()) <= frames._max_bytes
        shares_of_noise.append(np.mean([len(block) > 1_000 for block, _ in frames._blocks.values()]))
    assert np.mean(shares_of_noise) == pytest.approx(0.5, abs=0.1)  # of the later half of all unrolls


# both -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["standard", "reservoir"])
@pytest.mark.parametrize("chunks", [2, 60])
def test_sampling_continues_exactly_from_a_state(kind, chunks):
    memory, (actor,) = make(kind)
    for _ in range(chunks):
        actor.write(1)
        memory._ingest()
    sampled(memory)
    resumed, _ = make(kind, seed=7)
    resumed.load_state_dict(memory.state_dict())
    assert [sampled(resumed) for _ in range(4)] == [sampled(memory) for _ in range(4)]
    assert resumed.statistics() == memory.statistics()
