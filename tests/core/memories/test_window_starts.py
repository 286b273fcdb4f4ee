"""Sequences start at every stride-th step only, in the uniform and in the prioritised memory."""

import numpy as np
import pytest

from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memories.uniform import UniformMemory, UniformParams
from core.specs import WindowSpec
from core.types import SampleIds
from tests.core.memories.trees import check_tree
from tests.core.tapes import RandomPlay, small_layout

STRIDE, ENVS, ACTORS = 4, 2, 2
MEMORIES = {"shared": (UniformMemory, UniformParams), "prioritized": (PrioritizedMemory, PrioritizedParams)}


def sequence(length, stride=STRIDE):
    return WindowSpec(length, tuple(range(length + 1)), stride=stride)


LONG, SHORT = sequence(9), sequence(2)  # longer and shorter than a stride


def make(name, spec=LONG, rows=40, frame_stack=4, end=0.2, seed=0, priorities=None, **params):
    kind, kind_params = MEMORIES[name]
    plays = [RandomPlay(actor, ENVS, frame_stack=frame_stack, end=end) for actor in range(ACTORS)]
    for play in plays:
        play.with_states = True
    layout = small_layout(
        plays[0].spec,
        rows=rows,
        chunk_length=STRIDE,
        num_envs=ENVS,
        num_actors=ACTORS,
        extras=RandomPlay.extras,
        states=RandomPlay.states,
        with_priority=kind.with_priority,
    )
    memory = kind(kind_params(100, **params), layout, spec, seed)
    return memory, plays, [memory.writer(actor, priorities) for actor in range(ACTORS)]


def filled(name, steps=70, **options):
    memory, plays, writers = make(name, **options)
    play_all(plays, writers, steps)
    return memory, plays, writers


def play_all(plays, writers, steps):
    for play, writer in zip(plays, writers):
        play.play(writer, steps)


def legal(memory):
    """Return every multiple of the stride whose steps, frame stack and end included, are readable; by loops."""
    written = memory.trajectories.written()
    layout, spec = memory.layout, memory.window
    keys = []
    for actor in range(ACTORS):
        oldest = written[actor] - layout.ring_length + 2 * STRIDE
        for serial in range(0, int(written[actor]), STRIDE):
            stack = layout.frame_stack - 1 if layout.frame_stack and oldest > 0 else 0
            if serial - stack >= oldest and serial + spec.length < written[actor]:
                keys += [(actor * ENVS + env, serial) for env in range(ENVS)]
    return keys


def as_keys(pairs):
    return SampleIds(*np.array(pairs).T)


def assert_windows_are_the_rows_of_their_keys(memory, plays, batch):
    for column, (stream, serial) in enumerate(zip(*batch.keys)):
        rows = plays[stream // ENVS].rows[stream % ENVS][serial : serial + memory.window.length + 1]
        window = batch.window
        for place, row in enumerate(rows):
            np.testing.assert_array_equal(window.observations[place, column].numpy(), row.observation)
            np.testing.assert_array_equal(window.extras["features"][place, column].numpy(), row.features)
        for name in ("first", "last", "action", "reward", "discount"):
            assert getattr(window, name + "s")[:, column].tolist() == [getattr(row, name) for row in rows]
        np.testing.assert_array_equal(window.states[0][column].numpy(), rows[0].state)


@pytest.mark.parametrize("spec", [LONG, SHORT, sequence(4)])
@pytest.mark.parametrize("name", MEMORIES)
def test_every_stride_th_step_is_drawn_equally_often(name, spec):
    memory, plays, _ = filled(name, steps=73, spec=spec)
    starts = legal(memory)
    counts = dict.fromkeys(starts, 0)
    draws, batch = 40_000, 400
    for _ in range(draws // batch):
        for key in zip(*memory.sample(batch).keys):
            counts[key] += 1
    mean = draws / len(starts)
    assert sum((count - mean) ** 2 / mean for count in counts.values()) < len(starts) - 1 + 5 * np.sqrt(
        2 * (len(starts) - 1)
    )
    ends = [plays[stream // ENVS].rows[stream % ENVS][serial].last for stream, serial in starts]
    assert len(starts) >= 16 and any(ends)  # the last step of an episode may start a sequence


@pytest.mark.parametrize("spec", [LONG, SHORT])
@pytest.mark.parametrize("frame_stack", [0, 1, 4])
@pytest.mark.parametrize("name", MEMORIES)
def test_windows_hold_their_steps_and_state_through_wrap_around(name, frame_stack, spec):
    memory, plays, writers = make(name, spec=spec, frame_stack=frame_stack)
    seen = set()
    for part in range(60):
        plays[0].play(writers[0], 3)
        plays[1].play(writers[1], 1 + part % 6)
        batch = memory.sample(8)
        starts = set(legal(memory))
        assert (batch is None) == (not starts)
        if batch is not None:
            assert set(zip(*batch.keys)) <= starts
            assert_windows_are_the_rows_of_their_keys(memory, plays, batch)
            seen |= set(zip(*batch.keys))
    assert int(memory.trajectories.written().min()) > 2 * memory.layout.ring_length and len(seen) > 60


def test_starts_are_drawn_in_proportion_to_their_priorities():
    memory, _, _ = filled("prioritized", alpha=0.5, priority_epsilon=0.01)
    memory.sample(1)
    keys = as_keys(legal(memory))
    priorities = np.random.default_rng(0).random(len(keys.step_ids)) * 3
    memory.update_priorities(keys, priorities)
    check_tree(memory.tree)
    shares = (priorities + 0.01) ** 0.5
    shares /= shares.sum()
    draws, counts, place = 40_000, np.zeros(len(shares)), {key: number for number, key in enumerate(zip(*keys))}
    for _ in range(draws // 250):
        for key in zip(*memory.sample(250).keys):
            counts[place[key]] += 1
    assert (np.abs(counts - draws * shares) < 5 * np.sqrt(draws * shares) + 1).all()


def test_each_start_has_one_leaf_and_lost_ones_are_cleared():
    memory, plays, writers = make("prioritized")
    for steps in (30, 5, 40, 200, 9):
        play_all(plays, writers, steps)
        memory.sample(4)
        assert np.count_nonzero(memory.tree.leaves) == len(legal(memory))
        check_tree(memory.tree)
    assert memory.tree.capacity == memory.layout.num_slots // STRIDE


def test_late_priorities_never_reach_a_new_start():
    memory, plays, writers = filled("prioritized", alpha=1.0, priority_epsilon=0.5)
    old, generator = memory.sample(32).keys, np.random.default_rng(0)
    for _ in range(12):
        play_all(plays, writers, 5)
        memory.sample(1)
        before = {key: memory.tree.leaves[memory._starts.leaf_indices(*as_keys([key]))][0] for key in legal(memory)}
        priorities = dict(zip(zip(*old), generator.random(32) * 9))  # one for each start, the last of equal ones
        memory.update_priorities(old, np.array([priorities[key] for key in zip(*old)]))
        for key, leaf in before.items():
            expected = priorities[key] + 0.5 if key in priorities else leaf
            assert memory.tree.leaves[memory._starts.leaf_indices(*as_keys([key]))][0] == pytest.approx(expected)
    assert not set(zip(*old)) & set(legal(memory))


def test_a_starts_initial_priority_is_that_of_its_sequence():
    memory, plays, writers = make(
        "prioritized", alpha=1.0, priority_epsilon=0.5, priorities=lambda window: np.abs(window.rewards.sum(0).numpy())
    )
    ends, checked = 0, 0
    for _ in range(25):
        known = set(legal(memory))
        play_all(plays, writers, 4)
        memory.sample(4)
        for stream, serial in set(legal(memory)) - known:
            rows = plays[stream // ENVS].rows[stream % ENVS][serial : serial + 10]
            leaf = memory.tree.leaves[memory._starts.leaf_indices(*as_keys([(stream, serial)]))][0]
            assert leaf == pytest.approx(abs(sum(row.reward for row in rows)) + 0.5, rel=1e-5)
            ends, checked = ends + rows[0].last, checked + 1
    assert checked > 30 and ends > 3


@pytest.mark.parametrize("steps", [22, 75])
@pytest.mark.parametrize("name", MEMORIES)
def test_sampling_continues_exactly_from_a_state(name, steps):
    memory, plays, writers = filled(name, steps=steps)
    generator = np.random.default_rng(2)
    for _ in range(5):
        memory.update_priorities(memory.sample(8).keys, generator.random(8) * 4)
    resumed, _, _ = make(name, seed=8)
    resumed.load_state_dict(memory.state_dict())
    for _ in range(4):
        expected, found = memory.sample(16), resumed.sample(16)
        assert list(zip(*expected.keys)) == list(zip(*found.keys)) and expected.weights.equal(found.weights)
        assert_windows_are_the_rows_of_their_keys(resumed, plays, found)
        priorities = generator.random(16)
        memory.update_priorities(expected.keys, priorities)
        resumed.update_priorities(found.keys, priorities)
    assert resumed.statistics() == memory.statistics()


@pytest.mark.parametrize("spec", [LONG, SHORT, sequence(8)])
@pytest.mark.parametrize("frame_stack", [0, 1, 4, 6])
@pytest.mark.parametrize("name", MEMORIES)
def test_the_smallest_accepted_ring_always_holds_a_sequence(name, frame_stack, spec):
    rows = next(rows for rows in range(STRIDE, 100, STRIDE) if accepted(name, spec, rows, frame_stack))
    memory, plays, writers = make(name, spec, rows, frame_stack)
    for _ in range(80):
        play_all(plays, writers, 1)
        assert (memory.sample(4) is None) == (memory.trajectories.written()[0] <= spec.length)


def accepted(name, spec, rows, frame_stack):
    try:
        make(name, spec, rows, frame_stack)
    except ValueError as error:
        assert f"{rows} steps an environment are too few" in str(error)
        return False
    return True
