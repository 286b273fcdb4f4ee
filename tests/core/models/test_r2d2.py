"""Recurrent action-value networks read observation, action and reward, and unroll as they step."""

import pytest
import torch

from core.models.layers.torsos import torso_input
from core.models.r2d2 import R2D2CNN, R2D2MLP, R2D2MinAtar, R2D2Small
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import OARInputs, restart

LENGTH, BATCH = 6, 3
SMALL = {"hidden": 16, "lstm": 8}


def pixels(size, stack=4):
    return EnvSpec("game", ArraySpec((size, size), "uint8"), stack, Discrete(4), is_image=True, max_value=255.0)


VECTOR = EnvSpec("numbers", ArraySpec((5,), "float32"), 0, Discrete(4))
PLANES = EnvSpec("breakout", ArraySpec((10, 10, 4), "bool"), 0, Discrete(4), is_image=True)
MODELS = {
    "cnn": (R2D2CNN, pixels(84)),
    "small": (R2D2Small, pixels(42)),
    "minatar": (R2D2MinAtar, PLANES),
    "mlp": (R2D2MLP, VECTOR),
}


def make(name, **settings):
    torch.manual_seed(0)
    kind, spec = MODELS[name]
    return kind(kind.Params(**{**SMALL, **settings}), spec), spec


def some_inputs(spec):
    """Return inputs and `firsts` [T, B] in which some episodes start."""
    generator = torch.Generator().manual_seed(1)
    firsts = torch.rand(LENGTH, BATCH, generator=generator) < 0.3
    high = {"bool": 2, "uint8": 256, "float32": 3}[spec.frame.dtype]
    observation = torch.randint(0, high, (LENGTH, BATCH, *spec.observation_shape), generator=generator)
    action = torch.randint(0, 4, (LENGTH, BATCH), generator=generator).masked_fill(firsts, -1)
    reward = torch.randn(LENGTH, BATCH, generator=generator).masked_fill(firsts, 0.0)
    return OARInputs(observation.to(getattr(torch, spec.frame.dtype)), action, reward), firsts


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_unroll_equals_its_steps_with_restarts(name, dueling):
    model, spec = make(name, dueling=dueling)
    inputs, firsts = some_inputs(spec)
    assert firsts[1:].any() and not firsts.all()
    start = tuple(torch.randn(BATCH, 8) for _ in range(2))
    values, final = model.unroll(inputs, firsts, start)
    assert values.shape == (LENGTH, BATCH, 4)
    state = start
    for step in range(LENGTH):
        state = restart(state, firsts[step], model.initial_state(BATCH))
        expected, state = model(OARInputs(*(part[step] for part in inputs)), state)
        assert torch.allclose(values[step], expected, atol=1e-5)
    assert all(torch.allclose(part, other, atol=1e-5) for part, other in zip(final, state))


@pytest.mark.parametrize("name", MODELS)
def test_the_state_carries_earlier_observations(name):
    model, spec = make(name)
    inputs, _ = some_inputs(spec)
    changed = inputs.observation.clone()
    changed[0] = ~changed[0] if spec.frame.dtype == "bool" else 3 - changed[0]
    nowhere = torch.zeros(LENGTH, BATCH, dtype=torch.bool)
    values = model.unroll(inputs, nowhere, model.initial_state(BATCH))[0]
    others = model.unroll(inputs._replace(observation=changed), nowhere, model.initial_state(BATCH))[0]
    assert (values[1] != others[1]).any(1).all()


def test_the_lstm_reads_torso_then_last_action_then_last_reward():
    model, _ = make("mlp")
    inputs = OARInputs(torch.randn(3, 5), torch.tensor([2, -1, 0], dtype=torch.int16), torch.tensor([0.5, 0.0, -900.0]))
    encoded = model._encode(inputs)
    assert torch.equal(encoded[:, :16], model.torso(inputs.observation))
    assert encoded[:, 16:20].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert encoded[:, 20].tolist() == pytest.approx([0.46211715726, 0.0, -1.0])  # tanh 0.5


def test_pixels_are_scaled_to_one():
    model, spec = make("cnn")
    white = OARInputs(
        torch.full((1, *spec.observation_shape), 255, dtype=torch.uint8), torch.tensor([-1]), torch.zeros(1)
    )
    assert torch.allclose(model._encode(white)[:, :16], model.torso(torch.ones(1, 4, 84, 84)), atol=1e-5)


def test_the_cnn_has_the_published_sizes():
    model = R2D2CNN(R2D2CNN.Params(), pixels(84))
    torso = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64 + (3136 + 1) * 512
    lstm = 4 * 512 * (512 + 4 + 1 + 512 + 2)
    streams = 2 * (512 + 1) * 512 + 513 * (4 + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == torso + lstm + streams


@pytest.mark.parametrize("name", ["cnn", "small", "minatar"])
def test_the_lstm_sees_differences_between_pictures(name):
    """Torch's own weights would leave a sixth of their mean square to each layer with a ReLU: 1,296th after four."""
    model, spec = make(name, hidden=256)
    inputs = torso_input(model, some_inputs(spec)[0].observation.flatten(0, 1))
    differences = [each.diff(dim=0).square().mean() for each in (model.torso(inputs), inputs)]
    assert 0.1 < differences[0] / differences[1] < 2.5


def test_a_dueling_head_centres_its_advantages():
    model, spec = make("mlp")
    inputs, start = OARInputs(*(part[0] for part in some_inputs(spec)[0])), model.initial_state(BATCH)
    features, _ = model.core.step(model._encode(inputs), start)
    assert torch.allclose(model(inputs, start)[0].mean(1), model.q.value(features)[:, 0], atol=1e-5)


def test_the_state_dict_holds_weights_only():
    assert not [name for name in make("mlp")[0].state_dict() if "actions" in name]
