"""The LSTM follows its equations and forgets at an episode's start."""

import pytest
import torch

from core.models.layers.lstm import LSTMCore

LENGTH, BATCH, FEATURES, UNITS = 7, 3, 5, 4


@pytest.fixture
def core():
    torch.manual_seed(0)
    return LSTMCore(FEATURES, UNITS)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    state = (torch.randn(BATCH, UNITS, generator=generator), torch.randn(BATCH, UNITS, generator=generator))
    return torch.randn(LENGTH, BATCH, FEATURES, generator=generator), state


def at(*places):
    firsts = torch.zeros(LENGTH, BATCH, dtype=torch.bool)
    for place in places:
        firsts[place] = True
    return firsts


def slow(core, features, firsts, state):
    """Return the outputs and states of an LSTM with forget gate, computed step by step in float64."""
    weights, recurrent = core.lstm.weight_ih_l0.double(), core.lstm.weight_hh_l0.double()
    bias = core.lstm.bias_ih_l0.double() + core.lstm.bias_hh_l0.double()
    outputs = torch.zeros(*features.shape[:2], UNITS, dtype=torch.float64)
    finals = []
    for stream in range(features.shape[1]):
        h, c = state[0][stream].double(), state[1][stream].double()
        for t in range(len(features)):
            if firsts[t, stream]:
                h, c = torch.zeros(UNITS, dtype=torch.float64), torch.zeros(UNITS, dtype=torch.float64)
            i, f, g, o = (weights @ features[t, stream].double() + recurrent @ h + bias).split(UNITS)
            c = 1 / (1 + torch.exp(-f)) * c + 1 / (1 + torch.exp(-i)) * torch.tanh(g)
            h = 1 / (1 + torch.exp(-o)) * torch.tanh(c)
            outputs[t, stream] = h
        finals.append((h, c))
    return outputs, torch.stack([h for h, _ in finals]), torch.stack([c for _, c in finals])


@pytest.mark.parametrize(
    "firsts",
    [
        at(),
        at((0, 1)),
        at((0, slice(None))),
        at((3, 1)),
        at((1, 2)),
        at((0, 0), (2, 2), (3, 2), (6, 0)),
        at((slice(None), 1)),
        at(slice(None)),
    ],
)
def test_a_sequence_follows_the_equations_at_any_episode_starts(core, inputs, firsts):
    features, state = inputs
    outputs, (h, c) = core(features, firsts, state)
    expected, expected_h, expected_c = slow(core, features, firsts, state)
    assert outputs.shape == (LENGTH, BATCH, UNITS) and h.shape == c.shape == (BATCH, UNITS)
    for actual, wanted in ((outputs, expected), (h, expected_h), (c, expected_c)):
        assert torch.allclose(actual.double(), wanted, atol=1e-6)


def test_one_step_follows_the_equations(core, inputs):
    features, state = inputs
    outputs, (h, c) = core.step(features[0], state)
    expected, expected_h, expected_c = slow(core, features[:1], at()[:1], state)
    assert torch.allclose(outputs.double(), expected[0], atol=1e-6) and torch.equal(outputs, h)
    assert torch.allclose(h.double(), expected_h, atol=1e-6) and torch.allclose(c.double(), expected_c, atol=1e-6)


def test_gradients_of_the_fused_call_and_of_the_loop_agree(core, inputs):
    features, state = inputs
    gradients = []
    for firsts in (at((0, slice(None))), at((0, slice(None)), (LENGTH - 1, 0))):
        core.zero_grad()
        outputs, _ = core(features, firsts, state)
        outputs[:-1].square().sum().backward()  # the loop's extra start is in the step left out
        gradients.append([parameter.grad.clone() for parameter in core.parameters()])
    assert all(torch.allclose(fused, loop, atol=1e-5) for fused, loop in zip(*gradients))
    assert all(gradient.any() for gradient in gradients[0])


@pytest.mark.parametrize("row", [0, 3])
def test_a_non_finite_state_ends_with_its_episode(core, inputs, row):
    features, state = inputs
    broken = (torch.full_like(state[0], torch.nan), torch.full_like(state[1], torch.inf))
    outputs, final = core(features, at((row, slice(None))), broken)
    assert outputs[row:].isfinite().all() and all(part.isfinite().all() for part in final)


def test_the_initial_forget_gate_bias_is_one(core):
    bias = core.lstm.bias_ih_l0 + core.lstm.bias_hh_l0
    assert bias.tolist() == [0.0] * UNITS + [1.0] * UNITS + [0.0] * 2 * UNITS
