"""Networks in bfloat16 compute products in bfloat16; their weights, gradients and outputs stay float32."""

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.agents.ddpg import DDPG
from core.learning.precision import Bfloat16Weights, in_bf16, precision_on, use_tf32
from core.models.actor_critic import MLPAC, MLPACParams
from core.models.dqn import DQNCNN, RainbowMinAtar
from core.models.iqn import IQNCNN
from core.models.policy_critic import DDPGCNN, ControlNetworkParams
from core.models.r2d2 import R2D2MLP
from core.runtime.parameter_store import ParameterStore
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec
from tests.core import resident_agents
from tests.core.agents import control_agents
from tests.core.distributed.test_two_learners import flat
from tests.core.learning import test_staged_update

PICTURES = EnvSpec("pictures", ArraySpec((84, 84), "uint8"), 4, Discrete(3), is_image=True, max_value=255.0)
MINATAR = EnvSpec("images", ArraySpec((10, 10, 4), "uint8"), 0, Discrete(3), is_image=True)
VECTORS = EnvSpec("vectors", ArraySpec((6,), "float32"), 0, Discrete(3))
UNROLLS = [name for name in test_staged_update.AGENTS if name != "dqn"]
AGENTS = [*resident_agents.AGENTS, *UNROLLS]
UNIT_ROUNDOFF = 2.0**-8  # of bfloat16, which has 8 bits


def make_agent(name, bf16=False, **settings):
    """Make an agent of the test helpers, whose networks compute in bfloat16 if `bf16` is true."""
    module = test_staged_update if name in UNROLLS else resident_agents
    kind, *others = module.AGENTS[name]
    place = 0 if name in UNROLLS else 1
    others[place] = {**others[place], **settings}
    init = kind.__init__

    def init_in_bf16(self, params, spec, make_model):
        init(self, params, spec, lambda: in_bf16(make_model()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.AGENTS, name, (kind, *others))
        if bf16:
            patch.setattr(kind, "__init__", init_in_bf16)
        return module.make_agent(name)


def make_batches(agent, name, count):
    if name in UNROLLS:
        return [test_staged_update.make_batch(agent, seed) for seed in range(count)]
    memory = resident_agents.shared_memory(agent)
    return [memory.sample(16) for _ in range(count)]


def seen_dtypes(model) -> dict[str, torch.dtype]:
    """Return a dict that collects the output dtype of each linear, convolution and LSTM layer of the model."""
    found: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d, torch.nn.LSTM)):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: found.update(
                    {name: (output[0] if isinstance(output, tuple) else output).dtype}
                )
            )
    return found


# arithmetic -----------------------------------------------------------------------------------------------------------
def test_all_layers_but_the_last_are_bfloat16():
    torch.manual_seed(0)
    model = DQNCNN(DQNCNN.Params(dueling=True), PICTURES)
    observation = torch.randint(0, 256, (4, 4, 84, 84), dtype=torch.uint8)
    exact = model(observation)[0].detach()
    found = seen_dtypes(in_bf16(model))
    values = model(observation, ())[0]
    values.square().sum().backward()
    last = {"q.value.2", "q.advantage.2"}
    assert len(found) == 7 and last < set(found)
    assert all(dtype == (torch.float32 if name in last else torch.bfloat16) for name, dtype in found.items())
    tensors = [values, *(tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad))]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    difference = float((values.detach() - exact).norm() / exact.norm())
    assert 1e-5 < difference < 0.03


def test_the_embedding_of_fractions_is_bfloat16():
    torch.manual_seed(0)
    model = in_bf16(IQNCNN(IQNCNN.Params(), PICTURES))
    found = seen_dtypes(model)
    model(torch.randint(0, 256, (4, 4, 84, 84), dtype=torch.uint8), ())
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {"q.2"}
    assert found["embedding.linear"] == torch.bfloat16


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, features):
        return self.layer(features.unflatten(1, (-1, 64))).flatten(1)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm,
        lambda size: nn.LayerNorm(size, elementwise_affine=False),
        nn.BatchNorm1d,
        lambda size: nn.BatchNorm1d(size, affine=False),
        lambda size: nn.Sequential(nn.Unflatten(1, (64, -1)), nn.InstanceNorm1d(64), nn.Flatten()),
        lambda size: nn.utils.parametrizations.spectral_norm(nn.Linear(size, size)),
        lambda size: nn.utils.parametrizations.weight_norm(nn.Linear(size, size)),
        nn.PReLU,
        Attention,
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_networks_of_others_may_have_any_layers(layer, training):
    torch.manual_seed(0)
    model = RainbowMinAtar(RainbowMinAtar.Params(noisy=False), MINATAR)
    model.torso = nn.Sequential(*model.torso, layer(model.num_features))
    model.train(training)
    low, observation = in_bf16(copy.deepcopy(model)), torch.randint(0, 2, (16, 10, 10, 4), dtype=torch.uint8)
    exact, output = model(observation, ())[0].detach(), low(observation, state=())[0]
    output.square().sum().backward()
    assert output.dtype == torch.float32 and all(each.grad is not None for each in low.torso[-1].parameters())
    assert (output.detach() - exact).norm() < 0.05 * exact.norm()


def test_deviations_of_a_policy_stay_float32():
    torch.manual_seed(0)
    action = Continuous(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    model = in_bf16(MLPAC(MLPACParams(hidden=8), replace(VECTORS, action=action)))
    with torch.no_grad():
        model.log_deviations.copy_(torch.tensor([0.1, -1 / 3]))
    logits = model(torch.randn(4, 6), ())[0].logits
    assert torch.equal(logits[:, 2:], model.log_deviations.expand(4, 2))


@pytest.mark.parametrize("lstm", [0, 8])
def test_unrolls_and_named_outputs_keep_their_types(lstm):
    model = in_bf16(MLPAC(MLPACParams(lstm=lstm, hidden=8), VECTORS))
    found = seen_dtypes(model)
    output, state = model.unroll(torch.randn(5, 2, 6), torch.zeros(5, 2, dtype=torch.bool), model.initial_state(2))
    assert type(output).__name__ == "ActorCriticOutput" and output.logits.shape == (5, 2, 3)
    assert {part.dtype for part in (*output, *state)} == {torch.float32} and len(state) == 2 * bool(lstm)
    kept = {"policy", "value", "core.lstm"} & set(found)
    assert all(dtype == (torch.float32 if name in kept else torch.bfloat16) for name, dtype in found.items())
    assert len(found) == (5 if lstm else 4)


def test_recurrent_cores_compute_in_float32_step_by_step_too():
    torch.manual_seed(0)
    model = in_bf16(R2D2MLP(R2D2MLP.Params(hidden=8, lstm=8), VECTORS))
    features, state = torch.randn(3, 12), model.initial_state(3)
    weights = [parameter.detach() for parameter in model.core.lstm.parameters()]
    with model.bf16_weights.swapped_in():
        after = model.core.step(features.bfloat16(), state)[1]
    cell = torch.nn.LSTMCell(12, 8)
    with torch.no_grad():
        for parameter, weight in zip(cell.parameters(), weights):
            parameter.copy_(weight)
    expected = cell(features.bfloat16().float(), state)
    assert all(torch.allclose(*pair, atol=1e-6) and pair[0].dtype == torch.float32 for pair in zip(after, expected))


class RoundingError(torch.autograd.Function):
    """Change each value, and each gradient, by a unit roundoff of random sign."""

    @staticmethod
    def forward(ctx, tensor):
        return perturbed(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return perturbed(gradient)


def perturbed(tensor):
    signs = torch.randint(0, 2, tensor.shape, generator=perturbed.generator) * 2 - 1
    return tensor * (1 + UNIT_ROUNDOFF * signs)


@contextmanager
def rounding_errors(agent, seed):
    """Let the layers of a float32 agent that bfloat16 would round err by a unit roundoff wherever it rounds.

    These places are inputs, weights and outputs of each layer, and their gradients.
    """
    networks = [agent.model, *([agent.target] if hasattr(agent, "target") else [])]
    modules = [module for network in networks for module in network.modules()]
    kept = [part for module in modules if getattr(module, "keeps_float32", False) for part in module.modules()]
    rounded = {id(weight) for module in modules if module not in kept for weight in module.parameters(recurse=False)}
    perturbed.generator = torch.Generator().manual_seed(seed)
    error = RoundingError.apply

    def with_errors(function):
        def erring(input, *others, **named):
            if not any(id(each) in rounded for each in (*others, *named.values())):
                return function(input, *others, **named)
            others = [error(each) if isinstance(each, torch.Tensor) else each for each in others]
            named = {key: error(each) if isinstance(each, torch.Tensor) else each for key, each in named.items()}
            return error(function(error(input), *others, **named))

        return erring

    with pytest.MonkeyPatch.context() as patch:
        for name in ("linear", "layer_norm"):
            patch.setattr(F, name, with_errors(getattr(F, name)))
        yield


@pytest.mark.parametrize("name", AGENTS)
def test_an_update_differs_from_float32_by_less_than_rounding_errors(name):
    """Compare the change of all weights with float32 updates in which every rounded number errs by a unit roundoff.

    Rounding to nearest errs by less than that, so the difference of bfloat16 is the smaller one. The optimiser's
    epsilon makes its step nearly proportional to the gradient: others amplify errors of gradients close to zero. A
    small error may switch a ReLU on or off, which only some of the erring updates do.
    """

    def updated(bf16=False, seed=None):
        agent = make_agent(name, bf16, optimizer_eps=1.0)
        batch = make_batches(agent, name, 1)[0]
        torch.manual_seed(1)
        with nullcontext() if seed is None else rounding_errors(agent, seed):
            output = agent.learn(batch)
        assert output.priorities is None or output.priorities.dtype == torch.float32
        assert {each.dtype for each in output.statistics.values() if each.is_floating_point()} == {torch.float32}
        weights = agent.model.state_dict().values()
        assert {weight.dtype for weight in weights} == {torch.float32}
        return torch.cat([weight.flatten() for weight in weights])

    exact = updated()
    difference = float((updated(bf16=True) - exact).norm())
    assert difference > 0
    assert any(float((updated(seed=seed) - exact).norm()) > difference for seed in range(20))


# copies of weights ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", AGENTS)
def test_copies_follow_the_weights_through_updates_and_resumes(name):
    """An agent that goes on from a checkpoint has new copies, so equal results prove that no copy was out of date."""
    agent = make_agent(name, bf16=True)
    batches = make_batches(agent, name, 6)
    for batch in batches[:3]:
        agent.learn(batch)
    other = make_agent(name, bf16=True)
    other.load_state_dict(copy.deepcopy(agent.state_dict()))
    state = torch.random.get_rng_state()
    for batch in batches[3:]:
        agent.learn(batch)
    torch.random.set_rng_state(state)
    for batch in batches[3:]:
        other.learn(batch)
        # Drop the copies, as if this had been the last update before another checkpoint.
        for network in networks_of(other):
            network.bf16_weights._versions = []
    first, second = flat(agent.state_dict()), flat(other.state_dict())
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def networks_of(agent):
    models = [agent.model, *([agent.target] if hasattr(agent, "target") else [])]
    return [network for model in models for network in model.networks()]


@pytest.mark.parametrize("name", ["dqn", "dqn, rmsprop", "rainbow", "r2d2", "impala", "impact"])
def test_weights_are_copied_once_an_update(name, monkeypatch):
    agent = make_agent(name, bf16=True)
    batches, copied, made = make_batches(agent, name, 4), [], Bfloat16Weights._copies_of

    def counted(self, weights):
        before = self._copies
        result = made(self, weights)
        copied.append((self, result is not before))
        return result

    monkeypatch.setattr(Bfloat16Weights, "_copies_of", counted)
    agent.learn(batches[0])
    for batch in batches[1:]:
        copied.clear()
        agent.learn(batch)
        assert [fresh for weights, fresh in copied if weights is agent.model.bf16_weights].count(True) == 1


def test_published_weights_reach_the_copies():
    torch.manual_seed(0)
    learned, acting = (MLPAC(MLPACParams(hidden=8), VECTORS) for _ in range(2))
    in_bf16(acting)
    store, observation = ParameterStore(ParameterStore.size_of(learned)), torch.randn(4, 6)
    with torch.inference_mode():
        acting(observation, ())
        store.publish(learned)
        store.pull(acting, 0)
        found = acting(observation, ())[0].logits
        assert torch.equal(found, in_bf16(learned)(observation, ())[0].logits)


@pytest.mark.parametrize("name", AGENTS)
def test_checkpoints_are_those_of_float32(name):
    plain, low = make_agent(name), make_agent(name, bf16=True)
    batches = make_batches(plain, name, 2)
    for batch in batches:
        low.learn(batch)
    state = flat(low.state_dict())
    plain.load_state_dict(copy.deepcopy(low.state_dict()))
    after = flat(plain.state_dict())
    assert after.keys() == state.keys() and all(torch.equal(after[key], state[key]) for key in state)
    assert {tensor.dtype for tensor in low.model.state_dict().values()} == {torch.float32}
    plain.learn(batches[0])


def test_networks_of_images_for_control_compute_in_bfloat16():
    action = Continuous(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
    spec = EnvSpec("pictures", ArraySpec((44, 44), "uint8"), 4, action, is_image=True, max_value=255.0)
    torch.manual_seed(0)
    agent = DDPG(DDPG.Params(batch_size=4), spec, lambda: in_bf16(DDPGCNN(ControlNetworkParams(hidden=(16,)), spec)))
    found = seen_dtypes(agent.model)
    agent.init_learner()
    window = control_agents.make_batch(control_agents.make_agent("ddpg", action=action), 4).window
    images = torch.randint(0, 256, (2, 4, 4, 44, 44), dtype=torch.uint8)
    batch = control_agents.make_batch(control_agents.make_agent("ddpg", action=action), 4)
    agent.learn(batch._replace(window=window._replace(observations=images)))
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {"policy.1.2", "critic.0.layers.2"}
    assert {parameter.dtype for parameter in agent.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["ddpg", "d4pg", "td3", "sac"])
def test_control_targets_compute_in_bfloat16_with_their_own_weights(kind):
    agent = control_agents.make_agent(kind, learner=False)
    in_bf16(agent.model)
    agent.init_learner()
    found = seen_dtypes(agent.target)
    agent.learn(control_agents.make_batch(agent))
    assert torch.bfloat16 in found.values()
    observation, action = torch.randn(4, 5), torch.rand(4, 3)
    with torch.no_grad():
        for parameter in agent.target.parameters():
            parameter.zero_()
        assert not agent.target.critic(observation, action).any() and agent.model.critic(observation, action).any()
        assert not agent.target.policy(observation).any() and agent.model.policy(observation).any()


# choice ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("capabilities", "size"),
    [
        *((each, (84, 84)) for each in ({}, {"avx512_bf16": False}, {"avx512_bf16": True}, {"amx_bf16": True})),
        *(({"amx_bf16": True}, size) for size in ((42, 42), (41, 84), (10, 10, 4), None)),
    ],
)
def test_auto_is_bfloat16_for_images_on_cpus_that_compute_it(capabilities, size, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    frame = ArraySpec(size or (6,), "uint8")
    spec = EnvSpec("any", frame, 4, Discrete(3), is_image=size is not None, max_value=255.0)
    fast = any(capabilities.values()) and size in ((84, 84), (42, 42))
    assert precision_on("cpu", "auto", spec) == ("bf16" if fast else "float32")
    for device in ("cuda", "cuda:1"):
        assert precision_on(device, "auto", spec) == "tf32"
    for named in ("float32", "tf32", "bf16"):
        assert precision_on("cpu", named, spec) == precision_on("cuda", named, spec) == named


def test_tf32_is_set_for_the_whole_process():
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for enabled in (True, False):
            use_tf32(enabled)
            assert [flag.allow_tf32 for flag in flags] == [enabled, enabled]
    finally:
        flags[0].allow_tf32, flags[1].allow_tf32 = before
