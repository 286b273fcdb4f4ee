"""Graphed updates on batches from the CPU equal the agent's own, even if the batch changes afterwards."""

import numpy as np
import pytest
import torch

from core.agents.dqn import DQN
from core.agents.impact import Impact
from core.agents.impala import Impala
from core.agents.ppo import PPO
from core.agents.pqn import PQN
from core.agents.td3 import TD3
from core.learning.updates import EagerUpdates, GraphedUpdate, StagedBatches
from core.models.actor_critic import MLPAC
from core.models.dqn import DQNMLP
from core.types import Batch, SampleIds, Window, tree_leaves
from tests.core.devices import DEVICES
from tests.core.learning.test_graphed_update import CPU
from tests.core.resident_agents import CONTINUOUS, DISCRETE
from tests.reliability.test_inline import RUNS, differences, saved, train

STREAMS = 6
UNROLLS = {
    "unroll_length": 4,
    "batch_size": STREAMS,
    "learning_rate": 1e-3,
    "lr_schedule": "linear",
    "lr_schedule_updates": 50,
}
AGENTS = {
    "impala": (Impala, UNROLLS, {}),
    "impala with LSTM": (Impala, {**UNROLLS, "optimizer": "adam"}, {"lstm": 5}),
    "clear, laser": (
        Impala,
        {**UNROLLS, "policy_cloning_cost": 0.01, "value_cloning_cost": 0.005, "relevance": "implied"},
        {},
    ),
    "impact": (Impact, {**UNROLLS, "target_update_period": 3, "kl_coefficient": 0.2, "kl_target": 1e-5}, {}),
    "impact with LSTM": (Impact, {**UNROLLS, "target_update_period": 2}, {"lstm": 5}),
    "ppo": (PPO, {**UNROLLS, "epochs": 2, "minibatches": 2, "target_kl": 0.01}, {"value_torso": True}),
    "ppo, stopped by KL": (PPO, {**UNROLLS, "epochs": 3, "minibatches": 1, "target_kl": 1.0}, {}),
    "ppo with LSTM": (PPO, {**UNROLLS, "epochs": 2, "minibatches": 1, "normalize_rewards": True}, {"lstm": 5}),
    "ppo, asynchronous and continuous": (
        PPO,
        {**UNROLLS, "epochs": 2, "minibatches": 1, "normalize_rewards": True, "squash_actions": True, "c_bar": 1.3},
        {"normalize_observations": True},
    ),
    "pqn": (PQN, {**UNROLLS, "epochs": 2, "minibatches": 3}, {"norm": "layer"}),
    "pqn, whole rollouts": (PQN, {**UNROLLS, "epochs": 2, "minibatches": 1}, {"norm": "layer", "dueling": True}),
    "dqn": (DQN, {"batch_size": STREAMS, "n_step": 3, "target_update_period": 4}, {}),
}


def make_agent(name, device="cpu"):
    agent, settings, network = AGENTS[name]
    torch.manual_seed(3)
    model = DQNMLP if agent.required_output == "q" else MLPAC
    params = model.Params(hidden=16, **network)
    spec = CONTINUOUS if "continuous" in name else DISCRETE
    made = agent(agent.Params(**settings), spec, lambda: model(params, spec).to(device))
    made.init_learner()
    return made


def make_batch(agent, seed):
    draw, rows = np.random.default_rng(seed), agent.window.length + 1
    lasts = draw.random((rows, STREAMS)) < 0.2
    firsts = np.concatenate([lasts[:1] & False, lasts[:-1]])
    observations = draw.integers(
        0, 256, (len(agent.window.observations), STREAMS, *DISCRETE.observation_shape), np.uint8
    )
    extras = {
        name: draw.normal(size=(rows, STREAMS, *spec.shape)).astype(spec.dtype) for name, spec in agent.extras.items()
    }
    window = Window(
        *map(
            torch.from_numpy,
            (
                observations,
                firsts,
                lasts,
                draw.integers(5, size=(rows, STREAMS)),  # of continuous actions nothing is read
                draw.normal(size=(rows, STREAMS)).astype(np.float32),
                (draw.random((rows, STREAMS)) > 0.1).astype(np.float32),
            ),
        ),
        {name: torch.from_numpy(array) for name, array in extras.items()},
        tuple(torch.randn(STREAMS, *part.shape[1:]) for part in agent.initial_state(1)),
    )
    return Batch(
        window,
        SampleIds(np.zeros(STREAMS, np.int64), np.arange(STREAMS)),
        torch.from_numpy(draw.random(STREAMS).astype(np.float32)),
        None if isinstance(agent, DQN) else torch.from_numpy(draw.random(STREAMS) < 0.5),
        on_policy=isinstance(agent, PPO) and agent.params.c_bar == 1,
    )


def staged(agent, device=CPU, *, capture=False):
    return GraphedUpdate(agent, StagedBatches(device), capture=capture)


def learnt(name, learn_of, count=12, device="cpu"):
    """Return state, priorities of each update and reported means; each batch is overwritten after its update.

    Priorities are not copied, so that those of later updates would show in earlier ones.
    """
    agent, priorities = make_agent(name, device), []
    learn = learn_of(agent)
    for seed in range(count):
        torch.manual_seed(seed)
        batch = make_batch(agent, seed)
        output = learn(batch)
        priorities.append(None if output.priorities is None else output.priorities.cpu().numpy())
        for tensor in tree_leaves((batch.window, batch.weights, batch.fresh)):
            tensor.fill_(1)
    return agent, priorities, learn.statistics()


def assert_same(found, expected, **tolerance):
    one, other = (each[0].state_dict() for each in (found, expected))
    for part in one.keys() & {"model", "target"}:
        for name, tensor in one[part].items():
            torch.testing.assert_close(tensor.cpu(), other[part][name].cpu(), msg=f"{part} {name}", **tolerance)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert (mine is None) == (theirs is None) and (mine is None or np.allclose(mine, theirs, rtol=1e-3, atol=1e-4))
    assert found[2] == pytest.approx(expected[2], rel=1e-3, abs=1e-5)
    for part in one.keys() & {"optimizer", "policy_optimizer", "critic_optimizer"}:
        assert one[part]["updates"] == other[part]["updates"]
    assert one.get("kl_coefficient") == other.get("kl_coefficient")


@pytest.mark.parametrize("name", AGENTS)
def test_staged_updates_equal_those_of_a_plain_agent(name):
    found = learnt(name, staged)
    expected = learnt(name, lambda agent: EagerUpdates(agent, False))
    assert_same(found, expected, rtol=1e-3, atol=1e-5)
    assert name != "impact" or found[0].state_dict()["kl_coefficient"] not in (0.2, 0.0)  # it was adapted


@pytest.mark.cuda
@pytest.mark.parametrize("name", AGENTS)
def test_captured_updates_equal_eager_ones(name):
    found, expected = (
        learnt(name, lambda agent, capture=capture: staged(agent, torch.device("cuda"), capture=capture), 30, "cuda")
        for capture in (True, False)
    )
    assert_same(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AGENTS)
def test_a_staged_non_finite_update_is_skipped_and_counted(device, name):
    agent = make_agent(name, device)
    learn = staged(agent, torch.device(device))
    learn(make_batch(agent, 0)), learn.statistics()
    before = {key: tensor.clone() for key, tensor in agent.model.state_dict().items()}
    batch = make_batch(agent, 1)
    batch.window.rewards[:] = torch.nan
    output = learn(batch)
    assert output.priorities is None or output.priorities.isnan().all()
    assert all(torch.equal(tensor, before[key]) for key, tensor in agent.model.state_dict().items())
    assert learn.statistics() == {"nonfinite_updates": 1.0} and learn.metrics.consecutive_skipped == 1


def test_other_batch_sizes_and_periodic_agents_are_refused():
    agent = make_agent("dqn")
    learn, batch = staged(agent), make_batch(agent, 0)
    learn(batch)
    with pytest.raises(RuntimeError, match=r"\(6\) must match .* \(3\)"):
        learn(batch._replace(weights=batch.weights[:3]))
    with pytest.raises(ValueError, match="1 updates of TD3 at once cannot be captured"):
        staged(TD3(TD3.Params(), CONTINUOUS, lambda: None), capture=True)


def test_a_run_with_staged_batches_trains_like_one_without(tmp_path, monkeypatch):
    # as if there were a GPU to capture for
    monkeypatch.setattr("utils.config.validation.device_problems", lambda options: [])
    made, make = [], GraphedUpdate.__init__
    monkeypatch.setattr(
        GraphedUpdate, "__init__", lambda self, *rest, **settings: (made.append(self), make(self, *rest, **settings))[1]
    )
    states = [
        saved(train(tmp_path / captured, *RUNS["prioritized"], "--learner.cuda_graph", captured, "--steps", "200"))
        for captured in ("off", "auto", "on")
    ]
    assert len(made) == 1 and not differences(states[0]["agent"], states[1]["agent"])
    assert states[0]["agent"]["optimizer"]["updates"] == states[2]["agent"]["optimizer"]["updates"] > 5
    for name, tensor in states[0]["agent"]["model"].items():
        torch.testing.assert_close(states[2]["agent"]["model"][name], tensor, rtol=1e-3, atol=1e-5)
