import threading
import time

import numpy as np
import pytest
import torch

from core.learning.prefetcher import Prefetcher
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.specs import WindowSpec
from core.types import SampleIds
from tests.core.tapes import RandomPlay, small_layout


class Tape:
    """A memory that writes down who was called when, and by which thread."""

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
        return self.drawn

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


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_come_in_the_order_they_were_drawn(prefetch, depth):
    prefetcher = prefetch(Tape(), depth=depth)
    assert [prefetcher.get(5) for _ in range(20)] == list(range(1, 21))


@pytest.mark.parametrize("depth", [1, 3])
def test_at_first_one_batch_is_drawn_ahead(prefetch, depth):
    tape = Tape()
    prefetcher = prefetch(tape, depth=depth)
    settle(tape, 1)
    assert tape.drawn == 1
    prefetcher.get(5)
    settle(tape, 2)
    assert tape.drawn == 2


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
    settle(tape, 1)
    prefetcher.pause()
    prefetcher.get(1)
    assert prefetcher.get(0.05) is None and tape.drawn == 1
    prefetcher.update_priorities(KEYS, np.array([5.0]))
    prefetcher.resume()
    assert prefetcher.get(5) == 2 and tape.calls[1:3] == [("update", 5.0), ("sample", 2)]


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
    state = prefetcher.call(lambda: memory.state_dict())
    resumed = PrioritizedMemory(PrioritizedParams(), layout, WindowSpec(3, (0, 3)), 0)
    resumed.load_state_dict(state)
    resumed.tree.check()
    assert resumed.sample(8) is not None


# depth ----------------------------------------------------------------------------------------------------------------
class Slow(Tape):
    """A draw takes `seconds`; before a batch the memory says `nothings` times that it has no rows."""

    def __init__(self, seconds: float = 0.0, nothings: int = 0):
        super().__init__()
        self.seconds, self.nothings, self.said, self.attempts = seconds, nothings, 0, 0

    def sample(self, batch_size):
        self.attempts += 1
        if self.said < self.nothings:
            self.said += 1
            return None
        self.said = 0
        time.sleep(self.seconds)
        return super().sample(batch_size)


def depth_of(prefetcher) -> int:
    return int(prefetcher.statistics()["prefetch_depth"])


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def grown(prefetcher, tape, depth: int) -> None:
    """A learner that is faster than the draws until the depth has grown so far."""
    tape.seconds = 0.005
    until(lambda: prefetcher.get(5) and depth_of(prefetcher) == depth)
    tape.seconds = 0.0


def test_draws_slower_than_the_learner_are_prepared_further_ahead_but_never_beyond_the_most(prefetch):
    tape = Slow()
    prefetcher = prefetch(tape, depth=3)
    depths = []
    tape.seconds = 0.005
    until(lambda: prefetcher.get(5) and depths.append(depth_of(prefetcher)) is None and depths[-1] == 3)
    assert depths == sorted(depths) and set(depths) <= {1, 2, 3}
    assert all(prefetcher.get(5) and depth_of(prefetcher) == 3 for _ in range(20))
    settle(tape, tape.drawn + 3)
    ahead = tape.drawn
    assert [prefetcher.get(5) for _ in range(3)] == [ahead - 2, ahead - 1, ahead]


def test_batches_that_are_always_ready_are_prepared_less_far_ahead_down_to_one(prefetch, monkeypatch):
    monkeypatch.setattr("core.learning.prefetcher.SMOOTH_GETS", 5)
    tape = Slow()
    prefetcher = prefetch(tape, depth=3)
    grown(prefetcher, tape, 3)
    monkeypatch.setattr("core.learning.prefetcher.LONG_WAIT", 5.0)  # this machine may be busy
    depths = []
    for _ in range(20):
        prefetcher.get(5)
        depths.append(depth_of(prefetcher))
    assert depths == [3] * 4 + [2] * 5 + [1] * 11
    time.sleep(0.05)
    assert tape.drawn == prefetcher.get(5)  # one was ready


def test_one_long_wait_starts_the_count_of_ready_batches_again(prefetch, monkeypatch):
    monkeypatch.setattr("core.learning.prefetcher.SMOOTH_GETS", 5)
    tape = Slow()
    prefetcher = prefetch(tape, depth=2)
    grown(prefetcher, tape, 2)
    for waits in ([5.0] * 4, [-1.0], [5.0] * 4):
        for wait in waits:  # no wait is long, or every one is
            monkeypatch.setattr("core.learning.prefetcher.LONG_WAIT", wait)
            prefetcher.get(5)
        assert depth_of(prefetcher) == 2
    prefetcher.get(5)
    assert depth_of(prefetcher) == 1


@pytest.mark.parametrize("nothings", [1, 3])
def test_waiting_for_rows_makes_no_difference(prefetch, monkeypatch, nothings):
    monkeypatch.setattr("core.learning.prefetcher.SMOOTH_GETS", 5)
    tape = Slow(nothings=nothings)
    prefetcher = prefetch(tape, depth=3)
    for number in range(20):
        assert prefetcher.get(5) == number + 1 and depth_of(prefetcher) == 1


def test_waiting_for_rows_makes_no_difference_also_where_several_batches_are_ready(prefetch, monkeypatch):
    monkeypatch.setattr("core.learning.prefetcher.SMOOTH_GETS", 1_000)
    tape = Slow()
    prefetcher = prefetch(tape, depth=3)
    grown(prefetcher, tape, 2)
    tape.nothings = 1
    monkeypatch.setattr("core.learning.prefetcher.RETRY_SECONDS", 0.02)
    for _ in range(5):
        until(lambda: len(prefetcher._batches) == 2)
        prefetcher.get(5)
        until(lambda: tape.said or len(prefetcher._batches) == 2)  # no rows for the next draw, found while another batch is ready
        prefetcher.get(5), prefetcher.get(5)
        assert depth_of(prefetcher) == 2


def test_waiting_for_rows_neither_raises_nor_lowers_the_depth(prefetch, monkeypatch):
    monkeypatch.setattr("core.learning.prefetcher.SMOOTH_GETS", 5)
    tape = Slow()
    prefetcher = prefetch(tape, depth=3)
    grown(prefetcher, tape, 2)
    tape.nothings = 1
    monkeypatch.setattr("core.learning.prefetcher.LONG_WAIT", 5.0)
    assert all(prefetcher.get(5) for _ in range(3))  # at most so many were drawn before there were no rows
    monkeypatch.setattr("core.learning.prefetcher.LONG_WAIT", -1.0)
    assert all(prefetcher.get(5) and depth_of(prefetcher) == 2 for _ in range(10))
    tape.nothings = 0
    assert all(prefetcher.get(5) for _ in range(5)) and depth_of(prefetcher) == 3


def test_statistics_tell_the_depth_and_the_mean_wait_since_they_were_last_told(prefetch):
    tape = Slow(seconds=0.06)
    prefetcher = prefetch(tape, depth=1)
    for _ in range(3):
        until(lambda: prefetcher.get(0.005) is not None)  # most of the waiting ends in time-outs
    told = prefetcher.statistics()
    assert told.keys() == {"prefetch_depth", "prefetch_wait_ms"}
    assert told["prefetch_depth"] == 1 and 10 < told["prefetch_wait_ms"] < 5_000
    assert prefetcher.statistics() == {"prefetch_depth": 1, "prefetch_wait_ms": 0}


def test_without_a_thread_nothing_is_ever_kept_ready(prefetch):
    prefetcher = prefetch(Tape(), depth=0)
    prefetcher.get(0)
    assert prefetcher.statistics() == {"prefetch_depth": 0, "prefetch_wait_ms": 0}


def test_batches_drawn_together_each_take_every_third_window_of_one_draw(prefetch):
    class Recorded(PrioritizedMemory):
        def sample(self, batch_size):
            drawn.append(super().sample(batch_size))
            return drawn[-1]

    play, drawn = RandomPlay(0, 2), []
    memory = Recorded(PrioritizedParams(), small_layout(play.spec, rows=64, chunk_length=4, num_envs=2, with_priority=True),
                      WindowSpec(1, (0, 1)), 0)
    play.play(memory.writer(0), 40)
    prefetcher = prefetch(memory, batch_size=5, depth=1, together=3)
    batches = [prefetcher.get(5) for _ in range(6)]
    assert [batch.weights.shape for batch in batches] == [(5,)] * 6 and drawn[0].weights.shape == (15,)
    for start, batch in enumerate(batches):
        whole, part = drawn[start // 3], slice(start % 3, None, 3)
        assert np.array_equal(batch.keys.step_ids, whole.keys.step_ids[part]) and torch.equal(batch.weights, whole.weights[part])
        assert torch.equal(batch.window.observations, whole.window.observations[:, part])
        assert torch.equal(batch.window.rewards, whole.window.rewards[:, part])
    prefetcher.pause()
    assert memory.beta == memory.rule.beta(3 * len(drawn))


# a checkpoint -----------------------------------------------------------------------------------------------------------
def test_batches_that_were_ready_are_given_first_after_a_resume_and_then_what_the_memory_gives(prefetch):
    before = prefetch(Tape(), depth=4)
    before._depth = 4
    settle(before._memory, 4)
    first, second = before.get(1.0), before.get(1.0)
    before.put_back(second)  # the learner was interrupted with it in its hand
    settle(before._memory, 5)
    drawn = before.call(before.drawn)
    assert (first, drawn[:3]) == (1, [2, 3, 4])
    for depth in (0, 2):
        after = Prefetcher(Tape(), 4, depth, drawn=drawn)
        assert [after.get(1.0) for _ in range(len(drawn) + 2)] == [*drawn, 1, 2]
        after.close()
