"""Reading drawn windows while actors write: what every sampling rule shares."""

from collections.abc import Callable

import numpy as np

from core.memory import Keys
from core.trajectory import Trajectories, Window, WindowSpec

ATTEMPTS = 100  # draws before a memory that changes faster than it is read, or holds no start at all, counts as not ready


def check_batch_size(batch_size: int) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"batch size must be an integer of at least 1, not {batch_size!r}")


def read_windows(trajectories: Trajectories, spec: WindowSpec, draw: Callable[[int], Keys | None],
                 batch_size: int) -> tuple[Window, Keys] | None:
    """batch_size windows whose starts `draw(count)` names; those that their writer reached meanwhile are drawn again.

    None when `draw` knows no start.
    """
    keys = draw(batch_size)
    for _ in range(ATTEMPTS):
        if keys is None:
            return None
        window = trajectories.gather(*keys, spec)
        lost = ~trajectories.intact(*keys) | window.lasts[0].numpy()
        if not lost.any():
            return window, keys
        keys = _replace(keys, lost, draw)
    return None


def _replace(keys: Keys, lost: np.ndarray, draw: Callable[[int], Keys | None]) -> Keys | None:
    fresh = draw(int(lost.sum()))
    if fresh is None:
        return None
    streams, serials = keys.streams.copy(), keys.serials.copy()
    streams[lost], serials[lost] = fresh
    return Keys(streams, serials)
