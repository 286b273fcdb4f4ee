"""The main function of a process of the local engine, which drives one generator; Ray's processes share parts of it."""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from core.common.console import log_to_stderr
from core.common.foreign_code import text_of
from core.common.processes import IGNORED_SIGNALS, die_with_parent, idle_delays, reuse_freed_memory, set_process_name
from core.device.torch_runtime import use_threads
from core.engines.run_end import DONE, TRAINING_FAILED, exit_code_of
from core.engines.strays import mark_forks
from core.runtime.context import Context

MAX_TEXT = 7_000  # characters of an error and of its traceback: a pipe takes both although nobody reads it yet


def main(
    process: Callable[[Context, int], Iterator[bool]],
    context: Context,
    role: str,
    index: int,
    threads: int,
    parent: int,
    report: Connection,
) -> None:
    """Drive the generator of a role and index to its end, then exit.

    The supervisor receives a report: None if the work was done, or the error as text. The exit code says of which
    kind it was.

    Args:
        process: generator function of the role.
        context: the run's context.
        role: role of this process.
        index: number of this process among those of its role.
        threads: intra-op threads of torch.
        parent: process id of the parent, which is main or the fork server.
        report: pipe to the supervisor.
    """
    die_with_parent(parent, signal.SIGKILL, TRAINING_FAILED)
    set_process_name(f"{role} {index}")
    _ignore_signals()
    mark_forks()
    reuse_freed_memory()
    use_threads(threads)
    try:
        # Without line buffering the reader of a pipe would get whole pages only.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        drive(process(context, index), context, context.process_ind(role, index))
        report.send(None)
        exit_code = DONE
    except BaseException as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        message = _shortened(f"{type(error).__name__}: {text_of(error)}")
        report.send((message, notes, _shortened(traceback.format_exc())))
        exit_code = exit_code_of(error)
    report.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: the interpreter would wait for an environment's threads and other learners' GPUs, or crash in gloo's
    # threads.
    os._exit(exit_code)


def drive(generator: Iterator[bool], context: Context, process_ind: int) -> None:
    """Run a single-process to its end: a heartbeat after every slice of work, a short sleep where there was none."""
    delays = idle_delays()
    for worked in generator:
        context.run_state.heartbeat(process_ind)
        if worked:
            delays = idle_delays()
        else:
            time.sleep(next(delays))


def end_with(owner: int) -> None:
    """End this process when the owner of its shared memory, main or a learner's host, has ended.

    The owner need not be its parent. Ray would end it with main too, but not if Ray's head has gone.
    """

    def wait() -> None:
        select.select([descriptor], [], [])
        log_to_stderr(f"this process ends, because the owner of its shared memory (pid {owner}) has ended")
        os._exit(TRAINING_FAILED)

    descriptor = os.pidfd_open(owner)
    threading.Thread(target=wait, name="end with owner", daemon=True).start()


def _ignore_signals() -> None:
    """Ignore the signals that main handles.

    Programs and workers of an environment inherit ignored signals. They must end when the environment terminates
    them, so SIGTERM has an empty handler instead, which they do not inherit.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


def _shortened(text: str) -> str:
    """Return the text, without its middle if it is longer than MAX_TEXT."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]}\n... {len(text) - MAX_TEXT:,} characters ...\n{text[-MAX_TEXT // 2 :]}"
