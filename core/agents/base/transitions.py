"""Batches of n-step transitions, from which agents of action values and of continuous actions learn."""

from typing import NamedTuple

from torch import Tensor


class TransitionBatch(NamedTuple):
    """A batch of n-step transitions; actions of continuous agents are in -1 .. 1."""

    observation: Tensor  # [B, ...]
    action: Tensor  # [B], or [B, A]
    returns: Tensor  # [B] R of n_step_return
    bootstrap_discounts: Tensor  # [B] D of n_step_return: the target is R + D * bootstrap
    next_observation: Tensor  # [B, ...] that the target bootstraps from
    legal: Tensor | None = None  # [B, A] actions that were legal; None if the environment has no masks
    next_legal: Tensor | None = None  # [B, A] actions that are legal in the observation bootstrapped from

    def select(self, part: slice | None) -> "TransitionBatch":
        """Return some of the transitions. If `part` is None, return all."""
        if part is None:
            return self
        return TransitionBatch._make(None if field is None else field[part] for field in self)
