"""Agents for continuous actions: actions, targets, gradients, target networks and checkpoints."""

import copy

import numpy as np
import pytest
import torch

from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer
from core.learning.updates import EagerMetricAccumulator, _Updates
from core.specs import ArraySpec, Continuous, EnvSpec
from tests.core.agents.control_agents import KINDS, make_agent, make_batch, space, timestep


def parameters(module):
    return [part.detach().clone() for part in module.parameters()]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second))


# model ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_parameter_that_nothing_trains_is_refused(kind):
    agent, params, model, model_params = KINDS[kind]
    spec = EnvSpec("numbers", ArraySpec((5,), "float32"), 0, space(3))

    def make(trained):
        made = model(model_params, spec)
        made.encoder = torch.nn.Linear(5, 5).requires_grad_(trained)
        return made

    with pytest.raises(TypeError, match=r"only parameters of `policy` and `critic` .*encoder\.weight, encoder\.bias"):
        agent(params, spec, lambda: make(True)).model
    assert agent(params, spec, lambda: make(False)).model.encoder  # a fixed one is part of `preprocess`


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_and_shared_parameters_are_refused(kind):
    agent, params, model, model_params = KINDS[kind]
    spec = EnvSpec("numbers", ArraySpec((5,), "float32"), 0, space(3))
    fixed, shared = model(model_params, spec), model(model_params, spec)
    fixed.policy[1][0].weight.requires_grad_(False)
    shared.critic[0].torso = shared.policy[1][0]
    with pytest.raises(TypeError, match=r"all parameters .* are trained, and it fixes policy\.1\.0\.weight$"):
        agent(params, spec, lambda: fixed).model
    with pytest.raises(TypeError, match=r"no common parameter, and it shares policy\.1\.0\.weight"):
        agent(params, spec, lambda: shared).model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_register_its_critic_first(kind, monkeypatch):
    def critic_first(self, *arguments):
        registered(self, *arguments)
        self.policy = self._modules.pop("policy")

    agents = [make_agent(kind)]
    registered = KINDS[kind][2].__init__
    monkeypatch.setattr(KINDS[kind][2], "__init__", critic_first)
    agents.append(make_agent(kind, learner=False))
    assert next(agents[1].model.named_parameters())[0].startswith("critic.")
    agents[1].model.load_state_dict(agents[0].model.state_dict())
    agents[1].init_learner()
    for agent in agents:
        torch.manual_seed(1)
        for seed in range(3):
            agent.learn(make_batch(agent, seed=seed))
    assert same(*(parameters(agent.model.policy) for agent in agents))
    assert same(*(parameters(agent.model.critic) for agent in agents))


def test_critics_may_share_a_parameter():
    agent = make_agent("td3", learner=False)
    first, second = (critic.layers[0] for critic in agent.model.critic)
    second.weight = first.weight
    agent.init_learner()
    before = first.weight.detach().clone()
    agent.learn(make_batch(agent))
    assert first.weight is second.weight and not torch.equal(before, second.weight)


# acting -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_noisy_actions_stay_within_the_bounds_of_the_space(kind):
    action = Continuous(
        np.array([[-2, 0, 1], [-1, -1, 0.1]], np.float32), np.array([[2, 4, 1], [0, 5, 0.3]], np.float32)
    )
    agent = make_agent(kind, action, noise="gaussian", noise_scale=5.0)
    exploration = agent.exploration(0, 1, 50, np.random.default_rng(0))
    observation = np.random.default_rng(1).normal(size=(50, 5)).astype(np.float32)
    taken = agent.act(timestep(observation), (), exploration).action
    assert taken.shape == (50, 2, 3) and taken.dtype == np.float32
    assert (taken >= action.low).all() and (taken <= action.high).all()
    # clipped to both bounds
    assert {-2.0, 2.0} <= set(taken[:, 0, 0].tolist()) and set(taken[:, 0, 2].tolist()) == {1.0}
    greedy = agent.act(timestep(observation), (), None).action
    np.testing.assert_array_equal(greedy, agent.act(timestep(observation), (), None).action)
    assert not np.array_equal(greedy, taken)


def test_noise_restarts_where_an_episode_starts():
    agent = make_agent("ddpg", noise="ornstein-uhlenbeck", noise_scale=0.0, ou_dt=1.0)
    exploration = agent.exploration(0, 1, 2, np.random.default_rng(0))
    exploration._state = np.full((2, 3), 0.01)
    observation = np.zeros((2, 5), np.float32)
    agent.act(timestep(observation, np.array([True, False])), (), exploration)
    assert exploration._state[0].tolist() == [0, 0, 0]
    assert exploration._state[1].tolist() == pytest.approx([0.01 * 0.85] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_batch_norm_of_a_policy_work_in_updates_only(kind):
    agent = make_agent(kind, learner=False, noise="none")
    agent.model.policy = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5), agent.model.policy)
    observation = timestep(np.ones((1, 5), np.float32))
    first = agent.act(observation, (), None).action  # one environment, of which no variance is computed
    for _ in range(5):
        np.testing.assert_array_equal(agent.act(observation, (), None).action, first)
    agent.init_learner()
    assert agent.model.training and agent.target.training
    agent.act(observation, (), None)
    for seed in range(2):  # TD3's policy learns in the second update
        agent.learn(make_batch(agent, seed=seed))
    assert agent.model.training and agent.model.policy[0].num_batches_tracked > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_action_is_read_as_the_policy_gave_it(kind):
    agent = make_agent(kind, space(4, low=-2.0, high=6.0), noise="none")
    inside = np.random.default_rng(0).uniform(-1, 1, (9, 4)).astype(np.float32)
    stored = agent.action_range.to_space(torch.from_numpy(inside))
    np.testing.assert_allclose(stored, 2 + 4 * inside, rtol=1e-6)
    np.testing.assert_allclose(agent.action_range.from_space(stored), inside, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_observations_of_any_shape_are_accepted(kind):
    agent = make_agent(kind, frame=(2, 3))
    assert agent.act(timestep(np.ones((4, 2, 3), np.float32)), (), None).action.shape == (4, 3)
    assert not agent.learn(make_batch(agent)).skipped


@pytest.mark.parametrize("kind", KINDS)
def test_the_greedy_action_of_a_scalar_space_is_the_one_acted(kind):
    agent = make_agent(kind, Continuous(np.array(-2, np.float32), np.array(4, np.float32)))
    observation = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    acted = agent.act(timestep(observation), (), None).action
    with torch.no_grad():
        named = agent.greedy(agent.model(torch.from_numpy(observation), ())[0])["action"]
    assert named.shape == acted.shape == (6,) and (np.abs(acted) > 0).all()
    np.testing.assert_allclose(named.numpy(), acted, rtol=1e-5)


# targets by hand --------------------------------------------------------------------------------------------------
def test_ddpg_n_step_targets_handle_terminations_and_truncations():
    agent, generator = make_agent("ddpg", n_step=2, gamma=0.9), torch.Generator().manual_seed(3)
    for part in agent.online_vectors.both, agent.target_vectors.both:
        part.copy_(torch.randn(part.shape, generator=generator) * 0.3)
    batch = make_batch(agent)
    window = batch.window
    values = agent.model.critic(window.observations[0], window.actions[0])[0, :, 0]
    final = agent.target.critic(window.observations[1], agent.target.policy(window.observations[1]))[0, :, 0]
    rewards = window.rewards
    for discounts, lasts, target in (
        ([1, 1, 1], [0, 0, 0], rewards[0] + 0.9 * rewards[1] + 0.81 * final),
        ([1, 0, 1], [0, 0, 1], rewards[0] + 0.9 * rewards[1]),  # terminated
        ([0, 1, 1], [0, 1, 0], rewards[0]),  # terminated after one step
        ([1, 1, 1], [0, 1, 0], rewards[0] + 0.9 * final),
    ):  # truncated after one step
        columns = [torch.tensor(column, dtype=torch.float32)[:, None].expand(3, 7) for column in (discounts, lasts)]
        shaped = batch._replace(window=window._replace(discounts=columns[0], lasts=columns[1].bool()))
        step = agent.transitions(shaped)
        found = agent.critic_losses(step, agent.model.critic(step.observation, step.action), agent.bootstrap(step))
        assert found.priorities.tolist() == pytest.approx((target - values).abs().tolist(), rel=1e-4, abs=1e-5)
        assert found.losses.tolist() == pytest.approx((target - values).square().tolist(), rel=1e-4, abs=1e-5)


def test_d4pg_projects_the_n_step_distribution_as_the_paper_does():
    """The expected loss is the sum of algorithm 1 of 1707.06887, written out atom by atom in float64."""
    agent = make_agent("d4pg", n_step=2, gamma=0.9)
    batch = make_batch(agent)
    batch.window.discounts[0, :3] = 0  # these three terminate
    batch.window.lasts[1, :3] = True
    step = agent.transitions(batch)
    logits = agent.bootstrap(step)[0]
    losses = agent.critic_losses(step, agent.model.critic(step.observation, step.action), logits[None])
    atoms = np.linspace(-5, 5, 11)
    chosen = agent.model.critic(step.observation, step.action)[0].detach().double().log_softmax(1).numpy()
    rewards = batch.window.rewards.double().numpy()
    for sample in range(7):
        terminated = sample < 3
        returned = rewards[0, sample] + (0 if terminated else 0.9 * rewards[1, sample])
        mass, probabilities = np.zeros(11), logits[sample].double().softmax(0).numpy()
        for atom, probability in zip(atoms, probabilities):
            moved = np.clip(returned + (0 if terminated else 0.81) * atom, -5, 5) + 5
            low = min(int(moved), 9)
            mass[low] += probability * (low + 1 - moved)
            mass[low + 1] += probability * (moved - low)
        expected = sum(m * (np.log(m) - log) for m, log in zip(mass, chosen[sample]) if m > 0)
        assert float(losses.losses[sample].detach()) == pytest.approx(expected, abs=1e-4)


def test_a_perfect_distribution_has_a_valid_priority():
    agent = make_agent("d4pg", gamma=1.0)
    batch = make_batch(agent, batch_size=500)
    batch.window.rewards.zero_()
    step = agent.transitions(batch)
    logits = 3 * torch.randn(1, 500, 11)
    found = agent.critic_losses(step, logits, logits)
    assert (found.losses < 0).any() and (found.priorities >= 0).all() and found.priorities.max() < 1e-5


def test_td3_bootstraps_from_the_lower_critic_at_a_noisy_action():
    agent = make_agent("td3", smoothing_scale=50.0, smoothing_clip=0.5)
    agent.target.critic.forward = lambda observation, action: action
    for mean, lowest, highest in ((0.0, -0.5, 0.5), (1.0, 0.5, 1.0)):
        agent.target.policy.forward = lambda observation, mean=mean: torch.full((2000, 3), mean)
        smoothed = agent.bootstrap(agent.transitions(make_batch(agent)))
        assert {*smoothed.unique().tolist()} >= {lowest, highest}
        assert (float(smoothed.min()), float(smoothed.max())) == (lowest, highest)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_learnt_through_what_is_bootstrapped(kind, monkeypatch):
    agent, enabled = make_agent(kind), []
    bootstrap = agent.bootstrap  # A class of one's own may compute it by the network that learns.
    monkeypatch.setattr(agent, "bootstrap", lambda step: enabled.append(torch.is_grad_enabled()) or bootstrap(step))
    agent.learn(make_batch(agent))
    assert enabled == [False]


def test_sac_bounds_the_deviations_of_its_policy():
    agent = make_agent("sac")
    outputs = [torch.cat([torch.zeros(4, 3), torch.full((4, 3), value)], 1) for value in (2.0, 90.0, -20.0, -90.0)]
    samples = []
    for output in outputs:
        torch.manual_seed(2)
        samples.append(agent._sample(output))
    for bound, beyond in (samples[:2], samples[2:]):
        assert all(torch.equal(*pair) and pair[0].isfinite().all() for pair in zip(bound, beyond))


def test_sacs_evaluations_take_the_tanh_of_the_mean():
    means = torch.tensor([[0.3, -2.0, 40.0]])
    agent = make_agent("sac", space(3, low=-2.0, high=2.0))
    action = agent.greedy(torch.cat([means, torch.ones(1, 3)], 1))["action"]
    torch.testing.assert_close(action, 2 * means.tanh())


def test_sac_maximises_what_a_subclass_makes_of_the_critics():
    agent = make_agent("sac", learn_temperature=False, temperature=1e-6)
    agent.policy_values = lambda outputs: 7.0 + 0 * outputs.mean((0, 2))
    found = agent.learn(make_batch(agent)).statistics["policy_loss"]
    assert found.item() == pytest.approx(-7.0, abs=1e-3)


def test_statistics_of_critic_losses_are_reported():
    agent = make_agent("sac")
    losses_of = agent.critic_losses
    agent.critic_losses = lambda *inputs: losses_of(*inputs)._replace(statistics={"mine": torch.tensor(3.0)})
    assert agent.learn(make_batch(agent)).statistics["mine"] == 3


def test_a_fixed_temperature_stays():
    fixed = make_agent("sac", learn_temperature=False, temperature=0.2)
    fixed.learn(make_batch(fixed))
    assert fixed.log_temperature.exp().item() == pytest.approx(0.2)


def test_policy_critic_and_temperature_have_rates_and_decays_of_their_own():
    """The decay of a logarithm would pull the temperature towards 1."""
    settings = {"learning_rate": 1e-3, "critic_learning_rate": 2e-3, "weight_decay": 0.1, "critic_weight_decay": 0.2}
    agent = make_agent("sac", **settings)
    agent.learn(make_batch(agent))
    optimizers = agent.policy_optimizer, agent.critic_optimizer, agent.temperature_optimizer
    groups = [group for optimizer in optimizers for group in optimizer._optimizer.param_groups]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0.1), (2e-3, 0.2), (1e-3, 0.0)]


def test_sac_aims_at_minus_one_nat_a_number_unless_told():
    for settings, excess in (({}, 3.0), ({"target_entropy": 1.5}, -1.5)):
        agent = make_agent("sac", **settings)
        agent.temperature_optimizer._optimizer.step = lambda: None
        entropy = float(agent.learn(make_batch(agent)).statistics["entropy"])
        assert agent.log_temperature.grad.item() == pytest.approx(entropy + excess, rel=1e-4)


def test_sacs_temperature_follows_the_schedule_of_its_policy():
    settings = {"lr_schedule": "linear", "lr_schedule_updates": 10, "policy_update_period": 2}
    agent = make_agent("sac", **settings)
    for seed in range(2):
        agent.learn(make_batch(agent, seed=seed))
    assert agent.temperature_optimizer.next_lr == agent.policy_optimizer.next_lr == pytest.approx(3e-4 * 0.7)


# gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_importance_weights_scale_each_windows_gradient(kind):
    gradients = []
    for weights in ([1.0, 0.0], [0.0, 1.0], [0.25, 0.5]):
        agent = make_agent(kind, **({"smoothing_scale": 0.0} if kind == "td3" else {}))
        agent._sample = lambda output: (output[:, :3].tanh(), output[:, 3])
        agent.critic_optimizer._optimizer.step = lambda: None
        agent.learn(make_batch(agent, batch_size=2, weights=torch.tensor(weights)))
        gradients.append(agent.online_vectors.critic.grad.clone())
    first, second, both = gradients
    assert first.abs().max() > 0 and not torch.allclose(first, second)
    torch.testing.assert_close(both, 0.25 * first + 0.5 * second)


@pytest.mark.parametrize("kind", KINDS)
def test_every_agent_learns_with_any_layers_and_with_priorities(kind):
    for network in ({"layer_norm": True}, {"hidden": ()}, {"hidden": (8, 8, 8)}):
        agent = make_agent(kind, network=network)
        output = agent.learn(make_batch(agent, weights=torch.linspace(0.1, 1, 7)))
        assert not output.skipped and output.priorities.shape == (7,) and (output.priorities >= 0).all()


# targets, optimisers, checkpoints ---------------------------------------------------------------------------------
def test_targets_move_softly_or_by_copies_and_critics_have_an_lr():
    soft, hard = (
        make_agent("ddpg", target_update_tau=0.25),
        make_agent("ddpg", target_update_period=2, target_update_tau=1.0),
    )
    for agent in (soft, hard):
        before = agent.target_vectors.both.clone()
        agent.learn(make_batch(agent))
        moved = 0.25 * (agent.online_vectors.both - before) if agent is soft else torch.zeros_like(before)
        assert torch.allclose(agent.target_vectors.both - before, moved, atol=1e-6)
    hard.learn(make_batch(hard))
    assert torch.equal(hard.target_vectors.both, hard.online_vectors.both)
    agent = make_agent("ddpg", learning_rate=1e-3, critic_learning_rate=1e-2, optimizer_eps=1e-12)
    policy, critic = agent.online_vectors.policy.detach().clone(), agent.online_vectors.critic.detach().clone()
    agent.learn(make_batch(agent))
    steps = [
        (now.detach() - before).abs().max()
        for now, before in ((agent.online_vectors.policy, policy), (agent.online_vectors.critic, critic))
    ]
    # Adam's first step equals the learning rate
    assert [float(step) for step in steps] == pytest.approx([1e-3, 1e-2], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_policy_and_critics_reach_the_target(kind):
    agent = make_agent(kind, learner=False, target_update_period=1, target_update_tau=0.5, policy_update_period=1)
    for part in (agent.model.policy, agent.model.critic[0]):
        part.register_buffer("scale", torch.zeros(2))
    agent.init_learner()
    for part in (agent.model.policy, agent.model.critic[0]):
        part.scale += 1
    agent.learn(make_batch(agent))
    assert agent.target.policy.scale.tolist() == agent.target.critic[0].scale.tolist() == [0.5, 0.5]


def test_td3_moves_policy_and_targets_at_every_other_update():
    agent = make_agent("td3")
    for _ in range(2):
        policy, target = agent.online_vectors.policy.detach().clone(), agent.target_vectors.both.clone()
        output = agent.learn(make_batch(agent))
        assert torch.equal(policy, agent.online_vectors.policy) and torch.equal(target, agent.target_vectors.both)
        assert "policy_lr" not in output.statistics
        output = agent.learn(make_batch(agent))
        assert not torch.equal(policy, agent.online_vectors.policy) and not torch.equal(
            target, agent.target_vectors.both
        )
        assert "policy_loss" in output.statistics and float(output.statistics["policy_lr"]) == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_continues_training_exactly(kind):
    first, second = make_agent(kind), make_agent(kind, seed=9)
    for seed in range(3):
        first.learn(make_batch(first, seed=seed))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for agent in (first, second):
        torch.manual_seed(4)
        agent.learn(make_batch(agent, seed=7))
        agent.learn(make_batch(agent, seed=8))
    assert torch.equal(first.online_vectors.both, second.online_vectors.both)
    assert torch.equal(first.target_vectors.both, second.target_vectors.both)
    # still views of one vector
    assert second.model.policy[1][0].weight.data_ptr() == second.online_vectors.both.data_ptr()


def test_sac_restores_a_learnt_temperature_but_not_a_fixed_one():
    first = make_agent("sac", temperature=0.2)
    first.learn(make_batch(first))
    learnt = first.log_temperature.exp().item()
    for learn_temperature, expected in ((True, learnt), (False, 0.7)):
        second = make_agent("sac", temperature=0.7, learn_temperature=learn_temperature)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert second.log_temperature.exp().item() == pytest.approx(expected) and learnt != pytest.approx(0.2)


def test_sac_begins_to_learn_the_temperature_that_is_given():
    schedule = {"lr_schedule": "linear", "lr_schedule_updates": 100}
    for planned in (False, True):
        first = make_agent("sac", temperature=1.0, learn_temperature=False, **schedule)
        for seed in range(3):
            if planned:
                first.prepare_updates(1)
            first.learn(make_batch(first, seed=seed))
        second = make_agent("sac", temperature=0.2, **schedule)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert second.log_temperature.exp().item() == pytest.approx(0.2)
        assert second.temperature_optimizer.next_lr == second.policy_optimizer.next_lr


@pytest.mark.parametrize(
    ("kind", "target_update_tau", "planned"),
    [*((kind, 0.5, False) for kind in KINDS), ("sac", 0.5, True), ("ddpg", 1.0, False)],
)
def test_a_non_finite_update_changes_no_network_and_no_statistics(kind, target_update_tau, planned):
    network = {"normalize_observations": True}
    agent = make_agent(kind, policy_update_period=1, target_update_tau=target_update_tau, network=network)
    agent.learn(make_batch(agent))
    for part in [*agent.model.policy.parameters(), *agent.model.critic.parameters()]:
        part.data.mul_(1.5)  # moves the online networks away from the target
    everything = copy.deepcopy([*agent.target.state_dict().values(), *agent.model.state_dict().values()])
    target, count = agent.target_vectors.both.clone(), float(agent.model.normalization.count)
    temperature = agent.log_temperature.detach().clone() if kind == "sac" else None
    batch = make_batch(agent, seed=1)
    batch.window.rewards[0, 2] = float("nan")
    updates = _Updates(agent, EagerMetricAccumulator())
    if planned:
        agent.prepare_updates(1)
    output = updates._learn(batch)
    assert output.skipped and (planned or output.priorities is None)
    if kind == "sac":
        assert torch.equal(temperature, agent.log_temperature)
    assert same(everything, [*agent.target.state_dict().values(), *agent.model.state_dict().values()])
    if planned:
        agent.prepare_updates(1)
    agent.learn(make_batch(agent, seed=2))
    assert not torch.equal(target, agent.target_vectors.both) and float(agent.model.normalization.count) == count + 7


@pytest.mark.parametrize("planned", [0, 1, 2])
def test_lr_and_target_copies_count_updates_at_any_policy_period(planned):
    """Update n has the schedule's learning rate at n - 1, for policy and critic alike.

    A copy is due at every fifth update, or at the policy's next one.
    """
    settings = {
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "lr_schedule": "linear",
        "lr_schedule_updates": 20,
        "target_update_period": 5,
        "target_update_tau": 1.0,
    }
    agent, copied = make_agent("td3", policy_update_period=2, **settings), []
    rates = {"policy": [], "critic": []}
    for update in range(1, 21):
        if planned and (update - 1) % planned == 0:
            agent.prepare_updates(planned)
        agent.learn(make_batch(agent, seed=update))
        for name, optimizer in (("critic", agent.critic_optimizer), ("policy", agent.policy_optimizer)):
            if name == "critic" or update % 2 == 0:
                rates[name].append((update, float(optimizer._optimizer.param_groups[0]["lr"])))
        if torch.equal(agent.target_vectors.both, agent.online_vectors.both):
            copied.append(update)
    expected = {update: 1e-3 * (1 - (update - 1) / 20) for update in range(1, 21)}
    for pairs in rates.values():
        assert [rate for _, rate in pairs] == pytest.approx([expected[update] for update, _ in pairs], rel=1e-5)
    assert copied == [6, 10, 16, 20]


def test_scalar_actions_can_be_learnt_from():
    agent = make_agent("ddpg", action=space(low=-2.0, high=4.0))
    batch = make_batch(agent)
    assert batch.window.actions.shape == (2, 7)
    step = agent.transitions(batch)
    assert step.action[:, 0].tolist() == pytest.approx(((batch.window.actions[0] - 1) / 3).tolist(), abs=1e-6)
    assert not agent.learn(batch).skipped


def test_atoms_need_a_range():
    agent = make_agent("d4pg", v_min=1.0, v_max=1.0)
    assert agent.problems(agent.params) == ["agent.v_min=1.0 must be below agent.v_max=1.0"]


def test_observation_statistics_come_from_learning_only():
    agent = make_agent("ddpg", network={"normalize_observations": True})
    batch = make_batch(agent)
    agent.act(timestep(np.full((2, 5), 100, np.float32)), (), None)
    assert float(agent.model.normalization.count) == 0
    agent.learn(batch)
    seen = batch.window.observations[0]
    assert torch.allclose(agent.model.normalization.mean, seen.mean(0), atol=1e-6)
    other = make_agent("ddpg", seed=3, network={"normalize_observations": True})
    other.model.load_state_dict(agent.model.state_dict())
    observation = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal(*(each.act(timestep(observation), (), None).action for each in (agent, other)))


def test_apply_uses_the_present_gradient():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer = Optimizer([weight], make_agent("ddpg").params)
    norm, taken = optimizer.apply(torch.tensor(1.0))
    assert float(norm) == pytest.approx(5.0) and taken and weight.tolist() == pytest.approx([2.999, 3.999])


@pytest.mark.parametrize("way", ["step", "minimise"])
def test_an_update_that_leaves_out_the_vector_of_gradients_is_refused(way):
    agent = make_agent("ddpg")
    transitions = agent.transitions(make_batch(agent))
    outputs = agent.model.critic(transitions.observation, transitions.action)
    loss = agent.critic_losses(transitions, outputs, agent.bootstrap(transitions)).losses.mean()
    with pytest.raises(ValueError, match=r"vectors\.differentiate\(loss, vectors\.critic\)"):
        if way == "step":
            agent.critic_optimizer.step(loss)
        else:
            agent.critic_optimizer.minimise(7, lambda part: Loss(loss, {}))
