"""Every unroll memory gives whole unrolls, counts its bytes and reports statistics, whatever its strategies."""

import dataclasses
import io
import json
import os

import numpy as np
import pytest
import torch

from core.memories.unrolls.circular import CircularMemory, CircularParams
from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.memories.unrolls.queue import QueueMemory, QueueParams
from core.memories.unrolls.unroll_memory import shares
from core.memories.unrolls.unroll_slots import UnrollStore
from core.specs import WindowSpec
from core.types import SampleIds
from tests.core.tapes import (
    CODED_FEATURES,
    CodedActor,
    RandomPlay,
    assert_unroll_equals_twin,
    check_coded_unrolls,
    coded_features,
    coded_spec,
    small_layout,
    unroll_memory,
    unroll_spec,
)


def mixed(*items: dict) -> MixedParams:
    """Return equal shares for items that set no ratio."""
    return MixedParams(json.dumps([{"sample_ratio": 1 / len(items), **item} for item in items]))


def only(kind: str, capacity: int = 1, **settings) -> tuple[type, MixedParams]:
    return MixedMemory, mixed({"type": kind, "capacity": capacity, **settings})


EVERY_RULE = [
    (QueueMemory, QueueParams(1)),
    (QueueMemory, QueueParams(1, "keep_latest")),
    (QueueMemory, QueueParams(1, "keep_oldest")),
    (QueueMemory, QueueParams(1, "alternating")),
    (CircularMemory, CircularParams(1, num_batches=1, max_reuse=1)),
    (CircularMemory, CircularParams(1, "keep_latest", num_batches=2)),
    only("queue"),
    only("standard"),
    only("reservoir"),
    only("attentive"),
    only("elite"),
    only("custom"),
    only("custom", insert_strategy="elite_insertion"),
    only("custom", sample_strategy="elite_sampling"),
]


def make(memory_type, params, **options):
    memory = unroll_memory(
        memory_type, params, coded_spec((2,), options.pop("frame_stack", 4)), extras=CODED_FEATURES, **options
    )
    memory.features_of = coded_features
    return memory


# sizes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("frame_stack", "length"), [(0, 1), (4, 5)])
@pytest.mark.parametrize(("memory_type", "params"), EVERY_RULE)
def test_the_smallest_memories_of_all_strategies_give_unrolls(memory_type, params, frame_stack, length):
    memory = make(memory_type, params, frame_stack=frame_stack, length=length, batch_size=1, num_envs=1)
    assert memory_type.problems(params, 1) == []
    actor, batches = CodedActor(memory, 0), 0
    for row in range(3 * memory.layout.ring_length):
        batch = memory.sample(1) if row % length in (0, 1) else None
        if batch is not None:
            assert set(check_coded_unrolls(memory.layout, batch.window)) <= set(actor.unrolls())
            batches += 1
        assert actor.step()
    assert batches >= 3 * memory.layout.ring_length // length - 1


@pytest.mark.parametrize(
    ("memory_type", "params", "slots"),
    [
        (QueueMemory, QueueParams(5), 0),
        (QueueMemory, QueueParams(5, "keep_oldest"), 5),
        (CircularMemory, CircularParams(5), 0),
        (*only("standard", 30), 0),
        (*only("reservoir", 30), 30),
        (*only("elite", 7), 7),
        (*only("attentive", 7), 0),
        (
            MixedMemory,
            mixed(
                {"type": "queue", "capacity": 4, "on_full": "alternating"},
                {"type": "reservoir", "capacity": 9},
                {"type": "custom", "capacity": 3, "insert_strategy": "elite_insertion"},
            ),
            4 + 9 + 3,
        ),
    ],
)
@pytest.mark.parametrize("frame_stack", [0, 4])
def test_bytes_are_known_before_a_memory_is_made(memory_type, params, slots, frame_stack):
    memory = make(memory_type, params, frame_stack=frame_stack, batch_size=8, num_actors=2, num_envs=3, length=6)
    stores = [rule.store for rule in memory.strategies if rule.store is not memory.trajectories]
    sizes = [os.fstat(store.arrays._fd).st_size for store in stores]
    assert memory_type.own_bytes(params, memory.layout, memory.window) == sum(sizes)
    rows = slots * (max(frame_stack - 1, 0) + 6 + 1)
    row = 2 * 8 + 2 * 8 + 8 + 4 + 4 + 1 + 1  # frame, features, action, reward, discount, first, last
    assert rows * row <= sum(sizes) <= rows * row + slots * 128 + 64 * 12 * len(stores)
    assert os.fstat(memory.trajectories.arrays._fd).st_size == memory.layout.nbytes


@pytest.mark.parametrize(
    ("memory_type", "params", "unrolls"),
    [
        (QueueMemory, QueueParams(5), 5 + 8),
        (QueueMemory, QueueParams(1), 1 + 8),
        (CircularMemory, CircularParams(5, num_batches=3), 5 + 4 * 8),
        (*only("standard", 30), 30),
        (*only("attentive", 30), 30),
        (MixedMemory, mixed({"type": "queue", "capacity": 4}, {"type": "standard", "capacity": 50}), 4 + 4 + 50),
    ],
)
def test_the_rings_hold_what_the_strategies_need_from_one_actor(memory_type, params, unrolls):
    memory = make(memory_type, params, batch_size=8, num_envs=3)
    actor = CodedActor(memory, 0)
    actor.write(40)
    newest = SampleIds(*np.array(actor.unrolls()[-unrolls:]).T)
    assert memory.trajectories.still_valid(*newest).all()
    assert (
        check_coded_unrolls(memory.layout, memory.trajectories.gather(*newest, memory.window))
        == actor.unrolls()[-unrolls:]
    )


@pytest.mark.parametrize(
    ("window", "chunk_length"), [(WindowSpec(4, (0,)), 4), (unroll_spec(4), 2), (WindowSpec(4, (0,), 8), 8)]
)
def test_windows_that_are_no_whole_chunks_are_refused(window, chunk_length):
    layout = small_layout(coded_spec((2,), 0), rows=64, chunk_length=chunk_length, num_envs=1)
    with pytest.raises(ValueError, match="unrolls are whole chunks"):
        QueueMemory(QueueParams(), layout, window, 0)


# shares -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "ratios",
    [
        [1.0],
        [0.5, 0.5],
        [0.25, 0.75],
        [0.1] * 10,
        [1 / 3] * 3,
        [0.333333] * 3,
        [0.29, 0.71],
        [0.07, 0.93],
        [0.125, 0.125, 0.75],
        [0.2, 0.3, 0.5],
        [0.01, 0.99],
    ],
)
def test_shares_sum_to_the_batch_and_are_less_than_one_off(ratios):
    for batch_size in (*range(1, 70), 100, 256, 1_000, 4_096):
        counts = shares(ratios, batch_size)
        assert sum(counts) == batch_size and len(counts) == len(ratios)
        for count, ratio in zip(counts, ratios):
            exact = ratio / sum(ratios) * batch_size
            assert abs(count - exact) < 1
            assert abs(exact - round(exact)) > 1e-6 or count == round(exact)


def test_remaining_unrolls_go_to_the_largest_remainders():
    assert shares([0.15, 0.25, 0.6], 10) in ([2, 2, 6], [1, 3, 6])  # 1.5, 2.5, 6
    assert shares([0.14, 0.26, 0.6], 10) == [1, 3, 6] and shares([0.16, 0.24, 0.6], 10) == [2, 2, 6]
    assert shares([0.19, 0.19, 0.62], 10) == [2, 2, 6]


# arrival ----------------------------------------------------------------------------------------------------------
def test_every_unroll_reaches_every_strategy_once_oldest_first():
    memory = make(
        MixedMemory,
        mixed({"type": "standard", "capacity": 40}, {"type": "reservoir", "capacity": 4}),
        batch_size=2,
        num_actors=2,
    )
    shown, generator = [[], []], np.random.default_rng(0)
    for rule, tape in zip(memory.strategies, shown):
        rule.insert = lambda keys, tape=tape: tape.extend(zip(*map(np.ndarray.tolist, keys)))
    actors = [CodedActor(memory, actor) for actor in range(2)]
    for _ in range(50):
        for actor in actors:
            for _ in range(generator.integers(12)):
                actor.step()
        memory._ingest()
    assert shown[0] == shown[1] and len(shown[0]) == len(set(shown[0]))
    for actor in actors:
        assert [unroll for unroll in shown[0] if unroll[0] // 2 == actor.actor_ind] == actor.unrolls()


def test_unrolls_overwritten_before_being_seen_are_counted():
    memory = make(QueueMemory, QueueParams(50, "keep_latest"), batch_size=1, num_actors=2)
    actors = [CodedActor(memory, actor) for actor in range(2)]
    actors[0].write(300)
    actors[1].write(2)
    memory._ingest()
    statistics = memory.statistics()
    assert statistics["queue_inserted"] == 302 * 2 and statistics["queue_size"] == 50
    assert statistics["queue_dropped"] == 302 * 2 - 50
    batch = memory.sample(50)
    found = check_coded_unrolls(memory.layout, batch.window)
    assert set(found) == {*actors[0].unrolls()[-46:], *actors[1].unrolls()}


def test_other_strategies_sample_after_the_queue_has_its_share():
    memory = make(
        MixedMemory, mixed({"type": "standard", "capacity": 40}, {"type": "queue", "capacity": 4}), batch_size=8
    )
    actor = CodedActor(memory, 0)
    actor.write(1)
    assert memory.sample(8) is None and [len(held.fresh) for held in memory._pending] == [0, 2]
    actor.write(1)
    batch = memory.sample(8)
    assert batch is not None and batch.fresh.tolist() == [False] * 4 + [True] * 4


def test_a_seed_determines_the_batches():
    found = []
    for seed in (1, 1, 2):
        memory = make(*only("standard", 20), batch_size=8, seed=seed)
        CodedActor(memory, 0).write(9)
        found.append([check_coded_unrolls(memory.layout, memory.sample(8).window) for _ in range(4)])
    assert found[0] == found[1] != found[2]


def test_statistics_of_two_strategies_of_a_kind_are_separate():
    memory = make(
        MixedMemory,
        mixed(
            {"type": "attentive", "capacity": 3}, {"type": "custom", "capacity": 5}, {"type": "queue", "capacity": 2}
        ),
        batch_size=3,
    )
    CodedActor(memory, 0).write(4)
    memory.sample(3)
    statistics = memory.statistics()
    assert set(statistics) == {
        "replay_steps",
        "replay_mb",
        "feature_replay_size",
        "candidate_multiplier",
        "feature_replay_size_2",
        "candidate_multiplier_2",
        "queue_size",
        "queue_inserted",
        "queue_dropped",
    }
    assert (statistics["feature_replay_size"], statistics["feature_replay_size_2"]) == (3, 5)


def test_shared_names_are_numbered_in_the_order_of_the_replay_list():
    memory = make(
        MixedMemory,
        mixed(
            {"type": "queue", "capacity": 2},
            {"type": "elite", "capacity": 3},  # keeps copies, so its unrolls are read last
            {"type": "attentive", "capacity": 5},
            {"type": "attentive", "capacity": 7},
        ),
        batch_size=4,
    )
    CodedActor(memory, 0).write(8)
    memory.sample(4)
    sizes = {name: size for name, size in memory.statistics().items() if name.startswith("feature_replay_size")}
    assert sizes == {"feature_replay_size": 3, "feature_replay_size_2": 5, "feature_replay_size_3": 7}


@pytest.mark.parametrize(
    ("memory_type", "params", "names"),
    [
        (QueueMemory, QueueParams(2), {"queue_size", "queue_inserted", "queue_dropped"}),
        (CircularMemory, CircularParams(2), {"queue_size", "queue_inserted", "queue_dropped", "remaining_reuses"}),
        (*only("standard"), {"standard_size"}),
        (*only("reservoir"), {"reservoir_size", "reservoir_inserted"}),
        (*only("elite"), {"feature_replay_size", "candidate_multiplier"}),
    ],
)
def test_every_memory_reports_its_statistics_by_name(memory_type, params, names):
    assert set(make(memory_type, params, batch_size=1).statistics()) == {"replay_steps", "replay_mb"} | names


@pytest.mark.parametrize(
    ("memory_type", "params", "expected"),
    [
        (QueueMemory, QueueParams(), (1.0, None)),
        (CircularMemory, CircularParams(), (2.0, None)),
        (*only("standard"), (None, None)),
        (*only("attentive"), (None, "float32")),
        (*only("elite"), (None, "float32")),
        (*only("custom"), (None, None)),
        (
            MixedMemory,
            mixed({"type": "custom", "insert_strategy": "elite_insertion"}, {"type": "queue"}),
            (2.0, "float32"),
        ),
        (MixedMemory, dataclasses.replace(only("elite")[1], feature_dtype="float16"), (None, "float16")),
    ],
)
def test_a_memory_declares_its_samples_per_step_and_feature_dtype(memory_type, params, expected):
    assert (memory_type.samples_per_step(params), memory_type.feature_dtype(params)) == expected


@pytest.mark.parametrize(("memory_type", "params"), EVERY_RULE)
def test_a_state_stays_as_it_was_while_sampling_goes_on(memory_type, params):
    """The learner writes it to a file while the thread that samples goes on."""

    def stored(state) -> bytes:
        torch.save(state, file := io.BytesIO())
        return file.getvalue()

    memory = make(memory_type, params, batch_size=1)
    actor, states = CodedActor(memory, 0), []
    for _ in range(12):
        actor.write(1)
        memory.sample(1)
        states.append((state := memory.state_dict(), stored(state)))
    assert all(stored(state) == before for state, before in states)


# slots ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("frame_stack", [0, 1, 4])
@pytest.mark.parametrize("length", [1, 5])
def test_copies_stay_equal_after_their_steps_are_overwritten(frame_stack, length):
    play = RandomPlay(0, 2, frame_stack=frame_stack)
    play.with_states = True
    memory = unroll_memory(
        QueueMemory, QueueParams(), play.spec, batch_size=4, length=length, extras=play.extras, states=play.states
    )
    writer, slots, where = memory.writer(0), UnrollStore(memory.trajectories, 7, length), {}
    generator = np.random.default_rng(0)
    for chunk in range(60):
        play.play(writer, length)
        chosen = generator.choice(7, 2, replace=False)
        assert slots.put(chosen, SampleIds(np.arange(2), np.full(2, chunk * length))).all()
        where |= {int(slot): (stream, chunk * length) for stream, slot in enumerate(chosen)}
    restored = UnrollStore(memory.trajectories, 7, length)
    restored.load_state_dict(slots.state_dict())
    for store in (slots, restored):
        window = store.store.gather(*store.keys(np.array(list(where))), memory.window)
        for column, (stream, serial) in enumerate(where.values()):
            assert_unroll_equals_twin(window, column, play, stream, serial)
    assert len(where) == 7


def test_an_overwritten_unroll_is_not_copied():
    memory = make(QueueMemory, QueueParams(), batch_size=1)
    actor, slots = CodedActor(memory, 0), UnrollStore(memory.trajectories, 2, 4)
    actor.write(20)
    newest = SampleIds(*np.array(actor.unrolls()[-2:]).T)
    assert slots.put(np.arange(2), newest).all()
    gone = SampleIds(newest.env_ids, np.array([0, newest.step_ids[1] - 4]))
    assert slots.put(np.arange(2), gone).tolist() == [False, True]
    found = check_coded_unrolls(memory.layout, slots.store.gather(*slots.keys(np.arange(2)), memory.window))
    assert found == [actor.unrolls()[-2], actor.unrolls()[-3]]


def test_an_unroll_overwritten_while_being_copied_is_not_kept(monkeypatch):
    memory = make(QueueMemory, QueueParams(), batch_size=1)
    actor, slots = CodedActor(memory, 0), UnrollStore(memory.trajectories, 1, 4)
    actor.write(2)
    states = memory.trajectories.states

    def slow(slots):
        actor.write(memory.layout.ring_length // 4)  # the writer overwrites the steps after their fields were read
        return states(slots)

    monkeypatch.setattr(memory.trajectories, "states", slow)
    assert not slots.put(np.zeros(1, np.int64), SampleIds(np.zeros(1, np.int64), np.zeros(1, np.int64))).any()
