"""The learner's parts: batches in pieces that fit, their joined output, and features by the published weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.agent import LearnerOutput, joined
from core.agents.impala import Impala
from core.memories.mixed import MixedMemory
from core.memories.prioritized import PrioritizedMemory
from core.memories.queue import QueueMemory
from core.memories.shared import SharedMemory
from core.memory import Batch, Keys, batch_size, piece
from core.parameters import ParameterStore
from core.single_processes.learner import Statistics
from core.single_processes.updates import Pieces, feature_source
from core.windows import Window
from tests.core.agents.unrolls import Table, random_unrolls, table_agent


def numbered_batch(size, fresh=True):
    """Windows of T + 1 = 3 rows; every element of every field says which window it belongs to."""
    number = torch.arange(size)
    rows = number.expand(3, -1)
    return Batch(Window(rows[..., None], rows % 2 == 0, rows % 3 == 0, rows, rows.float(), rows / 10, {"logits": rows[..., None] + 0.5},
                        (number[:, None] * 2, number * 3)),
                 Keys(np.arange(size), np.arange(size) + 100), number / 4, number % 2 == 0 if fresh else None)


class Limited:
    """An agent that runs out of memory above `most` windows."""

    def __init__(self, most, priorities=True, skips=()):
        self.most, self.with_priorities, self.skips = most, priorities, skips
        self.learnt, self.attempts = [], []

    def learn(self, batch):
        size = batch_size(batch)
        self.attempts.append(size)
        if size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.learnt.append(batch.keys.streams.tolist())
        skipped = len(self.learnt) - 1 in self.skips
        statistics = {"loss": torch.tensor(float("nan") if skipped else float(len(self.learnt)))}
        return LearnerOutput(statistics, batch.weights * 4 if self.with_priorities else None, skipped)


def windows(learnt):
    return [window for part in learnt for window in part]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 6), slice(6, 9)])
def test_a_piece_has_every_field_of_its_windows_and_nothing_else(part, fresh):
    batch = numbered_batch(7, fresh)
    some = piece(batch, part)
    chosen = list(range(7))[part]
    assert batch_size(some) == len(chosen)
    expected = numbered_batch(7, fresh)
    for name in Window._fields[:6]:
        assert torch.equal(getattr(some.window, name), getattr(expected.window, name)[:, chosen]), name
    assert torch.equal(some.window.extras["logits"], expected.window.extras["logits"][:, chosen])
    assert [state.tolist() for state in some.window.states] == [[[2 * number] for number in chosen], [3 * number for number in chosen]]
    assert some.keys.streams.tolist() == chosen and some.keys.serials.tolist() == [100 + number for number in chosen]
    assert some.weights.tolist() == [number / 4 for number in chosen]
    assert (some.fresh is None) == (not fresh) and (not fresh or some.fresh.tolist() == [number % 2 == 0 for number in chosen])


@pytest.mark.parametrize(("size", "most", "sizes", "pieces"), [
    (8, 8, [], [8]), (8, 4, [4], [4, 4]), (8, 3, [4, 2], [2, 2, 2, 2]), (7, 4, [4], [4, 3]), (7, 1, [4, 2, 1], [1] * 7),
    (9, 2, [5, 3, 2], [2, 2, 2, 2, 1])])
def test_a_batch_that_does_not_fit_is_halved_until_it_does_and_every_window_learnt_once_in_order(capsys, size, most, sizes, pieces):
    agent = Limited(most)
    learn = Pieces(agent, shrink=True)
    output = learn(numbered_batch(size))
    assert [len(part) for part in agent.learnt] == pieces and windows(agent.learnt) == list(range(size))
    assert agent.attempts[:len(sizes) + 1] == [size, *sizes]
    assert output.priorities.tolist() == list(range(size))
    assert float(output.statistics["loss"]) == np.mean(np.arange(len(pieces)) + 1)
    printed = capsys.readouterr().err.splitlines()
    assert printed == [f"out of GPU memory: batches of {size} are learnt in pieces of {smaller} from now on" for smaller in sizes]
    assert learn.statistics() == {"batch_size": float((sizes or [size])[-1])}


def test_later_batches_are_learnt_in_the_pieces_that_fitted(capsys):
    agent = Limited(4)
    learn = Pieces(agent, shrink=True)
    learn(numbered_batch(8))
    agent.attempts.clear(), capsys.readouterr()
    learn(numbered_batch(8))
    assert agent.attempts == [4, 4] and capsys.readouterr().err == ""


def test_memory_that_runs_out_amid_a_batch_costs_and_repeats_no_window():
    agent = Limited(4)
    learn = Pieces(agent, shrink=True)
    learn(numbered_batch(8))
    agent.learnt.clear()
    remaining = iter([4, 2, 2, 2, 2])
    original = agent.learn

    def learn_with_less(batch):
        agent.most = next(remaining)
        return original(batch)

    agent.learn = learn_with_less
    learn(numbered_batch(8))
    assert agent.learnt == [[0, 1, 2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("shrink", "size", "most"), [(False, 8, 4), (True, 1, 0), (True, 8, 0)])
def test_where_nothing_can_be_done_the_error_is_raised(capsys, shrink, size, most):
    agent = Limited(most)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        Pieces(agent, shrink)(numbered_batch(size))
    assert agent.learnt == [] and len(capsys.readouterr().err.splitlines()) == (3 if shrink and size == 8 else 0)


def test_the_failed_attempts_tensors_are_let_go_before_the_next(monkeypatch):
    alive = []

    class Kept:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    class Hungry(Limited):
        def learn(self, batch):
            activations = Kept()
            return super().learn(batch) if activations else None

    seen = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(len(alive)))
    Pieces(Hungry(2), shrink=True)(numbered_batch(8))
    assert seen == [0, 0]


def test_without_shrinking_there_is_nothing_to_report_and_the_batch_is_passed_on_as_it_is():
    seen = []
    learn = Pieces(SimpleNamespace(learn=lambda batch: seen.append(batch) or LearnerOutput({}, None)), shrink=False)
    batch = numbered_batch(4)
    learn(batch)
    assert seen[0] is batch and learn.statistics() == {}


def test_pieces_without_priorities_have_none_together():
    assert Pieces(Limited(2, priorities=False), shrink=True)(numbered_batch(4)).priorities is None


def test_of_the_pieces_only_those_that_changed_something_count():
    output = Pieces(Limited(2, skips=(1,)), shrink=True)(numbered_batch(6))
    assert not output.skipped and float(output.statistics["loss"]) == (1 + 3) / 2
    assert Pieces(Limited(2, skips=(0, 1, 2)), shrink=True)(numbered_batch(6)).skipped


def test_joined_priorities_are_all_or_none():
    sound = LearnerOutput({"loss": torch.tensor(1.0)}, torch.ones(2))
    broken = LearnerOutput({"loss": torch.tensor(5.0)}, None, skipped=True)
    assert joined([sound, broken, sound]).priorities is None
    assert joined([sound, sound]).priorities.tolist() == [1] * 4


def test_pieces_of_an_actor_critics_batch_are_updates_of_their_own():
    batch, logits, values = random_unrolls(seed=0, streams=6)
    whole, halves = (table_agent(Impala, logits, values) for _ in range(2))
    whole.learn(piece(batch, slice(0, 3))), whole.learn(piece(batch, slice(3, 6)))
    learn_as_before = halves.learn

    def learn_at_most_three(part):
        if batch_size(part) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return learn_as_before(part)

    halves.learn = learn_at_most_three
    Pieces(halves, shrink=True)(batch)
    assert torch.equal(whole.model.logits, halves.model.logits) and torch.equal(whole.model.values, halves.model.values)


# features -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def source():
    """The learner's network, the published parameters, features by them, and a batch."""
    batch, logits, values = random_unrolls(seed=1, length=3, streams=4)
    logits, values = logits.astype(np.float32), values.astype(np.float32)
    agent = table_agent(Impala, logits, values)
    store = ParameterStore(ParameterStore.size_of(agent.model))
    context = SimpleNamespace(parameters=store, make_agent=lambda device: table_agent(Impala, 0 * logits, 0 * values))
    features_of = feature_source(context, "cpu")
    store.publish(agent.model)
    return agent.model, store, features_of, batch.window


def test_features_follow_what_was_published_and_not_the_weights_in_the_making(source):
    model, store, features_of, window = source
    published = model.logits.detach().clone()
    expected = published[window.observations[:-1, :, 0]]  # [T, B, F]
    assert torch.equal(features_of(window), expected)
    model.logits.data.add_(1.0)
    assert torch.equal(features_of(window), expected)
    store.publish(model)
    assert torch.equal(features_of(window), expected + 1)
    assert torch.equal(model.logits, published + 1)


def test_features_draw_nothing_from_the_learners_random_state(source):
    _, _, features_of, window = source
    before = torch.get_rng_state()
    features_of(window)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_network_of_the_features_is_made_before_the_learners_random_state_is_restored():
    made = []

    def make_agent(device):
        return Impala(Impala.Params(), None, lambda: made.append(device) or Table(np.zeros((1, 4)), np.zeros(1)))

    feature_source(SimpleNamespace(parameters=None, make_agent=make_agent), "cpu:0")
    assert made == ["cpu:0"]


# statistics -----------------------------------------------------------------------------------------------------------
def test_statistics_are_means_of_the_updates_that_were_taken_and_leave_what_they_are_given_as_it_is():
    statistics, losses = Statistics(), torch.tensor([1.0, 4.0, 100.0, 7.0])
    for number, skipped in enumerate([False, False, True, False]):
        statistics.add({"loss": losses[number], "count": torch.tensor(number)}, skipped)
    assert statistics.take() == {"loss": 4.0, "count": pytest.approx(4 / 3), "skipped_updates": 1.0}
    assert losses.tolist() == [1.0, 4.0, 100.0, 7.0]
    assert statistics.take() == {"skipped_updates": 1.0}
    statistics.add({"loss": losses[0]}, False)
    assert statistics.take() == {"loss": 1.0, "skipped_updates": 1.0}


def test_only_rules_that_do_something_with_priorities_are_given_them():
    assert PrioritizedMemory.__new__(PrioritizedMemory).takes_priorities
    for rule in (SharedMemory, QueueMemory, MixedMemory):
        assert not rule.__new__(rule).takes_priorities, rule
