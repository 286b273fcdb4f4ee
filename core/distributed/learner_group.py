"""Several learners as one: each computes gradients on its own batch, and their optimisers step with what all batches together say.

The engine puts into the context where the learners of its run meet; each learner joins. Within `LearnerGroup.run` whatever
changes what is learnt (core/learning/optimizer.py, and statistics that an agent or a model keeps) sees the group by `all_reduce_sum` and
`all_reduce_mean`; outside of it, and where there is one learner, there is nothing to do and nothing is copied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result")
_GROUP: ContextVar["LearnerGroup | None"] = ContextVar("group", default=None)


def _nothing() -> None:
    """Beat where nobody watches."""


class PeerLostError(RuntimeError):
    """Another learner has gone: this one cannot go on alone."""


class LearnerGroup(ABC):
    """Learner `index` among `size`. All make the same calls in the same order; each waits for the others.

    Its generators are the learner's own: they yield True after work and False while they wait. All raise PeerLostError.
    """

    def __init__(self, index: int, size: int):
        self.index, self.size = index, size
        self.parted: PeerLostError | None = None  # since an update that was finished without the others
        self.heartbeat: Callable[[], None] = _nothing  # called now and then while `sum` waits for the others
        self._exchanged = False  # in this update

    @abstractmethod
    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """The values of every learner, by index: as many of each, 64 bits with sign."""

    @abstractmethod
    def run(self, function: Callable[[], Result]) -> Generator[bool, None, Result]:
        """function(), which may call `all_reduce_sum` and `all_reduce_mean`."""

    def sum(self, tensor: Tensor) -> None:
        """Becomes the sum of all learners' tensors, in place; only within `run`. Bit for bit the same for all.

        An update whose first sum finds another learner gone has changed nothing and is given up. After that sum an update is finished
        with this learner's values in place of everybody's, so that no half of an update is saved; the next `gather` raises.
        """
        if self.parted is None:
            try:
                self._sum(tensor)
                self._exchanged = True
                return
            except PeerLostError as error:
                if not self._exchanged:
                    raise
                self.parted = error
        tensor.mul_(self.size)

    @abstractmethod
    def _sum(self, tensor: Tensor) -> None:
        """Add up the tensors of all. Raises PeerLostError with the tensor as it was."""

    def _within(self, function: Callable[[], Result]) -> Result:
        """function(), with the sums of an update of its own."""
        self._exchanged = False
        with within(self):
            return function()

    def __enter__(self) -> "LearnerGroup":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """This learner leaves; one that failed does not wait for the others, who may be waiting for it."""


class Rendezvous(Protocol):
    """Where the learners of a run meet; inherited by each of their processes."""

    def join(self, index: int, device: str) -> LearnerGroup:
        """Of the learner that computes on this device. Waits for the others."""


class SingleLearner(LearnerGroup):
    """The only learner of its run."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def join(self, index: int, device: str) -> LearnerGroup:
        if index:
            raise RuntimeError(f"this engine brings no learners together: learner {index} would learn for itself")
        return self

    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        yield from ()
        return [list(values)]

    def run(self, function: Callable[[], Result]) -> Generator[bool, None, Result]:
        yield from ()
        return function()

    def _sum(self, tensor: Tensor) -> None:
        """Do nothing: with one learner the tensor already is the sum."""


@contextmanager
def within(group: LearnerGroup) -> Iterator[None]:
    """For groups: what `run` runs is run in here."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def num_learners() -> int:
    """That average what is learnt here."""
    group = _GROUP.get()
    return 1 if group is None else group.size


def all_reduce_sum(tensor: Tensor) -> None:
    """Becomes the sum of all learners' tensors, in place."""
    group = _GROUP.get()
    if group is not None:
        group.sum(tensor)


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """The mean of all learners' tensors, a new one; where there is one learner, the tensor itself."""
    if num_learners() == 1:
        return tensor
    mean = tensor.detach().clone()
    all_reduce_sum(mean)
    return mean / num_learners()
