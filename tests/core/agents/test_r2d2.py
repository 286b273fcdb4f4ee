"""R2D2's targets, loss and priorities equal a loop in float64, and training uses the states it acted with."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.agents.r2d2 import R2D2, R2D2Params
from core.envs.recall import RecallEnv, RecallParams
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.models.r2d2 import R2D2MLP
from core.specs import ArraySpec, Discrete, EnvSpec
from core.trajectory.ring_buffer import Layout
from core.types import Batch, OARInputs, SampleIds, Window, restart

SPEC = EnvSpec("numbers", ArraySpec((3,), "float32"), 0, Discrete(3))
COLUMNS, HIDDEN = 40, 8


def make_agent(spec=SPEC, seed=0, **settings):
    params = R2D2Params(
        burn_in=3,
        unroll_length=7,
        sequence_period=3,
        n_step=2,
        gamma=0.9,
        learning_rate=0.01,
        rescaling_eps=0.01,
        eta=0.7,
    )

    def model():
        torch.manual_seed(seed)
        return R2D2MLP(R2D2MLP.Params(hidden=16, lstm=HIDDEN), spec)

    agent = R2D2(replace(params, **settings), spec, model)
    agent.init_learner()
    return agent


def spread(agent):
    """Set the online and target networks apart, so that tests show which one does what."""
    generator = torch.Generator().manual_seed(5)
    for network in (agent.target, agent.model):
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return agent


def make_batch(agent, seed=0):
    """Return sequences with terminations, truncations and lost lives, and invalid values where no action was taken."""
    draw = np.random.default_rng(seed)
    rows = agent.window.length + 1
    firsts, lasts = np.zeros((rows, COLUMNS), bool), np.zeros((rows, COLUMNS), bool)
    firsts[0], lasts[0] = np.arange(COLUMNS) % 5 == 0, np.arange(COLUMNS) % 5 == 1
    discounts = (draw.random((rows, COLUMNS)) > 0.05).astype(np.float32)
    for row in range(1, rows):
        firsts[row] = lasts[row - 1]
        lasts[row] = ~firsts[row] & (draw.random(COLUMNS) < 0.25)
        discounts[row - 1] = np.where(lasts[row], draw.random(COLUMNS) < 0.5, discounts[row - 1])
    rewards = np.where(lasts, 1e6, draw.normal(size=(rows, COLUMNS)) * 3).astype(np.float32)
    actions = draw.integers(3, size=(rows, COLUMNS))
    before = np.concatenate([draw.integers(3, size=(1, COLUMNS)), actions[:-1]])
    earned = np.concatenate([draw.normal(size=(1, COLUMNS)), rewards[:-1]])
    extras = {
        "previous_action": np.where(firsts, -1, before).astype(np.int16),
        "previous_reward": np.where(firsts, 0, earned).astype(np.float32),
    }
    window = Window(
        *map(
            torch.from_numpy,
            (draw.normal(size=(rows, COLUMNS, 3)).astype(np.float32), firsts, lasts, actions, rewards, discounts),
        ),
        {name: torch.from_numpy(array) for name, array in extras.items()},
        (
            *(torch.from_numpy(draw.normal(size=(COLUMNS, HIDDEN)).astype(np.float32)) for _ in range(2)),
            torch.zeros(COLUMNS),
        ),
    )
    weights = torch.from_numpy(draw.random(COLUMNS).astype(np.float32))
    return Batch(window, SampleIds(np.zeros(COLUMNS, np.int64), np.arange(COLUMNS)), weights)


# the loop ---------------------------------------------------------------------------------------------------------
def h(x, eps):
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def inverse(y, eps):
    return math.copysign(((math.sqrt(1 + 4 * eps * (abs(y) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1, y)


def stepped(model, window, column):
    """Return the action values of every step of one environment, computed one step at a time."""
    state, values = tuple(part[column : column + 1] for part in window.states[:2]), []
    for row in range(len(window.lasts)):
        state = restart(state, window.firsts[row, column : column + 1], model.initial_state(1))
        inputs = OARInputs(
            window.observations[row, column][None],
            window.extras["previous_action"][row, column][None],
            window.extras["previous_reward"][row, column][None],
        )
        value, state = model(inputs, state)
        values.append(value[0])
    return values


def walk(params, window, column, online, target):
    """Return (step, TD error) of every trained step with an action; `online` and `target` are numbers [steps][A]."""
    found = []
    for start in range(params.burn_in, params.burn_in + params.unroll_length):
        if window.lasts[start, column]:
            continue
        total, factor, row = 0.0, 1.0, start
        while row < start + params.n_step and not window.lasts[row, column]:
            total += factor * float(window.rewards[row, column])
            factor *= params.gamma * float(window.discounts[row, column])
            row += 1
        best = int(np.argmax((online if params.double_q else target)[row]))
        y = h(total + factor * inverse(target[row][best], params.rescaling_eps), params.rescaling_eps)
        found.append((start, y - online[start][int(window.actions[start, column])]))
    return found


def numbers(values):
    return [value.detach().double().tolist() for value in values]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"double_q": False},
        {"burn_in": 0},
        {"n_step": 1},
        {"n_step": 5, "eta": 0.0},
        {"eta": 1.0},
        {"unroll_length": 1},
        {"sequence_period": 20},
    ],
)
def test_loss_and_priorities_equal_the_loop(settings):
    agent = spread(make_agent(**settings))
    params, batch = agent.params, make_batch(agent)
    found = agent.loss(batch)
    expected, loss = [], torch.zeros(())
    for column in range(COLUMNS):
        online = stepped(agent.model, batch.window, column)
        errors = walk(
            params, batch.window, column, numbers(online), numbers(stepped(agent.target, batch.window, column))
        )
        sizes = [abs(error) for _, error in errors]
        expected.append(params.eta * max(sizes) + (1 - params.eta) * sum(sizes) / len(sizes) if sizes else 0.0)
        loss = loss + batch.weights[column] / COLUMNS * sum(error * error / 2 for _, error in errors)
    np.testing.assert_allclose(found.priorities.numpy(), expected, rtol=2e-4, atol=1e-5)
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-4)
    assert not found.priorities.requires_grad


@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_gradient_is_that_of_trained_steps_and_fixed_targets(burn_in):
    agent = spread(make_agent(burn_in=burn_in))
    batch, parameters = make_batch(agent), list(agent.model.parameters())
    gradients = torch.autograd.grad(agent.loss(batch).loss, parameters)
    with torch.no_grad():
        warm = agent.model.unroll(*warming(batch.window, burn_in))[1] if burn_in else batch.window.states[:2]
    loss = torch.zeros(())
    later = Window(
        batch.window.observations[burn_in:],
        batch.window.firsts[burn_in:],
        batch.window.lasts[burn_in:],
        *batch.window[3:6],
        {name: field[burn_in:] for name, field in batch.window.extras.items()},
        warm,
    )
    for column in range(COLUMNS):
        online = stepped(agent.model, batch.window, column)
        errors = dict(
            walk(
                agent.params,
                batch.window,
                column,
                numbers(online),
                numbers(stepped(agent.target, batch.window, column)),
            )
        )
        values = stepped(agent.model, later, column)
        for row, error in errors.items():
            taken = values[row - burn_in][batch.window.actions[row, column]]
            loss = loss + batch.weights[column] / COLUMNS * 0.5 * (taken.detach() + error - taken).square()
    for found, wanted in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4) and wanted.any()


def warming(window, rows):
    inputs = OARInputs(window.observations, window.extras["previous_action"], window.extras["previous_reward"])
    return OARInputs(*(part[:rows] for part in inputs)), window.firsts[:rows], window.states[:2]


def test_no_gradient_flows_through_burn_in_and_bootstrap_steps():
    agent = spread(make_agent())
    batch = make_batch(agent)
    window = batch.window
    nowhere = torch.zeros_like(window.firsts)
    leaves = [window.observations.requires_grad_(), *(state.requires_grad_() for state in window.states[:2])]
    agent.loss(batch._replace(window=window._replace(firsts=nowhere, lasts=nowhere))).loss.backward()
    gradient = leaves[0].grad.abs().sum((1, 2))
    assert not gradient[:3].any() and (gradient[3:10] > 0).all() and not gradient[10:].any()
    assert leaves[1].grad is None and leaves[2].grad is None


def test_a_sequence_without_actions_has_zero_priority_and_loss():
    agent = make_agent(unroll_length=1, burn_in=0)
    batch = make_batch(agent)
    lasts = batch.window.lasts.clone()
    lasts[0] = True
    output = agent.learn(batch._replace(window=batch.window._replace(lasts=lasts)))
    assert not output.priorities.any() and float(output.statistics["loss"]) == 0.0 and not output.skipped


def test_learning_lowers_the_loss_of_a_batch():
    agent = make_agent()
    batch = make_batch(agent)
    losses = [float(agent.learn(batch).statistics["loss"]) for _ in range(100)]
    assert losses[-1] < 0.3 * losses[0]


# acting -----------------------------------------------------------------------------------------------------------
class Played:
    """Play episodes of recall as an actor does, through a real writer into a real memory."""

    def __init__(self, steps=200, num_envs=4, **settings):
        env = RecallEnv(RecallParams(delay=5), "recall", num_envs)
        self.agent = spread(make_agent(env.spec, **settings))
        self.agent.target.load_state_dict(self.agent.model.state_dict())
        states = tuple(ArraySpec(tuple(tensor.shape[1:]), "float32") for tensor in self.agent.initial_state(1))
        window = self.agent.window
        layout = Layout.of(
            env.spec,
            self.agent.extras,
            capacity=num_envs * 60,
            num_actors=1,
            num_envs=num_envs,
            chunk_length=window.stride,
            with_priority=True,
            states=states,
        )
        self.memory = PrioritizedMemory(PrioritizedParams(alpha=1.0, priority_epsilon=1e-6), layout, window, 0)
        writer = self.memory.writer(0, self.agent.initial_priorities)
        exploration = self.agent.exploration(0, 1, num_envs, np.random.default_rng(0))
        exploration.epsilon = np.full(num_envs, 0.5)
        timestep = env.reset(0)
        initial = state = self.agent.initial_state(num_envs)
        self.states, self.timesteps, self.actions = [], [], []
        for _ in range(steps):
            state = restart(state, timestep.first, initial)
            output = self.agent.act(timestep, state, exploration)
            after = env.step(output.action)
            writer.append(timestep, output.action, after, output.extras, state)
            self.states.append(state)
            self.timesteps.append(timestep)
            self.actions.append(output.action)
            timestep, state = after, output.state


@pytest.mark.parametrize("settings", [{}, {"burn_in": 0}, {"sequence_period": 5, "burn_in": 1}])
def test_training_sees_the_actors_inputs_states_and_values(settings):
    played = Played(**settings)
    batch = played.memory.sample(64)
    window, burn_in = batch.window, played.agent.params.burn_in
    assert window.firsts[1:].any() and not window.firsts[0].all() and window.lasts[0].any()
    for column, (stream, serial) in enumerate(zip(*batch.keys)):
        for stored, acted in zip(window.states, played.states[serial]):
            assert torch.equal(stored[column], acted[stream].float())
        for row in range(len(window.lasts)):
            seen = played.timesteps[serial + row]
            assert (window.observations[row, column].numpy() == seen.observation[stream]).all()
            assert float(window.extras["previous_reward"][row, column]) == seen.reward[stream]
            before = -1 if seen.first[stream] else played.actions[serial + row - 1][stream]
            assert int(window.extras["previous_action"][row, column]) == before
    with torch.no_grad():
        values = played.agent._unroll(played.agent.model, window, window.firsts)  # [U + n, B, A]
    taken = values.gather(2, window.actions[burn_in:, :, None])[..., 0]
    assert torch.allclose(taken, window.extras["q_taken"][burn_in:], atol=1e-5)
    assert torch.allclose(values.amax(2), window.extras["q_max"][burn_in:], atol=1e-5)
    # the reward of an episode's end was an input as well
    assert (window.extras["previous_reward"][window.lasts] != 0).all()


def test_the_stored_reward_stays_if_the_environment_reuses_its_arrays():
    env, agent = RecallEnv(RecallParams(), "recall", 2), make_agent(RecallEnv(RecallParams(), "recall", 2).spec)
    timestep = env.reset(0)._replace(reward=np.float32([3, 4]))
    output = agent.act(timestep, agent.initial_state(2), agent.exploration(0, 1, 2, np.random.default_rng(0)))
    timestep.reward[:] = 7  # as the next step would
    assert output.extras["previous_reward"].tolist() == [3, 4]


@pytest.mark.parametrize("double", [True, False])
def test_initial_priorities_equal_the_learners_with_same_weights(double):
    played = Played(double_q=double)
    batch = played.memory.sample(64)
    initial = played.agent.initial_priorities(batch.window._replace(observations=torch.empty(0)))
    leaves = played.memory.tree.leaves[played.memory._starts.leaf_indices(*batch.keys)]
    moved = ~batch.window.lasts[0].numpy()
    np.testing.assert_allclose(leaves[moved], initial[moved] + 1e-6, rtol=1e-5)  # alpha is 1
    np.testing.assert_allclose(played.agent.learn(batch).priorities.numpy(), initial, rtol=1e-3, atol=1e-5)
    assert initial.std() > 0.01


def test_an_actors_state_restarts_with_its_episode():
    played = Played(steps=40)
    starts = [(timestep, state) for timestep, state in zip(played.timesteps, played.states) if timestep.first.any()]
    assert len(starts) > 4
    for timestep, (h_state, c_state, action) in starts:
        assert (
            not h_state[timestep.first].any()
            and not c_state[timestep.first].any()
            and (action[timestep.first] == -1).all()
        )


def test_a_window_holds_burn_in_trained_and_bootstrap_steps():
    window = R2D2(R2D2Params(), SPEC, R2D2MLP).window
    assert (window.length, window.observations, window.stride) == (124, tuple(range(125)), 40)
    assert make_agent().samples_per_window == 7


def test_the_last_of_many_actions_is_stored_whole():
    for num_actions, dtype in ((32_768, "int16"), (40_000, "int32")):
        spec = replace(SPEC, action=Discrete(num_actions))
        field = R2D2(R2D2.Params(), spec, R2D2MLP).extras["previous_action"]
        assert field.dtype == dtype and np.iinfo(field.dtype).max >= num_actions - 1
