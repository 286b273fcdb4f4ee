"""Data that crosses rooms: time steps, windows, batches, the inputs and outputs of networks; and checks of shapes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

State = tuple[Tensor, ...]  # recurrent state, each [B, ...]; empty for feed-forward models


ACTION_MASK = "action_mask"  # name of the stored masks of legal actions in Window.extras


class TimeStep(NamedTuple):
    """A time step of E environments. `reward` and `discount` belong to the action just taken."""

    observation: np.ndarray  # [E, *EnvSpec.observation_shape]
    reward: np.ndarray  # [E] float32, transformed for training (clipped)
    discount: np.ndarray  # [E] float32, 0 where the action terminated (or lost a life, in training), else 1
    first: np.ndarray  # [E] bool, the observation starts an episode
    last: np.ndarray  # [E] bool, the observation ended an episode
    raw_reward: np.ndarray  # [E] float32, as the game gave it; its sum over an episode is the score
    # [E, A] bool, the legal actions, or those of several choices one after another; an environment
    # may return anything where an episode terminated; None if the environment has no masks
    action_mask: np.ndarray | None = None


def restart(state: State, first: np.ndarray | Tensor, initial: State) -> State:
    """Return the recurrent state with the initial state in environments where `first` [B] starts an episode."""
    if not state or not first.any():
        return state
    mask = torch.as_tensor(first, device=state[0].device)
    return tuple(
        torch.where(mask.view(-1, *[1] * (tensor.dim() - 1)), start, tensor) for tensor, start in zip(state, initial)
    )


class Window(NamedTuple):
    """T + 1 consecutive steps of B environments, time-major. P is the number of observation positions asked for."""

    observations: Tensor  # [P, B, *observation_shape] as stored
    firsts: Tensor  # [T + 1, B] bool
    lasts: Tensor  # [T + 1, B] bool
    actions: Tensor  # [T + 1, B, *action shape]
    rewards: Tensor  # [T + 1, B] float32
    discounts: Tensor  # [T + 1, B] float32
    extras: dict[str, Tensor]  # each [T + 1, B, ...]
    states: State = ()  # recurrent state before step 0, each [B, ...]; only of windows that start with a chunk

    def to(self, device: torch.device) -> "Window":
        """Return the window with every tensor on the device."""
        window: Window = tree_map(lambda tensor: tensor.to(device, non_blocking=True), self)
        return window


class SampleIds(NamedTuple):
    """The steps at which sampled windows start. Step ids never repeat, so an overwritten step is recognised."""

    env_ids: np.ndarray  # [B] int64, actor * environments per actor + environment
    step_ids: np.ndarray  # [B] int64, number of the step in its environment, from 0

    def select(self, which: slice | list[int] | np.ndarray) -> "SampleIds":
        """Return some of the steps."""
        return SampleIds(self.env_ids[which], self.step_ids[which])


class Batch(NamedTuple):
    """Sampled windows, their identities and their weights."""

    window: Window
    keys: SampleIds
    weights: Tensor  # [B] float32 importance weights, 1 when sampling is uniform
    fresh: Tensor | None = None  # [B] bool, sampled for the first time; None if the memory does not keep count
    on_policy: bool = False  # all actions were chosen with the parameters that the learner has now
    precomputed: Any = None  # what `Agent.precompute` made of this batch


def slice_batch(batch: Batch, part: slice | None) -> Batch:
    """Return some windows of a batch, as views and not precomputed. If `part` is None, return the batch itself."""
    if part is None:
        return batch
    window = batch.window
    fields = tree_map(lambda field: field[:, part], window[:-1])
    sliced = Window._make([*fields, tuple(state[part] for state in window.states)])
    fresh = None if batch.fresh is None else batch.fresh[part]
    return Batch(sliced, batch.keys.select(part), batch.weights[part], fresh, batch.on_policy)


class TransitionBatch(NamedTuple):
    """A batch of n-step transitions; actions of continuous agents are in -1 .. 1."""

    observation: Tensor  # [B, ...]
    action: Tensor  # [B], or [B, A]
    returns: Tensor  # [B] R of n_step_return
    bootstrap_discounts: Tensor  # [B] D of n_step_return: the target is R + D * bootstrap
    next_observation: Tensor  # [B, ...] that the target bootstraps from
    legal: Tensor | None = None  # [B, A] actions that were legal; None if the environment has no masks
    next_legal: Tensor | None = None  # [B, A] actions that are legal in the observation bootstrapped from
    extras: Mapping[str, Tensor] = {}  # [B, ...] fields that an agent adds for its losses

    def select(self, part: slice | None) -> "TransitionBatch":
        """Return some of the transitions. If `part` is None, return all."""
        if part is None:
            return self
        extras = {name: field[part] for name, field in self.extras.items()}
        return TransitionBatch._make([*(None if field is None else field[part] for field in self[:-1]), extras])


class ActorCriticOutput(NamedTuple):
    """Output of the kind "actor-critic": [B, ...] of one step, [T, B, ...] of an unroll.

    A model may return another named tuple, of these fields and more.
    """

    logits: Tensor  # [..., P] parameters of the policy (core/ops/policy_distributions.py): logits of A actions
    value: Tensor  # [...]
    features: Tensor  # [..., F], the vector that both heads read


class PictureAndVector(NamedTuple):
    """Both halves of frames that hold a picture and a vector, B observations."""

    picture: Tensor  # [B, *picture_shape] bytes, or with a stack [B, S, *picture_shape]
    vector: Tensor  # [B, N] or [B, S, N] float32


class QuantileInputs(NamedTuple):
    """Observation and fractions for "implicit-quantiles" models, which compute the quantiles at these fractions."""

    observation: Tensor  # [B, *observation_shape] in its stored dtype
    fractions: Tensor  # [B, N] in 0 .. 1


class OARInputs(NamedTuple):
    """Observation, action and reward for "recurrent-q" models: [B, ...] of one step, [T, B, ...] of an unroll."""

    observation: Tensor  # [..., *observation_shape] in its stored dtype
    action: Tensor  # [...] of any integer dtype, the action that led here; -1 where an episode starts
    reward: Tensor  # [...] float32, the reward of that action; 0 where an episode starts


# nested tensors -------------------------------------------------------------------------------------------------------
def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the same structure with every leaf replaced by `function(leaf, *leaves)`.

    Args:
        function: Applied to each leaf and to the leaves at its place in the other trees.
        tree: A tensor or array, None, or nested tuples and dictionaries of these. None stays None, and named tuples
            keep their type.
        others: Trees of the same structure.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {name: tree_map(function, child, *(other[name] for other in others)) for name, child in tree.items()}
    if isinstance(tree, tuple | list):
        children = [tree_map(function, *parts) for parts in zip(tree, *others, strict=True)]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return function(tree, *others)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    leaves = list[Any]()
    tree_map(leaves.append, tree)
    return leaves


# shapes, because broadcasting would hide that tensors do not fit -----------------------------------------------------
def check_shapes(axes: str, *tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape, with as many axes as "T, B" names, none of them empty."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or tensors[0].ndim != axes.count(",") + 1 or 0 in tensors[0].shape:
        raise ValueError(f"tensors must be [{axes}] of one shape, not {sorted(shapes)}")


def check_scalar(name: str, value: object) -> None:
    """Raise ValueError unless the value of this name is a scalar tensor."""
    if not isinstance(value, Tensor) or value.dim():
        found = f"a tensor of shape {[*value.shape]}" if isinstance(value, Tensor) else f"of {type(value)}"
        raise ValueError(f"{name} is {found}, expected a scalar tensor")
