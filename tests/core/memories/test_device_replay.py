"""Replay on the learner's device has the starts, priorities, weights and frequencies of the CPU memories."""

import dataclasses

import numpy as np
import pytest
import torch

from core.memories.prioritized import DevicePrioritizedReplay, PrioritizedMemory, PrioritizedParams
from core.memories.uniform import UniformMemory, UniformParams
from core.specs import WindowSpec
from core.types import SampleIds
from tests.core.devices import DEVICES
from tests.core.tapes import RandomPlay, observed, small_layout

SPEC = WindowSpec(3, (0, 3))
SEQUENCES = WindowSpec(6, tuple(range(7)), stride=4)


class Replay:
    """Provide two actors of two environments each, and the device replay of their memory."""

    def __init__(
        self,
        device: str = "cpu",
        memory_type=PrioritizedMemory,
        spec: WindowSpec = SPEC,
        priorities=None,
        rows: int = 24,
        seed: int = 0,
        end: float = 0.15,
        **params,
    ):
        self.plays = [RandomPlay(actor, 2, end=end) for actor in range(2)]
        self.layout = small_layout(
            self.plays[0].spec,
            rows=rows,
            chunk_length=4,
            num_envs=2,
            num_actors=2,
            with_priority=memory_type.with_priority,
        )
        params = PrioritizedParams(100, **params) if memory_type is PrioritizedMemory else UniformParams(100)
        self.memory, self.spec = memory_type(params, self.layout, spec, seed), spec
        self.writers = [self.memory.writer(actor, priorities) for actor in range(2)]
        self.resident = self.memory.device_class(self.memory, torch.device(device))

    def play(self, *steps: int) -> "Replay":
        for play, writer, count in zip(self.plays, self.writers, steps):
            play.play(writer, count)
        return self

    def ready(self, batches: int = 1) -> "Replay":
        assert self.resident.refresh()
        self.resident.plan(batches)
        return self

    def starts(self) -> SampleIds:
        """Return every valid start, found by walking over the plays."""
        stride = self.spec.stride or 1
        low, high = self.memory.trajectories.starts(self.spec.length)
        found = [
            (actor * 2 + stream, serial)
            for actor, play in enumerate(self.plays)
            for stream in range(2)
            for serial in range(low[actor], high[actor])
            if serial % stride == 0 and (self.spec.stride or not play.rows[stream][serial].last)
        ]
        return SampleIds(*np.array(found).T)

    def places(self, keys: SampleIds) -> np.ndarray:
        actors, envs = np.divmod(keys.env_ids, 2)
        per_stream = self.layout.ring_length // (self.spec.stride or 1)
        return (actors * per_stream + keys.step_ids // (self.spec.stride or 1) % per_stream) * 2 + envs

    def leaves(self) -> np.ndarray:
        return self.resident._leaves.cpu().numpy().ravel().copy()

    def set(self, keys: SampleIds, priorities: np.ndarray) -> None:
        device = self.resident.device
        self.resident.update_priorities(
            torch.from_numpy(self.places(keys)).to(device), torch.from_numpy(priorities).to(device)
        )

    def counts(self, keys: SampleIds, draws: int) -> np.ndarray:
        """Return how often each key was drawn; drawing any other key is an error."""
        place = {key: index for index, key in enumerate(zip(*keys))}
        counts = np.zeros(len(place))
        for _ in range(draws // 250):
            self.resident.plan(1)
            for key in zip(*(part.tolist() for part in self.resident.sample(250)[0].keys)):
                counts[place[key]] += 1
        return counts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_starts_are_drawn_in_proportion_to_their_priorities(device, alpha):
    replay = Replay(device, alpha=alpha, priority_epsilon=0.01).play(50, 38).ready()
    keys = replay.starts()
    priorities = np.random.default_rng(0).random(len(keys.step_ids)) * 3
    replay.set(keys, priorities)
    shares = (priorities + 0.01) ** alpha / ((priorities + 0.01) ** alpha).sum()
    draws = 50_000
    counts = replay.counts(keys, draws)
    assert (np.abs(counts - draws * shares) < 5 * np.sqrt(draws * shares) + 1).all() and len(shares) > 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", [SPEC, SEQUENCES])
def test_uniform_sampling_draws_valid_starts_equally_often(device, spec):
    replay = Replay(device, UniformMemory, spec, rows=40).play(70, 38).ready()
    keys = replay.starts()
    draws, share = 20_000, 1 / len(keys.step_ids)
    counts = replay.counts(keys, draws)
    assert (np.abs(counts - draws * share) < 5 * np.sqrt(draws * share)).all() and len(counts) > 8
    assert (replay.resident.sample(8)[0].weights == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_importance_weights_equal_the_papers(device):
    replay = Replay(device, alpha=0.7, beta_start=0.4, priority_epsilon=0.001).play(50, 50).ready()
    keys = replay.starts()
    priorities = np.random.default_rng(1).random(len(keys.step_ids)) * 2
    replay.set(keys, priorities)
    batch, _ = replay.resident.sample(16)
    leaves = {key: (priority + 0.001) ** 0.7 for key, priority in zip(zip(*keys), priorities.tolist())}
    drawn = zip(*(part.tolist() for part in batch.keys))
    weights = [(len(leaves) * leaves[key] / sum(leaves.values())) ** -0.4 for key in drawn]
    np.testing.assert_allclose(batch.weights.cpu().numpy(), np.array(weights) / max(weights), rtol=1e-5)
    assert batch.weights.max() == 1.0 and batch.weights.min() < 0.9 and batch.weights.dtype == torch.float32


def test_beta_follows_its_schedule():
    replay = Replay(alpha=1.0, priority_epsilon=0.5, beta_start=0.5, beta_end=1.0, beta_updates=4).play(30, 30).ready(6)
    keys = replay.starts()
    replay.set(keys, np.where(np.arange(len(keys.step_ids)) % 2, 0.5, 1.5))  # leaves 1 and 2
    weights = [float(replay.resident.sample(64)[0].weights.min()) for _ in range(6)]
    assert weights == pytest.approx([2**-beta for beta in (0.5, 0.625, 0.75, 0.875, 1.0, 1.0)])
    assert replay.resident.statistics()["beta"] == 1.0


def test_samples_are_stratified():
    replay = Replay(alpha=1.0, priority_epsilon=1e-9, end=0.0).play(16, 16).ready()
    keys = replay.starts()
    replay.set(keys, np.ones(len(keys.step_ids)))
    drawn = replay.resident.sample(len(keys.step_ids))[0].keys
    assert sorted(zip(*(part.tolist() for part in drawn))) == sorted(zip(*keys))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_holds_the_windows_of_its_keys(device):
    replay = Replay(device).play(50, 41).ready()
    batch, places = replay.resident.sample(64)
    streams, serials = (part.tolist() for part in batch.keys)
    assert (replay.places(SampleIds(np.array(streams), np.array(serials))) == places.cpu().numpy()).all()
    for column, (stream, serial) in enumerate(zip(streams, serials)):
        rows = replay.plays[stream // 2].rows[stream % 2]
        assert not rows[serial].last
        for place, observation in enumerate(observed(rows, serial, SPEC)):
            np.testing.assert_array_equal(batch.window.observations[place, column].cpu().numpy(), observation)


def partly_absolute_return(window) -> np.ndarray | None:
    """Return an actor's priorities, or None now and then."""
    actions = window.actions[0].numpy()
    return np.abs(window.rewards.sum(0).numpy()) + actions if actions.sum() % 3 else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", [SPEC, SEQUENCES])
def test_leaves_equal_those_of_the_cpu_tree(device, spec):
    replay = Replay(device, spec=spec, priorities=partly_absolute_return, alpha=0.6, rows=40)
    generator = np.random.default_rng(5)
    for part, steps in enumerate([9, 3, 17, 100, 41, 8, 12, 25, 7, 160, 30]):
        replay.play(steps, steps // 2 + part)
        batch = replay.memory.sample(16)  # makes the CPU's memory read what is new
        if not replay.resident.refresh() or batch is None:
            continue
        np.testing.assert_allclose(replay.leaves(), replay.memory.tree.leaves, rtol=1e-12)
        assert np.flatnonzero(replay.leaves()).tolist() == sorted(
            place
            for place, leaf in zip(
                replay.places(replay.starts()), replay.memory.tree.leaves[replay.places(replay.starts())]
            )
            if leaf
        )
        keys = SampleIds(*np.unique(np.stack(batch.keys), axis=1))
        priorities = generator.random(len(keys.step_ids)) * (1 + part)
        replay.memory.update_priorities(keys, priorities)
        replay.set(keys, priorities)
    assert part == 10 and float(replay.resident.rule.largest) == replay.memory.statistics()["max_priority"] > 1
    found, expected = replay.resident.statistics(), replay.memory.statistics()
    assert found == pytest.approx({**expected, "beta": found["beta"]})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_invalid_priority_changes_nothing(bad):
    replay = Replay(alpha=1.0).play(30, 30).ready()
    keys, before = replay.starts(), replay.leaves()
    replay.set(SampleIds(keys.env_ids[:3], keys.step_ids[:3]), np.array([bad, 4.0, bad]))
    changed = replay.leaves() != before
    assert np.flatnonzero(changed).tolist() == [replay.places(keys)[1]] and float(replay.resident.rule.largest) == 4.0


def test_no_batch_is_offered_before_the_first_valid_start():
    replay = Replay()
    assert not replay.resident.refresh()
    assert not replay.play(0, 4).resident.refresh()  # one start may be the end of an episode
    assert replay.play(0, 4).resident.refresh()
    assert Replay(spec=SEQUENCES).play(0, 8).resident.refresh()  # one sequence, which may start with an end


# checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_type", [PrioritizedMemory, UniformMemory])
def test_sampling_continues_exactly_from_a_state(device, memory_type):
    replay = Replay(device, memory_type, rows=40).play(70, 45).ready(5)
    for _ in range(5):
        places = replay.resident.sample(8)[1]
        replay.resident.update_priorities(places, torch.rand(8).to(device) * 4)
    resumed = Replay(device, memory_type, rows=40, seed=8)
    resumed.resident.load_state_dict(replay.resident.state_dict())
    replay.ready(5), resumed.ready(5)
    assert (replay.leaves() == resumed.leaves()).all() and replay.resident.statistics() == resumed.resident.statistics()
    for _ in range(5):
        expected, found = replay.resident.sample(16), resumed.resident.sample(16)
        assert torch.equal(expected[1], found[1]) and torch.equal(expected[0].weights, found[0].weights)
        assert torch.equal(expected[0].window.observations, found[0].window.observations)


@pytest.mark.parametrize("memory_type", [PrioritizedMemory, UniformMemory])
def test_a_state_replaces_what_was_there(memory_type):
    replay, used = (Replay(memory_type=memory_type, rows=40, seed=seed) for seed in (0, 5))
    replay.play(70, 45).ready()
    used.play(90, 90).ready().resident.sample(4)
    used.resident.load_state_dict(replay.resident.state_dict())
    used.resident.refresh(), used.resident.plan(1), replay.ready()
    assert (replay.leaves() == used.leaves()).all()
    (expected, places), (found, found_places) = (each.resident.sample(64) for each in (replay, used))
    assert torch.equal(places, found_places) and torch.equal(expected.window.rewards, found.window.rewards)
    assert all(torch.equal(*pair) for pair in zip(expected.keys, found.keys))


def test_seeds_give_other_draws():
    draws = [Replay(seed=seed).play(30, 30).ready().resident.sample(64)[1] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_state_moves_between_cpu_and_device():
    replay = Replay(rows=40).play(70, 45)
    replay.memory.update_priorities(replay.memory.sample(16).keys, np.arange(16.0))
    moved = Replay(rows=40)
    of_cuda = {"device_generator": torch.zeros(16, dtype=torch.uint8)}
    moved.resident.load_state_dict({**replay.memory.state_dict(), **of_cuda})
    moved.ready()
    assert (moved.leaves() == replay.memory.tree.leaves).all()
    back = Replay(rows=40)
    back.memory.load_state_dict(moved.resident.state_dict())
    assert (back.memory.tree.leaves == replay.memory.tree.leaves).all()
    assert back.memory.statistics()["beta"] > replay.memory.statistics()["beta"]  # one batch was prepared on the device


def test_beta_continues_without_the_stored_steps():
    replay = Replay(beta_updates=10).play(50, 50).ready(5)
    resumed = Replay(beta_updates=10)
    resumed.resident.continue_at(5)
    assert (
        not resumed.resident.refresh() and resumed.resident.statistics()["beta"] == replay.resident.statistics()["beta"]
    )


@pytest.mark.parametrize("memory_type", [PrioritizedMemory, UniformMemory])
def test_the_computed_bytes_are_those_allocated(memory_type):
    replay = Replay(memory_type=memory_type, rows=4000)
    # once more as running sums
    tensors = [*replay.resident.ring.tensors.values(), replay.resident._leaves, replay.resident._leaves]
    allocated = sum(tensor.nbytes for tensor in tensors)
    counted = replay.memory.device_class.nbytes(replay.layout, SPEC)
    assert allocated <= counted <= allocated + 64 * len(tensors)


def test_compressed_frames_count_uncompressed_on_the_device():
    layout = Replay(rows=400).layout
    packed = dataclasses.replace(layout, arena_bytes=10_000)
    assert DevicePrioritizedReplay.nbytes(packed, SPEC) == DevicePrioritizedReplay.nbytes(layout, SPEC)
