"""The inline engine: every single-process in this process, in turns; bit-for-bit reproducible on a CPU.

- A round is the learner until it has caught up, then one slice of evaluator and logger, then one step of each actor.
- Each single-process has its own random state of torch.
- A checkpoint separates episodes and evaluations: actors begin new episodes after it, and an evaluation ends before
  it. With learner.checkpoint_replay, a resumed run therefore equals one that made the checkpoint and went on. For
  that, a round begins with what follows a checkpoint.
"""

import os
import signal
import traceback
from collections.abc import Generator, Mapping
from typing import cast

import torch

from core.common.console import log_to_stderr
from core.common.exit_codes import DONE, TRAINING_FAILED
from core.common.processes import Interrupts, deliver_signals_to_forks
from core.device.torch_runtime import use_threads
from core.engines import run_end
from core.engines.run_end import Conditions
from core.runtime.context import Context, Process

Key = tuple[str, int]  # role and index


class InlineEngine:
    """Run the processes of a context, which has one learner at most, in turns."""

    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = context, processes
        self._generators: dict[Key, Generator[bool, None, None]] = {}
        self._random_states: dict[Key, torch.Tensor] = {}
        self._interrupts, self._pid = Interrupts(), os.getpid()
        self._has_begun = False  # every single-process has had a turn

    def run(self) -> int:
        """Run to the end, or to a second request to end. Returns the exit code of the program."""
        use_threads(1)
        deliver_signals_to_forks()
        handlers = {number: signal.signal(number, self._interrupt) for number in run_end.interrupt_signals()}
        try:
            return self._run()
        except KeyboardInterrupt:
            if not self._interrupts:
                raise
            self._log_resume_command()
            return self._interrupts.exit_code
        finally:
            torch.set_flush_denormal(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for generator in reversed(self._generators.values()):  # the logger last, which the others report to
                generator.close()

    def _run(self) -> int:
        """Run to the end. Returns the exit code of the program.

        An error is printed, unless the run was interrupted: Ctrl-C reaches the programs of an environment as well. The
        learner then saves, unless the error was its own.
        """
        try:
            for key in self._context.roles:
                self._start(key)
            self._run_rounds()
            self._finish_all()
        except Exception as error:
            if not self._interrupts:
                traceback.print_exc()
            self._context.run_state.stop(interrupt=True)
            try:
                self._finish("learner")
            except Exception:
                traceback.print_exc()
            self._log_resume_command()
            return self._interrupts.exit_code or run_end.exit_code_of(error, self._has_begun)
        if failed_writes := run_end.unsaved(self._context):
            log_to_stderr(failed_writes)
        if failed_writes or self._interrupts:
            self._log_resume_command()
        if failed_writes:
            return TRAINING_FAILED
        return self._interrupts.exit_code or DONE

    def _run_rounds(self) -> None:
        """Run rounds until the run stops or every single-process has ended."""
        run_state, conditions = self._context.run_state, Conditions(self._context)
        while self._generators:
            self._exhaust("learner")
            conditions.check()
            if run_state.stopped:
                break
            if run_state.checkpoint_due:
                self._exhaust("evaluator")
                self._exhaust("learner")
                for key in self._keys("actor"):
                    self._generators[key].close()
                    self._start(key)
            for role in ("evaluator", "logger", "tester", "actor"):
                for key in self._keys(role):
                    self._advance(key)
            self._has_begun = True

    def _finish_all(self) -> None:
        """Let every single-process end, in an order in which none waits for another."""
        self._finish("actor")
        self._finish("tester")
        self._exhaust("evaluator")  # the current evaluation; the last one is of the learner's last parameters
        self._finish("learner")
        self._finish("evaluator")
        self._context.run_state.end_logger()
        self._finish("logger")

    def _keys(self, role: str) -> list[Key]:
        return [key for key in self._generators if key[0] == role]

    def _start(self, key: Key) -> None:
        self._random_states[key] = torch.get_rng_state()
        role, index = key
        self._generators[key] = cast(Generator[bool, None, None], self._processes[role](self._context, index))

    def _advance(self, key: Key) -> bool:
        """Run one slice of a single-process with its own random state. Returns False if it was idle or has ended."""
        torch.set_rng_state(self._random_states[key])
        try:
            worked = next(self._generators[key], None)  # None after its end, and after an error
        finally:
            self._random_states[key] = torch.get_rng_state()
        if worked is None:
            del self._generators[key]
        return bool(worked)

    def _exhaust(self, role: str) -> None:
        """Run single-processes of this role until all of them are idle or have ended."""
        while sum(map(self._advance, self._keys(role))):
            pass

    def _finish(self, role: str) -> None:
        """Run single-processes of this role to their end."""
        while keys := self._keys(role):
            for key in keys:
                self._advance(key)

    def _log_resume_command(self) -> None:
        if self._context.options.mode == 1:
            log_to_stderr(run_end.resume_command_hint(self._context.options))

    def _interrupt(self, number: int, frame: object) -> None:
        """Stop the run at the first request, and end it at once at a second one.

        In a worker that an environment forked, end that worker instead.
        """
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            return signal.raise_signal(number)
        if self._interrupts.add(number) and self._interrupts.requests > 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # else foreign_code would replace the exception
            raise KeyboardInterrupt
        self._context.run_state.stop(interrupt=True)
