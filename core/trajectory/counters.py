"""Functions of a ring's counters that tell which steps readers may use."""

import numpy as np

from core.common.shared_arrays import SharedArrays


def first_valid_step(arrays: SharedArrays, rows: int, chunk_length: int) -> np.ndarray:
    """[num_actors] serial numbers before which rows may have been overwritten until now: by the open chunk and the head that follows
    it, or in the arena, or left out of a snapshot."""
    return np.maximum(arrays["written"][:, 0] - rows + chunk_length + 1, arrays["oldest"][:, 0])
