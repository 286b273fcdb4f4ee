"""Networks for continuous actions: shapes, initial outputs, images and normalisation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from core.models.policy_critic import D4PGMLPParams, MLPNetwork
from core.specs import ArraySpec, Continuous, EnvSpec
from utils.factory import ModelsDict

KINDS = {"ddpg": (1, 1), "d4pg": (1, 51), "td3": (2, 1), "sac": (2, 1)}  # critics, and outputs of each
SPACE = Continuous(np.full((2, 3), -1, np.float32), np.full((2, 3), 1, np.float32))
VECTOR = EnvSpec("vector", ArraySpec((4, 2), "float32"), 0, SPACE)
PICTURE = EnvSpec("picture", ArraySpec((84, 84, 3), "uint8"), 0, SPACE, is_image=True, max_value=255.0)


def make(kind, spec=VECTOR, **settings):
    model = ModelsDict[f"{kind}-cnn" if spec.is_image else f"{kind}-mlp"]
    return model(replace(model.Params(), **{"hidden": (32, 16), **settings}), spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [VECTOR, PICTURE])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_heads_have_their_shapes_and_small_initial_outputs(kind, spec, layer_norm):
    model, (critics, numbers) = make(kind, spec, layer_norm=layer_norm), KINDS[kind]
    observation = torch.randint(0, 256, (5, 84, 84, 3), dtype=torch.uint8) if spec.is_image else torch.randn(5, 4, 2)
    prepared, action = model.preprocess(observation), torch.rand(5, 6) * 2 - 1
    chosen, values = model.policy(prepared), model.critic(prepared, action)
    assert chosen.shape == (5, 12 if kind == "sac" else 6) and values.shape == (critics, 5, numbers)
    assert float(chosen.abs().max()) < 0.2 and float(values.abs().max()) < 0.2
    lowest, highest = [layer for layer in model.policy.modules() if isinstance(layer, nn.Linear)][-1].weight.aminmax()
    assert -3e-3 <= lowest < -2e-3 and 2e-3 < highest <= 3e-3  # 1509.02971, section 7
    assert torch.equal(model(observation, ())[0], chosen)
    assert not torch.equal(model.critic(prepared, -action), values)
    assert sum(isinstance(part, nn.LayerNorm) for part in model.modules()) == (2 * (1 + critics) if layer_norm else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_is_shared(kind):
    model = make(kind, PICTURE)
    parts = [*model.policy.parameters(), *(part for critic in model.critic for part in critic.parameters())]
    assert len({id(part) for part in parts}) == len(parts) == len(list(model.parameters()))


class Ensemble(MLPNetwork):
    Params, output_kind, gaussian, num_critics = D4PGMLPParams, "gaussian-quantiles", True, 3


def test_a_subclass_says_which_policy_and_how_many_critics_it_has():
    model = Ensemble(Ensemble.Params(atoms=4), VECTOR)
    prepared = model.preprocess(torch.randn(5, 4, 2))
    assert model.policy(prepared).shape == (5, 12) and model.critic(prepared, torch.rand(5, 6)).shape == (3, 5, 4)


def test_images_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="too small"):
        make("ddpg", replace(PICTURE, frame=ArraySpec((20, 20, 3), "uint8")))


def test_networks_normalize_on_request_and_copy_the_statistics():
    plain, normalising, other = (
        make("ddpg"),
        make("ddpg", normalize_observations=True),
        make("ddpg", normalize_observations=True),
    )
    observation = torch.randn(64, 4, 2) * 9 + 50
    for model in (plain, normalising):
        model.update_normalization(observation)
    assert torch.equal(plain.preprocess(observation), observation.flatten(1))
    assert float(normalising.preprocess(observation).abs().max()) < 5
    other.load_state_dict(normalising.state_dict())
    assert torch.equal(other.preprocess(observation), normalising.preprocess(observation))
