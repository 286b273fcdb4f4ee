"""Inference on static inputs gives the same answers, in any order of callers and after weight updates."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.acting.graphed_inference import StaticInputs, capture_forward, with_graphed_forward
from core.agents.impala import Impala
from core.models.actor_critic import MLPAC, MLPACParams
from core.runtime.parameter_store import ParameterStore
from core.types import TimeStep, restart, tree_leaves
from tests.core.resident_agents import AGENTS, DISCRETE
from tests.core.resident_agents import make_agent as make_planned

ACTING = ["dqn", "rainbow", "iqn", "r2d2", "impala with LSTM", "ddpg", "sac"]
STREAMS = 3


def make_agent(name, device="cpu", seed=3):
    if name in AGENTS:
        return make_planned(name, device, seed)
    torch.manual_seed(seed)
    return Impala(Impala.Params(), DISCRETE, lambda: MLPAC(MLPACParams(hidden=8, lstm=4), DISCRETE).to(device))


def seen(draw):
    first = draw.random(STREAMS) < 0.3
    numbers = draw.normal(size=STREAMS).astype(np.float32)
    return TimeStep(
        draw.integers(0, 256, (STREAMS, *DISCRETE.observation_shape), np.uint8), numbers, numbers, first, first, numbers
    )


def played(name, agent, steps=12):
    """Return actions, extras and states of two alternating splits, with parameter pulls and one evaluation between."""
    store, exploration = (
        ParameterStore(ParameterStore.size_of(agent.model)),
        agent.exploration(0, 1, STREAMS, np.random.default_rng(5)),
    )
    version, found, draw = 0, [], np.random.default_rng(1)
    initial = agent.initial_state(STREAMS)
    states = [initial, initial]
    for step in range(steps):
        torch.manual_seed(step)
        for group in range(2):
            timestep = seen(draw)
            state = restart(states[group], timestep.first, initial)
            output = agent.act(timestep, state, None if step == 5 else exploration)
            states[group] = output.state
            found += [output.action, *output.extras.values()]
        if step % 3 == 2:
            store.publish(make_agent(name, seed=step).model)
            version = store.pull(agent.model, version)
    return [*found, *(part.cpu().numpy() for state in states for part in state)]


def assert_same(found, expected, **tolerance):
    assert len(found) == len(expected) > 20
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, **tolerance)


@pytest.mark.cuda
# these draw differently in a captured graph
@pytest.mark.parametrize("name", [name for name in ACTING if name not in ("rainbow", "iqn", "sac")])
def test_captured_inference_equals_eager_inference(name):
    agent = make_agent(name, "cuda")
    assert with_graphed_forward(agent, "auto") is agent and "forward" in vars(agent.model)
    assert_same(played(name, agent), played(name, make_agent(name, "cuda")), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ACTING)
def test_static_inference_can_be_captured(name, monkeypatch):
    """A graph keeps tensors made outside the inference mode of `act`; test_cuda_graph.py refuses reads of values."""
    calls, call = [], StaticInputs._call

    def watched(self):
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        calls.append(call(self))
        assert not any(leaf.is_inference() or leaf.requires_grad for leaf in tree_leaves((self._inputs, self._output)))

    monkeypatch.setattr(StaticInputs, "_call", watched)
    agent = make_agent(name)
    capture_forward(agent.model, capture=False)
    exploration, draw = agent.exploration(0, 1, STREAMS, np.random.default_rng(5)), np.random.default_rng(1)
    state = agent.initial_state(STREAMS)
    for _ in range(3):
        state = agent.act(seen(draw), state, exploration).state
    assert len(calls) == 3


def test_an_answer_is_not_overwritten_by_the_next():
    agent = make_agent("impala with LSTM")
    capture_forward(agent.model, capture=False)
    draw = np.random.default_rng(1)
    first = agent.act(seen(draw), agent.initial_state(STREAMS), None)
    kept = [part.clone() for part in first.state]
    agent.act(seen(draw), agent.initial_state(STREAMS), None)
    assert all(map(torch.equal, first.state, kept))


@pytest.mark.parametrize(
    ("on_gpu", "cuda_graph", "replaced"),
    [(True, "auto", [True]), (True, "on", [True]), (True, "off", []), (False, "auto", [])],
)
def test_only_gpu_networks_are_captured_and_only_if_requested(monkeypatch, on_gpu, cuda_graph, replaced):
    found = []
    monkeypatch.setattr("core.acting.graphed_inference.capture_forward", lambda model, capture: found.append(capture))
    with_graphed_forward(
        SimpleNamespace(model=SimpleNamespace(parameters=lambda: iter([SimpleNamespace(is_cuda=on_gpu)]))), cuda_graph
    )
    assert found == replaced


def test_weights_are_updated_in_place():
    agent = make_agent("dqn")
    places = [part.data_ptr() for part in agent.model.state_dict().values()]
    store = ParameterStore(ParameterStore.size_of(agent.model))
    other = make_agent("dqn", seed=4)
    store.publish(other.model)
    assert store.pull(agent.model, 0) == 1
    assert places == [part.data_ptr() for part in agent.model.state_dict().values()]
    assert all(map(torch.equal, agent.model.state_dict().values(), other.model.state_dict().values()))
