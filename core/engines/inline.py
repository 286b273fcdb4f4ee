"""Inline engine: every single-process in this process, in a fixed order; bit-for-bit reproducible on a CPU.

A round is the learners until they have caught up, then one slice of evaluator and logger, then one step of each actor. Each
single-process keeps a torch random state of its own. A checkpoint is a boundary of episodes and of evaluations: actors begin afresh after
it and an evaluation ends before it, so that a run resumed from it and the run that went on are the same run. What a round begins with is
therefore what comes after a checkpoint.
"""

import os
import signal
import traceback
from collections.abc import Iterator, Mapping

import torch

from core.common.console import log_to_stderr
from core.device.torch_runtime import use_threads
from core.distributed.lockstep_group import Turns
from core.engines import run_end
from core.engines.run_conditions import Conditions
from core.engines.run_end import resume_command_hint, unsaved
from core.runtime.context import Context, Process


class InlineEngine:
    def __init__(self, context: Context, processes: Mapping[str, Process]):
        self._context, self._processes = context, processes
        self._generators: dict[tuple[str, int], Iterator[bool]] = {}
        self._random: dict[tuple[str, int], torch.Tensor] = {}
        self._signal, self._pid = 0, os.getpid()
        if len(context.memories) > 1:
            context.rendezvous = Turns(len(context.memories))

    def run(self, roles: list[tuple[str, int]]) -> int:
        """Run to the end. Returns the exit code; an error is printed, and the learner saves if it is not the learner's own."""
        use_threads(1)
        handlers = {number: signal.signal(number, self._interrupt) for number in run_end.interrupting()}
        try:
            for role, index in self._context.roles:
                self._start(role, index)
            self._loop()
        except Exception as error:
            traceback.print_exc()
            self._context.run_state.stop(interrupt=True)
            self._save()
            self._say_farewell()
            return run_end.of(error)
        finally:
            torch.set_flush_denormal(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for generator in self._generators.values():
                generator.close()  # type: ignore[attr-defined]
        lost = unsaved(self._context)
        if lost:
            log_to_stderr(lost)
        if lost or self._signal:
            self._say_farewell()
        return run_end.TRAINING_FAILED if lost else run_end.INTERRUPTED + self._signal if self._signal else run_end.DONE

    def _say_farewell(self) -> None:
        if self._context.options.mode == 1:
            log_to_stderr(resume_command_hint(self._context.options))

    def _loop(self) -> None:
        run_state, conditions = self._context.run_state, Conditions(self._context)
        actors = self._of("actor")
        while self._generators:
            self._exhaust("learner")
            conditions.check()
            if run_state.stopped:
                break
            if run_state.checkpoint_due:
                self._exhaust("evaluator")
                self._exhaust("learner")
                for actor in actors:
                    self._restart(actor)
            for key in self._of("evaluator") + self._of("logger") + self._of("tester"):
                self._advance(key)
            for actor in actors:
                self._advance(actor)
        self._finish("actor")
        self._exhaust("evaluator")  # the evaluation at hand; the last one is of the learner's last parameters
        self._finish("learner")
        self._finish("evaluator")
        run_state.end_logger()
        self._finish("logger")

    def _of(self, role: str) -> list[tuple[str, int]]:
        return [key for key in self._generators if key[0] == role]

    def _start(self, role: str, index: int) -> None:
        self._random[role, index] = torch.get_rng_state()
        self._generators[role, index] = self._processes[role](self._context, index)

    def _restart(self, key: tuple[str, int]) -> None:
        self._generators[key].close()  # type: ignore[attr-defined]
        self._start(*key)

    def _advance(self, key: tuple[str, int]) -> bool:
        """One slice of a single-process with its own random state. False when it is idle or over."""
        if key not in self._generators:
            return False
        torch.set_rng_state(self._random[key])
        try:
            return next(self._generators[key])
        except StopIteration:
            del self._generators[key]
            return False
        except Exception:
            del self._generators[key]
            raise
        finally:
            self._random[key] = torch.get_rng_state()

    def _exhaust(self, role: str) -> None:
        """All in turn until all are idle: learners wait for each other."""
        while sum(map(self._advance, self._of(role))):
            pass

    def _finish(self, role: str) -> None:
        while keys := self._of(role):
            for key in keys:
                self._advance(key)

    def _save(self) -> None:
        """After an error, which may have been a learner's: the others cannot go on without it, but may save."""
        while self._of("learner"):
            try:
                self._finish("learner")
            except Exception:
                traceback.print_exc()

    def _interrupt(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a worker that an environment forked is told to end
            signal.signal(number, signal.SIG_DFL)
            return signal.raise_signal(number)
        self._signal = number
        self._context.run_state.stop(interrupt=True)
