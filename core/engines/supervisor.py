"""The supervisor of a run's processes: it starts them, replaces those that fail, and ends all of them together.

How a process is started and killed is the launcher's part (core/engines/launcher.py). The supervisor guarantees:

- Actors, the evaluator and the logger are replaced after a failure, at most `max_restarts` times within
  `restart_window`.
- A learner or tester that fails ends the run. So does an error of every process of another role at its start.
- A process without a heartbeat for `heartbeat_timeout`, or `start_timeout` at its start, is killed and counts as
  failed.
- Every run ends in order: all but the logger save and exit, then the logger. Processes that exceed their time are
  killed. A run without its last evaluation fails, unless it was interrupted.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from core.common.console import log_to_stderr
from core.common.exit_codes import DONE, TRAINING_FAILED
from core.common.processes import Interrupts
from core.common.system import usable_cores
from core.distributed.torch_group import rendezvous
from core.engines.launcher import ExitStatus, Launcher, ProcessHandle
from core.engines.run_end import Conditions, interrupt_signals, resume_command_hint, unsaved
from core.runtime.context import Context
from core.runtime.options import RunOptions

RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds until a process that could not be started is tried again
CHECKPOINT_FACTOR = 10  # times as long as other processes a learner may take that writes or reads a large replay


def learner_threads(options: RunOptions) -> int:
    """Return the intra-op threads of a learner. Learners share the cores that actors leave, or all of up to four.

    OMP_NUM_THREADS, if it is set, comes before that. Learners of other nodes get as many threads as those here.
    """
    if options.learner.threads:
        return options.learner.threads
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(int(asked), 1)
    cores = usable_cores()
    available = cores if cores <= 4 else max(cores - options.num_actors - 1, cores // 2)
    return max(available // len(options.learners_at_home), 1)


@dataclass(eq=False)
class ProcessSlot:
    """One (role, index) of a run, and the process that has it now."""

    role: str
    index: int
    process_ind: int  # number of its heartbeat and log buffer
    process: ProcessHandle | None = None  # None before the first start, after an exit, and until the next start
    started: float = 0.0  # monotonic seconds
    failed_attempts: int = 0  # to start the process, in a row
    next_attempt: float | None = None  # monotonic seconds; None if the process need not be tried again
    failed_at_start: bool = False  # its first process reported an error before its first heartbeat
    restarts: list[float] = field(default_factory=list)  # monotonic seconds of those in the last restart_window

    def __str__(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def ends_run(self) -> bool:
        """A run cannot go on without this process, because a successor would lack its state."""
        return self.role in ("learner", "tester")


class Supervisor:
    """Run all processes of a context to the end."""

    def __init__(self, context: Context, launcher: Launcher):
        self._context, self._launcher = context, launcher
        self._options, self._run_state = context.options, context.run_state
        self._slots = [ProcessSlot(role, index, process_ind) for process_ind, (role, index) in enumerate(context.roles)]
        self._interrupts = Interrupts()
        self._shown_errors: set[str] = set()
        # A pause between two checks means that the whole run was stopped, as by Ctrl-Z; heartbeats count from its
        # end.
        self._last_check = self._resumed = time.monotonic()
        self._exit_code = 0
        self._has_lost_learner = self._has_failed_learner = False  # a learner that fails reports an error of its own
        self._more_learners = 0  # for which nodes have room

    def run(self) -> int:
        """Run to the end. Returns the exit code of the program."""
        with ExitStack() as stack:
            for number in interrupt_signals():
                stack.callback(signal.signal, number, signal.signal(number, self._interrupt))
            if self._options.mode == 1 and (count := self._options.num_learners) > 1:
                self._context.rendezvous = stack.enter_context(rendezvous(count, self._launcher.address))
            stack.callback(self._launcher.close)
            stack.callback(lambda: self._kill(self._alive()))
            self._launcher.prepare()
            if not self._interrupts:
                self._supervise()
            self._end()
        return self._exit_code or self._interrupts.exit_code or DONE

    @property
    def next_learners(self) -> int | None:
        """Number of learners with which an elastic run goes on if nodes have room; None if it has ended."""
        if self._interrupts or not self._options.supervisor.elastic or self._exit_code not in (DONE, TRAINING_FAILED):
            return None
        if self._has_failed_learner or not (self._has_lost_learner or self._more_learners):
            return None
        return self._options.num_learners + self._more_learners

    def _interrupt(self, number: int, frame: object) -> None:
        """End the run at the first request. After a second one, `_await_exits` kills what is left."""
        self._interrupts.add(number)
        self._run_state.stop(interrupt=True)

    def _supervise(self) -> None:
        """Start all processes, and replace those that fail, until the run stops."""
        conditions = Conditions(self._context)
        conditions.check()  # a resumed run may be done
        for slot in self._slots:
            self._start(slot)
        while not self._run_state.stopped and (
            self._alive() or any(slot.next_attempt is not None for slot in self._slots)
        ):
            self._wait(self._alive())
            self._check_processes()
            if not self._exit_code and (reason := self._launcher.check()) is not None:
                self._log(f"{reason}; the run ends")
                self._give_up(TRAINING_FAILED)
            conditions.check()
            takes_learners = self._options.supervisor.elastic and self._run_state.checkpoint_due
            if takes_learners and not self._run_state.stopped and (more := self._launcher.room_for_learners()):
                self._more_learners = more
                self._log(
                    f"nodes have room for more learners ({more}); the run saves and goes on with {self.next_learners}"
                )
                self._run_state.stop(interrupt=True)

    # start and replace ------------------------------------------------------------------------------------------------
    def _start(self, slot: ProcessSlot) -> None:
        """Start the process of a slot. If the machine has no process or descriptor to give, schedule a retry."""
        slot.next_attempt = None
        self._run_state.count_start(slot.process_ind)
        try:
            slot.process = self._launcher.start(
                slot.role, slot.index, learner_threads(self._options) if slot.role == "learner" else 1
            )
        except OSError as error:
            if slot.failed_attempts == len(RETRY_DELAYS):
                self._log(f"{slot} could not be started within {sum(RETRY_DELAYS):.0f} s ({error}); the run ends")
                return self._give_up(TRAINING_FAILED)
            delay = RETRY_DELAYS[slot.failed_attempts]
            slot.failed_attempts, slot.next_attempt = slot.failed_attempts + 1, time.monotonic() + delay
            self._log(f"{slot} could not be started ({error}); the next attempt is in {delay:.0f} s")
        else:
            slot.started, slot.failed_attempts = time.monotonic(), 0
            if slot.restarts:
                self._log(f"{slot} restarted ({len(slot.restarts)} of {self._options.supervisor.max_restarts})")

    def _check_processes(self) -> None:
        """Handle processes that ended or hang, and start those whose next attempt is due."""
        now = time.monotonic()
        if now - self._last_check > self._options.supervisor.heartbeat_timeout / 2:
            self._resumed = now
        self._last_check = now
        for slot in self._slots:
            if slot.next_attempt is not None and now >= slot.next_attempt:
                self._start(slot)
        for slot, process in self._alive():
            if (status := process.poll()) is not None:
                self._handle_exit(slot, status)
            elif (reason := self._hang_reason(slot, process)) is not None:
                process.kill()
                process.join()
                self._handle_exit(slot, (process.poll() or ExitStatus())._replace(reason=reason))
            if self._exit_code:  # processes that now fail for lack of this one are not the cause
                return

    def _hang_reason(self, slot: ProcessSlot, process: ProcessHandle) -> str | None:
        """Return why a process that has not ended must be replaced, or None."""
        params, context, now = self._options.supervisor, self._context, time.monotonic()
        if process.lacks_node():
            slot.started = now  # start_timeout begins when a node has room
            return None
        restores = context.resume_from is not None and not context.parameters.version
        is_long = slot.role == "learner" and (restores or self._run_state.checkpoint_due)
        factor = CHECKPOINT_FACTOR if is_long else 1
        if not self._run_state.has_started(slot.process_ind):
            limit = params.start_timeout * factor
            late = now - max(slot.started, self._resumed) > limit
            return f"did not start within {limit:.0f} s (supervisor.start_timeout)" if late else None
        silence = min(self._run_state.seconds_since_heartbeat(slot.process_ind), now - self._resumed)
        if silence <= params.heartbeat_timeout * factor:
            return None
        return f"sent no heartbeat for {silence:.0f} s (supervisor.heartbeat_timeout)"

    def _handle_exit(self, slot: ProcessSlot, status: ExitStatus) -> None:
        """Replace a process that ended, or end the run. Do neither if its work was done."""
        process, slot.process = slot.process, None
        assert process is not None
        process.clean_up()
        if status.done:
            return
        params, started = self._options.supervisor, self._run_state.has_started
        slot.failed_at_start |= status.error is not None and not slot.restarts and not started(slot.process_ind)
        self._note_failure(slot, f"{slot} (pid {process.pid})", status)
        now = time.monotonic()
        slot.restarts = [restart for restart in slot.restarts if now - restart < params.restart_window]
        siblings = [other for other in self._slots if other.role == slot.role]
        if slot.ends_run or all(other.failed_at_start and not started(other.process_ind) for other in siblings):
            self._give_up(status.run_exit_code)
        elif len(slot.restarts) >= params.max_restarts:
            self._log(
                f"{slot} was restarted {len(slot.restarts)} times within {params.restart_window:g} s "
                "(supervisor.restart_window), which is supervisor.max_restarts; the run ends"
            )
            self._give_up(TRAINING_FAILED)
        else:
            slot.restarts.append(now)
            self._run_state.count_restart()
            self._start(slot)

    def _note_failure(self, slot: ProcessSlot, name: str, status: ExitStatus) -> None:
        """Log why a process ended. The traceback of an error is shown once, at its first occurrence."""
        error = status.error
        if slot.role == "learner":
            if error is None or not error.is_of_peer:
                self._run_state.lose_learner(slot.index)
            self._has_lost_learner |= error is None or error.is_of_peer
            self._has_failed_learner |= error is not None and not error.is_of_peer
        if error is None:
            env_ind = self._run_state.active_env(slot.process_ind)
            where = "" if env_ind is None else f", within environment {env_ind}"
            return self._log(f"{name} {status.reason}{where}")
        if error.message not in self._shown_errors:
            self._shown_errors.add(error.message)
            if not error.is_of_peer:
                log_to_stderr(error.traceback)
        self._log(f"{name} failed: {error.message}{error.notes}")

    # end --------------------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        """Let every process save and exit, the logger last."""
        loggers = [slot for slot in self._slots if slot.role == "logger"]
        self._await_exits([slot for slot in self._slots if slot.role != "logger"])
        self._launcher.collect()
        for slot, process in self._alive(loggers):
            if (status := process.poll()) is not None and not status.done:
                self._note_failure(slot, str(slot), status)
                slot.process, slot.next_attempt = None, time.monotonic()
        for slot in loggers:
            if slot.next_attempt is not None:  # another one writes what is left
                self._start(slot)
        self._run_state.end_logger()
        tracker_timeout = 0.0 if self._run_state.interrupted else self._options.logger.tracker_timeout
        self._await_exits(loggers, timeout=5.0 + tracker_timeout)
        if failed_writes := unsaved(self._context):
            self._log(failed_writes)
            self._give_up(TRAINING_FAILED)
        if self._options.mode == 1 and (self._exit_code or self._interrupts) and self.next_learners is None:
            self._log(resume_command_hint(self._options))

    def _await_exits(self, slots: Sequence[ProcessSlot], timeout: float | None = None) -> None:
        """Wait until the processes of these slots have ended, and kill those that exceed their time.

        If `timeout`, in seconds, is None, the time is `finish_timeout`, or `stop_timeout` from an interrupt on.
        """
        begin, was_interrupted = time.monotonic(), self._run_state.interrupted
        for slot in slots:
            if slot.next_attempt is not None and slot.ends_run and not was_interrupted:
                self._log(f"{slot} was not started; the run ends")  # nobody else could save
                self._give_up(TRAINING_FAILED)
            elif slot.next_attempt is not None:
                self._check_last_work(slot)
        for slot, process in self._alive(slots):
            is_needed = slot.role != "actor" and not was_interrupted
            if not (is_needed or process.has_process()):  # it would otherwise start now
                process.kill()
                slot.process = None
        while waiting := self._alive(slots):
            if timeout is None and self._run_state.interrupted and not was_interrupted:
                was_interrupted, begin = True, time.monotonic()  # an interrupt leaves all of stop_timeout
            elapsed, with_learner = time.monotonic() - begin, any(slot.role == "learner" for slot, _ in waiting)
            if elapsed > (timeout or self._time_to_end(with_learner)) or self._interrupts.requests > 1:
                names = ", ".join(str(slot) for slot, _ in waiting)
                self._log(f"{names} did not end within {elapsed:.0f} s: killed")
                self._kill(waiting)
                for slot, _ in waiting:
                    self._check_last_work(slot)
                if self._interrupts.requests < 2 and with_learner:  # it has not saved
                    self._give_up(TRAINING_FAILED)
                return
            self._wait(waiting)
            for slot, process in waiting:
                if (status := process.poll()) is not None:
                    slot.process = None
                    if not status.done:
                        self._note_failure(slot, str(slot), status)
                        self._check_last_work(slot)
                        if slot.ends_run or slot.role == "logger":  # reports are lost
                            self._give_up(status.run_exit_code)

    def _check_last_work(self, slot: ProcessSlot) -> None:
        """Fail a run that was not interrupted if this process, which did not end well, is its evaluator or logger.

        The run is not interrupted for it, because its learner may still be saving.
        """
        missing = {"evaluator": "last evaluation", "logger": "last reports"}.get(slot.role)
        if missing and not self._run_state.interrupted:
            self._log(f"the run has no {missing} and counts as failed")
            self._exit_code = self._exit_code or TRAINING_FAILED

    def _time_to_end(self, with_learner: bool) -> float:
        """Return the seconds that processes of a run that ends may take. A learner may have a large replay to save."""
        if not self._run_state.interrupted:
            return self._options.supervisor.finish_timeout
        saves_replay = with_learner and self._options.learner.checkpoint_replay
        return self._options.supervisor.stop_timeout * (CHECKPOINT_FACTOR if saves_replay else 1)

    # helpers ----------------------------------------------------------------------------------------------------------
    def _alive(self, slots: Sequence[ProcessSlot] | None = None) -> list[tuple[ProcessSlot, ProcessHandle]]:
        """Return these slots, by default all, that have a process, each with its process."""
        return [(slot, slot.process) for slot in (self._slots if slots is None else slots) if slot.process is not None]

    def _wait(self, alive: list[tuple[ProcessSlot, ProcessHandle]]) -> None:
        self._launcher.wait([process.waitable for _, process in alive])

    def _kill(self, alive: list[tuple[ProcessSlot, ProcessHandle]]) -> None:
        """Kill these processes and wait until they have ended."""
        for _, process in alive:
            process.kill()
        for slot, process in alive:
            process.join()
            slot.process = None

    def _give_up(self, exit_code: int) -> None:
        """End the run with this exit code, unless another process gave it one before."""
        self._exit_code = self._exit_code or exit_code
        self._run_state.stop(interrupt=True)

    def _log(self, message: str) -> None:
        log_to_stderr(f"supervisor: {message}")
