"""Updates and inference stay on their device, and no value returns to python.

The device is torch's meta, whose tensors have shapes and no values, so reading one is an error. It has no multi-tensor
kernels, therefore the optimiser's own step is left out. On CUDA, test_graphed_update and test_staged_update repeat the
updates.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.acting.graphed_inference import StaticInputs, capture_forward
from core.learning.optimizer import Optimizer, OptimizerParams
from core.learning.updates import EagerUpdates
from core.models.layers.running_normalization import RunningNormalization
from tests.core import resident_agents
from tests.core.acting import test_graphed_inference
from tests.core.distributed.learner_pair import FirstOfTwo
from tests.core.learning import test_staged_update
from tests.core.learning.test_graphed_update import graphed
from tests.selection import slow_except

META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Refuse operators with a tensor on another device; in a CUDA graph a copy from the CPU would be an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        assert devices <= {"meta"}, f"{func} of tensors on {devices}"
        return result


class HostGenerator(torch.Generator):
    """Replace the generator of meta, which has none; no number is drawn there."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


@pytest.fixture(autouse=True)
def a_device_without_values(monkeypatch):
    def apply(self, loss, wanted=True):
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        assert gradients and all(gradient.is_meta for gradient in gradients)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if self._planned is None:
            return norm, bool(torch.isfinite(norm))
        self._last_lr = self._planned.take()
        return norm, torch.isfinite(norm + loss.detach()) & wanted

    monkeypatch.setattr(
        "core.device.torch_runtime._staged", lambda source: source
    )  # pinned memory exists with CUDA only
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    monkeypatch.setattr(Optimizer, "apply", apply)


@pytest.mark.parametrize("name", slow_except(["rainbow", "td3"], resident_agents.AGENTS))
def test_updates_from_the_device_replay_stay_on_their_device(name):
    agent = resident_agents.make_agent(name, "meta")
    memory, count = resident_agents.make_memory(agent, "meta"), 2 * agent.update_cycle(agent.params)
    assert memory.refresh()
    updates = graphed(agent, memory, 16, count, META)
    for on_device in (nullcontext(), OneDevice()):  # the first time makes what is made on first use
        memory.plan(count), agent.prepare_updates(count)
        with on_device:
            updates._run_updates()


@pytest.mark.parametrize("name", test_staged_update.AGENTS)
def test_updates_on_host_batches_stay_on_their_device(name):
    agent = test_staged_update.make_agent(name, "meta")
    learn = test_staged_update.staged(agent, META)
    output = learn(test_staged_update.make_batch(agent, 0))
    assert output.statistics == {} and (output.priorities is None or output.priorities.is_meta)
    agent.prepare_updates(1)
    with OneDevice():
        learn._launch()


class Two(FirstOfTwo):
    """Act as the first of two learners and record the summed tensors."""

    def __init__(self):
        super().__init__()
        self.summed = []

    def _sum(self, tensor):
        self.summed.append(tensor)


def test_learners_exchange_one_tensor_that_stays_on_the_device():
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=META)) for shape in ((3, 2), (5,), ())]
    optimizer, normalization, group = Optimizer(parameters, OptimizerParams()), RunningNormalization(4).to(META), Two()
    for parameter in parameters[:2]:
        parameter.grad = torch.zeros_like(parameter)

    def exchange():
        loss = optimizer._exchange.finish(group, torch.zeros((), device=META), 2)
        normalization.update(torch.zeros(7, 4, device=META))
        return loss

    with OneDevice():
        loss = group.run(exchange)
    gradients, *moments = group.summed
    assert gradients.shape == (3 * 2 + 5 + 1 + 1,) and gradients.is_contiguous() and loss.shape == () and loss.is_meta
    assert parameters[2].grad.is_meta and [moment.shape for moment in moments] == [(), (4,), (4,)]


def test_an_update_that_reads_a_value_is_detected():
    agent = test_staged_update.make_agent("dqn", "meta")
    with pytest.raises(RuntimeError, match="meta"):
        EagerUpdates(agent, False)(test_staged_update.make_batch(agent, 0))


@pytest.mark.parametrize("name", test_graphed_inference.ACTING)
def test_inference_stays_on_its_device(name, monkeypatch):
    """Inference stays there up to the copy of actions to the host."""
    agent, calls, call = test_graphed_inference.make_agent(name, "meta"), [], StaticInputs._call

    def watched(answers):
        calls.append(None)
        with OneDevice() if len(calls) > 1 else nullcontext():
            call(answers)

    monkeypatch.setattr(StaticInputs, "_call", watched)
    capture_forward(agent.model, capture=False)
    timestep = test_graphed_inference.seen(np.random.default_rng(0))
    exploration = agent.exploration(0, 1, test_graphed_inference.STREAMS, np.random.default_rng(5))
    for _ in range(2):
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            agent.act(timestep, agent.initial_state(test_graphed_inference.STREAMS), exploration)
    assert len(calls) == 2
