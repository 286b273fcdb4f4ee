"""What learners sample: some rows of one stream in a row, and of many streams beside each other."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Window(NamedTuple):
    """T + 1 rows of B streams, time-major. P is the number of observation positions asked for."""

    observations: Tensor       # [P, B, *observation_shape] as stored
    firsts: Tensor             # [T + 1, B] bool
    lasts: Tensor              # [T + 1, B] bool
    actions: Tensor            # [T + 1, B, *action shape]
    rewards: Tensor            # [T + 1, B] float32
    discounts: Tensor          # [T + 1, B] float32
    extras: dict[str, Tensor]  # each [T + 1, B, ...]
    states: tuple[Tensor, ...] = ()  # recurrent state before row 0, each [B, ...]; of windows that start with a chunk

    def to(self, device: torch.device) -> "Window":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Window":
        """function(tensor) of each of its tensors."""
        extras = {name: function(tensor) for name, tensor in self.extras.items()}
        return Window._make([*map(function, self[:6]), extras, tuple(map(function, self.states))])


class TimeStep(NamedTuple):
    """What E streams return to one action each. `reward` and `discount` belong to the action just taken."""

    observation: np.ndarray  # [E, *EnvSpec.observation_shape]
    reward: np.ndarray       # [E] float32, transformed for training (clipped)
    discount: np.ndarray     # [E] float32, 0 where the action terminated (or lost a life, in training), else 1
    first: np.ndarray        # [E] bool, the observation starts an episode
    last: np.ndarray         # [E] bool, the observation ended an episode
    raw_reward: np.ndarray   # [E] float32, as the game gave it: the score is their sum over an episode


class SampleIds(NamedTuple):
    """The steps at which sampled windows start. Step ids never repeat, so an overwritten step is recognised."""

    env_ids: np.ndarray   # [B] int64, actor * environments per actor + environment
    step_ids: np.ndarray  # [B] int64, number of the step in its environment, from 0


class Batch(NamedTuple):
    window: Window
    keys: SampleIds
    weights: Tensor  # [B] float32 importance weights, 1 when uniform
    fresh: Tensor | None = None  # [B] bool: drawn for the first time; None: the rule does not keep count


def batch_size(batch: Batch) -> int:
    return len(batch.weights)


def tensors(batch: Batch) -> list[Tensor]:
    """All that it has, in the same order for batches of the same agent."""
    window, fresh = batch.window, [] if batch.fresh is None else [batch.fresh]
    return [*window[:6], *window.extras.values(), *window.states, batch.weights, *fresh]


def slice_batch(batch: Batch, part: slice | None) -> Batch:
    """Return some windows of a batch; if part is None, return the batch itself."""
    if part is None:
        return batch
    window, keys = batch.window, batch.keys
    some = Window(window.observations[:, part], window.firsts[:, part], window.lasts[:, part], window.actions[:, part],
                  window.rewards[:, part], window.discounts[:, part], {name: field[:, part] for name, field in window.extras.items()},
                  tuple(state[part] for state in window.states))
    return Batch(some, SampleIds(keys.env_ids[part], keys.step_ids[part]), batch.weights[part],
                 None if batch.fresh is None else batch.fresh[part])


State = tuple[Tensor, ...]  # recurrent state, each [B, ...]; empty for feed-forward models


class ActorCriticOutput(NamedTuple):
    """What the head "actor-critic" returns: of one step [B, ...], of an unroll [T, B, ...]."""

    logits: Tensor    # [..., A] of the policy
    value: Tensor     # [...]
    features: Tensor  # [..., F], the vector that both heads read


class OARInputs(NamedTuple):
    """What models of the head "recurrent-q" take in place of an observation: of one step [B, ...], of an unroll [T, B, ...]."""

    observation: Tensor  # [..., *observation_shape] in its stored dtype
    action: Tensor       # [...] of any integer dtype, the one that led here; -1 where an episode starts
    reward: Tensor       # [...] float32, what it earned; 0 where an episode starts
