"""Train (mode 1) or test (mode 2) what utils/options.py and the command line say.

`python main.py --help` lists every option.
"""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

# First of all, because it opens standard descriptors that are missing before anything else takes their numbers.
import utils  # noqa: F401

if __name__ == "__main__":
    # Imports take seconds, in which packages turn an interrupt into an error of their own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    # The parent process may ignore SIGCHLD; deaths of children would then go unnoticed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # numpy would start threads, and the fork server needs a process without. OpenCV's would take cores of others.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")
    from utils.config.early_answer import EarlyAnswer

    early_answer = EarlyAnswer(sys.argv[1:])

from core.common import fork_server
from core.common.console import log_to_stderr
from core.common.exit_codes import DONE
from core.common.processes import deliver_signals_to_forks, kill_descendants
from core.common.system import remove_empty_compile_caches
from core.common.terminal import Terminal, relay_output
from core.engines.run_end import best_model_hint, interrupt_signals
from utils import run_registry
from utils.config.command_line import preload, read_options, refusing
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import ElasticRun, create_context
from utils.options import Options

if __name__ == "__main__":
    early_answer.wait()


def main(arguments: Sequence[str]) -> int:
    """Train or test, and return the exit code.

    Returns:
        0 done, 2 bad configuration, 3 bad checkpoint, 4 training failed, 129 / 130 / 143 interrupted, state saved.
    """
    with ExitStack() as stack:
        if preload(arguments):
            stack.enter_context(fork_server.running())
        deliver_signals_to_forks()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in interrupt_signals()[1:]:
            stack.callback(signal.signal, number, signal.signal(number, partial(raise_interrupt, os.getpid())))
        options = read_options(arguments)
        stack.enter_context(refusing())
        if options.check:
            from utils.config.check import check

            check(options)
            return 0
        return run(options, stack.enter_context(relay_output()))


def raise_interrupt(pid: int, number: int, frame: object) -> None:
    """Raise KeyboardInterrupt with the number of a signal that arrives before the engine handles it.

    In a worker that an environment forked from process `pid`, end that worker instead.
    """
    if os.getpid() == pid:
        raise KeyboardInterrupt(number)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def run(options: Options, terminal: Terminal) -> int:
    """Train or test to the end and return the exit code. Raises ConfigurationError before a process is started."""
    elastic = ElasticRun(options)
    while True:
        exit_code, options, learners = run_part(options, terminal)
        next_options = elastic.next_options(options, exit_code, learners)
        if next_options is None:
            return elastic.exit_code(exit_code)
        gc.collect()  # else reference cycles of launcher and Ray keep the part's memory, and its lock of the folder
        options = next_options


def run_part(options: Options, terminal: Terminal) -> tuple[int, Options, int | None]:
    """Train or test until the end of the engine.

    Returns:
        The exit code, the options with which the run was claimed, and the number of learners with which an elastic run
        goes on, or None.
    """
    context, agent = create_context(options)
    context.terminal = terminal
    engine, updates = EnginesDict[options.engine](context, ProcessesDict), context.counters.updates
    exit_code = agent.launch(engine)
    next_learners = getattr(engine, "next_learners", None)
    if options.mode == 1:
        run_registry.end(context.options, None if exit_code == DONE and next_learners else exit_code)
        if exit_code == DONE and context.counters.updates == updates:
            log_to_stderr("warning: no update was made, so that nothing was learned: train longer")
        if exit_code == DONE and not next_learners:
            print(best_model_hint(context.options))
    return exit_code, cast(Options, context.options), next_learners


if __name__ == "__main__":  # spawned processes import this file
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt as interrupt:  # before the engine took over
        sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
    finally:
        kill_descendants()  # of environments that were made in this process
        remove_empty_compile_caches()
