import time

from core.runtime.run_state import RunCounters, RunState
from tests.core.tapes import quick_processes


def test_heartbeats_measure_silence_and_can_be_reset():
    run_state = RunState(4)
    assert run_state.seconds_since_heartbeat(2) == 0.0
    run_state.heartbeat(2)
    time.sleep(0.02)
    assert 0.02 <= run_state.seconds_since_heartbeat(2) < 5 and run_state.seconds_since_heartbeat(1) == 0.0
    run_state.reset_heartbeat(2)
    assert run_state.seconds_since_heartbeat(2) == 0.0


def act_and_stop(counters: RunCounters, run_state: RunState) -> None:
    counters.count_agent_steps(1, 7)
    run_state.stop()


def test_another_process_shares_counters_and_the_stop_flag():
    counters, run_state = RunCounters(2, 1), RunState(4)
    process = quick_processes().Process(target=act_and_stop, args=(counters, run_state))
    process.start()
    process.join()
    assert counters.agent_steps == 7 and run_state.stopped


def test_an_interrupt_that_comes_while_the_run_stops_counts(monkeypatch):
    run_state, write = RunState(1), RunState._set_flag

    def write_late(run_state, name, value):
        monkeypatch.undo()
        run_state.stop(interrupt=True)  # as the handler of a signal does
        write(run_state, name, value)

    monkeypatch.setattr(RunState, "_set_flag", write_late)
    run_state.stop()
    assert run_state.stopped and run_state.interrupted
