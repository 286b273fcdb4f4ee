import threading
import time

import numpy as np
import pytest
import torch

from core.learning.batch_source import Prefetcher
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.specs import WindowSpec
from core.types import SampleIds
from tests.core.memories.trees import check_tree
from tests.core.tapes import RandomPlay, small_layout


class Drawn(int):
    """Stand in for a batch: its number among those that a Tape has given."""

    weights: np.ndarray


class Tape:
    """Record who called the memory when, and in which thread."""

    takes_priorities = True

    def __init__(self, batches: int = 1_000_000):
        self.calls: list[tuple] = []
        self.threads: set[int] = set()
        self.batches, self.drawn = batches, 0

    def sample(self, batch_size):
        self.threads.add(threading.get_ident())
        if self.drawn >= self.batches:
            return None
        self.drawn += 1
        self.calls.append(("sample", self.drawn))
        drawn = Drawn(self.drawn)
        drawn.weights = np.ones(batch_size)
        return drawn

    def update_priorities(self, keys, priorities):
        self.threads.add(threading.get_ident())
        self.calls.append(("update", float(priorities[0])))
        if not np.isfinite(priorities).all():
            raise ValueError("priorities must be finite")


KEYS = SampleIds(np.zeros(1, np.int64), np.zeros(1, np.int64))


@pytest.fixture
def prefetch():
    made = []

    def make(memory, batch_size=4, depth=2, together=1):
        made.append(Prefetcher(memory, batch_size, depth, together))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def settle(tape: Tape, drawn: int) -> None:
    end = time.monotonic() + 5
    while tape.drawn < drawn and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)


def test_nothing_is_sampled_ahead_while_the_replay_warms_up():
    tape, warm = Tape(), []
    prefetcher = Prefetcher(tape, 4, 2, is_warming_up=lambda: not warm)
    assert prefetcher.get(0.05) is None and tape.drawn == 0
    warm.append(True)
    assert prefetcher.get(5) is not None
    prefetcher.close()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_arrive_in_the_order_they_were_drawn(prefetch, depth):
    prefetcher = prefetch(Tape(), depth=depth)
    assert [prefetcher.get(5) for _ in range(20)] == list(range(1, 21))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_memory_that_gives_fewer_windows_is_refused(prefetch, depth):
    class Small(Tape):
        def sample(self, batch_size):
            return super().sample(batch_size - 1)

    with pytest.raises(ValueError, match=r"Small.sample\(4\) has returned 3 windows, not 4"):
        prefetch(Small(), depth=depth).get(5)


@pytest.mark.parametrize("depth", [1, 3])
def test_one_batch_is_drawn_ahead_at_first(prefetch, depth):
    tape = Tape()
    prefetcher = prefetch(tape, depth=depth)
    settle(tape, depth)
    assert tape.drawn == len(prefetcher.ready_batches()) == depth
    prefetcher.get(5)
    settle(tape, depth + 1)
    assert tape.drawn == depth + 1


def test_with_depth_zero_the_caller_draws(prefetch):
    tape, threads = Tape(), threading.active_count()
    prefetcher = prefetch(tape, depth=0)
    assert threading.active_count() == threads and tape.drawn == 0
    prefetcher.get(0)
    prefetcher.update_priorities(KEYS, np.ones(1))
    assert prefetcher.call(lambda: 7) == 7
    prefetcher.get(0)
    assert tape.calls == [("sample", 1), ("update", 1.0), ("sample", 2)] and tape.threads == {threading.get_ident()}
    with pytest.raises(ValueError):
        prefetcher.update_priorities(KEYS, np.array([np.nan]))


def test_only_the_prefetching_thread_uses_the_memory(prefetch):
    tape = Tape()
    prefetcher = prefetch(tape, depth=1)
    for update in range(20):
        prefetcher.get(5)
        prefetcher.update_priorities(KEYS, np.array([float(update)]))
    calls = prefetcher.call(lambda: list(tape.calls))
    assert [value for name, value in calls if name == "update"] == list(range(20))
    assert len(tape.threads) == 1 and threading.get_ident() not in tape.threads


def test_an_empty_memory_gives_none_without_busy_waiting(prefetch):
    class Empty(Tape):
        def sample(self, batch_size):
            self.drawn += 1

    tape = Empty()
    prefetcher = prefetch(tape)
    begin = time.monotonic()
    assert prefetcher.get(0.2) is None
    assert 0.19 < time.monotonic() - begin < 2 and tape.drawn < 100


def test_a_memory_that_fills_later_is_noticed(prefetch):
    tape = Tape(batches=0)
    prefetcher = prefetch(tape)
    assert prefetcher.get(0.02) is None
    tape.batches = 10
    assert prefetcher.get(5) == 1


def test_errors_of_the_thread_are_raised_in_the_caller(prefetch):
    class Failing(Tape):
        def sample(self, batch_size):
            raise ZeroDivisionError("inside the memory")

    prefetcher = prefetch(Failing())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="inside the memory"):
            prefetcher.get(5)
    with pytest.raises(ZeroDivisionError):
        prefetcher.call(lambda: 1)


def test_a_bad_priority_is_raised_by_a_later_get(prefetch):
    prefetcher = prefetch(Tape(), depth=1)
    prefetcher.update_priorities(KEYS, np.array([np.nan]))
    with pytest.raises(ValueError, match="finite"):
        for _ in range(1000):
            prefetcher.get(5)


@pytest.mark.parametrize("depth", [0, 2])
def test_call_returns_results_and_errors_and_the_thread_lives(prefetch, depth):
    prefetcher = prefetch(Tape(), depth=depth)
    assert prefetcher.call(lambda: {"a": 1}) == {"a": 1}
    with pytest.raises(KeyError):
        prefetcher.call(lambda: {}["missing"])
    assert prefetcher.get(5) == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_close_ends_the_thread_and_later_calls_are_errors(depth):
    threads = threading.active_count()
    prefetcher = Prefetcher(Tape(), 4, depth)
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() == threads
    for call in (
        lambda: prefetcher.get(1),
        lambda: prefetcher.call(int),
        lambda: prefetcher.update_priorities(KEYS, np.ones(1)),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_prioritized_memory_stays_consistent_under_prefetching(prefetch):
    play = RandomPlay(0, 2)
    layout = small_layout(play.spec, rows=40, chunk_length=4, num_envs=2, with_priority=True)
    memory = PrioritizedMemory(PrioritizedParams(), layout, WindowSpec(3, (0, 3)), 0)
    writer, prefetcher = memory.writer(0), prefetch(memory, 16, 3)
    play.play(writer, 12)
    generator = np.random.default_rng(0)
    for _ in range(300):
        batch = prefetcher.get(5)
        prefetcher.update_priorities(batch.keys, generator.random(16))
        play.play(writer, 1)
    prefetcher.call(lambda: check_tree(memory.tree))
    state = prefetcher.call(lambda: memory.state_dict())
    resumed = PrioritizedMemory(PrioritizedParams(), layout, WindowSpec(3, (0, 3)), 0)
    resumed.load_state_dict(state)
    check_tree(resumed.tree)
    assert resumed.sample(8) is not None


# waiting ----------------------------------------------------------------------------------------------------------
def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_waiting_for_steps_differs_from_waiting_for_a_slow_draw(prefetch):
    tape = Tape(batches=1)
    prefetcher = prefetch(tape, depth=1)
    assert prefetcher.get(5) == 1 and not prefetcher.starved
    assert prefetcher.get(0.05) is None and prefetcher.starved
    tape.batches = 3
    assert prefetcher.get(5) == 2 and prefetcher.starved
    assert prefetcher.get(5) == 3 and not prefetcher.starved


def test_waiting_for_a_draw_that_outlasts_the_timeout_is_no_lack_of_steps(prefetch):
    go_on = threading.Event()

    class Slow(Tape):
        def sample(self, batch_size):
            go_on.wait(20)
            return super().sample(batch_size)

    prefetcher = prefetch(Slow(batches=1), depth=1)
    assert prefetcher.get(0.02) is None and not prefetcher.starved
    go_on.set()
    assert prefetcher.get(5) == 1 and not prefetcher.starved


@pytest.mark.parametrize(("depth", "least"), [(1, 10), (0, 59)])
def test_statistics_report_the_mean_wait_since_the_last_call(prefetch, depth, least):
    class Slow(Tape):
        def sample(self, batch_size):
            time.sleep(0.06)
            return super().sample(batch_size)

    prefetcher = prefetch(Slow(), depth=depth)
    for _ in range(3):
        until(lambda: prefetcher.get(0.005) is not None)  # most waits end in time-outs
    told = prefetcher.statistics()
    assert told.keys() == {"batch_wait_ms"} and least < told["batch_wait_ms"] < 5_000
    assert prefetcher.statistics() == {"batch_wait_ms": 0}


def test_batches_of_one_draw_take_every_third_window(prefetch):
    class Recorded(PrioritizedMemory):
        def sample(self, batch_size):
            drawn.append(super().sample(batch_size))
            return drawn[-1]

    play, drawn = RandomPlay(0, 2), []
    memory = Recorded(
        PrioritizedParams(),
        small_layout(play.spec, rows=64, chunk_length=4, num_envs=2, with_priority=True),
        WindowSpec(1, (0, 1)),
        0,
    )
    play.play(memory.writer(0), 40)
    prefetcher = prefetch(memory, batch_size=5, depth=1, together=3)
    batches = [prefetcher.get(5) for _ in range(6)]
    assert [batch.weights.shape for batch in batches] == [(5,)] * 6 and drawn[0].weights.shape == (15,)
    for start, batch in enumerate(batches):
        whole, part = drawn[start // 3], slice(start % 3, None, 3)
        assert np.array_equal(batch.keys.step_ids, whole.keys.step_ids[part]) and torch.equal(
            batch.weights, whole.weights[part]
        )
        assert torch.equal(batch.window.observations, whole.window.observations[:, part])
        assert torch.equal(batch.window.rewards, whole.window.rewards[:, part])
    assert prefetcher.call(lambda: memory.statistics()["beta"] == memory._start_leaves.rule.beta(3 * len(drawn)))


# checkpoints ------------------------------------------------------------------------------------------------------
def test_ready_batches_are_given_first_after_a_resume(prefetch):
    before = prefetch(Tape(), depth=4)
    settle(before._memory, 4)
    first, second = before.get(1.0), before.get(1.0)
    before.put_back(second)  # as if the learner was interrupted while holding this batch
    settle(before._memory, 5)
    drawn = before.call(before.ready_batches)
    assert (first, drawn[:3]) == (1, [2, 3, 4])
    for depth in (0, 2):
        after = Prefetcher(Tape(), 4, depth, ready_batches=drawn)
        assert [after.get(1.0) for _ in range(len(drawn) + 2)] == [*drawn, 1, 2]
        after.close()
