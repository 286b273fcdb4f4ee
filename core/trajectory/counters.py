"""Functions of a ring's counters that tell which steps readers may use."""

import numpy as np

from core.common.shared_arrays import SharedArrays


def first_valid_step(arrays: SharedArrays, ring_length: int, chunk_length: int) -> np.ndarray:
    """Return the oldest step id of each actor that cannot have been overwritten until now, [num_actors] int64.

    Older steps may be lost to the chunk being written and its bootstrap step, to the frame arena, or to a checkpoint
    that left them out.
    """
    overwritten = arrays["written"][:, 0] - ring_length + chunk_length + 1
    first: np.ndarray = np.maximum(overwritten, arrays["oldest"][:, 0])
    return first
