"""Unrolls are copied into slots, raw or compressed."""

import json

import numpy as np
import pytest
import torch

from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.memories.unrolls.unroll_slots import CompressedFrames, UnrollStore, slots_bytes
from core.specs import ArraySpec
from core.trajectory.frame_compression import CorruptedBlock, StorageParams
from tests.core.tapes import (
    CODED_FEATURES,
    CodedActor,
    RandomPlay,
    check_coded_unrolls,
    coded_features,
    coded_spec,
    unroll_memory,
)

LZ4 = StorageParams("lz4")
RULES = (
    {"type": "queue", "capacity": 16},
    {"type": "queue", "capacity": 16, "on_full": "keep_oldest"},
    {"type": "standard", "capacity": 30},
    {"type": "reservoir", "capacity": 30},
    {"type": "attentive", "capacity": 30},
    {"type": "elite", "capacity": 30, "elite_batch_size": 5},
)
FRAME = ArraySpec((6, 5), "uint8")


def make(*items: dict, storage: StorageParams, batch_size: int = 8, states=()):
    ratio = 1 / len(items)
    params = MixedParams(json.dumps([{**item, "sample_ratio": ratio} for item in items]))
    memory = unroll_memory(
        MixedMemory,
        params,
        coded_spec((40,), 4),
        batch_size=batch_size,
        extras=CODED_FEATURES,
        num_actors=2,
        states=states,
        storage=storage,
    )
    memory.features_of = coded_features
    return memory, [CodedActor(memory, actor) for actor in range(2)]


def play(memory: MixedMemory, actors: list[CodedActor], rounds: int) -> list:
    generator, batches = np.random.default_rng(3), []
    for _ in range(rounds):
        for _ in range(10):
            actors[generator.integers(2)].step()
        batches.append(memory.sample(8))
    return batches


def frames(generator: np.random.Generator, rows: int, noise: int) -> np.ndarray:
    """Return [rows, *frame] frames that compress worse the more of their pixels are noise."""
    some = np.zeros((rows, *FRAME.shape), np.uint8)
    some.reshape(-1)[:noise] = generator.integers(256, size=noise)
    return some


# strategies -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("items", [RULES[:1], RULES[1:]])
def test_every_strategy_gives_equal_batches_compressed_and_raw(items):
    states = (ArraySpec((3,), "int64"),)
    (raw, raw_actors), (packed, packed_actors) = (
        make(*items, storage=storage, states=states) for storage in (StorageParams(), LZ4)
    )
    assert packed.layout.packed and not raw.layout.packed
    compared = 0
    for first, second in zip(play(raw, raw_actors, 150), play(packed, packed_actors, 150), strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            assert check_coded_unrolls(raw.layout, first.window) == check_coded_unrolls(packed.layout, second.window)
            assert torch.equal(first.window.observations, second.window.observations)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("items", [RULES[3:4], RULES[5:], RULES[1:]])
def test_sampling_continues_exactly_from_a_state(items):
    memory, actors = make(*items, storage=LZ4)
    play(memory, actors, 60)
    resumed, _ = make(*items, storage=LZ4)
    resumed.load_state_dict(memory.state_dict())
    for _ in range(5):
        first, second = memory.sample(8), resumed.sample(8)
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first.window.observations, second.window.observations)


@pytest.mark.parametrize("kind", ["reservoir", "elite"])
def test_a_strategy_without_room_for_copies_shrinks(kind):
    memory, actors = make({"type": kind, "capacity": 30}, storage=LZ4)
    rule = memory.strategies[0]
    rule.store.frames._max_bytes //= 6
    play(memory, actors, 200)
    assert (
        rule._copies.capacity < 30
        and len(rule) == rule._copies.capacity
        and rule.store.frames.used <= rule.store.frames._max_bytes
    )
    drawn = {unroll for _ in range(20) for unroll in check_coded_unrolls(memory.layout, memory.sample(8).window)}
    assert max(serial for _, serial in drawn) > 400  # unrolls that came after it was full are drawn too


@pytest.mark.parametrize("kind", ["reservoir", "elite"])
@pytest.mark.parametrize("capacity", [1, 4])
def test_few_compressed_slots_hold_an_incompressible_unroll(kind, capacity):
    params = MixedParams(json.dumps([{"type": kind, "capacity": capacity, "sample_ratio": 1.0}]))
    play = RandomPlay(0, 2, frame_shape=(16, 16))
    sizes = {"batch_size": 4, "extras": play.extras, "storage": LZ4}
    memory = unroll_memory(MixedMemory, params, play.spec, **sizes)
    memory.features_of = lambda window: window.extras["features"][:-1]
    writer = memory.writer(0)
    for _ in range(10):
        play.play(writer, 4)
        assert memory.sample(4) is not None


@pytest.mark.parametrize("packs", [True, False])
def test_the_computed_bytes_of_slots_are_those_allocated(packs):
    memory, _ = make({"type": "standard", "capacity": 30}, storage=LZ4)
    slots = UnrollStore(memory.trajectories, 30, 4, packs)
    most = slots.store.frames._max_bytes if packs else 0
    assert slots_bytes(memory.layout, 30, 4, packs) == slots.store.layout.nbytes + most
    raw = UnrollStore(memory.trajectories, 30, 4, packs=False).store.arrays["frame"].nbytes
    assert most == packs * (raw // 8)
    assert ("frame" in slots.store.arrays) != packs


def test_blocking_compressed_queues_lose_no_frames():
    items = {"type": "queue", "capacity": 6}, {"type": "standard", "capacity": 400}
    memory, actors = make(*items, storage=StorageParams("lz4", max_frame_bytes=1))
    incompressible, given = np.random.default_rng(0), 0
    for actor in actors:
        actor.writer._compressor._frames[:] = 0
        append = actor.writer._compressor.pack

        def pack(chunk, append=append, frames=actor.writer._compressor._frames):
            frames[:] ^= incompressible.integers(1 << 62, size=frames.shape)
            append(chunk)

        actor.writer._compressor.pack = pack
    for _ in range(300):
        for actor in actors:
            while actor.step():
                pass
        given += sum(int(batch.fresh.sum()) for batch in iter(lambda: memory.sample(8), None))
    statistics = memory.statistics()
    assert statistics["queue_dropped"] == 0 and given > 1_000
    assert memory.trajectories.arrays["oldest"].max() > 100  # the arena wrapped around


# copies -----------------------------------------------------------------------------------------------------------
def test_compressed_copies_return_what_was_stored_last():
    copies, generator, truth = CompressedFrames(7, FRAME, 10**6, 0), np.random.default_rng(0), {}
    for _ in range(300):
        slot, truth_of_slot = int(generator.integers(20)), frames(generator, 7, int(generator.integers(210)))
        assert copies.put(slot, truth_of_slot)
        truth[slot] = truth_of_slot
        slots, rows = generator.choice([*truth], 50), generator.integers(7, size=(3, 50))
        np.testing.assert_array_equal(
            copies.take(slots, rows), np.stack([[truth[s][r] for s, r in zip(slots, line)] for line in rows])
        )
    assert copies.used == sum(len(block) for block, _ in copies._blocks.values())


def test_compressed_copies_keep_their_byte_limit():
    copies, generator, truth, refused = CompressedFrames(7, FRAME, 1_000, 0), np.random.default_rng(0), {}, 0
    for _ in range(500):
        slot, some = int(generator.integers(20)), frames(generator, 7, int(generator.integers(210)))
        if copies.put(slot, some):
            truth[slot] = some
        else:
            refused += 1
        assert copies.used == sum(len(block) for block, _ in copies._blocks.values()) <= 1_000
        for held, frames_of_slot in truth.items():
            np.testing.assert_array_equal(copies.take(np.full(7, held), np.arange(7)), frames_of_slot)
        assert [slot for slot in range(20) if slot in copies] == sorted(truth)
    assert refused > 100 and len(truth) > 5


def test_compressed_copies_are_saved_and_restored():
    copies, generator = CompressedFrames(7, FRAME, 10**6, 9), np.random.default_rng(0)
    for slot in (4, 0, 2):
        copies.put(slot, frames(generator, 7, 100))
    restored = CompressedFrames(7, FRAME, 10**6, 0)
    restored.load_state_dict(copies.state_dict())
    slots, rows = np.array([0, 2, 4])[:, None], np.arange(7)
    np.testing.assert_array_equal(restored.take(slots, rows), copies.take(slots, rows))
    assert restored.used == copies.used
    restored.load_state_dict(CompressedFrames(7, FRAME, 10, 0).state_dict())
    assert restored.used == 0 and 0 not in restored


def test_a_damaged_copy_is_an_error_that_names_its_slot():
    copies = CompressedFrames(7, FRAME, 10**6, 0)
    copies.put(3, frames(np.random.default_rng(0), 7, 100))
    block, check = copies._blocks[3]
    for bit in range(0, 8 * len(block), 11):
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        copies._blocks[3] = bytes(damaged), check
        with pytest.raises(CorruptedBlock, match="slot 3"):
            copies.take(np.array([3]), np.array([0]))
