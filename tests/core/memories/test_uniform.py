import json

import numpy as np
import pytest
import torch

from core.memories.uniform import UniformMemory, UniformParams
from core.specs import WindowSpec
from core.types import SampleIds
from tests.core.tapes import RandomPlay, observed, small_layout

SPEC = WindowSpec(3, (0, 3))


def filled(steps: int = 50, rows: int = 24, num_actors: int = 2, seed: int = 0):
    plays = [RandomPlay(actor, 2) for actor in range(num_actors)]
    memory = UniformMemory(
        UniformParams(100),
        small_layout(plays[0].spec, rows=rows, chunk_length=4, num_envs=2, num_actors=num_actors),
        SPEC,
        seed,
    )
    writers = [memory.writer(actor) for actor in range(num_actors)]
    for play, writer in zip(plays, writers):
        play.play(writer, steps)
    return memory, plays, writers


def legal_starts(memory: UniformMemory, plays: list[RandomPlay]) -> set[tuple[int, int]]:
    low, high = memory.trajectories.starts(SPEC.length)
    return {
        (actor * 2 + stream, serial)
        for actor, play in enumerate(plays)
        for stream in range(2)
        for serial in range(low[actor], high[actor])
        if not play.rows[stream][serial].last
    }


def test_every_valid_start_is_drawn_equally_often():
    memory, plays, _ = filled()
    legal = legal_starts(memory, plays)
    counts: dict[tuple[int, int], int] = {}
    batches, batch_size = 400, 256
    for _ in range(batches):
        for key in zip(*memory.sample(batch_size).keys):
            counts[key] = counts.get(key, 0) + 1
    assert set(counts) == legal and len(legal) > 20
    mean = batches * batch_size / len(legal)
    chi_square = sum((count - mean) ** 2 / mean for count in counts.values())
    freedom = len(legal) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_batch_holds_its_keys_windows_and_weights_of_one():
    memory, plays, _ = filled()
    batch = memory.sample(64)
    assert batch.weights.equal(torch.ones(64)) and batch.window.observations.shape == (2, 64, 4, 2, 3)
    for column, (stream, serial) in enumerate(zip(*batch.keys)):
        rows = plays[stream // 2].rows[stream % 2]
        for place, observation in enumerate(observed(rows, serial, SPEC)):
            np.testing.assert_array_equal(batch.window.observations[place, column].numpy(), observation)


def test_there_is_no_batch_before_the_first_valid_start():
    memory, plays, writers = filled(steps=0)
    assert memory.sample(8) is None
    plays[0].play(writers[0], 3)
    assert memory.sample(8) is None and memory.size() == 0
    plays[0].play(writers[0], 5)
    assert memory.sample(8) is not None and memory.size() == 16


def test_there_is_no_batch_if_all_steps_end_episodes():
    memory, _, _ = filled()
    memory.trajectories.arrays["last"][...] = True
    assert memory.sample(8) is None


def test_steps_overwritten_while_being_read_are_drawn_again(monkeypatch):
    memory, _, _ = filled()
    reads = []

    def intact(streams, serials):
        reads.append(SampleIds(streams.copy(), serials.copy()))
        return np.arange(len(serials)) % 4 != 0 if len(reads) == 1 else np.ones(len(serials), bool)

    monkeypatch.setattr(memory.trajectories, "still_valid", intact)
    batch = memory.sample(32)
    kept = np.arange(32) % 4 != 0
    assert len(reads) == 2 and (batch.keys.step_ids[kept] == reads[0].step_ids[kept]).all()
    assert not (batch.keys.step_ids[~kept] == reads[0].step_ids[~kept]).all()


def test_a_ring_that_is_always_overwritten_gives_no_batch(monkeypatch):
    memory, _, _ = filled()
    monkeypatch.setattr(memory.trajectories, "still_valid", lambda streams, serials: np.zeros(len(serials), bool))
    assert memory.sample(8) is None


def test_a_seed_determines_the_batches():
    first, second, other = (filled(seed=seed)[0] for seed in (1, 1, 2))
    keys = [[memory.sample(32).keys.step_ids.tolist() for _ in range(3)] for memory in (first, second, other)]
    assert keys[0] == keys[1] != keys[2]


def test_sampling_continues_exactly_from_a_state():
    memory, _, _ = filled(seed=3)
    for _ in range(3):
        memory.sample(7)
    state = memory.state_dict()
    assert json.loads(state["generator"])
    resumed = UniformMemory(memory.params, memory.layout, SPEC, 9)
    resumed.load_state_dict(state)
    for _ in range(3):
        expected, found = memory.sample(16), resumed.sample(16)
        assert (expected.keys.step_ids == found.keys.step_ids).all() and (
            expected.keys.env_ids == found.keys.env_ids
        ).all()
        assert expected.window.observations.equal(found.window.observations)


def test_a_ring_too_small_for_its_windows_is_refused():
    layout = small_layout(RandomPlay(0, 2).spec, rows=12, chunk_length=4, num_envs=2)
    UniformMemory(
        UniformParams(),
        small_layout(RandomPlay(0, 2).spec, rows=16, chunk_length=4, num_envs=2),
        WindowSpec(4, (0,)),
        0,
    )
    with pytest.raises(ValueError, match="12 steps an environment are too few"):
        UniformMemory(UniformParams(), layout, WindowSpec(4, (0,)), 0)


def test_the_smallest_accepted_ring_can_be_sampled():
    play = RandomPlay(0, 2, end=0.0)
    memory = UniformMemory(
        UniformParams(), small_layout(play.spec, rows=16, chunk_length=4, num_envs=2), WindowSpec(4, (0, 4)), 0
    )
    writer = memory.writer(0)
    for _ in range(60):
        play.play(writer, 1)
        assert memory.trajectories.written()[0] < 8 or memory.sample(4) is not None


def test_size_is_reported():
    memory, _, _ = filled()
    frames = memory.size() * memory.layout.fields["frame"].nbytes
    assert memory.statistics() == {"replay_steps": float(memory.size()), "replay_mb": frames / 1e6}
