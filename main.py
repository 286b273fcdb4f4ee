"""Train (mode 1) or test (mode 2) what utils/options.py and the command line say: `python main.py`, `python main.py --help`."""

import os
import signal
import sys
from collections.abc import Sequence

import utils  # noqa: F401  first of all: it opens standard descriptors that are missing, before anything else takes their numbers

if __name__ == "__main__":  # while the rest is imported: seconds, in which others turn an interrupt into an error of theirs
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started this may ignore it, and deaths of children would not be seen

from core.common.processes import kill_descendants
from core.common.system import remove_empty_compile_caches
from core.common.terminal import Terminal, relay_output
from utils import run_registry
from utils.config.command_line import read_options, refuse
from utils.errors import ConfigurationError
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import prepare
from utils.options import Options
from utils.preflight.check import check


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 done, 2 bad configuration, 3 bad checkpoint, 4 training failed, 129 / 130 / 143 interrupted with the state saved."""
    options = read_options(arguments)
    try:
        if options.check:
            check(options)
            return 0
        with relay_output() as terminal:
            return run(options, terminal)
    except ConfigurationError as refused:
        refuse(refused)


def run(options: Options, terminal: Terminal) -> int:
    """Train or test to the end. Returns the exit code. Raises Refused before a process is started."""
    context, agent = prepare(options)
    context.terminal, options = terminal, context.options
    engine = EnginesDict[options.engine](context, ProcessesDict)
    exit_code = agent.launch(engine, options.mode, options.num_actors, options.num_learners)
    if options.mode == 1:
        run_registry.end(options, exit_code)
    return exit_code


if __name__ == "__main__":  # spawned processes import this file
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the engine took over
        sys.exit(130)
    finally:
        kill_descendants()  # of environments that were made in this process
        remove_empty_compile_caches()
