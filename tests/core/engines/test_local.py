"""The local engine ends a run within its deadlines, on a simulated clock with simulated processes."""

import signal
from types import SimpleNamespace

import pytest

from core.engines import local, supervisor
from core.engines.local import LocalEngine
from core.runtime.options import SupervisorParams
from core.runtime.run_state import RunState

PARAMS = SupervisorParams(stop_timeout=10.0, finish_timeout=900.0)


class Evaluator:
    """Simulate the last evaluation of a finished run, during which the first Ctrl-C arrives."""

    def __init__(self, engine: LocalEngine, interrupted: float, saved: float):
        """Set the second of the engine's waiting at which the signal arrives, and the seconds until exit after it."""
        self.engine, self.interrupted, self.saved, self.seconds, self.killed_at = engine, interrupted, saved, 0.0, None

    def wait(self, places):
        self.seconds += 0.5
        if self.seconds == self.interrupted:
            self.engine._interrupt(signal.SIGINT, None)

    @property
    def exitcode(self):
        return 0 if self.seconds >= self.interrupted + self.saved else None

    def kill(self):
        self.killed_at = self.seconds

    def join(self):
        pass


@pytest.mark.parametrize("interrupted", [9.0, 800.0])
@pytest.mark.parametrize(("saved", "killed_after"), [(4.0, None), (9.5, None), (60.0, 10.5)])
def test_a_signal_in_the_last_evaluation_grants_the_stop_timeout(monkeypatch, interrupted, saved, killed_after):
    run_state = RunState(1)
    options = SimpleNamespace(supervisor=PARAMS, learner=SimpleNamespace(checkpoint_replay=False))
    engine = LocalEngine(SimpleNamespace(options=options, run_state=run_state, roles=[("evaluator", 0)]), {})
    (place,) = engine._places
    place.process = evaluator = Evaluator(engine, interrupted, saved)
    place.failure = SimpleNamespace(poll=lambda: True, recv=lambda: None)
    monkeypatch.setattr(engine, "_wait", evaluator.wait)
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: evaluator.seconds))
    run_state.stop()
    engine._await([place])
    assert place.ended and evaluator.killed_at == (killed_after and interrupted + killed_after)


def test_exits_before_the_restart_window_do_not_count(monkeypatch):
    seconds, place = [0.0], supervisor.Place("actor", 0, 1)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    found = []
    for seconds[0] in (0.0, 4.0, 8.0, 11.0, 30.0):
        place.count_death(10.0)
        found.append(place.restarts)
    assert found == [0, 1, 2, 2, 0]
