"""Elite and attentive replay choose unrolls by the distance of their features."""

import copy
import json
from collections import Counter

import numpy as np
import pytest
import torch

from core.memories.unrolls.feature_replay import MAX_COMPARED, STRATEGIES, FeatureDistanceStrategy
from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.trajectory.frame_compression import StorageParams
from core.trajectory.ring_buffer import STORAGE
from core.types import Window
from tests.core.tapes import (
    CODE,
    CODED_FEATURES,
    CodedActor,
    check_coded_unrolls,
    coded_features,
    coded_spec,
    unroll_memory,
)

ELITE = {"sample_strategy": "elite_sampling", "lambda_batch_multiplier": 4}
INSERTION = {"insert_strategy": "elite_insertion"}
ATTENTIVE = {"sample_strategy": "attentive_sampling", "lambda_batch_multiplier": 4}
SAMPLINGS = [ATTENTIVE, *({**ELITE, "elite_sampling_strategy": f"strategy{number}"} for number in (1, 2, 3, 4))]


def make(
    *,
    capacity: int = 20,
    batch_size: int = 4,
    seed: int = 0,
    num_envs: int = 2,
    storage: StorageParams = STORAGE,
    **settings,
):
    params = MixedParams(json.dumps([{"type": "custom", "capacity": capacity, "sample_ratio": 1.0, **settings}]))
    assert MixedMemory.problems(params, batch_size) == []
    memory = unroll_memory(
        MixedMemory,
        params,
        coded_spec((2,), 0),
        batch_size=batch_size,
        extras=CODED_FEATURES,
        seed=seed,
        num_envs=num_envs,
        storage=storage,
    )
    memory.features_of = coded_features
    return memory, CodedActor(memory, 0)


def unrolls_of(window: Window) -> list[tuple[int, int]]:
    streams, serials = np.divmod(window.actions[0].numpy(), CODE)
    return list(zip((streams - 1).tolist(), serials.tolist()))


def moved_by(distances: dict, tape: list):
    """Return a function that computes current features at the given distances from the stored ones.

    The list `tape` records the unrolls that the function receives.
    """

    def features(window: Window) -> torch.Tensor:
        tape.append(unrolls_of(window))
        shifts = torch.tensor([float(distances[unroll]) for unroll in tape[-1]])
        return coded_features(window).double() + shifts[:, None]

    return features


def sampled(memory: MixedMemory, batch_size: int = 4) -> list[tuple[int, int]]:
    batch = memory.sample(batch_size)
    assert not batch.fresh.any() and len(batch.fresh) == batch_size
    return check_coded_unrolls(memory.layout, batch.window)


# strategies -------------------------------------------------------------------------------------------------------
def naive(strategy: str, distances: list[float], times: list[int], count: int) -> list[int]:
    """Return the candidates to keep, by plain loops."""
    order = sorted(range(len(distances)), key=lambda candidate: distances[candidate])
    groups = [order[len(order) * group // count : len(order) * (group + 1) // count] for group in range(count)]
    assert all(groups) and max(map(len, groups)) - min(map(len, groups)) <= 1
    if strategy == "strategy1":
        return order[:count]
    if strategy == "strategy2":
        return [group[0] for group in groups]
    if strategy == "strategy3":
        kept = []
        for often in sorted(set(times)):
            kept += [candidate for candidate in order if times[candidate] == often]
        return kept[:count]
    return [
        next(candidate for candidate in group if times[candidate] == min(times[other] for other in group))
        for group in groups
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_keeps_what_plain_loops_keep(strategy):
    generator = np.random.default_rng(0)
    for _ in range(600):
        count = int(generator.integers(1, 12))
        size = count + int(generator.integers(0, 40))
        distances = generator.choice(
            [generator.random(size), generator.integers(0, 3, size).astype(float), np.zeros(size)]
        )
        times = generator.integers(0, generator.integers(1, 6), size)
        found = STRATEGIES[strategy](distances, times, count)
        assert (
            found.tolist() == naive(strategy, distances.tolist(), times.tolist(), count)
            and len(set(found.tolist())) == count
        )


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_batch_is_what_the_strategy_keeps_of_all_candidates(number):
    memory, actor = make(**{**ELITE, "lambda_batch_multiplier": 5}, elite_sampling_strategy=f"strategy{number}")
    actor.write(10)  # 20 unrolls: with a multiplier of 5 all of them are candidates for 4
    shuffled = np.random.default_rng(number).permutation(20).tolist()
    distances, tape, times = dict(zip(actor.unrolls(), shuffled)), [], Counter()
    memory.features_of = moved_by(distances, tape)
    unrolls = sorted(distances, key=distances.get)
    for _ in range(12):
        expected = naive(f"strategy{number}", list(range(20)), [times[unroll] for unroll in unrolls], 4)
        found = sampled(memory)
        assert set(found) == {unrolls[candidate] for candidate in expected}
        assert sorted(tape[-1]) == sorted(actor.unrolls())  # without replacement
        times.update(found)
    most = {1: 4, 2: 4, 3: 20, 4: 20}[number]
    assert len(times) == most


@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("insertion", [{}, INSERTION])
@pytest.mark.parametrize("chunks", [1, 2, 3])  # 2, 4 and 6 unrolls for batches of 4
def test_few_unrolls_still_make_whole_batches(settings, insertion, chunks):
    memory, actor = make(**settings, **insertion)
    actor.write(chunks)
    for _ in range(10):
        found = sampled(memory)
        assert set(found) <= set(actor.unrolls()) and len(set(found)) == min(4, len(actor.unrolls()))


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_equal_distances_are_accepted(settings):
    memory, actor = make(**settings)
    attentive = settings is ATTENTIVE
    memory.features_of = (
        (lambda window: torch.zeros(4, window.actions.shape[1], 2)) if attentive else moved_by(Counter(), [])
    )
    actor.write(10)
    assert len({unroll for _ in range(50) for unroll in sampled(memory)}) > 10


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_candidates_are_distinct_and_as_many_as_lambda_says(settings):
    memory, actor = make(**{**settings, "lambda_batch_multiplier": 2.5})
    memory.features_of, tape = moved_by(Counter(), tape := []), tape
    actor.write(10)
    seen = Counter()
    for _ in range(30):
        tape.clear()
        sampled(memory)
        candidates = tape[-1]
        assert len(candidates) == len(set(candidates)) == 10
        seen.update(candidates)
    assert len(seen) == 20


def test_overwritten_unrolls_are_no_candidates(monkeypatch):
    memory, actor = make(**ELITE)
    tape: list = []
    memory.features_of = moved_by(Counter(), tape)
    actor.write(10)
    intact, lost = memory.trajectories.still_valid, set(actor.unrolls()[:14])
    monkeypatch.setattr(
        memory.trajectories,
        "still_valid",
        lambda streams, serials: (
            intact(streams, serials) & [unroll not in lost for unroll in zip(streams.tolist(), serials.tolist())]
        ),
    )
    for _ in range(20):
        assert not set(sampled(memory)) & lost
    # lambda asks for 16
    assert tape and all(sorted(candidates) == sorted(actor.unrolls()[14:]) for candidates in tape)


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_a_small_forward_pass_chooses_alike(monkeypatch, settings):
    kept = []
    for largest in (MAX_COMPARED, 3):
        monkeypatch.setattr("core.memories.unrolls.feature_replay.MAX_COMPARED", largest)
        memory, actor = make(**settings)
        tape, generator = list[list](), np.random.default_rng(0)
        memory.features_of = moved_by({(env, step): generator.random() for env in (0, 1) for step in range(99)}, tape)
        actor.write(10)
        kept.append([sampled(memory) for _ in range(10)])
        assert max(map(len, tape)) == min(largest, 16)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_without_a_choice_the_network_is_not_called(settings):
    memory, actor = make(**{**settings, "lambda_batch_multiplier": 1})
    memory.features_of = None
    actor.write(1)
    assert sorted(sampled(memory)) == sorted(actor.unrolls() * 2)  # two unrolls for a batch of four
    actor.write(9)
    assert len(set(sampled(memory))) == 4


# lambda -----------------------------------------------------------------------------------------------------------
def test_lambda_falls_linearly_to_one_and_stays_there():
    memory, actor = make(**{**ELITE, "lambda_batch_multiplier": 6, "alfa_annealing_factor": 2.0, "lambda_batches": 10})
    actor.write(10)
    found = []
    for _ in range(25):
        found.append(memory.statistics()["candidate_multiplier"])
        sampled(memory)
    assert found == pytest.approx([6 - 0.25 * batch for batch in range(20)] + [1.0] * 5)


def test_repeated_draws_within_a_batch_do_not_anneal_lambda(monkeypatch):
    memory, actor = make(**ELITE, lambda_batches=10)
    actor.write(10)
    rule, intact, draw, drawn = memory.strategies[0], memory.trajectories.still_valid, memory.strategies[0].draw, []
    generator = np.random.default_rng(0)

    def sometimes(streams, serials):
        return intact(streams, serials) & ((np.arange(len(serials)) > 0) | (generator.random() < 0.5))

    monkeypatch.setattr(memory.trajectories, "still_valid", sometimes)
    monkeypatch.setattr(rule, "draw", lambda count: drawn.append(count) or draw(count))
    for _ in range(5):
        assert memory.sample(4) is not None
    assert len(drawn) > 5 and rule.multiplier == pytest.approx(4 - 5 * 0.3)


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_draws_pass_the_end_of_annealing(settings):
    memory, actor = make(**settings, capacity=10, lambda_batches=50)
    actor.write(10)
    memory._ingest()
    rule, keys = memory.strategies[0], Counter()
    for number in range(300):
        drawn = rule.draw(3)
        rule.on_batch_complete()
        assert len(drawn.fresh) == 3
        keys.update(zip(*map(np.ndarray.tolist, drawn.keys)))
        if number == 48:
            assert rule.multiplier == pytest.approx(1 + 3 / 50)
    assert rule.multiplier == 1 and len(keys) == 10 and rule._draw_counts.sum() == 900


# insertion --------------------------------------------------------------------------------------------------------
def contents(rule: FeatureDistanceStrategy) -> list[tuple[int, int]]:
    return unrolls_of(rule.store.gather(*rule.keys(np.arange(len(rule))), rule.memory.window))


class Distances(dict):
    """Give each unroll another distance, in no order."""

    def __missing__(self, unroll):
        self[unroll] = (unroll[1] * 7919 + unroll[0] * 104_729) % 1_009
        return self[unroll]


class OneByOne:
    """Insert one by one with plain lists: each unroll overwrites the farthest of its own randomly drawn candidates."""

    def __init__(self, capacity: int, elite_batch_size: int, distances: dict):
        self.capacity, self.size, self.distances, self.kept, self.quantiles = (
            capacity,
            elite_batch_size,
            distances,
            [],
            [],
        )

    def insert(self, arriving: list[tuple[int, int]], generator: np.random.Generator) -> None:
        free = self.capacity - len(self.kept)
        self.kept += arriving[:free]
        count = min(self.size, len(self.kept))
        choices = [generator.choice(len(self.kept), count, replace=False).tolist() for _ in arriving[free:]]
        for unroll, places in zip(arriving[free:], choices):
            victim = max(places, key=lambda place: self.distances[self.kept[place]])
            farther = sum(self.distances[other] > self.distances[self.kept[victim]] for other in self.kept)
            self.quantiles.append(1 - farther / len(self.kept))
            self.kept[victim] = unroll


@pytest.mark.parametrize("capacity", [3, 30, 150])
@pytest.mark.parametrize("together", [1, 5, 16])
def test_unrolls_that_arrive_together_choose_independently(together, capacity):
    memory, actor = make(capacity=capacity, num_envs=together, **INSERTION, elite_batch_size=8)
    distances, tape = Distances(), []
    memory.features_of = moved_by(distances, tape)
    twin = OneByOne(capacity, 8, distances)
    draws, seen = copy.deepcopy(memory.generator), 0
    for _ in range(300 // together):
        actor.write(1)
        memory._ingest()
        twin.insert(actor.unrolls()[seen:], draws)
        seen = len(actor.unrolls())
        assert contents(memory.strategies[0]) == twin.kept
        assert max(map(len, tape), default=0) <= MAX_COMPARED
        tape.clear()
    if capacity == 150:  # the farthest of 8 has 8/9 of all others below it, however many arrive at once
        assert np.mean(twin.quantiles) == pytest.approx(8 / 9, abs=0.05)


def test_unrolls_overwritten_before_being_copied_take_no_slot(monkeypatch):
    memory, actor = make(capacity=3, **INSERTION)
    actor.write(3)
    monkeypatch.setattr(memory.trajectories, "still_valid", lambda streams, serials: np.zeros(len(serials), bool))
    assert memory.sample(4) is None and len(memory.strategies[0]) == 0


def test_rings_do_not_hold_what_is_copied():
    few, many = (make(capacity=capacity, **INSERTION)[0].layout for capacity in (10, 1_000))
    assert few == many


def test_a_full_frame_store_shrinks_the_strategys_capacity(monkeypatch):
    memory, actor = make(capacity=10, num_envs=4, **INSERTION, storage=StorageParams("lz4"))
    rule, refused = memory.strategies[0], []
    frames = rule.store.frames
    frames._max_bytes, put = 10**6, frames.put
    monkeypatch.setattr(
        frames, "put", lambda slot, copied: refused.append(slot) if slot == 2 and not refused else put(slot, copied)
    )
    for _ in range(5):
        actor.write(1)
        memory._ingest()
        assert refused == [2] and len(rule) == rule._copies.capacity == 2
        assert actor.unrolls()[-1] in contents(rule) and set(sampled(memory)) <= set(contents(rule))


@pytest.mark.parametrize("insertion", [{}, INSERTION])
def test_the_use_count_of_an_unroll_is_reset_with_its_slot(insertion):
    memory, actor = make(capacity=6, **insertion, **{**ELITE, "elite_sampling_strategy": "strategy3"})
    rule, generator, times = memory.strategies[0], np.random.default_rng(0), Counter()
    for _ in range(80):
        if generator.random() < 0.5:
            actor.write(1)
        batch = memory.sample(4)
        if batch is not None:
            times.update(unrolls_of(batch.window))
            assert rule._draw_counts[: len(rule)].tolist() == [times[unroll] for unroll in contents(rule)]
    assert len(times) > 20


# distances --------------------------------------------------------------------------------------------------------
def ln(new, old, p):
    return (np.abs(new - old) ** p).sum() ** (1 / p)


def cosine(new, old, p):
    return 1 - (new * old).sum() / np.sqrt((new**2).sum() * (old**2).sum())


def divergence(new, old, p):
    new, old = (np.exp(array) / np.exp(array).sum(1, keepdims=True) for array in (new, old))
    return (new * np.log(new / old)).sum()


@pytest.mark.parametrize(
    ("name", "p", "naive_distance"),
    [("ln_norm", 2, ln), ("ln_norm", 1, ln), ("ln_norm", 3.5, ln), ("cos_dist", 2, cosine), ("kl_div", 2, divergence)],
)
@pytest.mark.parametrize("sampling", ["elite_sampling", "attentive_sampling"])
def test_the_nearest_unrolls_by_the_chosen_distance_are_kept(name, p, naive_distance, sampling):
    memory, actor = make(
        sample_strategy=sampling,
        lambda_batch_multiplier=5,
        dist_function=name,
        p=p,
        elite_sampling_strategy="strategy1",
    )
    actor.write(10)
    generator = np.random.default_rng(1)
    today = {unroll: generator.normal(size=(4, 2)) for unroll in actor.unrolls()}  # [T, F]
    then = {unroll: generator.normal(size=(4, 2)) for unroll in actor.unrolls()}
    gather = memory.trajectories.gather

    def with_features(streams, serials, spec):
        window = gather(streams, serials, spec)
        stored = np.stack([then[unroll] for unroll in unrolls_of(window)], 1)
        nothing = np.full_like(stored[:1], np.nan)  # the bootstrap step has none
        return window._replace(extras={"features": torch.tensor(np.concatenate([stored, nothing]))})

    memory.trajectories.gather = with_features
    memory.features_of = lambda window: torch.tensor(np.stack([today[unroll] for unroll in unrolls_of(window)], 1))
    newest = np.broadcast_to(today[actor.unrolls()[-1]][-1], (4, 2))
    other = {unroll: newest if sampling == "attentive_sampling" else then[unroll] for unroll in today}
    nearest = sorted(today, key=lambda unroll: naive_distance(today[unroll], other[unroll], p))
    batch = memory.sample(4)
    assert set(unrolls_of(batch.window)) == set(nearest[:4])


def test_attentive_replay_follows_the_newest_state():
    memory, actor = make(**ATTENTIVE, capacity=16, num_envs=1)
    # the agent's position, which goes round in circles
    memory.features_of = lambda window: (window.actions[:-1, :, None] % CODE % 100).float()
    for chunk in range(60):
        actor.write(1)
        memory._ingest()
        if chunk < 16:
            continue
        here = (actor.serial - 1) % 100
        distance = {
            unroll: np.sqrt(sum(((row % 100) - here) ** 2 for row in range(unroll[1], unroll[1] + 4)))
            for unroll in actor.unrolls()[-16:]
        }
        found = sampled(memory)
        assert sorted(distance[unroll] for unroll in found) == pytest.approx(sorted(distance.values())[:4])


# checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", SAMPLINGS)
@pytest.mark.parametrize("insertion", [{}, INSERTION])
@pytest.mark.parametrize("chunks", [3, 40])
def test_sampling_continues_exactly_from_a_state(settings, insertion, chunks):
    memory, actor = make(**settings, **insertion)
    for _ in range(chunks):
        actor.write(1)
        sampled(memory)
    resumed, _ = make(**settings, **insertion, seed=3)
    resumed.load_state_dict(memory.state_dict())
    assert [sampled(resumed) for _ in range(5)] == [sampled(memory) for _ in range(5)]
    assert (
        resumed.statistics() == memory.statistics()
        and (resumed.strategies[0]._draw_counts == memory.strategies[0]._draw_counts).all()
    )


@pytest.mark.parametrize("settings", [{**ELITE}, {**ELITE, **INSERTION}, ATTENTIVE])
def test_lambda_continues_without_the_stored_unrolls(settings):
    memory, actor = make(**settings, lambda_batches=10)
    actor.write(20)
    for _ in range(4):
        sampled(memory)
    resumed, other = make(**settings, lambda_batches=10)
    resumed.continue_at(4)
    assert resumed.sample(4) is None and resumed.statistics() == {
        "replay_steps": 0.0,
        "replay_mb": 0.0,
        "feature_replay_size": 0.0,
        "candidate_multiplier": memory.statistics()["candidate_multiplier"],
    }
    assert not resumed.strategies[0]._draw_counts.any()
    other.write(4)
    assert set(sampled(resumed)) <= set(other.unrolls())
