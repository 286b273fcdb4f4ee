"""The steps at which windows may start, and the reading of windows while actors write."""

from collections.abc import Callable

import numpy as np

from core.common.shared_arrays import next_multiple
from core.specs import WindowSpec
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.window_gather import Array
from core.types import SampleIds, Window

# Draws after which a memory that changes faster than it can be read, or that has no start at all, counts as not ready.
ATTEMPTS = 100


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a batch size that is not an integer of at least 1."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"batch size must be an integer of at least 1, not {batch_size!r}")


class WindowStarts:
    """The possible starts of windows, numbered in each environment: start k is step k * stride.

    The stride is 1, or with WindowSpec.stride the length of a chunk. Windows of stride 1 do not start at a `last` step,
    where no action was taken. Windows on a longer stride do, because most of their steps are others.

    Methods that compute indices accept numpy arrays and tensors of any device alike.
    """

    def __init__(self, trajectories: Trajectories, spec: WindowSpec):
        """Raise ValueError if the stride is not the chunk length, or if the rings might not hold a whole window."""
        self._trajectories, self._spec = trajectories, spec
        self.stride, self.layout = spec.stride or 1, trajectories.layout
        layout = self.layout
        self.per_env = layout.ring_length // self.stride  # starts in the ring of an environment
        if not spec.stride:
            return
        if spec.stride != layout.chunk_length:
            raise ValueError(
                f"sequences start with a chunk: every {spec.stride} steps does not fit chunks of {layout.chunk_length}"
            )
        stack = next_multiple(max(layout.frame_stack - 1, 0), spec.stride)
        min_length = layout.overwrite_margin + stack + spec.length + 1
        if layout.ring_length < min_length:
            raise ValueError(
                f"{layout.ring_length} steps an environment are too few for a sequence of length "
                f"{spec.length} every {spec.stride} steps: at least {min_length} are needed; raise the "
                "capacity or lower the number of environments"
            )

    def valid_range(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts [low, high) of each actor from which a whole window can be read, both [num_actors]."""
        return self.numbers_from(*self._trajectories.starts(self._spec.length))

    def numbers_from(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers [low, high) of the starts among steps [low, high)."""
        return -(-low // self.stride), -(-high // self.stride)

    def invalid_starts(self, lasts: Array) -> Array:
        """Return which steps are no starts, [B] bool; `lasts` [B] bool tells which steps end an episode."""
        invalid: Array = lasts & (not self._spec.stride)
        return invalid

    # leaves: one number for each start that the rings can hold --------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the leaves, which are stored flat: (actors, starts of an environment, environments)."""
        return self.layout.num_actors, self.per_env, self.layout.num_envs

    def leaf_indices(self, env_ids: Array, step_ids: Array) -> Array:
        """Return the positions [B] of starts among the leaves."""
        num_envs = self.layout.num_envs
        rings = env_ids // num_envs * self.per_env + step_ids // self.stride % self.per_env
        indices: Array = rings * num_envs + env_ids % num_envs
        return indices

    def ids(self, leaf_indices: Array, low: Array) -> tuple[Array, Array]:
        """Return environment and step ids, both [B], of the valid starts at these positions.

        Args:
            leaf_indices: Positions among the leaves, [B].
            low: Number of each actor's oldest valid start, [num_actors].
        """
        rings, envs = leaf_indices // self.layout.num_envs, leaf_indices % self.layout.num_envs
        actors = rings // self.per_env
        oldest = low[actors]
        step_ids = (oldest + (rings % self.per_env - oldest) % self.per_env) * self.stride
        return actors * self.layout.num_envs + envs, step_ids

    def ids_between(self, actor: int, first: int, last: int) -> SampleIds:
        """Return the starts [first, last) of all environments of an actor."""
        numbers, envs = np.arange(first, max(last, first)), np.arange(self.layout.num_envs)
        env_ids = np.tile(actor * self.layout.num_envs + envs, len(numbers))
        return SampleIds(env_ids, np.repeat(numbers, len(envs)) * self.stride)

    # reading ----------------------------------------------------------------------------------------------------------
    def read(self, draw: Callable[[int], SampleIds | None], batch_size: int) -> tuple[Window, SampleIds] | None:
        """Read windows whose starts `draw(count)` chooses.

        Windows that their writer reached during the reading are drawn again. Returns None if `draw` finds no start.
        """
        ids = draw(batch_size)
        for _ in range(ATTEMPTS):
            if ids is None:
                return None
            window = self._trajectories.gather(*ids, self._spec)
            lost = ~self._trajectories.still_valid(*ids) | self.invalid_starts(window.lasts[0].numpy())
            if not lost.any():
                return window, ids
            if (fresh := draw(int(lost.sum()))) is None:
                return None
            ids = SampleIds(ids.env_ids.copy(), ids.step_ids.copy())
            ids.env_ids[lost], ids.step_ids[lost] = fresh
        return None
