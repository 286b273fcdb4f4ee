"""Why a run is not started."""

import traceback
from collections.abc import Sequence

from core.common.foreign_code import text_of

BAD_CONFIGURATION, BAD_CHECKPOINT = 2, 3  # exit codes


class ConfigurationError(Exception):
    """Every problem found, one sentence each, and the exit code they lead to."""

    def __init__(self, problems: Sequence[str], code: int = BAD_CONFIGURATION):
        super().__init__("\n".join(problems))
        self.problems, self.code = tuple(problems), code


def describe_exception(error: BaseException) -> str:
    """An error of somebody's class in one line: what it says, where it was raised and its notes."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    said = text_of(error)
    if isinstance(error, SyntaxError):
        said, where = error.msg, f"{error.filename}, line {error.lineno}"
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {said}" + (f" ({where})" if where else "") + notes
