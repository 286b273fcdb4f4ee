"""When a checkpoint is asked for."""

from types import SimpleNamespace

import pytest

from core.engines.run_conditions import Conditions
from core.runtime.clock import Clock, ClockParams
from core.runtime.options import LearnerParams


@pytest.fixture
def run():
    options = SimpleNamespace(steps=None, updates=None, seconds=None, target_score=None, engine="inline",
                              learner=LearnerParams(checkpoint_steps=100))
    clock = Clock(1, 1, 1, ClockParams())
    return clock, Conditions(SimpleNamespace(clock=clock, options=options))


def test_a_checkpoint_is_asked_for_once_in_so_many_steps(run):
    clock, conditions = run
    asked = []
    for _ in range(10):
        clock.count_agent_steps(0, 30)
        conditions.check()
        asked.append(clock.checkpoint_due)
        clock.checkpoint_written()
    assert [30 * number for number, due in enumerate(asked, 1) if due] == [120, 210, 300]


def test_a_checkpoint_that_falls_due_while_another_is_written_comes_after_it(run):
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
