"""Shared ring buffers of steps, chunks and windows: the one data format between actors and learners.

A step of an environment is written once: its newest frame, `first`, `last`, action, reward, discount, and what the
agent adds. Step t holds the action taken at its observation, and the reward and discount which that action earned. A
`last` step ends an episode: no action was taken there.

- Each actor owns the rings of its E environments, [ring_length, E, ...], and is their only writer. It fills a chunk of
  steps, then raises `written`.
- Readers use steps in [written - ring_length + overwrite margin, written) and check `written` again after reading.
  Nobody locks, so a killed writer leaves nothing locked.
- The step after the newest chunk (the bootstrap step) is partly published: readers may use its observation, `first`,
  `last` and mask of legal actions. A learner can therefore bootstrap a full-chunk unroll without waiting for the next
  chunk.
- Every chunk has a ticket, which tells in what order the chunks of all actors were published: one more than the newest
  ticket that its writer saw. No counter is shared, and only chunks published at the same moment may have equal tickets.
  A checkpoint stores them.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.shared_arrays import SharedArrays
from core.common.system import available_bytes
from core.trajectory.frame_arena import CompressedFrameReader, GatherThreadPool, first_valid_step, gather_frames
from core.trajectory.layout import Layout
from core.trajectory.window_gather import WindowGatherer


class Trajectories(WindowGatherer[np.ndarray]):
    """The ring buffers of all actors in shared memory."""

    library = np

    def __init__(self, layout: Layout):
        self.layout = layout
        self.arrays = SharedArrays(layout.arrays())
        self._threads = GatherThreadPool(layout.storage.gather_threads)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made on first use."""
        made = ("frames", "_first_slots", "_ages", "_offsets")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    @cached_property
    def frames(self) -> CompressedFrameReader | None:
        """Return the reader of compressed frames; if frames are raw, return None."""
        packed = self.layout.packed
        return CompressedFrameReader(packed, self.arrays, self._threads) if packed else None

    def written(self) -> np.ndarray:
        """Return how many steps an environment of each actor has published, [num_actors] int64; never falls."""
        return self.arrays["written"][:, 0].copy()

    def starts(self, window_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the step ids [low, high) from which a whole window can be read, both [num_actors]."""
        written = self.written()
        low = np.maximum(written - self.layout.ring_length + self.layout.overwrite_margin, 0)
        low = np.maximum(low, self.arrays["oldest"][:, 0])
        low = np.where(low > 0, low + max(self.layout.frame_stack - 1, 0), 0)
        return low, np.maximum(written - window_length, low)

    def size(self) -> int:
        """Return the number of readable steps."""
        low, high = self.starts(0)
        return int((high - low).sum()) * self.layout.num_envs

    def still_valid(self, env_ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        """Return which windows no writer has overwritten until now, [B] bool.

        The older frames of a window's first stack belong to the window.
        """
        oldest_read: np.ndarray = np.maximum(step_ids - max(self.layout.frame_stack - 1, 0), 0)
        first_valid = first_valid_step(self.arrays, self.layout.ring_length, self.layout.chunk_length)
        valid: np.ndarray = oldest_read >= first_valid[env_ids // self.layout.num_envs]
        return valid

    def flat(self, name: str) -> np.ndarray:
        """Return a view of a field as [num_slots, ...]."""
        array = self.arrays[name]
        return array.reshape(-1, *array.shape[3:])

    def take_frames(self, env_ids: np.ndarray, step_ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        if self.frames is None:
            return gather_frames(self.flat("frame"), slots, self._threads)
        return self.frames.take(env_ids, step_ids)

    def _array(self, values: np.ndarray) -> np.ndarray:
        return values

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def _take(self, name: str, slots: np.ndarray) -> np.ndarray:
        return self.flat(name).take(slots, axis=0)

    def _clear(self, frames: np.ndarray, mask: np.ndarray) -> None:
        frames[mask] = 0

    def statistics(self) -> dict[str, float]:
        """Return replay_mb, the frames' size in 1e6 bytes, and for compressed frames their compression ratio."""
        packed = self.layout.packed
        low, high = self.starts(0)
        raw = float((high - low).sum()) * self.layout.num_envs * self.layout.fields["frame"].nbytes
        if packed is None or not raw:
            return {"replay_mb": raw / 1e6}
        used = CompressedFrameReader.used_bytes(packed, self.arrays)
        return {"replay_mb": used / 1e6, "compression": raw / max(used, 1)}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the steps in use.

        Writers may go on meanwhile: steps that they overwrite during the copy are excluded by `oldest`. Raises
        MemoryError when the machine has no space for the copies.
        """
        if self.layout.nbytes > available_bytes():
            raise MemoryError(
                f"{self.layout.nbytes:,} bytes are needed to copy the replay and {available_bytes():,} "
                "are free. Set a smaller memory.capacity, or learner.checkpoint_replay false."
            )
        state = self._copy_counters()
        lengths = self._lengths(state["written"], state.get("packed"))
        state |= {name: self.arrays[name][:, :length].copy() for name, length in lengths.items() if name not in state}
        # after the copy, so that everything overwritten meanwhile is excluded
        state["oldest"] = self.arrays["oldest"].copy()
        state["oldest"][:, 0] = first_valid_step(self.arrays, self.layout.ring_length, self.layout.chunk_length)
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def _copy_counters(self) -> dict[str, np.ndarray]:
        """Copy `written` and, for compressed frames, the short ring of raw ones and the arenas' ends at that time."""
        while True:
            state = {"written": self.arrays["written"].copy()}
            if self.layout.packed is None:
                return state
            state |= {name: self.arrays[name].copy() for name in ("frame", "packed")}
            if (self.arrays["written"] - state["written"] <= self.layout.chunk_length).all():
                return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; nobody may write meanwhile.

        Raises ValueError for a field whose shape or dtype differs.
        """
        written, ends = (state[name].numpy() if name in state else None for name in ("written", "packed"))
        lengths = self._lengths(written, ends)
        for name, spec in self.layout.arrays().items():
            shape = (spec.shape[0], lengths[name], *spec.shape[2:]) if name in lengths else spec.shape
            stored = state[name].numpy() if name in state else None
            if stored is None or stored.shape != shape or stored.dtype != spec.dtype:
                present = "absent" if stored is None else f"{stored.dtype} {stored.shape}"
                raise ValueError(
                    f"stored replay does not fit: field {name} is {present}, this run needs {spec.dtype} {shape}"
                )
        for name in self.layout.arrays():
            stored = state[name].numpy()
            self.arrays[name][:, : stored.shape[1]] = stored

    def _lengths(self, written: np.ndarray | None, ends: np.ndarray | None) -> dict[str, int]:
        """Return how much of each array's second axis holds data.

        Args:
            written: Published steps. The bootstrap step after them is stored too.
            ends: Ends of the arenas of compressed frames.
        """
        layout = self.layout
        used = 0 if written is None else min(layout.ring_length, int(written.max()) + 1)
        chunks = -(-used // layout.chunk_length)
        lengths = dict.fromkeys(layout.fields, used) | dict.fromkeys((*layout.state_fields, "tickets"), chunks)
        return lengths | layout.packed.lengths(chunks, ends) if layout.packed else lengths
