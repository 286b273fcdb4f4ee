"""What runs inside a spawned process: the driver of one generator."""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from core.common.foreign_code import text_of
from core.common.processes import die_with_parent, idle_delays, set_process_name
from core.device.torch_runtime import use_threads
from core.engines import run_end
from core.runtime.context import Context

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # main alone decides when a run ends
LONGEST = 7_000  # characters of an error and of its traceback: what a pipe takes although nobody reads it yet


def main(process: Callable[[Context, int], Iterator[bool]], context: Context, role: str, index: int, threads: int,
         parent: int, failure: Connection) -> None:
    """Drive the generator to its end. None is sent to the supervisor when it is done, an exception as text; the exit code says of what
    kind that was."""
    die_with_parent(parent, signal.SIGKILL, run_end.TRAINING_FAILED)
    set_process_name(f"{role} {index}")
    _ignore_signals()
    use_threads(threads)
    try:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a pipe's reader would see whole pages only
        drive(process(context, index), context, context.process_ind(role, index))
        failure.send(None)
        exit_code = run_end.DONE
    except BaseException as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        failure.send((_cut(f"{type(error).__name__}: {text_of(error)}"), notes, _cut(traceback.format_exc())))
        exit_code = run_end.of(error)
    failure.close()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(exit_code)  # at once: the interpreter would wait for threads of an environment, for other learners' GPUs, or trip over gloo's


def _ignore_signals() -> None:
    """Programs and workers that an environment starts are as deaf to the terminal, but end when that environment terminates them."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # in place of SIG_IGN, which programs would inherit
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def _cut(text: str) -> str:
    """Without its middle, if it is long."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST // 2]}\n... {len(text) - LONGEST:,} characters ...\n{text[-LONGEST // 2:]}"


def drive(generator: Iterator[bool], context: Context, process_ind: int) -> None:
    """Advance the generator to its end, with a heartbeat after every step; sleep while it is idle."""
    delays = idle_delays()
    for worked in generator:
        context.run_state.heartbeat(process_ind)
        if worked:
            delays = idle_delays()
        else:
            time.sleep(next(delays))


def end_with(main: int) -> None:
    """End this process when that one has ended, whose child it need not be. Ray would do so too, but not without its head."""
    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(run_end.TRAINING_FAILED)

    descriptor = os.pidfd_open(main)
    threading.Thread(target=wait, name="end with main", daemon=True).start()
