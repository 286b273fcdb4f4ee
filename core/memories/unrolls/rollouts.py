"""Rollouts for on-policy learning: one unroll of every environment, all by the newest parameters.

Actors and learner take turns. An actor begins a chunk when the learner has published what it learnt from the rollout
before. So rollout k is chunk k of every environment, no chunk is read twice, and none is overwritten before it is read.
"""

from typing import Any

import numpy as np
import torch

from core.common.shared_arrays import SharedArrays
from core.memories.unrolls.unroll_memory import check_whole_chunks
from core.memory import Memory
from core.specs import ArraySpec, WindowSpec
from core.trajectory.ring_buffer import Layout
from core.types import Batch, SampleIds


class RolloutMemory(Memory):
    """Synchronous collection: every batch is a whole rollout."""

    window_kinds = ("rollouts",)
    on_policy = True

    def __init__(self, params: Any, layout: Layout, window: WindowSpec, seed: int):
        check_whole_chunks(layout, window)
        super().__init__(params, layout, window, seed)
        self._shared = SharedArrays({"released": ArraySpec((1,), "int64")})  # rollouts after which actors went on
        self._next = 0  # the next rollout, which only the sampling thread reads and writes

    # requirements -----------------------------------------------------------------------------------------------------
    @classmethod
    def ring_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        return length * batch_size

    @classmethod
    def kept_steps(cls, params: Any, batch_size: int, length: int, num_actors: int) -> int:
        return length * batch_size

    @classmethod
    def samples_per_step(cls, params: Any) -> float:
        return 1.0

    # actors and learner -----------------------------------------------------------------------------------------------
    def has_room(self, actor_ind: int) -> bool:
        return bool(self._chunks()[actor_ind] <= self._shared["released"][0])

    def _chunks(self) -> np.ndarray:
        """Return how many chunks each actor has published."""
        chunks: np.ndarray = self.trajectories.written() // self.window.length
        return chunks

    def sample(self, batch_size: int) -> Batch | None:
        """Return the next rollout, ordered by environment, or None while an actor has not finished its part."""
        if self._chunks().min() <= self._next:
            return None
        total = self.layout.total_envs
        keys = SampleIds(np.arange(total), np.full(total, self._next * self.window.length, np.int64))
        window = self.trajectories.gather(*keys, self.window)
        self._next += 1
        return Batch(window, keys, torch.ones(total), torch.ones(total, dtype=torch.bool), on_policy=True)

    def release_actors(self) -> None:
        self._shared["released"][0] += 1

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        rollouts = {"next": self._next, "released": int(self._shared["released"][0])}
        return {**super().state_dict(), "rollouts": rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._next, self._shared["released"][0] = state["rollouts"]["next"], state["rollouts"]["released"]
