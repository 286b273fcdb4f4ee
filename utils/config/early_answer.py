"""Answer --help and refuse wrong words before torch is imported, which takes longer than everything else.

A fork of main reads the command line with a stand-in for torch: options need nothing of it, only the classes beside
them do. main goes on with its imports meanwhile. What the fork cannot judge it leaves to main: a saved run, classes of
a user, options that are wrong only together.
"""

import os
import signal
import sys
import types
from abc import ABCMeta
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

PACKAGE = "torch"
LEFT_TO_MAIN = 255  # exit code of the fork
PATIENCE = 60.0  # seconds after which the kernel ends the fork


class EarlyAnswer:
    """The fork that reads the command line. When it has an answer, main exits with its code."""

    def __init__(self, arguments: Sequence[str]):
        self._ended = False
        self._pid = os.fork()
        if self._pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)  # main finds whatever the fork would have found
            try:
                os._exit(_answer(arguments))
            finally:
                os._exit(LEFT_TO_MAIN)
        if {"-h", "--help"} & set(arguments):
            self._exit_if_answered(0)
        signal.signal(signal.SIGCHLD, lambda number, frame: self._exit_if_answered(os.WNOHANG))

    def wait(self) -> None:
        """Wait for the fork to end, and exit if it has an answer."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._exit_if_answered(0)

    def _exit_if_answered(self, waitpid_options: int) -> None:
        if not self._ended:
            pid, status = os.waitpid(self._pid, waitpid_options)
            self._ended = pid == self._pid
            code = os.waitstatus_to_exitcode(status) if self._ended else LEFT_TO_MAIN
            if code in range(LEFT_TO_MAIN) or code == -signal.SIGPIPE:
                os._exit(max(code, 0))


def _answer(arguments: Sequence[str]) -> int:
    """Print help or what is wrong, and return the exit code; LEFT_TO_MAIN if there is nothing to print."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
    try:
        sys.meta_path.insert(0, _Finder)
        from utils.config import command_line

        with command_line.refusing():
            command_line.judge_words(arguments)
    except SystemExit as end:
        sys.stdout.flush()
        return int(end.code or 0)
    except Exception:  # whatever needs more than the stand-in
        pass
    return LEFT_TO_MAIN


def _stand_in(owner: Any, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _StandIn(name, (), {})


class _StandIn(ABCMeta):
    """Anything of the package: a class to inherit from, a decorator, a function of which the result is not used."""

    __getattr__ = _stand_in

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else cls


class _Module(types.ModuleType):
    __path__: list[str] = []
    __getattr__ = _stand_in


class _Finder:
    """Finds the package and every module of it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder, is_package=True) if name.partition(".")[0] == PACKAGE else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        pass
