"""Two learners on the inline engine: they learn what one learner would from both batches, stay alike, stop and save together."""

import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch

from core.agent import Agent
from core.memories.unrolls import concatenated
from core.memory import Batch, Keys
from core.single_processes import learner as learner_module
from core.single_processes.learner import Pieces
from tests.core.engines.test_inline import CARTPOLE, RUNS, differences, saved, train
from utils.factory import EnginesDict, ProcessesDict
from utils.command_line import read_options
from utils.run import prepare
from utils import checkpoint

TWO = ("--num_learners", "2", "--num_actors", "2", "--learner.compare_period", "1")
QUIET = {"rainbow": ("--model.noisy", "false", "--agent.epsilon_start", "0.5")}  # one network's noise is not another's


class Learnt(NamedTuple):
    agent: Agent
    initial: dict
    batches: list[Batch]


@pytest.fixture
def learnt(monkeypatch):
    """Of each learner of the run."""
    found = []

    class Recording(Pieces):
        def __init__(self, agent, shrink):
            super().__init__(agent, shrink)
            found.append(Learnt(agent, copy.deepcopy(agent.state_dict()), []))
            self.batches = found[-1].batches

        def __call__(self, batch):
            self.batches.append(batch)
            return super().__call__(batch)

    monkeypatch.setattr(learner_module, "Pieces", Recording)
    return found


def joined(first: Batch, second: Batch) -> Batch:
    fresh = None if first.fresh is None else torch.cat([first.fresh, second.fresh])
    keys = Keys(*(np.concatenate(pair) for pair in zip(first.keys, second.keys)))
    return Batch(concatenated([first.window, second.window]), keys, torch.cat([first.weights, second.weights]), fresh)


@pytest.mark.parametrize("name", RUNS)
def test_two_learners_learn_what_one_does_from_both_their_batches(tmp_path, learnt, name):
    context = train(tmp_path, *RUNS[name], *TWO, *QUIET.get(name, ()), "--steps", "300")
    first, second = learnt
    assert len(first.batches) == len(second.batches) == context.clock.updates >= 3
    assert context.clock.sampled == 2 * context.clock.updates * context.options.agent.batch_size * first.agent.samples_per_window
    assert not differences(first.initial, second.initial) and not differences(first.agent.state_dict(), second.agent.state_dict())
    twin = context.make_agent()
    twin.load_state_dict(first.initial)
    for pair in zip(first.batches, second.batches):
        twin.learn(joined(*pair))
    print(name, len(first.batches), distance(first.agent, twin.state_dict()), distance(first.agent, first.initial))
    assert distance(first.agent, twin.state_dict()) < 1e-6 < distance(first.agent, first.initial) / 100


def distance(agent: Agent, state: dict) -> float:
    """Of the weights."""
    return max(float((state["model"][key] - value).abs().max()) for key, value in agent.model.state_dict().items())
