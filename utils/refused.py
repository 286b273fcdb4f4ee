"""Why a run is not started."""

from collections.abc import Sequence

BAD_CONFIGURATION, BAD_CHECKPOINT = 2, 3  # exit codes


class Refused(Exception):
    """Every problem found, one sentence each, and the exit code they lead to."""

    def __init__(self, problems: Sequence[str], code: int = BAD_CONFIGURATION):
        super().__init__("\n".join(problems))
        self.problems, self.code = tuple(problems), code
