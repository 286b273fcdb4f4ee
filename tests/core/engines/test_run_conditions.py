"""Checkpoints are requested when they are due."""

from types import SimpleNamespace

import pytest

from core.engines.run_conditions import Conditions
from core.runtime.clock import Clock, ClockParams
from core.single_processes.learner import LearnerParams


@pytest.fixture
def run():
    options = SimpleNamespace(steps=None, updates=None, seconds=None, target_score=None, engine="inline",
                              learner=LearnerParams(checkpoint_steps=100))
    clock = Clock(1, 1, 1, ClockParams())
    return clock, Conditions(SimpleNamespace(clock=clock, options=options))


def test_a_checkpoint_is_requested_once_per_checkpoint_steps(run):
    clock, conditions = run
    asked = []
    for _ in range(10):
        clock.count_agent_steps(0, 30)
        conditions.check()
        asked.append(clock.checkpoint_due)
        clock.checkpoint_written()
    assert [30 * number for number, due in enumerate(asked, 1) if due] == [120, 210, 300]


def test_a_checkpoint_due_during_another_follows_it(run):
    clock, conditions = run
    for _ in range(2):
        clock.count_agent_steps(0, 100)
        conditions.check()
        assert clock.checkpoint_due
    clock.checkpoint_written()
    conditions.check()
    assert clock.checkpoint_due
    clock.checkpoint_written()
    conditions.check()
    assert not clock.checkpoint_due
