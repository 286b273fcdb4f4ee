"""Several learners that learn as one: each has its own batch, and all step with the mean of their gradients.

- The engine puts a `Rendezvous` into the context, at which every learner joins the group.
- Within `LearnerGroup.run`, everything that changes what is learnt uses `all_reduce_sum` and `all_reduce_mean`: the
  optimiser (core/learning/optimizer.py), and statistics that an agent or a model keeps.
- Outside of `run`, and with one learner, both functions return at once and copy nothing.
"""

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.agent import Agent

Result = TypeVar("Result")
# What differs between learners where nothing failed: an agent or a model that several learners do not suit.
OWN_STATE = (
    ". If it happens again, the agent or its model keeps something of the batches or random numbers of one learner, "
    "such as statistics of BatchNorm or weights that are drawn anew: average it by "
    "core.distributed.learner_group.all_reduce_mean, or use one learner"
)
BROADCAST_BYTES = 1 << 24  # exchanged at once
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
        # Called about once a second while an exchange waits, and in long updates; raises PeerLostError to end a wait
        # without hope.
        self.heartbeat: Callable[[], None] = _no_heartbeat
        self.gradient_dtype: torch.dtype | None = None  # in which gradients are sent; None leaves theirs
        self._has_exchanged = False  # in the current update
        # Sums under way: the tensor, its values before (None on GPUs, where a lost peer is not noticed), and the wait.
        self._pending: list[tuple[Tensor, Tensor | None, Callable[[], None]]] = []

    @abstractmethod
    def gather(self, values: Sequence[int]) -> Generator[bool, None, list[list[int]]]:
        """Exchange values of 64 bits with sign, at least one and as many as every other learner.

        Yields:
            False while it waits for the others.

        Returns:
            The values of every learner, by index.

        Raises:
            PeerLostError: another learner has gone.
        """

    def barrier(self) -> Generator[bool, None, None]:
        """Wait until all learners have made this call. Yields False while it waits."""
        yield from self.gather([0])

    def broadcast(self, value: Any) -> Generator[bool, None, Any]:
        """Return the first learner's value, of tensors and plain values, as a copy. The others' values are ignored.

        Yields False while it waits for the others.
        """
        if self.size == 1:
            return value
        buffer = io.BytesIO()
        if self.index == 0:
            torch.save(value, buffer)
        (size,) = (yield from self.gather([buffer.tell()]))[0]
        content = torch.zeros(size, dtype=torch.uint8)
        if self.index == 0:
            content.copy_(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
        for piece in content.split(BROADCAST_BYTES):
            yield False
            self._start(piece)()  # with the zeros of the others
        return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)

    def run(self, function: Callable[[], Result]) -> Result:
        """Run an update in which `all_reduce_sum` and `all_reduce_mean` exchange with the other learners.

        Raises:
            PeerLostError: another learner had gone before the first exchange. No weight has been changed. Planned
                schedules, and buffers that a forward pass changes, may have been.
        """
        self._has_exchanged, self._pending = False, []
        token = _GROUP.set(self)
        try:
            return function()
        finally:
            _GROUP.reset(token)

    def sum(self, tensor: Tensor) -> None:
        """Replace the values of a tensor by the sum of all learners' tensors, bit for bit the same for all learners.

        Must be called within `run`. If another learner has gone at the first sum of an update, the update is abandoned.
        After the first sum, the update is finished as if all learners had this learner's values, so that no half of an
        update is saved; the next `gather` raises PeerLostError.
        """
        self.start_sum(tensor)
        self.finish_sums()

    def start_sum(self, tensor: Tensor) -> None:
        """Start to replace the values of a tensor, which must not be used before `finish_sums`."""
        if self.lost_peer is None:
            self._pending.append((tensor, None if tensor.is_cuda else tensor.clone(), self._start(tensor)))
        else:
            tensor.mul_(self.size)

    def finish_sums(self) -> None:
        """Wait for all started sums, which fail together: as one `sum`, they are abandoned or all finished alone."""
        pending, self._pending, errors = self._pending, [], list[PeerLostError]()
        for *_, wait in pending:
            try:
                wait()
            except PeerLostError as error:
                errors.append(error)
        if not errors:
            self._has_exchanged |= bool(pending)
            return
        for tensor, values, _ in pending:
            if values is not None:
                tensor.copy_(values)
        if not self._has_exchanged:
            raise errors[0]
        self.lost_peer = errors[0]
        for tensor, *_ in pending:
            tensor.mul_(self.size)

    @abstractmethod
    def _start(self, tensor: Tensor) -> Callable[[], None]:
        """Start to add up the tensors of all learners in place. Return a function that waits for the sum.

        That raises PeerLostError, after which values are undefined.
        """

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

    def _start(self, tensor: Tensor) -> Callable[[], None]:
        return lambda: None  # with one learner, the tensor already is the sum


def group_of_several() -> LearnerGroup | None:
    """Return the group with which the current update exchanges; None outside of an update, and for one learner."""
    group = _GROUP.get()
    return group if group is not None and group.size > 1 else None


def send_heartbeat() -> None:
    """Send a heartbeat within a long update. The next exchange notices a lost learner."""
    if (group := _GROUP.get()) is not None:
        with suppress(PeerLostError):
            group.heartbeat()


def num_learners() -> int:
    """Return the number of learners whose gradients are averaged; 1 outside of a group."""
    group = group_of_several()
    return 1 if group is None else group.size


def all_reduce_sum(tensor: Tensor) -> None:
    """Replace the values of a tensor by the sum of all learners' tensors."""
    if group := group_of_several():
        group.sum(tensor)


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """Return the mean of all learners' tensors, a new tensor; with one learner, the tensor itself."""
    if num_learners() == 1:
        return tensor
    mean = tensor.detach().clone()
    all_reduce_sum(mean)
    return mean / num_learners()


def all_reduce_and(condition: Tensor) -> Tensor:
    """Return a scalar that is True if the conditions of all learners are."""
    return condition if num_learners() == 1 else all_reduce_mean(condition.float()) == 1


class LearnersOutOfSyncError(RuntimeError):
    """Learners that should be alike have different update counts or parameters."""


class LearnerStatus(NamedTuple):
    """The status that each learner sends to all others before an update. Every field fits into 64 bits with sign."""

    stopped: int  # the run ends
    checkpoint_due: int
    has_batch: int
    agent_steps: int  # of the run
    updates: int  # made so far
    digest: int  # of the agent's state, if it is compared before this update; else 0


class SyncChecker:
    """Check that all learners are at the same update and have the same state.

    Update counts are compared before every update, states before the first update and then every `period` updates. If
    `period` is 0, states are never compared.
    """

    def __init__(self, agent: Agent, updates: int, period: int):
        self._agent, self._period, self.updates = agent, period, updates
        self._next_comparison = updates

    def local_status(self) -> tuple[int, int]:
        """Return the fields `updates` and `digest` of this learner's status."""
        return self.updates, state_digest(self._agent.state_dict()) if self._compares_states() else 0

    def merge_statuses(self, rows: list[list[int]]) -> LearnerStatus:
        """Return the status on which all learners act, from the statuses of all.

        Any learner can stop the run. Only the first, which writes the checkpoint, decides that one is due, and tells
        the agent steps. An update needs a batch of every learner.

        Raises:
            LearnersOutOfSyncError: update counts or digests differ.
        """
        if len(rows) == 1:
            return LearnerStatus(*rows[0])
        statuses = [LearnerStatus(*row) for row in rows]
        for name in ("updates", "digest"):
            values = [getattr(status, name) for status in statuses]
            if len(set(values)) > 1:
                cause = OWN_STATE if name == "digest" else ""
                raise LearnersOutOfSyncError(
                    f"after {self.updates} updates the learners are not alike any more: {name} of learners 0 to "
                    f"{len(statuses) - 1} are {', '.join(map(str, values))}. The last checkpoint may be sound: "
                    f"continue from it; if it is not, remove its folder, and the one before is taken{cause}"
                )
        if self._compares_states():
            self._next_comparison = (self.updates // self._period + 1) * self._period
        return statuses[0]._replace(
            stopped=any(status.stopped for status in statuses), has_batch=all(status.has_batch for status in statuses)
        )

    def _compares_states(self) -> bool:
        return bool(self._period) and self.updates >= self._next_comparison


def state_digest(state: Mapping[str, Any]) -> int:
    """Return a digest of all tensors and plain values of a state: 64 bits with sign."""
    digest = hashlib.blake2b(digest_size=8)
    for path, leaf in pytree.tree_leaves_with_path(state):
        digest.update(pytree.keystr(path).encode())
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), signed=True)
