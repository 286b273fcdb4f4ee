"""Two learners in processes of their own learn what one learner does from the batches of both."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from core.agents.impact import Impact
from core.agents.iqn import IQN
from core.distributed.learner_group import SingleLearner, state_digest
from core.learning import gradients
from core.models.dqn import RainbowMLP
from core.models.iqn import IQNMLP
from core.types import slice_batch, tree_map
from tests.core import resident_agents
from tests.core.agents.test_impact import random_target, with_target
from tests.core.agents.unrolls import differences, random_unrolls, table_agent
from tests.core.learning import test_staged_update
from tests.selection import slow_except

BATCH_SIZE, UPDATES = 12, 4
HALVES = (slice(0, None, 2), slice(1, None, 2))  # windows of each learner
WHOLE = slice(None)
# Minibatches of PPO and PQN are drawn by each learner for itself, so only those that are whole rollouts are comparable.
UNROLLS = [name for name in test_staged_update.AGENTS if name not in ("dqn", "ppo", "pqn")]
PLANNED = ["dqn", "dqn, rmsprop", "rainbow", "sac"]  # updates of which one can be planned alone


@contextmanager
def float64():
    """Compute in float64, without noise in networks, and draw the same values for a window in every batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "BUCKET_BYTES", 256)  # so that small networks have several buckets
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "randn_like", lambda tensor: (3 * tensor.detach()).sin())
        patch.setitem(resident_agents.NETWORKS, RainbowMLP, {"hidden": 16, "noisy": False})
        patch.setitem(resident_agents.NETWORKS, IQNMLP, {"hidden": 16})
        patch.setattr(IQN, "_draw_fractions", resident_agents.same_fractions)
        patch.setattr(test_staged_update, "STREAMS", BATCH_SIZE)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def double(batch):
    def wider(tensor):
        return tensor.double() if tensor.is_floating_point() else tensor

    return batch._replace(window=tree_map(wider, batch.window), weights=wider(batch.weights))


def agent_and_batches(name):
    if name in UNROLLS:
        agent = test_staged_update.make_agent(name)
        batches = [test_staged_update.make_batch(agent, seed) for seed in range(UPDATES)]
    else:
        agent = resident_agents.make_agent(name)
        memory = resident_agents.shared_memory(agent)
        batches = [memory.sample(BATCH_SIZE) for _ in range(UPDATES)]
    return agent, [double(batch) for batch in batches]


def flat(state, path=""):
    if isinstance(state, dict):
        return {key: value for name, part in state.items() for key, value in flat(part, f"{path}/{name}").items()}
    return {path: torch.as_tensor(state).double().clone()} if isinstance(state, (torch.Tensor, float, int)) else {}


def learn(name, windows, planned, group):
    """Learn from these windows of every batch.

    Returns:
        The state before and after, its digest, and the priorities and the statistics of every update.
    """
    with float64():
        torch.manual_seed(0)
        agent, batches = agent_and_batches(name)
        agent.state_dict()
        before, priorities, statistics = flat(agent.state_dict()), [], []
        for batch in batches:
            if planned:
                agent.prepare_updates(1)
            output = group.run(partial(agent.learn, batch if windows == WHOLE else slice_batch(batch, windows)))
            assert not output.skipped
            priorities.append(None if output.priorities is None else output.priorities.numpy())
            statistics.append({name: float(value) for name, value in output.statistics.items()})
        return before, flat(agent.state_dict()), state_digest(agent.state_dict()), priorities, statistics


@pytest.mark.parametrize(
    ("name", "planned"),
    slow_except(
        [("dqn", True), ("sac", False), (UNROLLS[0], False)],
        [*((name, False) for name in (*resident_agents.AGENTS, *UNROLLS)), *((name, True) for name in PLANNED)],
    ),
)
def test_two_learners_learn_what_one_does_from_both_batches(learners, name, planned):
    first, second = learners.call(*(partial(learn, name, windows, planned) for windows in HALVES))
    before, after, _, priorities, statistics = learn(name, WHOLE, planned, SingleLearner())
    assert first[2] == second[2]  # alike to the bit
    for key, value in after.items():
        torch.testing.assert_close(first[1][key], value, rtol=1e-8, atol=1e-10, msg=key)
    assert any((after[key] - before[key]).abs().max() > 1e-4 for key in after if "model" in key)
    for whole, *halves in zip(priorities, first[3], second[3]):
        assert (whole is None) == (halves[0] is None)
        if whole is not None:
            for half, windows in zip(halves, HALVES):
                np.testing.assert_allclose(half, whole[windows], rtol=1e-8, atol=1e-10)
    if name.startswith(("ppo", "pqn")):  # each learner reports its mean of the minibatch that both made together
        for whole, *halves in zip(statistics, first[4], second[4]):
            for metric in whole.keys() - {"value_mean", "explained_variance"}:
                mean = sum(half[metric] for half in halves) / 2
                assert mean == pytest.approx(whole[metric], rel=1e-7, abs=1e-9), metric
    if name == "ppo, stopped by KL":
        assert [found["epochs"] for found in statistics] != [3.0] * UPDATES


def learn_with_one_faulty_step(name, group):
    torch.manual_seed(group.index)
    agent = test_staged_update.make_agent(name)
    batch = test_staged_update.make_batch(agent, seed=group.index)
    if group.index == 0:
        faulty = batch.window.extras["q_max"] if name == "pqn" else batch.window.rewards
        faulty[batch.window.lasts.logical_not().nonzero()[0].unbind()] = torch.inf
    skipped = bool(group.run(partial(agent.learn, batch)).skipped)
    return skipped, state_digest(agent.state_dict())


@pytest.mark.parametrize(
    ("name", "skipped"),
    [("pqn", True), ("ppo", True), ("ppo with LSTM", False)],  # the last clips normalised rewards
)
def test_learners_stay_alike_if_a_number_of_one_is_not_finite(learners, name, skipped):
    first, second = learners.call(*[partial(learn_with_one_faulty_step, name)] * 2)
    assert first == second and first[0] is skipped


def agent_with_half_a_divergence(**settings):
    """Return an agent and a batch of six unrolls. The target network differs in the first three."""
    batch, logits, values = random_unrolls(seed=5, streams=6)
    target_logits = logits.copy()
    target_logits[:, :3] = random_target(logits)[:, :3]
    return with_target(
        table_agent(Impact, logits, values, target_update_period=1, kl_coefficient=0.4, **settings), target_logits
    ), batch


def learn_three(begin, kl_target):
    """Learn from three of the unrolls. Returns the divergence of these, and the agent's state."""
    agent, batch = agent_with_half_a_divergence(kl_target=kl_target)
    output = agent.learn(slice_batch(batch, slice(begin, begin + 3)))
    return float(output.statistics["target_kl"]), agent.state_dict()


def test_impacts_learners_adapt_the_kl_coefficient_together(learners):
    agent, batch = agent_with_half_a_divergence()
    measured = float(agent.learn(batch).statistics["target_kl"])
    (first, one), (second, other) = learners.run(*(partial(learn_three, begin, measured) for begin in (0, 3)))
    assert first > 1.5 * measured and second == 0  # alone the weight would be doubled, and halved
    assert one["kl_coefficient"] == other["kl_coefficient"] == pytest.approx(0.4)
    assert not differences(one, other)
