"""The inline engine takes its turns, ends on signals and tells an early error from a late one."""

import signal
from types import SimpleNamespace

import pytest

from core.common import processes
from core.common.foreign_code import foreign_code
from core.engines.inline import InlineEngine
from core.runtime.run_state import RunCounters, RunState


def engine(role, process):
    options = SimpleNamespace(
        mode=2,
        engine="inline",
        **dict.fromkeys(("steps", "updates", "seconds", "target_score")),
        learner=SimpleNamespace(checkpoint_steps=0, checkpoint_period=60.0),
    )
    context = SimpleNamespace(
        options=options, roles=((role, 0),), counters=RunCounters(1, 1), run_state=RunState(1), memories={}
    )
    return InlineEngine(context, {role: process})


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_request_ends_a_run_whose_environment_is_stuck(numbers, monkeypatch):
    monkeypatch.setattr(processes, "SAME_REQUEST", 0.0)

    def stuck(context, index):
        with foreign_code("the environment"):
            for number in numbers:
                signal.raise_signal(number)
            raise AssertionError("the second request was ignored")
        yield True

    before = signal.getsignal(signal.SIGINT)
    assert engine("actor", stuck).run() == 128 + numbers[0]
    assert signal.getsignal(signal.SIGINT) == before


def test_after_an_error_the_logger_ends_last():
    closed = []

    def single_process(role):
        def running(context, index):
            try:
                while not (context.run_state.stopped and role == "learner"):
                    yield False
                    if role == "actor":
                        raise ValueError("a fault")
            finally:
                closed.append(role)

        return running

    roles = ("logger", "actor", "learner", "evaluator")
    running = engine("logger", single_process("logger"))
    running._context.roles = tuple((role, 0) for role in roles)
    running._processes = {role: single_process(role) for role in roles}
    assert running.run() and closed[-1] == "logger"


def test_an_interrupted_test_ends_in_order():
    ended = []

    def tester(context, index):
        while not context.run_state.interrupted:
            signal.raise_signal(signal.SIGINT)
            yield True
        ended.append(index)

    assert engine("tester", tester).run() == 130 and ended == [0]


def test_an_environment_whose_program_died_of_ctrl_c_ends_the_run_in_order(capsys):
    def stepping(context, index):
        signal.raise_signal(signal.SIGINT)
        raise EOFError("the program has gone")
        yield True

    assert engine("tester", stepping).run() == 130 and "EOFError" not in capsys.readouterr().err


@pytest.mark.parametrize(("turns", "exit_code"), [(0, 2), (1, 4)])
def test_a_missing_package_is_a_bad_option_at_the_start_only(turns, exit_code):
    def lacking(context, index):
        for _ in range(turns):
            yield True
        raise ImportError("no such package")

    assert engine("tester", lacking).run() == exit_code
