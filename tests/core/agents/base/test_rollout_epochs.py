"""Steps of a rollout's epochs: which are taken, counted and averaged, whether they are planned or not."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from core.agents.base.rollout_epochs import CompiledStep, RolloutEpochs
from core.agents.ppo import PPOParams
from core.distributed.learner_group import PeerLostError, SingleLearner
from core.learning.gradients import Loss

TRUE = torch.tensor(True)


class Numbers(NamedTuple):
    """Samples that are numbers [N]."""

    values: Tensor

    def select(self, index):
        return Numbers(self.values[index])


class Descent:
    """Learn a weight from the numbers 0, 1, 2, ... by a loss whose slopes are given, one for each minibatch."""

    def __init__(self, slopes, num_samples=4, **settings):
        self.weight, self.samples, self.seen = nn.Parameter(torch.zeros(())), torch.arange(num_samples), []
        params = PPOParams(learning_rate=0.1, clip_norm=0.0, **settings)
        self.part = RolloutEpochs([self.weight], params, num_samples, lambda: 0.0)
        self._slopes: Iterator[float] = iter(slopes)

    def loss_of(self, minibatch):
        self.seen.append(minibatch.values.tolist())
        slope = next(self._slopes)
        return lambda part: Loss(self.weight * slope, {"slope": torch.tensor(slope)})

    def learn(self, planned=False, **more):
        if planned:
            self.part.plan(1)
        return self.part.learn(Numbers(self.samples), len(self.samples), self.loss_of, TRUE, **more)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("slopes", [[1.0, torch.nan, 2.0, 3.0], [1.0, 2.0, 3.0, torch.nan], [1.0, 2.0, 3.0, 4.0]])
def test_an_update_is_applied_if_every_step_was(slopes, planned):
    descent = Descent(slopes, epochs=2, minibatches=2)
    _, applied = descent.learn(planned)
    assert bool(applied) == (slopes[-1] == 4.0) and descent.weight.isfinite()


@pytest.mark.parametrize("planned", [False, True])
def test_no_epoch_follows_one_that_was_the_last(planned):
    """A planned update computes the other epochs as well, in which `continue_if` may change its mind."""
    short, answers = Descent([1.0, 3.0], epochs=1, minibatches=2), iter([False, True])
    short.learn()
    descent = Descent([1.0, 3.0, 50.0, 60.0, 70.0, 80.0], epochs=3, minibatches=2)
    statistics, applied = descent.learn(planned, continue_if=lambda statistics: torch.tensor(next(answers)))
    assert descent.weight.item() == short.weight.item() != 0 and bool(applied)
    assert (float(statistics["slope"]), float(statistics["epochs"])) == (2.0, 1.0)
    assert descent.part.optimizer.state_dict()["updates"] == descent.part.steps == 6


def test_every_minibatch_sends_a_heartbeat_which_no_lost_learner_ends():
    descent, group, beats = Descent([1.0] * 6, epochs=3, minibatches=2), SingleLearner(), []

    def heartbeat():
        beats.append(len(descent.seen))
        raise PeerLostError("learner 1 was lost")

    group.heartbeat = heartbeat
    group.run(descent.learn)
    assert beats == [0, 1, 2, 3, 4, 5]


def test_another_epoch_is_asked_for_by_the_last_minibatch_of_an_epoch():
    asked = []
    descent = Descent([1.0, 3.0, 5.0, 7.0], epochs=2, minibatches=2)
    descent.learn(continue_if=lambda statistics: torch.tensor(not asked.append(float(statistics["slope"]))))
    assert asked == [3.0]  # nothing follows the last epoch


@pytest.mark.parametrize(("num_samples", "minibatches", "sizes"), [(7, 3, [3, 2, 2]), (3, 5, [1, 1, 1]), (4, 1, [4])])
def test_minibatches_are_of_nearly_equal_sizes(num_samples, minibatches, sizes):
    descent = Descent([1.0] * 2 * len(sizes), num_samples, epochs=2, minibatches=minibatches)
    descent.learn()
    assert [len(numbers) for numbers in descent.seen] == 2 * sizes
    for epoch in (descent.seen[: len(sizes)], descent.seen[len(sizes) :]):
        assert sorted(number for part in epoch for number in part) == list(range(num_samples))


def test_results_of_a_compiled_step_stay_after_the_next():
    step = CompiledStep(
        lambda minibatch, continues: (2 * minibatch, continues & TRUE), torch.ones(1), TRUE, lambda work, _: work
    )
    first, second = step(torch.tensor([1.0]), TRUE), step(torch.tensor([5.0]), ~TRUE)
    assert [part.tolist() for part in (*first, *second)] == [[2.0], True, [10.0], False]
