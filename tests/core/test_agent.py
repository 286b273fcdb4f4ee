"""The agent contract derives what an agent does not say."""

import pytest

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
