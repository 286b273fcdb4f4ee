"""The agent contract derives what an agent does not say."""

from types import SimpleNamespace

import pytest
import torch

from core.agent import Agent
from core.specs import WindowSpec


@pytest.mark.parametrize(
    ("window", "samples"),
    [(WindowSpec.transition(3), 1), (WindowSpec.unroll(5), 5), (WindowSpec(8, (0, 8), stride=4), 8)],
)
def test_an_agent_learns_from_every_step_of_windows_with_a_stride_unless_it_says_otherwise(window, samples):
    own = type("Own", (Agent,), {**dict.fromkeys(Agent.__abstractmethods__), "window": window})
    assert own(None, None, None).samples_per_window == samples
    said = type("Said", (own,), {"samples_per_window": 2})
    assert said(None, None, None).samples_per_window == 2


def test_steps_learnt_from_are_those_after_the_burn_in_where_an_action_was_taken():
    own = type(
        "Own", (Agent,), {**dict.fromkeys(Agent.__abstractmethods__), "samples_per_window": 2, "burn_in_steps": 1}
    )
    lasts = torch.tensor([[1, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.bool)  # steps 1 and 2 are learnt from
    batch = SimpleNamespace(window=SimpleNamespace(lasts=lasts), weights=torch.ones(2))
    assert own(None, None, None).count_samples(batch) == 2
