"""Run code of other authors so that everything that it raises is an ordinary exception, which names the code.

Three failures are prevented:

- An environment that calls `sys.exit(0)` would end its process as if the process had finished.
- An ImportError in an environment's step would count as a bad configuration.
- An exception whose `__str__` raises would be hidden by a second exception.
"""

import reprlib
import signal
from contextlib import suppress
from types import TracebackType


def text_of(error: BaseException) -> str:
    """Return the exception's message, or a note about it if its `__str__` raises."""
    try:
        return str(error)
    except Exception as second:
        return f"(its __str__ raises {type(second).__name__})"


def described(error: BaseException) -> str:
    """Return the exception's class and message in one line."""
    return f"{type(error).__name__}: {text_of(error)}"


class ForeignCodeError(RuntimeError):
    """An error that replaces an exception of foreign code that must not leave it. The original traceback is kept."""


class foreign_code:
    """A context manager that lets only ordinary exceptions leave foreign code.

    - SystemExit, and a KeyboardInterrupt that is not Ctrl-C, become a ForeignCodeError.
    - ImportError does too, unless `may_lack_packages`, because missing packages are reported before a run starts.
    - An exception whose message cannot be read does too.

    Args:
        where: Subject of the error's sentence, such as "its constructor".
        may_lack_packages: Let an ImportError pass.
    """

    def __init__(self, where: str, may_lack_packages: bool = False):
        self._where, self._may_lack_packages = where, may_lack_packages

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and (predicate := self._replacement(error)) is not None:
            raise ForeignCodeError(f"{self._where} {predicate}").with_traceback(traceback) from None

    def _replacement(self, error: BaseException) -> str | None:
        """Return the predicate of the sentence that replaces this error, or None if the error may pass."""
        if isinstance(error, SystemExit):
            return f"called sys.exit({reprlib.repr(error.code)})"
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return None  # Ctrl-C at the start, before an engine or a child has installed handlers
        with suppress(Exception):
            str(error)  # raises if the message cannot be read, and then the error may not pass
            if isinstance(error, Exception) and (self._may_lack_packages or not isinstance(error, ImportError)):
                return None
        return f"raised {described(error)}"
