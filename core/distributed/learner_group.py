"""Several learners that learn as one: each has its own batch, and all step with the mean of their gradients.

- The engine puts a `Rendezvous` into the context, at which every learner joins the group.
- Within `LearnerGroup.run`, everything that changes what is learnt uses `all_reduce_sum` and `all_reduce_mean`: the
  optimiser (core/learning/optimizer.py), and statistics that an agent or a model keeps.
- Outside of `run`, and with one learner, both functions return at once and copy nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result")
_GROUP: ContextVar["LearnerGroup | None"] = ContextVar("group", default=None)


def _no_heartbeat() -> None:
    """Do nothing. A group is pickled with the context, and a lambda could not be."""


class PeerLostError(RuntimeError):
    """Another learner has gone, without which this one cannot go on."""


class LearnerGroup(ABC):
    """The learner `index` among `size` learners, as a member of their group.

    All learners make the same calls in the same order, and each call waits for the others.
    """

    def __init__(self, index: int, size: int):
        self.index, self.size = index, size
        self.lost_peer: PeerLostError | None = None  # set in an update that is finished without the others
        self.heartbeat: Callable[[], None] = (
            _no_heartbeat  # called about once a second while `sum` waits for the others
        )
        self._has_exchanged = False  # in the current update

    @abstractmethod
    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """Exchange values of 64 bits with sign, the same number by each learner.

        Yields:
            False while it waits for the others.

        Returns:
            The values of every learner, by index.

        Raises:
            PeerLostError: another learner has gone.
        """

    def run(self, function: Callable[[], Result]) -> Result:
        """Run an update in which `all_reduce_sum` and `all_reduce_mean` exchange with the other learners.

        Raises:
            PeerLostError: another learner had gone before the first exchange. Nothing has been changed.
        """
        self._has_exchanged = False
        with active_group(self):
            return function()

    def sum(self, tensor: Tensor) -> None:
        """Replace the values of a tensor by the sum of all learners' tensors, bit for bit the same for all learners.

        Must be called within `run`. If another learner has gone at the first sum of an update, the update is abandoned.
        After the first sum, the update is finished as if all learners had this learner's values, so that no half of an
        update is saved; the next `gather` raises PeerLostError.
        """
        if self.lost_peer is None:
            try:
                self._sum(tensor)
                self._has_exchanged = True
                return
            except PeerLostError as error:
                if not self._has_exchanged:
                    raise
                self.lost_peer = error
        tensor.mul_(self.size)

    @abstractmethod
    def _sum(self, tensor: Tensor) -> None:
        """Add up the tensors of all learners in place. Raises PeerLostError with the tensor as it was."""

    def __enter__(self) -> "LearnerGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Leave the group. A learner that failed does not wait for the others, which may wait for it."""


class Rendezvous(Protocol):
    """The place where the learners of a run meet. Each of their processes inherits it."""

    def join(self, index: int, device: str) -> LearnerGroup:
        """Wait for the other learners, and return the group of learner `index`, which computes on this device."""


class SingleLearner(LearnerGroup):
    """The group, and the rendezvous, of the only learner of a run."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def join(self, index: int, device: str) -> LearnerGroup:
        """Return this group. Raises RuntimeError for a second learner, which would learn for itself."""
        if index:
            raise RuntimeError(f"this engine brings no learners together: learner {index} would learn for itself")
        return self

    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """Return the values as those of one learner."""
        yield from ()
        return [list(values)]

    def _sum(self, tensor: Tensor) -> None:
        """Do nothing: with one learner the tensor already is the sum."""


@contextmanager
def active_group(group: LearnerGroup) -> Iterator[None]:
    """Let `all_reduce_sum` and `all_reduce_mean` exchange within this group."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def num_learners() -> int:
    """Return the number of learners whose gradients are averaged; 1 outside of a group."""
    group = _GROUP.get()
    return 1 if group is None else group.size


def all_reduce_sum(tensor: Tensor) -> None:
    """Replace the values of a tensor by the sum of all learners' tensors."""
    group = _GROUP.get()
    if group is not None:
        group.sum(tensor)


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """Return the mean of all learners' tensors, a new tensor; with one learner, the tensor itself."""
    if num_learners() == 1:
        return tensor
    mean = tensor.detach().clone()
    all_reduce_sum(mean)
    return mean / num_learners()
