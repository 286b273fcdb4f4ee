"""The model contract: the feed-forward unroll and the restart of recurrent states."""

import pickle
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import Model, ModelParams
from core.models.actor_critic import ActorCritic
from core.models.dqn import QNetwork
from core.models.layers.torsos import SmallTorso, TorsoParams
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import ActorCriticOutput, State, restart, tree_leaves


class Nested(NamedTuple):
    double: Tensor
    inner: ActorCriticOutput


class Plain(Model):
    """Return a tensor [B, 4]."""

    output_kind, observations = "q", "vector"

    def forward(self, observation: Tensor, state: State) -> tuple[Tensor, State]:
        return 2 * observation, state


class Named(Plain):
    """Return a named tuple of tensors [B, 4], [B] and [B, 4]."""

    def forward(self, observation, state):
        return ActorCriticOutput(2 * observation, observation.sum(1), -observation), state


class Inside(Plain):
    """Return a named tuple in a named tuple."""

    def forward(self, observation, state):
        return Nested(2 * observation, ActorCriticOutput(2 * observation, observation.sum(1), -observation)), state


@pytest.fixture
def observations():
    return torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


def unroll(model, observations):
    spec = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 0, Discrete(2))
    output, state = model(None, spec).unroll(observations, torch.zeros(5, 3, dtype=torch.bool), ())
    assert state == ()
    return output


def test_unrolling_unfolds_a_tensor(observations):
    assert torch.equal(unroll(Plain, observations), 2 * observations)


def test_unrolling_unfolds_each_tensor_of_a_named_tuple(observations):
    output = unroll(Named, observations)
    assert isinstance(output, ActorCriticOutput)
    assert torch.equal(output.logits, 2 * observations) and torch.equal(output.features, -observations)
    assert output.value.shape == (5, 3) and torch.allclose(output.value, observations.sum(2))


def test_unrolling_unfolds_nested_named_tuples(observations):
    output = unroll(Inside, observations)
    assert isinstance(output, Nested) and isinstance(output.inner, ActorCriticOutput)
    assert torch.equal(output.double, 2 * observations) and output.inner.value.shape == (5, 3)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_only_environments_at_an_episode_start_are_restarted(make):
    state, initial = (
        (torch.arange(6.0).view(3, 2), torch.ones(3, 1, 4)),
        (torch.full((3, 2), -1.0), torch.zeros(3, 1, 4)),
    )
    vector, planes = restart(state, make([False, True, False]), initial)
    assert vector.tolist() == [[0, 1], [-1, -1], [4, 5]] and planes[:, 0, 0].tolist() == [1, 0, 1]
    assert state[0][1].tolist() == [2, 3], "the state it was given stays"


def test_a_restart_removes_non_finite_states():
    (state,) = restart((torch.full((2, 1), torch.nan),), np.array([True, True]), (torch.zeros(2, 1),))
    assert state.tolist() == [[0], [0]]


def test_a_state_without_restarts_is_returned_unchanged():
    state = (torch.ones(2, 1),)
    assert restart(state, np.array([False, False]), (torch.zeros(2, 1),)) is state
    assert restart((), np.array([True, False]), ()) == ()


@frozen_dataclass
class FamilyParams(ModelParams):
    units: int = Field(default=8, ge=1, le=9)
    """Units of the family."""


class Family(Plain):
    Params = FamilyParams


class SmallMember(Family, torso=SmallTorso, hidden=64, units=3):
    """A family's network on a torso, with defaults of its own."""


class OtherMember(Family, torso=SmallTorso):
    pass


def test_a_torso_adds_its_options_to_those_of_the_family():
    params = SmallMember.Params(planes=4)
    assert (params.units, params.hidden, params.planes) == (3, 64, 4) and SmallMember.observations == "image"
    assert (OtherMember.Params().units, OtherMember.Params().hidden) == (8, 256) and Family.Params is FamilyParams
    assert isinstance(params, FamilyParams) and isinstance(params, SmallTorso)
    assert Plain.observations == Family.observations == "vector"


def test_other_defaults_keep_their_bounds():
    for wrong in ({"units": 10}, {"hidden": 0}, {"hidden": "64"}):
        with pytest.raises(ValidationError):
            SmallMember.Params(**wrong)


@pytest.mark.parametrize("in_torso", [False, True])
@pytest.mark.parametrize("family", [QNetwork, ActorCritic])
def test_a_torso_of_vectors_says_so_itself_or_in_its_network(family, in_torso):
    class Layers(TorsoParams):
        def layers(self, spec):
            return nn.Sequential(nn.Flatten(), nn.Linear(3, 7, bias=False))

    torso = type("Layers", (Layers,), {"observations": "vector"} if in_torso else {})
    body = {} if in_torso else {"observations": "vector"}
    network = types.new_class("Network", (family,), {"torso": torso}, lambda names: names.update(body))
    model = network(network.Params(), EnvSpec("test", ArraySpec((3,), "float32"), 0, Discrete(4)))
    assert network.observations == "vector"
    output, _ = model(torch.zeros(2, 3), ())
    assert next(iter(tree_leaves(output))).shape[0] == 2


def test_options_of_a_torso_travel_between_processes():
    params = SmallMember.Params(planes=4)
    again = pickle.loads(pickle.dumps(params))
    assert again == params and type(again) is SmallMember.Params


def test_an_unknown_keyword_of_a_class_is_an_error():
    with pytest.raises(TypeError, match="keyword"):

        class Wrong(Family, torse=SmallTorso):
            pass
