import tracemalloc

import numpy as np
import pytest

from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.specs import WindowSpec
from core.types import SampleIds, slice_batch
from tests.core.memories.trees import check_tree
from tests.core.tapes import RandomPlay, observed, small_layout

SPEC = WindowSpec(3, (0, 3))


def make(rows: int = 24, priorities=None, num_actors: int = 2, seed: int = 0, end: float = 0.15, **params):
    plays = [RandomPlay(actor, 2, end=end) for actor in range(num_actors)]
    layout = small_layout(
        plays[0].spec, rows=rows, chunk_length=4, num_envs=2, num_actors=num_actors, with_priority=True
    )
    memory = PrioritizedMemory(PrioritizedParams(100, **params), layout, SPEC, seed)
    return memory, plays, [memory.writer(actor, priorities) for actor in range(num_actors)]


def filled(steps: int = 50, **options):
    memory, plays, writers = make(**options)
    for play, writer in zip(plays, writers):
        play.play(writer, steps)
    return memory, plays, writers


def legal_starts(memory: PrioritizedMemory, plays: list[RandomPlay]) -> SampleIds:
    low, high = memory.trajectories.starts(SPEC.length)
    starts = [
        (actor * 2 + stream, serial)
        for actor, play in enumerate(plays)
        for stream in range(2)
        for serial in range(low[actor], high[actor])
        if not play.rows[stream][serial].last
    ]
    return SampleIds(*np.array(starts).T)


def counts_of(memory: PrioritizedMemory, keys: SampleIds, draws: int) -> np.ndarray:
    """Return how often each key was drawn; drawing any other key is an error."""
    place = {key: index for index, key in enumerate(zip(*keys))}
    counts = np.zeros(len(place))
    for _ in range(draws // 250):
        for key in zip(*memory.sample(250).keys):
            counts[place[key]] += 1
    return counts


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_starts_are_drawn_in_proportion_to_their_priorities(alpha):
    memory, plays, _ = filled(alpha=alpha, priority_epsilon=0.01)
    memory.sample(1)
    keys = legal_starts(memory, plays)
    priorities = np.random.default_rng(0).random(len(keys.step_ids)) * 3
    memory.update_priorities(keys, priorities)
    check_tree(memory.tree)
    shares = (priorities + 0.01) ** alpha
    shares /= shares.sum()
    draws = 50_000
    counts = counts_of(memory, keys, draws)
    assert (np.abs(counts - draws * shares) < 5 * np.sqrt(draws * shares) + 1).all() and len(shares) > 20


def test_importance_weights_equal_the_papers():
    memory, plays, _ = filled(alpha=0.7, beta_start=0.4, priority_epsilon=0.001)
    memory.sample(1)  # takes the new steps into the tree
    keys = legal_starts(memory, plays)
    priorities = np.random.default_rng(1).random(len(keys.step_ids)) * 2
    memory.update_priorities(keys, priorities)
    batch = memory.sample(16)
    leaves = {key: (priority + 0.001) ** 0.7 for key, priority in zip(zip(*keys), priorities.tolist())}
    weights = [(len(leaves) * leaves[key] / sum(leaves.values())) ** -0.4 for key in zip(*batch.keys)]
    np.testing.assert_allclose(batch.weights.numpy(), np.array(weights) / max(weights), rtol=1e-5)
    assert batch.weights.max() == 1.0 and batch.weights.min() < 0.9


def test_importance_weights_are_normalised_in_each_batch_of_a_draw():
    memory, plays, _ = filled(alpha=0.7, beta_start=0.4, beta_end=0.4, priority_epsilon=0.001)
    memory.sample(1)
    keys = legal_starts(memory, plays)
    priorities = np.random.default_rng(1).random(len(keys.step_ids)) * 2
    memory.update_priorities(keys, priorities)
    leaves = {key: (priority + 0.001) ** 0.7 for key, priority in zip(zip(*keys), priorities.tolist())}
    memory.batches_per_sample = 3
    draw, largest = memory.sample(12), []
    for start in range(3):
        batch = slice_batch(draw, slice(start, None, 3))
        weights = np.array([leaves[key] ** -0.4 for key in zip(*batch.keys)])
        np.testing.assert_allclose(batch.weights.numpy(), weights / weights.max(), rtol=1e-5)
        largest.append(weights.max())
    assert len(set(largest)) == 3


def test_beta_is_annealed_linearly_and_stays_at_its_end():
    memory, _, _ = filled(beta_start=0.4, beta_end=1.0, beta_updates=4)
    betas = []
    for _ in range(6):
        betas.append(memory.statistics()["beta"])
        memory.sample(2)
    assert betas == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0])


def test_beta_counts_every_batch_of_a_draw():
    memory, _, _ = filled(beta_start=0.4, beta_end=1.0, beta_updates=6)
    memory.batches_per_sample = 2
    memory.sample(4)
    assert memory.statistics()["beta"] == pytest.approx(0.4 + 0.6 * 2 / 6)


def test_samples_are_stratified():
    memory, plays, _ = filled(steps=16, alpha=1.0, priority_epsilon=1e-9, end=0.0)
    memory.sample(1)
    keys = legal_starts(memory, plays)
    memory.update_priorities(keys, np.ones(len(keys.step_ids)))
    drawn = memory.sample(len(keys.step_ids)).keys
    # one from each of n equal shares: with equal priorities each exactly once
    assert sorted(zip(*drawn)) == sorted(zip(*keys))


def test_a_batch_holds_the_windows_of_its_keys():
    memory, plays, _ = filled()
    batch = memory.sample(64)
    for column, (stream, serial) in enumerate(zip(*batch.keys)):
        rows = plays[stream // 2].rows[stream % 2]
        assert not rows[serial].last
        for place, observation in enumerate(observed(rows, serial, SPEC)):
            np.testing.assert_array_equal(batch.window.observations[place, column].numpy(), observation)


# initial priorities -----------------------------------------------------------------------------------------------
def absolute_return(window) -> np.ndarray:
    assert window.observations.shape[0] == 0
    return np.abs(window.rewards.sum(0).numpy()) + window.actions[0].numpy()


def test_new_starts_have_their_actors_priority_before_sampling():
    memory, plays, writers = make(priorities=absolute_return, alpha=1.0, priority_epsilon=0.5)
    for part in range(15):
        for play, writer in zip(plays, writers):
            play.play(writer, 3 + part % 3)
        if memory.sample(8) is None:
            continue
        keys = legal_starts(memory, plays)
        leaves = memory.tree.leaves[memory.trajectories.slots(*keys)]
        for leaf, stream, serial in zip(leaves, *keys):
            rows = plays[stream // 2].rows[stream % 2][serial : serial + 4]
            assert leaf == pytest.approx(abs(sum(row.reward for row in rows)) + rows[0].action + 0.5, rel=1e-5)
        assert np.count_nonzero(memory.tree.leaves) == len(keys.step_ids)  # no other step has any
    assert part == 14 and memory.trajectories.written().min() > 2 * 24


def test_starts_without_a_priority_get_the_largest_one_seen():
    memory, plays, writers = filled(steps=20, alpha=1.0, priority_epsilon=0.25)
    batch = memory.sample(4)
    # one, before any is seen
    assert (memory.tree.leaves[memory.trajectories.slots(*legal_starts(memory, plays))] == 1.25).all()
    memory.update_priorities(batch.keys, np.array([0.5, 3.0, 7.0, 0.0]))
    plays[0].play(writers[0], 4)
    memory.sample(4)
    high = memory.trajectories.starts(SPEC.length)[1]
    newest = [(stream, int(high[0]) - 1) for stream in range(2) if not plays[0].rows[stream][high[0] - 1].last]
    assert newest and all(memory.tree.leaves[memory.trajectories.slots(*map(np.array, key))] == 7.25 for key in newest)
    assert memory.statistics()["max_priority"] == 7.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_invalid_priority_of_an_actor_is_an_error(bad):
    _, plays, writers = make(priorities=lambda window: np.full(window.lasts.shape[1], bad))
    with pytest.raises(ValueError, match="finite and not negative; actor 0"):
        plays[0].play(writers[0], 8)


def test_priorities_of_last_steps_are_not_the_largest_seen():
    memory, _, _ = filled(priorities=lambda window: np.where(window.lasts[0], 1e6, 3.0), end=0.5)
    memory.sample(1)
    assert memory.statistics()["max_priority"] == 3.0


# updates ----------------------------------------------------------------------------------------------------------
def test_priorities_of_overwritten_steps_are_dropped():
    memory, plays, writers = filled(steps=16, alpha=1.0)
    old = memory.sample(16).keys
    plays[0].play(writers[0], 24)
    plays[1].play(writers[1], 24)
    memory.sample(1)
    leaves = memory.tree.leaves.copy()
    memory.update_priorities(old, np.full(16, 1e6))
    assert (memory.tree.leaves == leaves).all() and memory.statistics()["max_priority"] == 1.0
    check_tree(memory.tree)
    keys = SampleIds(*map(np.append, old, memory.sample(1).keys))  # one of which is still there
    memory.update_priorities(keys, np.append(np.full(16, 1e6), 2.0))
    assert memory.statistics()["max_priority"] == 2.0


def test_priorities_of_steps_that_are_no_starts_are_dropped():
    memory, _, _ = filled(steps=16)
    memory.sample(1)
    total = memory.tree.total
    first = int(memory.trajectories.starts(SPEC.length)[1][0])  # whose window is not whole yet
    memory.update_priorities(SampleIds(np.array([0, 0, 1]), np.array([first, 15, 400])), np.full(3, 5.0))
    assert memory.tree.total == total


def test_leaves_of_overwritten_steps_are_cleared_after_pauses():
    memory, plays, writers = filled(steps=16)
    memory.sample(1)
    for steps in (4, 24, 100, 7):
        for play, writer in zip(plays, writers):
            play.play(writer, steps)
        memory.sample(4)
        keys = legal_starts(memory, plays)
        live = np.zeros(memory.layout.num_slots, bool)
        live[memory.trajectories.slots(*keys)] = True
        assert ((memory.tree.leaves > 0) == live).all()
        check_tree(memory.tree)


def test_starts_that_are_lost_between_two_chunks_are_cleared():
    """A writer that needs the bytes of old frames takes their chunk from the readers before it publishes its own."""
    memory, plays, _ = filled(steps=16)
    memory.sample(1)
    memory.trajectories.arrays["oldest"][0, 0] = 4
    memory.sample(1)
    live = np.zeros(memory.layout.num_slots, bool)
    live[memory.trajectories.slots(*legal_starts(memory, plays))] = True
    assert ((memory.tree.leaves > 0) == live).all() and not live[:8].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.5])
def test_invalid_priorities_are_refused_by_value(bad):
    memory, _, _ = filled()
    keys = memory.sample(4).keys
    total = memory.tree.total
    with pytest.raises(ValueError, match=rf"not {bad} \(position 2\)"):
        memory.update_priorities(keys, np.array([1.0, 1.0, bad, 1.0]))
    assert memory.tree.total == total


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()])
def test_priorities_of_a_wrong_shape_are_refused(shape):
    memory, _, _ = filled()
    with pytest.raises(ValueError, match=r"shape"):
        memory.update_priorities(memory.sample(4).keys, np.ones(shape))


def test_all_zero_priorities_still_draw_every_start():
    memory, plays, _ = filled(priorities=lambda window: np.zeros(window.lasts.shape[1]))
    memory.sample(1)
    keys = legal_starts(memory, plays)
    memory.update_priorities(keys, np.zeros(len(keys.step_ids)))
    counts = counts_of(memory, keys, 5000)
    assert (counts > 0).all() and np.isfinite(memory.sample(8).weights.numpy()).all()


def test_there_is_no_batch_before_the_first_valid_start():
    memory, plays, writers = make()
    assert memory.sample(8) is None
    plays[1].play(writers[1], 4)
    assert memory.sample(8) is not None


def test_steps_overwritten_while_being_read_are_drawn_again(monkeypatch):
    memory, _, _ = filled()
    answers = iter([np.arange(32) % 2 == 0, np.ones(32, bool)])
    monkeypatch.setattr(memory.trajectories, "still_valid", lambda streams, serials: next(answers))
    batch = memory.sample(32)
    assert next(answers, None) is None and np.isfinite(batch.weights.numpy()).all()


@pytest.mark.parametrize("rows", [16_000, 17_000])  # leaves below and above a power of two
def test_the_bytes_of_the_tree_are_known_before_it_is_made(rows):
    memory, _, _ = make(rows=rows)
    tracemalloc.start()
    _ = memory.tree
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory.own_bytes(memory.params, memory.layout, memory.window) == pytest.approx(allocated, rel=0.01)


# checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [14, 50])
def test_sampling_continues_exactly_from_a_state(steps):
    memory, plays, _ = filled(steps=steps, rows=40)
    generator = np.random.default_rng(2)
    for _ in range(5):
        memory.update_priorities(memory.sample(8).keys, generator.random(8) * 4)
    state = memory.state_dict()
    resumed, _, _ = make(rows=40, seed=8)
    resumed.load_state_dict(state)
    check_tree(resumed.tree)
    for _ in range(4):
        expected, found = memory.sample(16), resumed.sample(16)
        assert (expected.keys.step_ids == found.keys.step_ids).all() and (
            expected.keys.env_ids == found.keys.env_ids
        ).all()
        assert expected.weights.equal(found.weights) and expected.window.observations.equal(found.window.observations)
        priorities = generator.random(16)
        memory.update_priorities(expected.keys, priorities)
        resumed.update_priorities(found.keys, priorities)
    assert resumed.statistics() == memory.statistics()
    for rows in plays[0].rows:
        del rows[int(resumed.trajectories.written()[0]) :]
        rows[-1] = rows[-1]._replace(last=True)  # the new writer ends the open episodes
    plays[0].restart()
    plays[0].play(resumed.writer(0), 60)
    resumed.sample(8)
    live = np.zeros(resumed.layout.num_slots, bool)
    live[resumed.trajectories.slots(*legal_starts(resumed, plays))] = True
    assert ((resumed.tree.leaves > 0) == live).all()


def test_beta_continues_without_the_stored_steps():
    memory, _, _ = filled(beta_updates=10)
    for _ in range(5):
        memory.update_priorities(memory.sample(8).keys, np.full(8, 9.0))
    resumed, _, _ = make(beta_updates=10)
    resumed.continue_at(5)
    assert resumed.tree.total == 0 and resumed.sample(4) is None
    resumed_statistics = resumed.statistics()
    assert resumed_statistics["beta"] == memory.statistics()["beta"] and resumed_statistics["max_priority"] == 1.0


def test_statistics_cover_the_valid_starts():
    memory, plays, _ = filled(alpha=1.0, priority_epsilon=1e-6)
    memory.sample(1)
    keys = legal_starts(memory, plays)
    priorities = np.random.default_rng(3).random(len(keys.step_ids)) * 5
    memory.update_priorities(keys, priorities)
    statistics = memory.statistics()
    assert statistics["mean_priority"] == pytest.approx(priorities.mean(), abs=1e-5)
    assert statistics["max_priority"] == max(1.0, priorities.max()) and statistics["replay_steps"] == memory.size()
