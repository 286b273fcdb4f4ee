"""The supervisor's decisions, by a clock of the test's own and processes that only say whether they have ended."""

import dataclasses
import signal
from types import SimpleNamespace

import pytest

from core.common import processes
from core.engines import supervisor
from core.engines.launcher import ExitStatus, ReportedError
from core.engines.supervisor import Supervisor
from core.runtime import run_state as run_state_module
from core.runtime.options import SupervisorParams
from core.runtime.run_state import RunState

PARAMS = SupervisorParams(stop_timeout=10.0, finish_timeout=900.0, max_restarts=2)
KILLED = ExitStatus(reason="was killed by signal 9")
FAILED = ExitStatus(
    error=ReportedError("ValueError: broken", " (actor 0)", "Traceback of it", is_of_peer=False), run_exit_code=2
)
DONE = ExitStatus(done=True)


class Process:
    """A process that ends when `status` is set or when it is killed."""

    pid, waitable = 7, None

    def __init__(self, role, index):
        self.name, self.status, self.killed_at, self.exists, self.without_node = (
            f"{role} {index}",
            None,
            None,
            True,
            False,
        )

    def has_process(self):
        return self.exists

    def lacks_node(self):
        return self.without_node

    def poll(self):
        return self.status

    def kill(self):
        self.status = self.status or KILLED

    def join(self):
        assert self.status

    def clean_up(self):
        assert self.status


class Run:
    """A run whose launcher advances time: half a second each wait, after which `script(seconds)` may do something."""

    def __init__(self, monkeypatch, *roles, **options):
        self.seconds, self.started, self.refused, self.failure, self.script = 1_000.0, [], 0, None, lambda seconds: None
        time = SimpleNamespace(monotonic=lambda: self.seconds)
        monkeypatch.setattr(supervisor, "time", time)
        monkeypatch.setattr(run_state_module, "time", time)
        monkeypatch.setattr(supervisor, "Conditions", lambda context: SimpleNamespace(check=lambda: None))
        monkeypatch.setattr(supervisor, "resume_command_hint", lambda options: "the command")
        self.logged = []
        monkeypatch.setattr(supervisor, "log_to_stderr", self.logged.append)
        self.run_state = RunState(len(roles))
        params = SimpleNamespace(
            **{"supervisor": PARAMS, "mode": 1, "num_actors": 1, "num_learners": 1, **options},
            learner=SimpleNamespace(checkpoint_replay=False, threads=1),
            logger=SimpleNamespace(tracker_timeout=0.0),
        )
        self.context = SimpleNamespace(
            options=params,
            run_state=self.run_state,
            roles=roles,
            memories={},
            resume_from=None,
            parameters=SimpleNamespace(version=0),
        )
        self.room = 0
        self.supervisor = Supervisor(self.context, self)

    # the launcher's part
    def prepare(self):
        pass

    def start(self, role, index, threads):
        if self.started and self.refused:
            self.refused -= 1
            raise OSError("no descriptor")
        self.started.append(Process(role, index))
        return self.started[-1]

    address = None

    def collect(self):
        pass

    def wait(self, waitables):
        self.seconds += 0.5
        self.script(self.seconds - 1_000.0)

    def check(self):
        return self.failure

    def room_for_learners(self):
        return self.room

    def close(self):
        pass

    def newest(self, name):
        return [process for process in self.started if process.name == name][-1]

    def end_all(self):
        self.run_state.stop()
        for process in self.started:
            process.status = process.status or DONE

    def said(self, text):
        return [line for line in self.logged if text in line]


@pytest.mark.parametrize("interrupted", [9.0, 800.0])
@pytest.mark.parametrize(("saved", "killed_after"), [(4.0, None), (9.5, None), (60.0, 10.5)])
def test_a_signal_in_the_last_evaluation_leaves_all_of_the_stop_timeout(monkeypatch, interrupted, saved, killed_after):
    run = Run(monkeypatch, ("evaluator", 0))
    run.run_state.stop()
    slot, killed = run.supervisor._slots[0], []
    slot.process = process = run.start("evaluator", 0, 1)
    process.kill = lambda: killed.append(run.seconds - 1_000.0)
    process.join = lambda: None

    def script(seconds):
        if seconds == interrupted:
            run.supervisor._interrupt(signal.SIGINT, None)
        if seconds >= interrupted + saved:
            process.status = DONE

    run.script = script
    run.supervisor._await_exits([slot])
    assert slot.process is None and killed == ([interrupted + killed_after] if killed_after else [])


@pytest.mark.parametrize(
    ("role", "status", "lacks"),
    [("evaluator", FAILED, "evaluation"), ("evaluator", None, "evaluation"), ("logger", None, "reports")],
)
def test_a_finished_run_whose_evaluator_or_logger_fails_or_is_too_late_fails(monkeypatch, role, status, lacks):
    run = Run(monkeypatch, ("learner", 0), (role, 0))

    def script(seconds):
        run.run_state.stop()
        run.newest("learner 0").status = DONE
        if seconds == 2.0:
            run.newest(f"{role} 0").status = status

    run.script = script
    assert run.supervisor.run() == 4 and not run.run_state.interrupted
    assert bool(run.said(f"{role} 0 did not end within")) == (status is None)
    assert run.said(f"the run has no last {lacks}") and run.logged[-1] == "supervisor: the command"


def test_a_finished_run_waits_for_processes_that_have_not_started_but_actors(monkeypatch):
    """On a cluster a process exists some seconds after its start."""
    run = Run(monkeypatch, ("learner", 0), ("evaluator", 0), ("actor", 0))
    start = run.start

    def start_late(role, index, threads):
        process = start(role, index, threads)
        process.exists = False
        return process

    def script(seconds):
        run.run_state.stop()
        if seconds == 2.0:
            run.newest("learner 0").status = run.newest("evaluator 0").status = DONE

    run.start, run.script = start_late, script
    assert run.supervisor.run() == 0 and not run.said("did not end within")
    statuses = [run.newest(name).status for name in ("learner 0", "evaluator 0", "actor 0")]
    assert statuses == [DONE, DONE, KILLED]


def test_a_finished_run_whose_evaluator_waits_to_be_started_again_fails(monkeypatch):
    run = Run(monkeypatch, ("learner", 0), ("evaluator", 0))

    def script(seconds):
        if seconds == 1.0:
            run.refused, run.newest("evaluator 0").status = 1, KILLED
        if seconds == 1.5:
            run.run_state.stop()
            run.newest("learner 0").status = DONE

    run.script = script
    assert run.supervisor.run() == 4 and run.said("the next attempt is in 1 s")
    assert run.said("the run has no last evaluation") and run.logged[-1] == "supervisor: the command"


@pytest.mark.parametrize(("refusals", "exit_code"), [(1, 0), (2, 4)])
def test_a_logger_that_waits_to_be_started_again_is_started_at_the_end_or_the_run_fails(
    monkeypatch, refusals, exit_code
):
    run = Run(monkeypatch, ("logger", 0), ("learner", 0))

    def script(seconds):
        if seconds == 1.0:
            run.refused, run.newest("logger 0").status = refusals, KILLED
        if seconds == 1.5:
            run.run_state.stop()
            run.newest("learner 0").status = DONE
        if run.run_state.logger_may_end:
            run.newest("logger 0").status = DONE

    run.script = script
    assert run.supervisor.run() == exit_code and run.said("the next attempt is in 1 s")
    assert len([process for process in run.started if process.name == "logger 0"]) == (2 if exit_code == 0 else 1)
    assert bool(run.said("the run has no last reports")) == (exit_code == 4)


def test_a_finished_run_whose_learner_never_started_fails_at_once(monkeypatch):
    """Nobody saves its checkpoint, for which the evaluator would wait until `finish_timeout`."""
    run = Run(monkeypatch, ("actor", 0), ("learner", 0), ("evaluator", 0))
    run.refused = 1

    def script(seconds):
        run.run_state.stop()
        run.newest("actor 0").status = DONE
        if run.run_state.interrupted:
            run.newest("evaluator 0").status = DONE

    run.script = script
    assert run.supervisor.run() == 4 and run.seconds < 1_010.0
    assert run.said("learner 0 was not started; the run ends") and run.logged[-1] == "supervisor: the command"


@pytest.mark.parametrize(("last", "exit_code"), [(DONE, 0), (KILLED, 4)])
def test_a_logger_that_dies_in_the_last_evaluation_is_replaced(monkeypatch, last, exit_code):
    run = Run(monkeypatch, ("logger", 0), ("learner", 0), ("evaluator", 0))

    def script(seconds):
        run.run_state.stop()
        run.newest("learner 0").status = DONE
        loggers = [process for process in run.started if process.name == "logger 0"]
        if seconds == 2.0:
            loggers[0].status = KILLED
        if seconds == 3.0:
            run.newest("evaluator 0").status = DONE
        if len(loggers) > 1:
            assert run.run_state.logger_may_end
            loggers[1].status = last

    run.script = script
    assert run.supervisor.run() == exit_code and run.said("logger 0 was killed by signal 9")
    assert len([process for process in run.started if process.name == "logger 0"]) == 2


def test_an_interrupted_run_needs_no_last_evaluation(monkeypatch):
    run = Run(monkeypatch, ("evaluator", 0))
    run.script = lambda seconds: run.supervisor._interrupt(signal.SIGINT, None) if seconds == 1.0 else None
    assert run.supervisor.run() == 130 and run.said("evaluator 0 did not end within")
    assert not run.said("no last evaluation")


def test_a_resumed_run_that_is_done_stops_before_its_processes_start(monkeypatch):
    run, stopped = Run(monkeypatch, ("learner", 0), ("actor", 0)), []
    conditions = SimpleNamespace(check=run.run_state.stop)
    monkeypatch.setattr(supervisor, "Conditions", lambda context: conditions)
    start = run.start

    def start_and_end(role, index, threads):
        stopped.append(run.run_state.stopped)
        process = start(role, index, threads)
        process.status = DONE
        return process

    monkeypatch.setattr(run, "start", start_and_end)
    assert run.supervisor.run() == 0 and stopped == [True, True]


def test_failures_of_longer_ago_than_the_window_are_no_restarts(monkeypatch):
    params = dataclasses.replace(PARAMS, restart_window=10.0)
    run = Run(monkeypatch, ("actor", 0), ("learner", 0), supervisor=params)

    def script(seconds):
        run.run_state.heartbeat(0), run.run_state.heartbeat(1)
        if seconds in (1.0, 5.0, 12.0, 16.0, 30.0):
            run.newest("actor 0").status = KILLED
        if seconds == 31.0:
            run.end_all()

    run.script = script
    assert run.supervisor.run() == 0
    restarted = [line.partition("restarted ")[2] for line in run.said("restarted")]
    assert restarted == [f"({count} of 2)" for count in (1, 2, 2, 2, 1)]


def test_an_actor_is_replaced_until_it_failed_too_often(monkeypatch):
    run = Run(monkeypatch, ("actor", 0), ("learner", 0))

    def script(seconds):
        run.run_state.heartbeat(0), run.run_state.heartbeat(1)
        run.newest("actor 0").status = KILLED
        if run.run_state.stopped:
            run.newest("learner 0").status = DONE

    run.script = script
    assert run.supervisor.run() == 4
    assert [process.name for process in run.started].count("actor 0") == 3 and run.run_state.restarts == 2
    assert run.said("actor 0 restarted (1 of 2)") and run.said("actor 0 was restarted 2 times within 3600 s")
    assert run.run_state.interrupted and run.logged[-1] == "supervisor: the command"


@pytest.mark.parametrize(("status", "exit_code"), [(KILLED, 4), (FAILED, 2)])
def test_a_learner_that_fails_ends_the_run(monkeypatch, status, exit_code):
    run = Run(monkeypatch, ("logger", 0), ("actor", 0), ("learner", 0))

    def script(seconds):
        if seconds == 2:
            run.newest("learner 0").status = status
        if run.run_state.interrupted:
            run.newest("actor 0").status = DONE
        if run.run_state.logger_may_end:
            run.newest("logger 0").status = DONE

    run.script = script
    assert run.supervisor.run() == exit_code and len(run.started) == 3
    assert run.said(
        "learner 0 (pid 7) was killed by signal 9"
        if status is KILLED
        else "learner 0 (pid 7) failed: ValueError: broken (actor 0)"
    )


def test_actors_that_all_fail_at_their_start_end_the_run_and_one_traceback_is_shown(monkeypatch):
    run = Run(monkeypatch, ("actor", 0), ("actor", 1), ("learner", 0))

    def script(seconds):
        for name in ("actor 0", "actor 1"):
            run.newest(name).status = FAILED
        if run.run_state.interrupted:
            run.newest("learner 0").status = DONE

    run.script = script
    assert run.supervisor.run() == 2
    assert len(run.said("Traceback of it")) == 1 and len(run.said("(pid 7) failed: ValueError: broken")) == 2


def test_a_process_that_cannot_be_started_is_tried_again_and_then_ends_the_run(monkeypatch):
    run = Run(monkeypatch, ("actor", 0))
    run.refused = 3

    def script(seconds):
        run.run_state.heartbeat(0)
        if seconds == 1:
            run.newest("actor 0").status = KILLED
        if len(run.started) == 2 and seconds > 20:
            run.end_all()

    run.script = script
    assert run.supervisor.run() == 0 and len(run.started) == 2 and run.refused == 0
    assert [line.rpartition("in ")[2] for line in run.said("the next attempt is in")] == ["1 s", "2 s", "4 s"]
    run = Run(monkeypatch, ("actor", 0))
    run.refused, run.script = 100, lambda seconds: run.started[0].kill()
    assert run.supervisor.run() == 4 and run.refused == 94
    assert run.said("actor 0 could not be started within 31 s (no descriptor); the run ends")


def test_silence_is_a_failure_but_not_while_all_were_stopped_or_no_node_has_room(monkeypatch):
    run = Run(monkeypatch, ("actor", 0), ("evaluator", 0))

    def script(seconds):
        run.newest("evaluator 0").without_node = True
        if seconds < 100:
            run.run_state.heartbeat(0)
            run.run_state.activity_marker(0)[:] = 4
        if seconds == 10:
            run.seconds += 70  # as by Ctrl-Z
        if seconds > 300:
            run.end_all()

    run.script = script
    assert run.supervisor.run() == 0
    (line,) = run.said("sent no heartbeat for 60 s (supervisor.heartbeat_timeout), within environment 3")
    assert line.startswith("supervisor: actor 0 (pid 7)") and not run.said("evaluator")
    late = [process.name for process in run.started].count("actor 0")
    assert late == 2 and not run.said("did not start")


def test_a_process_that_does_not_start_is_replaced(monkeypatch):
    run = Run(monkeypatch, ("actor", 0))

    def script(seconds):
        if len(run.started) == 2:
            run.end_all()

    run.script = script
    assert run.supervisor.run() == 0 and run.said("did not start within 180 s (supervisor.start_timeout)")


@pytest.mark.parametrize(("restored_at", "exit_code"), [(1_700, 0), (2_000, 4)])
def test_a_learner_may_take_ten_times_as_long_to_read_its_checkpoint(restored_at, exit_code, monkeypatch):
    run = Run(monkeypatch, ("learner", 0))
    run.context.resume_from = "checkpoint"

    def script(seconds):
        if seconds >= restored_at:
            run.run_state.heartbeat(0)
            run.context.parameters.version = 5
            run.end_all()

    run.script = script
    assert run.supervisor.run() == exit_code


def test_a_failure_of_the_launcher_ends_the_run_and_kills_what_has_no_process(monkeypatch):
    run = Run(monkeypatch, ("actor", 0), ("learner", 0))

    def script(seconds):
        run.newest("actor 0").exists = False
        run.failure = "the head is silent"
        if run.run_state.interrupted:
            run.newest("learner 0").status = DONE

    run.script = script
    assert run.supervisor.run() == 4 and run.said("the head is silent; the run ends")
    assert run.newest("actor 0").status is KILLED and not run.said("did not end within")


def test_a_second_signal_kills_what_is_left_and_the_run_has_the_code_of_the_first(monkeypatch):
    run = Run(monkeypatch, ("actor", 0), ("learner", 0))
    monkeypatch.setattr(processes, "SAME_REQUEST", 0.0)  # the times of this test are simulated

    def script(seconds):
        if seconds in (1.0, 2.0):
            run.supervisor._interrupt(signal.SIGTERM if seconds == 1.0 else signal.SIGINT, None)

    run.script = script
    assert run.supervisor.run() == 128 + signal.SIGTERM
    assert run.said("actor 0, learner 0 did not end within 1 s: killed")


ELASTIC = dataclasses.replace(PARAMS, elastic=3)
PEER_LOST = ExitStatus(error=ReportedError("PeerLostError: gone", "", "Traceback of it", is_of_peer=True))


@pytest.mark.parametrize(
    ("statuses", "params", "learners"),
    [
        ((KILLED, PEER_LOST), ELASTIC, 2),
        ((PEER_LOST, KILLED), ELASTIC, 2),
        ((KILLED, FAILED), ELASTIC, None),  # an error of its own would come again
        ((FAILED, PEER_LOST), ELASTIC, None),
        ((KILLED, PEER_LOST), PARAMS, None),
        ((DONE, DONE), ELASTIC, None),
    ],
)
def test_an_elastic_run_goes_on_after_a_loss_but_not_after_an_error(monkeypatch, statuses, params, learners):
    run = Run(monkeypatch, ("learner", 0), ("learner", 1), supervisor=params)
    for index in range(2):
        run.supervisor._start(run.supervisor._slots[index])
    for slot, status in zip(run.supervisor._slots, statuses, strict=True):
        slot.process.status = status
    monkeypatch.setattr(Supervisor, "_start", lambda self, slot: None)
    run.supervisor._options.num_learners = 2
    run.supervisor._supervise()
    run.supervisor._end()
    assert run.supervisor.next_learners == learners
    assert bool(run.said("the command")) == (learners is None and DONE not in statuses)
    assert bool(run.said("Traceback of it")) == (FAILED in statuses)


def test_a_learner_that_reports_the_loss_of_another_is_not_the_lost_one(monkeypatch):
    run = Run(monkeypatch, ("learner", 0), ("learner", 1))
    slots, note = run.supervisor._slots, run.supervisor._note_failure
    note(slots[0], "learner 0", PEER_LOST)
    assert run.run_state.lost_learner is None
    note(slots[1], "learner 1", KILLED)
    note(slots[0], "learner 0", PEER_LOST)
    assert run.run_state.lost_learner == 1


def test_an_elastic_run_takes_in_learners_at_its_next_checkpoint(monkeypatch):
    run = Run(monkeypatch, ("learner", 0), supervisor=ELASTIC)
    run.room = 2

    def script(seconds):
        assert not run.run_state.interrupted or seconds > 20
        if seconds == 20:
            run.run_state.request_checkpoint()
        if run.run_state.interrupted:
            run.end_all()

    run.script = script
    assert run.supervisor.run() == 0 and run.supervisor.next_learners == 3
    assert run.said("nodes have room for more learners (2); the run saves and goes on with 3") and not run.said(
        "the command"
    )


def test_a_signal_ends_an_elastic_run(monkeypatch):
    run = Run(monkeypatch, ("learner", 0), supervisor=ELASTIC)

    def script(seconds):
        run.supervisor._interrupt(signal.SIGINT, None)
        run.started[0].status = KILLED

    run.script = script
    assert run.supervisor.run() == 4 and run.supervisor.next_learners is None and run.said("the command")


@pytest.mark.parametrize(
    ("threads", "asked", "cores", "expected"),
    [
        (0, None, 2, 2),
        (0, None, 16, 12),
        (0, "1", 2, 1),
        (0, "3", 16, 3),
        (0, "4,2", 2, 2),
        (0, "0", 2, 1),
        (5, "1", 2, 5),
    ],
)
def test_a_learners_threads_are_those_asked_for_or_the_cores_that_actors_leave(
    threads, asked, cores, expected, monkeypatch
):
    monkeypatch.setattr(supervisor, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    learner = SimpleNamespace(threads=threads)
    options = SimpleNamespace(learner=learner, num_actors=3, learners_at_home=(0,))
    assert supervisor.learner_threads(options) == expected
