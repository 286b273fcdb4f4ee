"""The contract between the supervisor, which decides, and a launcher, which starts and kills processes.

`LocalLauncher` forks or spawns processes of this machine, `RayLauncher` starts Ray actors. The defaults here suit one
machine, which cannot lose or gain nodes.
"""

from typing import Any, NamedTuple, Protocol

from core.common.exit_codes import TRAINING_FAILED
from core.common.foreign_code import described
from core.distributed.learner_group import PeerLostError


class ReportedError(NamedTuple):
    """The exception that ended a process, as text."""

    message: str
    notes: str  # each in parentheses
    traceback: str
    is_of_peer: bool  # another learner was lost, and this process could not go on without it

    @classmethod
    def of(cls, error: BaseException, traceback: str) -> "ReportedError":
        """Describe an exception by its text and its notes. Its message may be unreadable, if foreign code raised it."""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return cls(described(error), notes, traceback, isinstance(error, PeerLostError))


class ExitStatus(NamedTuple):
    """The way in which a process ended: its work was done, it reported an error, or it ended for another `reason`.

    Exit code 0 alone does not mean that the work was done, because an environment may have ended the process.
    """

    done: bool = False
    error: ReportedError | None = None
    reason: str = ""
    run_exit_code: int = TRAINING_FAILED  # of a run that ends because of this process


class ProcessHandle(Protocol):
    """One process that a launcher was asked to start."""

    @property
    def pid(self) -> int | str:
        """Process id as messages show it."""

    @property
    def waitable(self) -> Any:
        """A process or Ray actor, as `Launcher.wait` takes it."""

    def has_process(self) -> bool:
        """Return True once the process exists. A cluster may first have to find a node for it."""
        return True

    def lacks_node(self) -> bool:
        """Return True if no node of the cluster has resources for the process now."""
        return False

    def poll(self) -> ExitStatus | None:
        """Return how the process ended, or None if it has not ended."""

    def kill(self) -> None:
        """Kill the process, if it has not ended, without waiting for its end."""

    def join(self) -> None:
        """Wait until the killed process has ended."""

    def clean_up(self) -> None:
        """End what a process that has ended left behind."""


class Launcher(Protocol):
    """Start and observe the processes of one run."""

    @property
    def address(self) -> str:
        """This machine's address for the learners; loopback if all of them are here."""
        return "127.0.0.1"

    def prepare(self) -> None:
        """Wait until processes can be started, or until the run is interrupted."""
        return

    def start(self, role: str, index: int, threads: int) -> ProcessHandle:
        """Start the single-process of this role and index, with this number of torch's intra-op threads.

        Raises:
            OSError: the machine has no process or file descriptor to give.
        """

    def wait(self, waitables: list[Any]) -> None:
        """Wait at most 0.1 s for any of these processes to end."""

    def check(self) -> str | None:
        """Report changes of the cluster. Return why the run must end, or None if it can go on."""
        return None

    def room_for_learners(self) -> int:
        """Return how many more learners, each with its actors, an elastic run could have now."""
        return 0

    def collect(self) -> None:
        """Fetch the last reports of other machines, once their processes have ended."""
        return

    def close(self) -> None:
        """End everything that processes of the run have left."""
