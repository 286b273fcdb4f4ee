"""Run code of other authors so that whatever it raises is an ordinary error that names it.

Without this an environment that calls `sys.exit(0)` would end its process as if the process were done, an ImportError in a step would
count as a bad configuration, and an exception whose `__str__` raises would hide itself behind a second one.
"""

import reprlib
import signal
from contextlib import suppress
from types import TracebackType


def text_of(error: BaseException) -> str:
    """Return what an exception says, also where its `__str__` raises."""
    try:
        return str(error)
    except Exception as second:
        return f"(its __str__ raises {type(second).__name__})"


class ForeignCodeError(RuntimeError):
    """Stands in for what foreign code raised and nobody who drives a process may meet. It keeps the original's traceback."""


class foreign_code:
    """A context in which only ordinary exceptions leave foreign code.

    - SystemExit, and a KeyboardInterrupt that is no Ctrl-C, become a ForeignCodeError.
    - ImportError does too, unless `may_lack_packages`, because a missing package is a matter of the start.
    - An exception whose text cannot be read does too.

    Args:
        where: subject of the error's sentence, such as "its constructor".
    """

    def __init__(self, where: str, may_lack_packages: bool = False):
        self._where, self._may_lack_packages = where, may_lack_packages

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and (what := self._what_it_did(error)) is not None:
            raise ForeignCodeError(f"{self._where} {what}").with_traceback(traceback) from None

    def _what_it_did(self, error: BaseException) -> str | None:
        """Return what to say in place of the error, or None if it may pass."""
        if isinstance(error, SystemExit):
            return f"called sys.exit({reprlib.repr(error.code)})"
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return None  # Ctrl-C at the start, before an engine or a child has handlers of its own
        with suppress(Exception):
            str(error)  # raises where its text cannot be read, and then the error may not pass
            if isinstance(error, Exception) and (self._may_lack_packages or not isinstance(error, ImportError)):
                return None
        return f"raised {type(error).__name__}: {text_of(error)}"
