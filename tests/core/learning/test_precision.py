"""Networks in bfloat16 compute products in bfloat16; their inputs, outputs and weights stay float32."""

import pytest
import torch

from core.device.torch_runtime import use_tf32
from core.learning.precision import in_bf16, precision_on
from core.models.actor_critic import MLPAC, MLPACParams
from core.models.dqn import DQNCNN, DQNCNNParams
from core.specs import ArraySpec, Discrete, EnvSpec
from tests.core.agents import control_agents

PICTURES = EnvSpec("pictures", ArraySpec((84, 84), "uint8"), 4, Discrete(3), is_image=True, max_value=255.0)
VECTORS = EnvSpec("vectors", ArraySpec((6,), "float32"), 0, Discrete(3))


def seen_dtypes(model) -> set[torch.dtype]:
    """Return a set that collects the output dtypes of the model's linear and convolution layers."""
    found: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            module.register_forward_hook(lambda module, inputs, output: found.add(output.dtype))
    return found


def test_only_products_are_bfloat16():
    torch.manual_seed(0)
    model = DQNCNN(DQNCNNParams(), PICTURES)
    observation = torch.randint(0, 256, (4, 4, 84, 84), dtype=torch.uint8)
    exact = model(observation)[0].detach()
    found = seen_dtypes(in_bf16(model))
    values = model(observation, ())[0]
    values.square().sum().backward()
    assert found == {torch.bfloat16} and values.dtype == torch.float32
    assert {tensor.dtype for parameter in model.parameters() for tensor in (parameter, parameter.grad)} == {
        torch.float32
    }
    difference = float((values.detach() - exact).norm() / exact.norm())
    assert 1e-5 < difference < 0.03


@pytest.mark.parametrize("lstm", [0, 8])
def test_unrolls_and_named_outputs_keep_their_types(lstm):
    model = in_bf16(MLPAC(MLPACParams(lstm=lstm, hidden=8), VECTORS))
    found = seen_dtypes(model)
    output, state = model.unroll(torch.randn(5, 2, 6), torch.zeros(5, 2, dtype=torch.bool), model.initial_state(2))
    assert (
        type(output).__name__ == "ActorCriticOutput" and output.logits.shape == (5, 2, 3) and found == {torch.bfloat16}
    )
    assert {part.dtype for part in (*output, *state)} == {torch.float32} and len(state) == 2 * bool(lstm)


@pytest.mark.parametrize("kind", ["ddpg", "d4pg", "td3", "sac"])
def test_control_updates_compute_in_bfloat16_with_own_targets(kind):
    agent = control_agents.make_agent(kind, learner=False)
    found = seen_dtypes(in_bf16(agent.model))
    agent.init_learner()
    agent.learn(control_agents.make_batch(agent))
    assert found == {torch.bfloat16}
    observation, action = torch.randn(4, 5), torch.rand(4, 3)
    with torch.no_grad():
        for parameter in agent.target.parameters():
            parameter.zero_()
        assert not agent.target.critic(observation, action).any() and agent.model.critic(observation, action).any()
        assert not agent.target.policy(observation).any() and agent.model.policy(observation).any()


@pytest.mark.parametrize(
    ("device", "wanted", "found"),
    [
        ("cuda", "auto", "tf32"),
        ("cuda:1", "auto", "tf32"),
        ("cpu", "auto", "float32"),
        ("cuda", "float32", "float32"),
        ("cpu", "bf16", "bf16"),
    ],
)
def test_auto_precision_is_tf32_on_a_gpu(device, wanted, found):
    assert precision_on(device, wanted) == found


def test_tf32_is_set_for_the_whole_process():
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for enabled in (True, False):
            use_tf32(enabled)
            assert [flag.allow_tf32 for flag in flags] == [enabled, enabled]
    finally:
        flags[0].allow_tf32, flags[1].allow_tf32 = before
