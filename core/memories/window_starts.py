"""Where windows may start, and reading those that were drawn while actors write: what every sampling rule shares."""

from collections.abc import Callable

import numpy as np

from core.common.rounding import next_multiple
from core.specs import WindowSpec
from core.trajectory.ring_buffer import Trajectories
from core.types import SampleIds, Window

ATTEMPTS = 100  # draws before a memory that changes faster than it is read, or holds no start at all, counts as not ready


def check_batch_size(batch_size: int) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"batch size must be an integer of at least 1, not {batch_size!r}")


class WindowStarts:
    """Start k of a stream is its row k * stride: every row, or with WindowSpec.stride the first one of every chunk.

    Windows that may start at any row do not start at a `last` one, where no action was taken. Those on a stride do: most of their rows
    are others. Raises ValueError for a stride that is not the chunks' length, and for rings that might not hold a whole window.
    """

    def __init__(self, trajectories: Trajectories, spec: WindowSpec):
        self._trajectories, self._spec = trajectories, spec
        self.stride = spec.stride or 1
        layout = trajectories.layout
        self.per_stream = layout.rows // self.stride  # starts that a ring has room for
        if not spec.stride:
            return
        if spec.stride != layout.chunk_length:
            raise ValueError(f"sequences start with a chunk: every {spec.stride} rows does not fit chunks of {layout.chunk_length}")
        stack = next_multiple(max(layout.frame_stack - 1, 0), spec.stride)
        if layout.rows < (least := layout.overwrite_margin + stack + spec.length + 1):
            raise ValueError(f"{layout.rows} rows a stream are too few for a sequence of length {spec.length} every {spec.stride} rows: at "
                             f"least {least} are needed; raise the capacity or lower the number of streams")

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each actor's starts from which a whole window can be read: [low, high), both [num_actors]."""
        low, high = self._trajectories.starts(self._spec.length)
        return -(-low // self.stride), -(-high // self.stride)

    def barred(self, lasts: np.ndarray) -> np.ndarray:
        """Of rows with these `last`, [B] bool each: which are no starts."""
        return lasts & (not self._spec.stride)

    def read(self, draw: Callable[[int], SampleIds | None], batch_size: int) -> tuple[Window, SampleIds] | None:
        """batch_size windows whose starts `draw(count)` names; those that their writer reached meanwhile are drawn again.

        None when `draw` knows no start.
        """
        keys = draw(batch_size)
        for _ in range(ATTEMPTS):
            if keys is None:
                return None
            window = self._trajectories.gather(*keys, self._spec)
            lost = ~self._trajectories.still_valid(*keys) | self.barred(window.lasts[0].numpy())
            if not lost.any():
                return window, keys
            keys = _replace(keys, lost, draw)
        return None


def _replace(keys: SampleIds, lost: np.ndarray, draw: Callable[[int], SampleIds | None]) -> SampleIds | None:
    fresh = draw(int(lost.sum()))
    if fresh is None:
        return None
    streams, serials = keys.streams.copy(), keys.serials.copy()
    streams[lost], serials[lost] = fresh
    return SampleIds(streams, serials)
