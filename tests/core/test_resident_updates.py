"""Updates that python only starts: planned equal to unplanned, recorded equal to eager, nothing in them that no recording could repeat."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.agent import LearnerOutput
from core.agents.dqn import DQN
from core.agents.impala import Impala
from core.agents.rainbow import Rainbow
from core.captured import WARM_UP, Captured
from core.env import Discrete, EnvSpec
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memories.resident import ResidentReplay
from core.models.dqn_mlp import DQNMLP
from core.models.rainbow import RainbowMLP
from core.optimizer import Optimizer
from core.resident import Refreshed, ResidentUpdates, Tally
from core.shared import ArraySpec
from tests.core.devices import DEVICES, cuda
from tests.core.tapes import RandomPlay, small_layout

SPEC = EnvSpec("bytes", ArraySpec((2, 3), "uint8"), 4, Discrete(5), max_value=255.0)
DQN_SETTINGS = {"batch_size": 16, "nstep": 3, "lr": 1e-3, "eps": 1e-8, "target_update": 7}
AGENTS = {
    "dqn": (DQN, DQNMLP, {}),
    "dqn, rmsprop": (DQN, DQNMLP, {"optimizer": "rmsprop", "lr_schedule": "linear", "lr_updates": 80, "clip_value": 0.1}),
    "dqn, soft target": (DQN, DQNMLP, {"target_update": 0.05, "loss": "squared", "weight_decay": 1e-3}),
    "rainbow": (Rainbow, RainbowMLP, {}),
    "rainbow of quantiles": (Rainbow, RainbowMLP, {"distribution": "quantile", "lr_schedule": "step", "lr_updates": 30})}


def make_agent(name: str, device: str = "cpu"):
    agent, model, settings = AGENTS[name]
    torch.manual_seed(3)
    made = agent(agent.Params(**{**DQN_SETTINGS, **settings}), SPEC, lambda: model(replace(model.Params(), hidden=16), SPEC).to(device))
    _ = made.target
    return made


def make_memory(agent, device: str = "cpu"):
    """The device's side of a full memory."""
    play = RandomPlay(1, 4)
    layout = small_layout(SPEC, rows=64, chunk_length=4, num_envs=4, extras=agent.extras, with_priority=True)
    memory = PrioritizedMemory(PrioritizedParams(100, beta_updates=60), layout, agent.window, 0)
    writer = memory.writer(0)
    append, extras = writer.append, {name: np.zeros(4, np.float32) for name in agent.extras}
    writer.append = lambda before, action, after, _, state: append(before, action, after, extras, state)
    play.play(writer, 80)
    return memory.Resident(memory, torch.device(device))


def trained(name: str, calls: int, count: int, device: str = "cpu", capture: bool = False):
    """Agent, memory and reported means after calls * count updates."""
    agent = make_agent(name, device)
    memory = make_memory(agent, device)
    torch.manual_seed(4)  # of the noise
    updates = ResidentUpdates(agent, memory, 16, count, torch.device(device), capture=capture)
    for _ in range(calls):
        assert updates(Refreshed(memory).get(timeout=0.0)).priorities is None
    return agent, memory, {**updates.statistics(), **memory.statistics()}


def weights(agent) -> dict[str, torch.Tensor]:
    return {f"{kind} {name}": tensor.detach().cpu() for kind, model in (("online", agent.model), ("target", agent.target))
            for name, tensor in model.state_dict().items()}


def assert_close(found, expected, rtol: float, atol: float) -> None:
    for name, tensor in weights(expected[0]).items():
        torch.testing.assert_close(weights(found[0])[name], tensor, rtol=rtol, atol=atol, msg=name)
    torch.testing.assert_close(found[1]._leaves.cpu(), expected[1]._leaves.cpu(), rtol=rtol, atol=atol)
    assert found[2] == pytest.approx(expected[2], rel=max(rtol, 1e-5), abs=atol)


@pytest.mark.parametrize("name", AGENTS)
def test_planned_updates_are_those_of_an_agent_that_looks_at_its_tensors(name):
    planned = trained(name, calls=40, count=1)
    agent = make_agent(name)
    memory = make_memory(agent)
    torch.manual_seed(4)
    sums: dict[str, float] = {}
    for _ in range(40):
        memory.refresh()
        memory.plan(1)
        batch, places = memory.sample(16)
        output = agent.learn(batch)
        assert output.skipped is False
        memory.update_priorities(places, output.priorities)
        sums = {key: sums.get(key, 0.0) + float(value) for key, value in output.statistics.items() if key != "lr"}
    means = {key: total / 40 for key, total in sums.items()}
    assert_close(planned, (agent, memory, {**memory.statistics(), **means, "lr": planned[2]["lr"], "skipped_updates": 0.0}), 1e-3, 1e-6)
    assert planned[0]._optimizer.lr == agent._optimizer.lr and planned[0]._updates == agent._updates == 40
    moved = [name for name, tensor in weights(make_agent(name)).items() if not torch.equal(tensor, weights(agent)[name])]
    assert len(moved) == len(weights(agent))


@pytest.mark.parametrize("name", ["dqn, rmsprop", "rainbow"])
def test_several_updates_a_call_are_the_same_updates(name):
    assert_close(trained(name, calls=3, count=5), trained(name, calls=15, count=1), 0.0, 0.0)


@cuda
@pytest.mark.parametrize("name", AGENTS)
def test_recorded_updates_equal_eager_ones(name):
    assert_close(trained(name, 25, 4, "cuda", capture=True), trained(name, 25, 4, "cuda"), 1e-3, 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("first", [True, False])
def test_a_planned_update_that_is_not_finite_changes_nothing(device, name, first):
    agent = make_agent(name, device)
    memory = make_memory(agent, device)
    memory.refresh()
    for _ in range(0 if first else 3):
        memory.plan(1), agent.plan(1)
        agent.learn(memory.sample(16)[0])
    before, states = weights(agent), [tensor.clone() for tensor in agent._optimizer._tensors()]
    memory.plan(1), agent.plan(1)
    batch, places = memory.sample(16)
    output = agent.learn(batch._replace(weights=batch.weights * torch.nan))
    assert bool(output.skipped) and output.priorities.isnan().all()
    if agent.params.target_update >= 1:  # a soft target has moved on
        assert all(torch.equal(tensor, before[key]) for key, tensor in weights(agent).items())
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(agent).items() if key.startswith("online"))
    after = agent._optimizer._tensors()
    assert all(torch.equal(tensor, old) for tensor, old in zip(after, states)) and not any(tensor.any() for tensor in after[len(states):])
    leaves = memory._leaves.clone()
    memory.update_priorities(places, output.priorities)
    assert torch.equal(memory._leaves, leaves)


# what a recording cannot repeat ---------------------------------------------------------------------------------------
class Watch(TorchDispatchMode):
    """Notes where python looks at a value, and where a result's shape depends on one."""

    LOOKS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
             torch.ops.aten.masked_select.default}
    INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}  # by a mask: as many as are true

    def __init__(self):
        super().__init__()
        self.looks, self.shapes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masked = function in self.INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
        if function in self.LOOKS or masked:
            self.looks.append(str(function))
        result = function(*args, **(kwargs or {}))
        self.shapes.append((str(function), [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]))
        return result


@pytest.mark.parametrize("name", [name for name in AGENTS if "rmsprop" not in name])  # on the CPU it looks at its learning rate
def test_in_planned_updates_python_looks_at_no_value_and_every_shape_is_the_same_each_time(name):
    agent = make_agent(name)
    memory = make_memory(agent)
    updates = ResidentUpdates(agent, memory, 16, 2, torch.device("cpu"), capture=False)
    updates(Refreshed(memory).get(timeout=0.0))
    seen = []
    for _ in range(2):
        memory.plan(2), agent.plan(2)
        with Watch() as watch:
            updates._updates()
        assert watch.looks == [] and len(watch.shapes) > 50
        seen.append(watch.shapes)
    assert seen[0] == seen[1]


class Elsewhere(TorchDispatchMode):
    """Notes operations that read or make a tensor that is not on the device "meta"."""

    def __init__(self):
        super().__init__()
        self.count, self.found = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.count, self.found = self.count + 1, self.found + [str(function) for tensor in tensors if tensor.device.type != "meta"]
        return result


@pytest.mark.parametrize("name", ["dqn", "rainbow"])
def test_a_planned_update_touches_nothing_outside_its_device(monkeypatch, name):
    """The device "meta" has no values and no optimiser of its own: all but drawing and the optimiser's step runs there."""
    def step(self, loss):
        self.planned_lr = self._planned.take()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach(), torch.isfinite(loss.detach())

    memory = make_memory(make_agent(name)).memory
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))
    monkeypatch.setattr(ResidentReplay, "_shares", lambda self, count: torch.rand(count, dtype=torch.float64, device=self.device))
    monkeypatch.setattr("core.planned.upload", lambda array, target: None)
    monkeypatch.setattr(Optimizer, "step", step)
    agent, model, settings = AGENTS[name]
    params = agent.Params(**{**DQN_SETTINGS, **settings, "optimizer": "rmsprop"})
    agent = agent(params, SPEC, lambda: model(model.Params(), SPEC).to("meta"))
    resident = memory.Resident(memory, torch.device("meta"))
    updates = ResidentUpdates(agent, resident, 16, 2, torch.device("meta"), capture=False)
    resident.plan(2), agent.plan(2)
    with Elsewhere() as elsewhere:
        updates._updates()
    assert elsewhere.found == [] and elsewhere.count > 100


def test_the_watch_sees_where_python_looks():
    with Watch() as watch:
        bool(torch.ones(1) > 0), torch.ones(3)[torch.ones(3) > 0]
    assert len(watch.looks) == 2


def test_agents_that_cannot_be_planned_are_not_captured():
    agent = Impala(Impala.Params(), SPEC, lambda: None)
    with pytest.raises(ValueError, match="Impala cannot be captured"):
        ResidentUpdates(agent, None, 1, 1, torch.device("cpu"), capture=True)
    with pytest.raises(NotImplementedError, match="Impala"):
        agent.plan(1)


# captured -------------------------------------------------------------------------------------------------------------
def test_without_a_recording_work_is_called_each_time_and_a_recording_needs_cuda():
    calls = []
    work = Captured(lambda: calls.append(1), torch.device("cpu"), capture=False)
    work(), work()
    assert len(calls) == 2
    with pytest.raises(ValueError, match="not on cpu"):
        Captured(work, torch.device("cpu"), capture=True)


@cuda
def test_a_replay_does_the_work_once_and_goes_on_in_its_generators_sequence():
    device, calls = torch.device("cuda"), []
    totals = []
    for capture in (False, True):
        total, generator = torch.zeros(3, device=device), torch.Generator(device).manual_seed(5)

        def work(total=total, generator=generator):
            calls.append(1)
            total.add_(torch.rand(3, generator=generator, device=device))

        captured = Captured(work, device, [generator], capture=capture)
        for _ in range(WARM_UP + 4):
            captured()
        totals.append(total)
    assert len(calls) == WARM_UP + 4 + WARM_UP + 1
    torch.testing.assert_close(*totals)


# what is reported -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_reports_are_means_of_the_updates_that_changed_something(device):
    tally = Tally(torch.device(device))
    assert tally.take() == ({"skipped_updates": 0.0}, 0)
    losses = [1.0, np.nan, np.nan, 5.0, np.nan]
    for loss in losses:
        tally.add(LearnerOutput({"loss": torch.tensor(loss, device=device)}, None, torch.tensor(np.isnan(loss), device=device)))
    assert tally.take() == ({"loss": 3.0, "skipped_updates": 3.0}, 2)
    tally.add(LearnerOutput({"loss": torch.tensor(np.nan)}, None, skipped=True))
    assert tally.take() == ({"skipped_updates": 4.0}, 2)  # in a row with the one before
    tally.add(LearnerOutput({"loss": torch.tensor(2.0)}, None))
    assert tally.take() == ({"loss": 2.0, "skipped_updates": 4.0}, 0)
