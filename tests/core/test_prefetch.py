import threading
import time

import numpy as np
import pytest

from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memory import Keys
from core.prefetch import Prefetcher
from core.trajectory import WindowSpec
from tests.core.tapes import RandomPlay, small_layout


class Tape:
    """A memory that writes down who was called when, and by which thread."""

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
        return self.drawn

    def update_priorities(self, keys, priorities):
        self.threads.add(threading.get_ident())
        self.calls.append(("update", float(priorities[0])))
        if not np.isfinite(priorities).all():
            raise ValueError("priorities must be finite")


KEYS = Keys(np.zeros(1, np.int64), np.zeros(1, np.int64))


@pytest.fixture
def prefetch():
    made = []

    def make(memory, batch_size=4, depth=2):
        made.append(Prefetcher(memory, batch_size, depth))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def settle(tape: Tape, drawn: int) -> None:
    end = time.monotonic() + 5
    while tape.drawn < drawn and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_the_order_they_were_drawn(prefetch, depth):
    prefetcher = prefetch(Tape(), depth=depth)
    assert [prefetcher.get(5) for _ in range(20)] == list(range(1, 21))


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_batches_are_drawn_ahead(prefetch, depth):
    tape = Tape()
    prefetcher = prefetch(tape, depth=depth)
    settle(tape, depth)
    assert tape.drawn == depth
    prefetcher.get(5)
    settle(tape, depth + 1)
    assert tape.drawn == depth + 1


def test_with_depth_zero_everything_happens_at_once_in_the_caller(prefetch):
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


def test_only_the_prefetching_thread_touches_the_memory_and_updates_precede_the_next_draw(prefetch):
    tape = Tape()
    prefetcher = prefetch(tape, depth=1)
    for update in range(20):
        prefetcher.get(5)
        prefetcher.update_priorities(KEYS, np.array([float(update)]))
    calls = prefetcher.call(lambda: list(tape.calls))
    assert [value for name, value in calls if name == "update"] == list(range(20))
    assert len(tape.threads) == 1 and threading.get_ident() not in tape.threads


def test_updates_given_while_paused_come_before_the_first_draw_after_it(prefetch):
    tape = Tape()
    prefetcher = prefetch(tape, depth=2)
    settle(tape, 2)
    prefetcher.pause()
    prefetcher.get(1), prefetcher.get(1)
    assert prefetcher.get(0.05) is None and tape.drawn == 2
    prefetcher.update_priorities(KEYS, np.array([5.0]))
    prefetcher.resume()
    assert prefetcher.get(5) == 3 and tape.calls[2:4] == [("update", 5.0), ("sample", 3)]


def test_an_empty_memory_gives_none_after_the_timeout_without_busy_waiting(prefetch):
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
def test_call_returns_results_and_its_own_errors_without_ending_the_thread(prefetch, depth):
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
    for call in (lambda: prefetcher.get(1), lambda: prefetcher.call(int), lambda: prefetcher.update_priorities(KEYS, np.ones(1))):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_prioritised_memory_stays_consistent_under_prefetching(prefetch):
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
    prefetcher.call(memory.tree.check)
    state = prefetcher.call(lambda: memory.state_dict(with_rows=True))
    resumed = PrioritizedMemory(PrioritizedParams(), layout, WindowSpec(3, (0, 3)), 0)
    resumed.load_state_dict(state)
    resumed.tree.check()
    assert resumed.sample(8) is not None
