"""Learners act on a common status, and those that are not alike are noticed."""

from types import SimpleNamespace

import pytest
import torch

from core.distributed.learner_group import LearnersOutOfSyncError, LearnerStatus, SyncChecker, state_digest


def checker(weight=1.0, updates=0, period=2):
    return SyncChecker(
        SimpleNamespace(state_dict=lambda: {"model": {"weight": torch.tensor([weight])}, "updates": 3}), updates, period
    )


def test_any_learner_stops_the_first_is_due_and_counts_steps_and_all_need_a_batch():
    def merged(*rows):
        return checker(period=0).merge_statuses([[*row, steps, 0, 0] for row, steps in zip(rows, (50, 70))])[:4]

    assert merged((0, 1, 1), (0, 0, 1)) == (False, 1, True, 50)
    assert merged((0, 0, 1), (1, 1, 1)) == (True, 0, True, 50)
    assert merged((0, 0, 1), (0, 0, 0)) == (False, 0, False, 50)


def test_a_single_learner_acts_on_its_own_status():
    assert checker().merge_statuses([[1, 0, 1, 50, 7, 0]]) == LearnerStatus(1, 0, 1, 50, 7, 0)


def test_states_are_compared_before_the_first_update_and_then_every_period():
    alike, compared = checker(updates=5, period=2), []
    for alike.updates in range(5, 10):
        updates, digest = alike.local_status()
        compared.append(bool(digest))
        alike.merge_statuses([[0, 0, 1, 50, updates, digest]] * 2)
    assert compared == [True, True, False, True, False]
    never = checker(period=0)
    assert never.local_status() == (0, 0)


@pytest.mark.parametrize(
    "name, other", [("updates", checker(updates=1, period=0)), ("digest", checker(weight=1 + 1e-6))]
)
def test_learners_that_are_not_alike_are_an_error_that_names_the_difference(name, other):
    own = checker(period=0 if name == "updates" else 2)
    rows = [[0, 0, 1, 50, *each.local_status()] for each in (own, other)]
    with pytest.raises(
        LearnersOutOfSyncError, match=f"after 0 updates the learners are not alike any more: {name} of learners 0 to 1"
    ) as error:
        own.merge_statuses(rows)
    assert ("such as statistics of BatchNorm" in str(error.value)) == (name == "digest")


def test_a_digest_sees_values_names_and_nesting_and_not_the_device_layout():
    state = {"a": torch.arange(6.0).view(2, 3), "b": [1, (2.0, "x")]}
    copied = {"a": state["a"].T.contiguous().T, "b": [1, (2.0, "x")]}
    assert state_digest(state) == state_digest(copied) and -(2**63) <= state_digest(state) < 2**63
    for changed in (
        {**state, "b": [1, (2.0, "y")]},
        {"c": state["a"], "b": state["b"]},
        {**state, "a": state["a"] + 1e-6},
    ):
        assert state_digest(changed) != state_digest(state)
