"""Two learners on the inline engine: they learn what one learner would from both batches, stay alike, stop and save together."""

import copy
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch

from core.agent import Agent
from core.agents.sac import SAC
from core.checkpoint import run_checkpoint
from core.engines.inline import InlineEngine
from core.learning.updates import EagerUpdates
from core.memories.unrolls.unroll_memory import concatenate_windows
from core.runtime.context import Context
from core.single_processes import learner as learner_module
from core.types import Batch, SampleIds
from tests.reliability.test_inline import CARTPOLE, RUNS, differences, saved, train
from utils.config.command_line import read_options
from utils.factory import EnginesDict, ProcessesDict
from utils.launch import create_context

TWO = ("--num_learners", "2", "--num_actors", "2", "--learner.compare_period", "1")
QUIET = {"rainbow": ("--model.noisy", "false", "--agent.eps", "1.5e-4"),  # one learner's noise is not another's; rounding stays small
         "td3": ("--agent.smoothing_scale", "0", "--agent.eps", "1.5e-4"), "sac": ("--agent.eps", "1.5e-4")}
ON_DEVICE = "on the learner's device"
COMPARABLE = [name for name in RUNS if name != ON_DEVICE]  # which has a test of its own


class Learnt(NamedTuple):
    agent: Agent
    initial: dict
    batches: list[Batch]


@pytest.fixture
def learnt(monkeypatch):
    """Of each learner of the run."""
    found = []

    class Recording(EagerUpdates):
        def __init__(self, agent, shrink):
            super().__init__(agent, shrink)
            found.append(Learnt(agent, copy.deepcopy(agent.state_dict()), []))
            self.batches = found[-1].batches

        def __call__(self, batch):
            self.batches.append(batch)
            return super().__call__(batch)

    monkeypatch.setattr(learner_module, "EagerUpdates", Recording)
    return found


def samples(params, window) -> int:
    """Rows that are learnt from, one by one: those of an unroll after the burn-in, or the first; none where an episode had ended."""
    begin = getattr(params, "burn_in", 0)
    rows = range(begin, begin + getattr(params, "unroll_length", 1))
    return sum(not window.lasts[row, column] for row in rows for column in range(window.lasts.shape[1]))


def joined(first: Batch, second: Batch) -> Batch:
    fresh = None if first.fresh is None else torch.cat([first.fresh, second.fresh])
    keys = SampleIds(*(np.concatenate(pair) for pair in zip(first.keys, second.keys)))
    return Batch(concatenate_windows([first.window, second.window]), keys, torch.cat([first.weights, second.weights]), fresh)


@pytest.mark.parametrize("name", COMPARABLE)
def test_two_learners_learn_what_one_does_from_both_their_batches(tmp_path, learnt, monkeypatch, name):
    monkeypatch.setattr(torch, "randn_like", lambda means: (3 * means.detach()).sin())  # SAC draws for every loss: of a row always the same
    follow = ("--agent.target_update", "2") if hasattr(read_options(RUNS[name]).agent, "target_update") else ()
    context = train(tmp_path, *RUNS[name], *TWO, *QUIET.get(name, ()), *follow, "--steps", "300")
    first, second = learnt
    assert len(first.batches) == len(second.batches) == context.counters.updates >= 3
    assert context.counters.sampled == sum(samples(first.agent.params, batch.window) for batch in (*first.batches, *second.batches))
    if context.options.memory_type == "queue":  # every step once
        assert 0.5 * context.counters.inserted < context.counters.sampled <= context.counters.inserted
    assert not differences(first.initial, second.initial) and not differences(first.agent.state_dict(), second.agent.state_dict())
    twin = context.make_agent()
    twin.load_state_dict(first.initial)
    for pair in zip(first.batches, second.batches):
        twin.learn(joined(*pair))
    assert distance(first.agent, twin.state_dict()) < 1e-6 < distance(first.agent, first.initial) / 100


def test_two_learners_with_rows_on_their_devices_learn_what_one_does_from_both_their_batches(tmp_path, monkeypatch):
    class Noted(learner_module.GraphedUpdate):
        def __init__(self, agent, batches, **settings):
            super().__init__(agent, batches, **settings)
            learnt.append(Learnt(agent, copy.deepcopy(agent.state_dict()), []))
            batches, learn = learnt[-1].batches, agent.learn
            agent.learn = lambda batch: (batches.append(batch), learn(batch))[1]

    learnt: list[Learnt] = []
    monkeypatch.setattr(learner_module, "GraphedUpdate", Noted)
    context = train(tmp_path, *RUNS[ON_DEVICE], *TWO, "--agent.target_update", "2", "--agent.eps", "1.5e-4", "--steps", "300")
    first, second = learnt
    assert len(first.batches) == len(second.batches) == context.counters.updates >= 4
    assert not differences(first.initial, second.initial) and not differences(first.agent.state_dict(), second.agent.state_dict())
    assert not torch.equal(first.batches[0].window.rewards, second.batches[0].window.rewards)
    twin = context.make_agent()
    twin.load_state_dict(first.initial)
    for pair in zip(first.batches, second.batches):
        twin.learn(joined(*pair))
    assert distance(first.agent, twin.state_dict()) < 1e-6 < distance(first.agent, first.initial) / 100


def test_every_learner_has_actors_and_rows_of_its_own(tmp_path, learnt):
    context = train(tmp_path, *CARTPOLE, "--num_learners", "2", "--num_actors", "3", "--steps", "300")
    assert [memory.layout.num_actors for memory in context.memories] == [2, 1]
    memory, other = context.memories
    assert [context.memory_of(actor) for actor in range(3)] == [(memory, 0), (other, 0), (memory, 1)]
    assert all(memory.trajectories.written().all() for memory in context.memories)
    deficit = (context.counters.inserted - 100) * 8 - context.counters.sampled
    assert 0 <= deficit < 2 * 16  # the ratio is that of all learners together, and exact
    first, second = (each.batches[0].window for each in learnt)
    assert first.observations.shape == second.observations.shape and not torch.equal(first.observations, second.observations)


def test_an_actor_that_comes_when_the_learners_are_behind_still_gives_its_own_learner_the_first_rows(tmp_path, monkeypatch):
    def late(self, key):
        if key != ("actor", 1):
            return advance(self, key)
        rounds.append(self._context.rate_limiter.can_insert())
        assert len(rounds) < 1_000, "they wait for each other"
        return len(rounds) > 100 and advance(self, key)

    advance, rounds = InlineEngine._advance, []
    monkeypatch.setattr(InlineEngine, "_advance", late)
    context = train(tmp_path, *CARTPOLE, *TWO, "--clock.tolerance", "100", "--steps", "400")
    assert rounds[0] and not rounds[99]  # the other actor had to wait for it
    assert all(memory.trajectories.written().all() for memory in context.memories) and context.counters.updates > 20


def test_what_two_learners_do_is_the_same_for_a_seed(tmp_path):
    noisy = (*RUNS["rainbow"], *TWO, "--steps", "150")
    first, second = (saved(train(tmp_path / name, *noisy)) for name in ("a", "b"))
    assert not differences(first, second)
    assert not torch.equal(first["learner"]["torch_rng"], first["learner_1"]["torch_rng"])  # the noise of each is its own


def test_a_resumed_run_of_two_learners_equals_the_run_that_was_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.run_registry.fcntl.flock", lambda descriptor, operation: None)  # as if the first had ended
    exact = (*RUNS["prioritized"], *TWO, "--learner.checkpoint_replay", "true", "--timestamp", "one")
    straight = saved(train(tmp_path / "straight", *exact, "--learner.checkpoint_steps", "150", "--steps", "250"))
    train(tmp_path / "halves", *exact, "--steps", "150")
    resumed = saved(train(tmp_path / "halves", "--engine", "inline", "--resume", "test_one", "--steps", "250"))
    for name in ("agent", "clock", "learner", "learner_1", "memory", "memory_1"):
        assert not differences(straight[name] | {"version": 0}, resumed[name] | {"version": 0}), name


def test_with_its_replay_a_run_goes_on_with_as_many_learners_and_without_it_with_any(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("utils.run_registry.fcntl.flock", lambda descriptor, operation: None)
    train(tmp_path, *CARTPOLE, *TWO, "--learner.checkpoint_replay", "true", "--timestamp", "one", "--steps", "120")
    train(tmp_path, *CARTPOLE, *TWO, "--timestamp", "two", "--steps", "120")
    alone = ("--engine", "inline", "--num_learners", "1", "--steps", "260")
    with pytest.raises(SystemExit) as refused:
        train(tmp_path, "--resume", "test_one", *alone)
    assert refused.value.code == 2 and "num_learners=1 cannot continue run test_one, which has num_learners=2" in capsys.readouterr().err
    before = run_checkpoint.load(tmp_path / "models/test_two_checkpoints")[0]["clock"]["updates"]
    context = train(tmp_path, "--resume", "test_two", *alone)
    assert before[0] == before[1] > 0 and context.counters.updates > before[0]


def launch(root, *arguments) -> tuple[int, Context]:
    options = read_options(["--root", str(root), *arguments])
    context, agent = create_context(options)
    return agent.launch(EnginesDict["inline"](context, ProcessesDict), 1, options.num_actors, options.num_learners), context


def test_learners_that_are_not_alike_end_the_run_by_name_and_save_nothing(tmp_path, monkeypatch, capsys):
    def drifting(self, batch):
        output = self._agent.learn(batch)
        drift[self] = drift.get(self, len(drift)) + 1
        if drift[self] == 3:  # the one that learns last has a smaller count
            next(self._agent.model.parameters()).data.view(-1)[0] += 1e-3
        return output

    drift: dict = {}
    monkeypatch.setattr(EagerUpdates, "__call__", drifting)
    exit_code, context = launch(tmp_path, *CARTPOLE, *TWO, "--steps", "300")
    assert exit_code == 4 and context.counters.updates == 2
    assert "after 2 updates the learners are not alike any more: fingerprint" in capsys.readouterr().err
    assert not context.options.checkpoint_folder.exists()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_learner_that_fails_ends_the_run_and_the_other_one_saves(tmp_path, monkeypatch, learnt, broken):
    recorded = learner_module.EagerUpdates.__call__

    def failing(self, batch):
        if len(self.batches) == 5 and self.batches is learnt[broken].batches:
            raise ValueError("broken")
        return recorded(self, batch)

    monkeypatch.setattr(learner_module.EagerUpdates, "__call__", failing)
    exit_code, context = launch(tmp_path, *CARTPOLE, *TWO, "--steps", "300")
    assert exit_code == 4 and context.counters.updates == 5
    assert "learn" not in [thread.name for thread in threading.enumerate()]
    assert not differences(saved(context)["agent"], learnt[1 - broken].agent.state_dict())


@pytest.mark.parametrize("broken", [0, 1])
def test_what_is_saved_is_of_whole_updates_when_a_learner_fails_within_one(tmp_path, monkeypatch, broken):
    def failing(self, step, wanted):
        agents.setdefault(id(self), self)
        if list(agents).index(id(self)) == broken and self._updates.made == 5:
            raise ValueError("broken between the critic's step and the policy's")
        return improve(self, step, wanted)

    agents, improve = {}, SAC.improve
    monkeypatch.setattr(SAC, "improve", failing)
    exit_code, context = launch(tmp_path, *RUNS["sac"], *TWO, "--steps", "300")
    state = saved(context)
    made = {state["agent"][name]["updates"] for name in ("policy_optimizer", "critic_optimizer", "temperature_optimizer")}
    assert exit_code == 4 and made == {state["agent"]["updates"]} == {max(state["clock"]["updates"])} == {5}


def distance(agent: Agent, state: dict) -> float:
    """Of the weights."""
    return max(float((state["model"][key] - value).abs().max()) for key, value in agent.model.state_dict().items())
