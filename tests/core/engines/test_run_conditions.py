"""Checkpoints are requested when they are due, and one at the end."""

from functools import partial
from types import SimpleNamespace

import pytest

from core.engines.run_end import Conditions
from core.runtime import run_state as run_state_module
from core.runtime.context import Context
from core.runtime.options import LearnerParams
from core.runtime.run_state import RunCounters, RunState


@pytest.fixture
def run():
    options = SimpleNamespace(
        mode=1,
        steps=None,
        updates=None,
        seconds=None,
        target_score=None,
        engine="inline",
        learner=LearnerParams(checkpoint_steps=100),
    )
    counters, run_state = RunCounters(1, 1), RunState(1)
    return counters, run_state, Conditions(context_of(counters, run_state, options))


def context_of(counters, run_state, options):
    context = SimpleNamespace(counters=counters, run_state=run_state, options=options)
    context.reached_limits = partial(Context.reached_limits, context)
    return context


def test_a_checkpoint_is_requested_once_per_checkpoint_steps(run):
    counters, run_state, conditions = run
    asked = []
    for _ in range(10):
        counters.count_agent_steps(0, 30)
        conditions.check()
        asked.append(run_state.checkpoint_due)
        run_state.confirm_checkpoint()
    assert [30 * number for number, due in enumerate(asked, 1) if due] == [120, 210, 300]


def test_a_checkpoint_due_during_another_follows_it(run):
    counters, run_state, conditions = run
    for _ in range(2):
        counters.count_agent_steps(0, 100)
        conditions.check()
        assert run_state.checkpoint_due
    run_state.confirm_checkpoint()
    conditions.check()
    assert run_state.checkpoint_due
    run_state.confirm_checkpoint()
    conditions.check()
    assert not run_state.checkpoint_due


def test_a_run_that_stops_is_due_its_last_checkpoint_and_no_other(run):
    counters, run_state, conditions = run
    conditions._options.steps = 250
    counters.count_agent_steps(0, 250)
    conditions.check()
    assert run_state.stopped and run_state.checkpoint_due
    run_state.confirm_checkpoint()
    counters.count_agent_steps(0, 250)
    conditions.check()
    assert not run_state.checkpoint_due


def test_a_test_has_no_stop_conditions(run):
    counters, run_state, conditions = run
    conditions._options.mode, conditions._options.steps, conditions._options.seconds = 2, 1, 1e-9
    counters.count_agent_steps(0, 250)
    conditions.check()
    assert not run_state.stopped and not run_state.checkpoint_due


def test_checkpoints_by_steps_come_beside_those_of_the_period(run):
    counters, run_state, conditions = run
    options = conditions._options
    options.engine, options.learner = "local", LearnerParams(checkpoint_steps=10**9, checkpoint_period=1e-9)
    Conditions(context_of(counters, run_state, options)).check()
    assert run_state.checkpoint_due


def test_the_period_begins_when_a_checkpoint_is_saved(run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_state_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counters, run_state, conditions = run
    options = conditions._options
    options.engine, options.learner = "local", LearnerParams(checkpoint_period=60.0)
    conditions, due = Conditions(context_of(counters, run_state, options)), []
    for now[0] in range(0, 300, 10):
        if run_state.checkpoint_due and now[0] >= due[-1] + 70:  # a save takes longer than the period
            run_state.confirm_checkpoint()
        was_due = run_state.checkpoint_due
        conditions.check()
        if run_state.checkpoint_due and not was_due:
            due.append(now[0])
    assert due == [60, 190]  # saved at 130 and 260
