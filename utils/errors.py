"""Errors that refuse to start a run, imports that raise them, and how to tell an exception in one line."""

import importlib
import traceback
from collections.abc import Sequence
from typing import Any

from core.common.exit_codes import BAD_OPTIONS
from core.common.foreign_code import foreign_code, text_of


class ConfigurationError(Exception):
    """A start that is refused, with one sentence for the problem or for each, and the exit code of the process."""

    def __init__(self, problems: str | Sequence[str], code: int = BAD_OPTIONS):
        self.problems, self.code = (problems,) if isinstance(problems, str) else tuple(problems), code
        super().__init__("\n".join(self.problems))


def import_extra(purpose: str, package: str, extra: str) -> Any:
    """Import and return an optional package, or raise ConfigurationError with the command that installs its extra."""
    try:
        with foreign_code(package, may_lack_packages=True):
            return importlib.import_module(package)
    except Exception as error:  # a package that is there may be broken in any way
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "is not installed" if is_missing else f"cannot be imported ({describe_exception(error)})"
    raise ConfigurationError(f'{purpose} needs {package}, which {reason}: pip install -e ".[{extra}]"')


def problems_of(owner: Any, *arguments: Any) -> list[str]:
    """Return what `owner.problems` says of options. The code of a class of the user's own can fail in any way."""
    try:
        found = owner.problems(*arguments)
        problems = [found] if isinstance(found, str) else list(found)
    except Exception as error:
        return [f"{owner.__name__}.problems failed: {describe_exception(error)}"]
    return [str(problem) for problem in problems]


def describe_exception(error: BaseException) -> str:
    """Return an exception in one line: its class, its message, where it was raised, and its notes."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    message = text_of(error)
    if isinstance(error, SyntaxError):
        message, where = error.msg, f"{error.filename}, line {error.lineno}"
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {message}" + (f" ({where})" if where else "") + notes
