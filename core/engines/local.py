"""Local engine: one spawned process for each single-process, supervised by their sentinels and heartbeats."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import connection, get_context, resource_tracker

from core.common.console import log_to_stderr
from core.distributed.torch_group import on_this_machine
from core.engines import process_main, run_end
from core.engines.run_conditions import Conditions
from core.engines.run_end import resume_command_hint, unsaved
from core.engines.strays import Strays, end_marked
from core.engines.supervisor import Place, learner_threads
from core.runtime.context import Context, Process

RETRY_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds until a process that could not be started is tried again
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "268435456"}  # bytes: fewer page faults on large activations


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal. Those started meanwhile are not to hear it, not even before `process_main.main` runs in
    them:
    they inherit the mask. Here signals wait until the end."""
    resource_tracker.ensure_running()  # it would start with the first of them, and unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, process_main.IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalEngine:
    """Spawns the table, forgives what can be forgiven, and leaves nothing behind."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes, self._options = context, processes, context.options
        self._run_state = context.run_state
        self._spawn = get_context("spawn")
        self._places = [Place(role, index, learner_threads(self._options) if role == "learner" else 1) for role, index in context.roles]
        self._signals: list[int] = []
        self._strays: Strays | None = None
        self._told: set[str] = set()  # errors whose traceback was shown
        self._watched = self._awake = time.monotonic()  # last, and ever since without a pause
        self._exit_code = 0

    def run(self, roles: list[tuple[str, int]]) -> int:
        """Run to the end. Returns the exit code."""
        os.environ.update({name: os.environ.get(name, value) for name, value in ALLOCATOR.items()})
        with ExitStack() as stack:
            for number in run_end.interrupting():
                stack.callback(signal.signal, number, signal.signal(number, self._interrupt))
            if len(self._context.memories) > 1:
                self._context.rendezvous = stack.enter_context(on_this_machine(len(self._context.memories)))
            stack.callback(self._leave_nothing)
            self._run()
        return self._exit_code or (run_end.INTERRUPTED + self._signals[0] if self._signals else run_end.DONE)

    def _run(self) -> None:
        for place in self._places:
            self._attempt(place)
        conditions = Conditions(self._context)
        while not self._run_state.stopped and (self._alive() or self._postponed()):
            self._wait(self._alive())
            self._supervise()
            conditions.check()
        self._end()

    # start ------------------------------------------------------------------------------------------------------------
    def _attempt(self, place: Place) -> None:
        """Start a process. Where the machine has no descriptor or process to give it is tried again later; then the run ends."""
        place.next_attempt = None
        try:
            self._start(place)
        except OSError as error:
            if place.attempts == len(RETRY_DELAYS):
                self._say(f"{place} could not be started in {sum(RETRY_DELAYS):.0f} s ({error}): the run ends")
                return self._give_up(run_end.TRAINING_FAILED)
            delay = RETRY_DELAYS[place.attempts]
            place.attempts, place.next_attempt = place.attempts + 1, time.monotonic() + delay
            self._say(f"{place} could not be started ({error}) and is tried again in {delay:.0f} s")
        else:
            place.ended, place.attempts = False, 0
            if place.restarts:
                self._say(f"{place} restarted ({place.restarts} of {self._options.supervisor.max_restarts})")

    def _postponed(self) -> list[Place]:
        return [place for place in self._places if place.next_attempt is not None]

    def _start(self, place: Place) -> None:
        receiver, sender = self._spawn.Pipe(duplex=False)
        self._run_state.reset_heartbeat(self._process_ind(place))
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(place.threads)
        process = self._spawn.Process(
            target=process_main.main, name=str(place), daemon=False,  # so that an environment may use multiprocessing
            args=(self._processes[place.role], self._context, place.role, place.index, place.threads, os.getpid(), sender))
        with _signals_blocked():
            self._strays = self._strays or Strays()
            with self._strays.mark() as place.mark:
                process.start()
        sender.close()
        place.process = process
        place.failure, place.started = receiver, time.monotonic()

    # supervise --------------------------------------------------------------------------------------------------------
    def _wait(self, places: list[Place]) -> None:
        """Until one of them has ended, but not long."""
        connection.wait([place.process.sentinel for place in places], timeout=0.1)

    def _exit_reason(self, place: Place) -> str:
        """How a process ended that did not say so itself."""
        number = -place.process.exitcode
        if number <= 0:
            return f"ended with exit code {place.process.exitcode} and said nothing"
        return f"was killed by signal {number}" + (", by hand or by the kernel for want of memory" if number == signal.SIGKILL else "")

    def _alive(self) -> list[Place]:
        return [place for place in self._places if place.process is not None and not place.ended]

    def _supervise(self) -> None:
        now = time.monotonic()
        if now - self._watched > self._options.supervisor.heartbeat_timeout / 2:
            self._awake = now  # all of the run was stopped, by Ctrl-Z say: that silence counts for nothing
        self._watched = now
        for place in self._postponed():
            if place.next_attempt is not None and now >= place.next_attempt:
                self._attempt(place)
        for place in self._alive():
            if place.process.exitcode is not None:
                self._handle_exit(place)
            elif (reason := self._hang_reason(place)) is not None:
                place.process.kill()
                place.process.join()
                self._handle_exit(place, reason)
            if self._exit_code:  # the run ends: others that now fail for want of this one are no cause of it
                return

    def _hang_reason(self, place: Place) -> str | None:
        """Why a process that still runs must be replaced."""
        process_ind, params = self._process_ind(place), self._options.supervisor
        if not self._run_state.has_started(process_ind):
            late = time.monotonic() - max(place.started, self._awake) > params.start_timeout
            return f"did not start within {params.start_timeout:.0f} s (supervisor.start_timeout)" if late else None
        silent = min(self._run_state.seconds_since_heartbeat(process_ind), time.monotonic() - self._awake)
        limit, stream = params.heartbeat_timeout, self._run_state.active_env(process_ind)
        if place.role == "learner" and self._run_state.checkpoint_due:
            limit *= 10  # a large replay is being written
        where = "" if stream is None else f", within the environment of stream {stream}"
        return f"gave no sign of life for {silent:.0f} s (supervisor.heartbeat_timeout){where}" if silent > limit else None

    def _handle_exit(self, place: Place, reason: str | None = None) -> None:
        """A process is gone: it was done, or it is replaced, or the run ends."""
        place.ended = True
        if place.mark is not None:
            end_marked(place.mark)
        exitcode, (done, error) = place.process.exitcode, self._reported_error(place)
        if done:
            return
        place.failed_at_start |= error is not None and not place.restarts and not self._has_started(place)
        reason = error or reason or self._exit_reason(place)
        self._say(f"{place} (pid {place.process.pid}) {'failed: ' if error else ''}{reason}")
        place.count_death(self._options.supervisor.restart_window)
        siblings = [other for other in self._places if other.role == place.role]
        if place.role in ("learner", "tester") or all(other.failed_at_start and not self._has_started(other) for other in siblings):
            self._give_up(exitcode if error and exitcode > 0 else run_end.TRAINING_FAILED)
        elif place.restarts >= self._options.supervisor.max_restarts:
            self._say(f"{place} was restarted {place.restarts} times within {self._options.supervisor.restart_window:g} s "
                      "(supervisor.restart_window), which is supervisor.max_restarts: the run ends")
            self._give_up(run_end.TRAINING_FAILED)
        else:
            place.restarts += 1
            self._run_state.count_restart()
            self._attempt(place)

    def _has_started(self, place: Place) -> bool:
        """In this life it has come to work."""
        return self._run_state.has_started(self._process_ind(place))

    def _reported_error(self, place: Place) -> tuple[bool, str | None]:
        """Return whether a process that ended had said that it was done, and the error that it sent if it had not: an exit code of 0
        may be that of an environment which ended the process. The traceback of an error is shown the first time there is such an error."""
        try:
            said = place.failure.recv() if place.failure.poll() else ()
        except (EOFError, OSError):
            said = ()
        place.failure = None  # closed: a descriptor less, should they be short
        if not said:
            return said is None, None
        error, notes, text = said
        if error not in self._told:
            self._told.add(error)
            log_to_stderr(text)
        return False, error + notes

    def _give_up(self, exit_code: int) -> None:
        self._exit_code = self._exit_code or exit_code
        self._run_state.stop(interrupt=True)

    # end --------------------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        """Let every process save and leave; the logger last."""
        self._await([place for place in self._places if place.role != "logger"])
        self._run_state.end_logger()
        trackers = 0.0 if self._run_state.interrupted else self._options.logger.tracker_timeout
        self._await([place for place in self._places if place.role == "logger"], limit=5.0 + trackers)
        if lost := unsaved(self._context):
            self._say(lost)
            self._give_up(run_end.TRAINING_FAILED)
        if self._options.mode == 1 and (self._exit_code or self._signals):
            self._say(resume_command_hint(self._options))

    def _await(self, places: list[Place], limit: float | None = None) -> None:
        params, started, with_replay = self._options.supervisor, time.monotonic(), self._options.learner.checkpoint_replay
        interrupted = self._run_state.interrupted
        while waiting := [place for place in places if place in self._alive()]:
            if limit is None and self._run_state.interrupted and not interrupted:
                interrupted, started = True, time.monotonic()  # from now on they have less time, but all of that
            large = with_replay and any(place.role == "learner" for place in waiting)  # and is being written
            seconds = limit or (params.stop_timeout * (10 if large else 1) if self._run_state.interrupted else params.finish_timeout)
            if time.monotonic() - started > seconds or len(self._signals) > 1:
                self._say(f"{', '.join(map(str, waiting))} did not end within {time.monotonic() - started:.0f} s and are killed")
                self._kill(waiting)
                if len(self._signals) < 2 and any(place.role == "learner" for place in waiting):  # it has not saved
                    self._give_up(run_end.TRAINING_FAILED)
                return
            self._wait(waiting)
            for place in waiting:
                if place.process.exitcode is not None:
                    place.ended = True
                    done, error = self._reported_error(place)
                    if not done:
                        self._say(f"{place} {f'failed: {error}' if error else self._exit_reason(place)}")
                        if place.role in ("learner", "tester"):
                            self._give_up((error and place.process.exitcode) or run_end.TRAINING_FAILED)

    def _kill(self, places: list[Place]) -> None:
        for place in places:
            place.process.kill()
        for place in places:
            place.process.join()
            place.ended = True

    def _leave_nothing(self) -> None:
        """End all processes that still run, and what environments started."""
        self._kill(self._alive())
        if self._strays is not None:
            self._strays.close()

    def _interrupt(self, number: int, frame: object) -> None:
        """The first signal saves and leaves; a second one leaves at once."""
        self._signals.append(number)
        self._run_state.stop(interrupt=True)

    def _process_ind(self, place: Place) -> int:
        return self._context.process_ind(place.role, place.index)

    def _say(self, message: str) -> None:
        log_to_stderr(f"supervisor: {message}")
