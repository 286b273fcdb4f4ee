"""Updates with target outputs that another thread computed equal those that compute them at once, to the bit."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Event
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.agents.dqn import DQN
from core.agents.iqn import IQN
from core.agents.r2d2 import R2D2
from core.agents.rainbow import Rainbow
from core.learning.batch_source import Prefetcher
from core.learning.precision import in_bf16
from core.models.dqn import DQNMinAtar, DQNResNet, RainbowMinAtar
from core.models.iqn import IQNMinAtar
from core.models.r2d2 import R2D2MinAtar
from core.specs import ArraySpec, Discrete, EnvSpec
from core.types import Batch, SampleIds, Window, slice_batch
from tests.core.agents.unrolls import differences

SPEC = EnvSpec("planes", ArraySpec((10, 10, 4), "uint8"), 0, Discrete(3), is_image=True, max_value=255.0)
SETTINGS = {"batch_size": 6, "learning_rate": 1e-2, "optimizer_eps": 1e-8}
MUNCHAUSEN = {"munchausen_alpha": 0.9, "double_q": False}
AGENTS = {
    "dqn": (DQN, DQNMinAtar, {"double_q": False}),
    "double dqn": (DQN, DQNMinAtar, {}),
    "dqn with spectral norm": (DQN, DQNResNet, {}),
    "munchausen dqn": (DQN, DQNMinAtar, MUNCHAUSEN),
    "rainbow": (Rainbow, RainbowMinAtar, {}),
    "munchausen quantiles": (Rainbow, RainbowMinAtar, {**MUNCHAUSEN, "distribution": "quantile"}),
    "iqn": (IQN, IQNMinAtar, {}),
    "munchausen iqn": (IQN, IQNMinAtar, MUNCHAUSEN),
    "r2d2": (R2D2, R2D2MinAtar, {"burn_in": 2, "unroll_length": 3, "sequence_period": 2, "n_step": 2}),
}


def make_agent(name, precision, **more):
    kind, network, settings = AGENTS[name]
    torch.manual_seed(3)
    params = network.Params(hidden=16)
    convert = in_bf16 if precision == "bf16" else lambda model: model
    agent = kind(kind.Params(**{**SETTINGS, **settings, **more}), SPEC, lambda: convert(network(params, SPEC)))
    agent.init_learner()
    return agent


def make_batch(agent, seed):
    draw, rows, size = np.random.default_rng(seed), agent.window.length + 1, agent.params.batch_size
    lasts = draw.random((rows, size)) < 0.2
    fields = (
        draw.integers(0, 256, (len(agent.window.observations), size, *SPEC.observation_shape), np.uint8),
        np.concatenate([lasts[:1] & False, lasts[:-1]]),
        lasts,
        draw.integers(3, size=(rows, size)),
        draw.normal(size=(rows, size)).astype(np.float32),
        (draw.random((rows, size)) > 0.1).astype(np.float32),
    )
    extras = {name: torch.zeros(rows, size, dtype=getattr(torch, spec.dtype)) for name, spec in agent.extras.items()}
    states = tuple(torch.zeros(size, *part.shape[1:], dtype=part.dtype) for part in agent.initial_state(1))
    keys = SampleIds(np.zeros(size, np.int64), np.arange(size))
    return Batch(Window(*map(torch.from_numpy, fields), extras, states), keys, torch.rand(size))


@pytest.mark.parametrize("name", [name for name in AGENTS if name != "r2d2"])
def test_nothing_is_learnt_through_what_is_bootstrapped(name, monkeypatch):
    agent, enabled = make_agent(name, "float32"), []
    bootstrap = agent.bootstrap  # A class of one's own may compute it by the network that learns.
    monkeypatch.setattr(agent, "bootstrap", lambda *given: enabled.append(torch.is_grad_enabled()) or bootstrap(*given))
    agent.learn(make_batch(agent, 0))
    assert enabled == [False]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", AGENTS)
def test_an_update_uses_what_was_precomputed_or_computes_it(name, precision):
    plain, ahead = (make_agent(name, precision, target_update_period=2) for _ in range(2))
    for update in range(5):
        batch = make_batch(plain, update)
        torch.manual_seed(update)
        expected = plain.learn(batch)
        torch.manual_seed(update)
        found = ahead.learn(batch._replace(precomputed=ahead.precompute(batch)))
        assert torch.equal(found.priorities, expected.priorities)
        assert found.statistics["loss"] == expected.statistics["loss"]
    assert not differences(ahead.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_outputs_of_an_older_target_are_not_used(name):
    plain, ahead = (make_agent(name, "float32", target_update_period=2) for _ in range(2))
    batches = [make_batch(plain, seed) for seed in range(4)]
    early = [batch._replace(precomputed=ahead.precompute(batch)) for batch in batches]
    for batch, with_older in zip(batches, early, strict=True):
        plain.learn(batch)
        ahead.learn(with_older)
    assert not differences(ahead.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", AGENTS)
def test_what_is_precomputed_leaves_the_state_as_it_was(name):
    agent = make_agent(name, "float32")
    before = deepcopy(agent.state_dict())
    agent.precompute(make_batch(agent, 0))
    assert not differences(agent.state_dict(), before)


def test_a_state_that_is_saved_while_a_target_computes_is_not_rounded():
    agent = make_agent("dqn", "bf16")
    before, computing = deepcopy(agent.state_dict()), Event()

    def compute(layer, inputs):
        computing.set()
        sleep(0.1)

    agent.target.torso[0].register_forward_pre_hook(compute)
    with ThreadPoolExecutor(1) as thread:
        ready = thread.submit(agent.precompute, make_batch(agent, 0))
        assert computing.wait(10)
        assert not differences(agent.state_dict(), before)
        ready.result()


def test_an_update_that_leaves_the_target_does_not_wait_for_what_is_precomputed():
    agent = make_agent("dqn", "float32", target_update_period=2)
    batch = make_batch(agent, 0)
    batch = batch._replace(precomputed=agent.precompute(batch))
    with ThreadPoolExecutor(1) as thread, agent._target_lock:  # as the sampling thread holds it
        thread.submit(agent.learn, batch).result(10)
        second = thread.submit(agent.learn, batch)
        sleep(0.2)
        assert not second.done()  # it moves the target
        agent._target_lock.release()
        second.result(10)
        agent._target_lock.acquire()


def test_a_changed_output_changes_the_update():
    """Otherwise the tests above would pass for an agent that ignores what was precomputed."""
    plain, ahead = (make_agent("dqn", "float32") for _ in range(2))
    batch = make_batch(plain, 0)
    ready = ahead.precompute(batch)
    ahead.learn(batch._replace(precomputed=ready._replace(target_outputs=(ready.target_outputs[0] + 1,))))
    plain.learn(batch)
    assert not torch.equal(*(agent.state_dict()["model"]["q.2.weight"] for agent in (plain, ahead)))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["dqn", "r2d2"])  # which draw nothing in an update
def test_a_thread_beside_moving_targets_changes_no_update(name, precision):
    plain, ahead = (make_agent(name, precision, target_update_period=3) for _ in range(2))
    batches = [make_batch(plain, seed) for seed in range(24)]
    drawn = iter(batches)
    memory = SimpleNamespace(sample=lambda size: next(drawn, None), takes_priorities=False, batches_per_sample=1)
    prefetcher = Prefetcher(memory, 6, 4, precompute=ahead.precompute)
    stale = 0
    for batch in batches:
        plain.learn(batch)
        given = prefetcher.get(10)
        stale += given.precomputed.target_version < ahead._target_version
        ahead.learn(given)
    prefetcher.close()
    assert stale  # batches waited while the target moved
    assert not differences(ahead.state_dict(), plain.state_dict())


def test_slices_of_a_batch_are_computed_anew():
    agent = make_agent("dqn", "float32")
    batch = make_batch(agent, 0)
    batch = batch._replace(precomputed=agent.precompute(batch))
    before = deepcopy(agent.state_dict())
    whole, first, last = (agent.loss(slice_batch(batch, part)).loss for part in (None, slice(0, 4), slice(4, 6)))
    assert whole.item() == pytest.approx((4 * first + 2 * last).item() / 6, rel=1e-5)
    assert not differences(agent.state_dict(), before)


class Resetting(DQN):
    """Reset the target after each update, without the lock that a thread holds while it computes with the target."""

    def learn(self, batch):
        output = super().learn(batch)
        with torch.no_grad():
            for part in self.target.parameters():
                part.zero_()
        return output


class Weighted(DQN):
    """Change the loss alone."""

    def loss(self, batch):
        return super().loss(batch)


def test_an_agent_whose_own_learn_may_change_the_target_precomputes_nothing():
    """In bfloat16 a reset changed the rounded copies that the other thread computed with, and was lost."""
    params = DQN.Params(target_update_period=1_000)
    assert DQN.can_precompute(params) and Weighted.can_precompute(params)
    assert not Resetting.can_precompute(params)
