"""Actor-critics that learn from unrolls count what they learnt from, if the model normalises observations."""

import pytest
import torch

from core.models.actor_critic import MLPAC
from tests.core.learning import test_staged_update


@pytest.mark.parametrize("name", ["impala", "impact"])
def test_observations_learnt_from_are_counted(name, monkeypatch):
    agent, settings, _ = test_staged_update.AGENTS[name]
    monkeypatch.setitem(test_staged_update.AGENTS, name, (agent, settings, {"normalize_observations": True}))
    made = test_staged_update.make_agent(name)
    assert isinstance(made.model, MLPAC) and made.model.normalization is not None
    batch = test_staged_update.make_batch(made, 0)
    assert not made.learn(batch).skipped
    seen = batch.window.observations[:-1].flatten(0, 1).flatten(1).double()
    assert float(made.model.normalization.count) == len(seen)
    assert torch.allclose(made.model.normalization.mean.double(), seen.mean(0), rtol=1e-4)
    assert torch.allclose(made.model.normalization.variance.double(), seen.var(0, correction=0), rtol=1e-3)
