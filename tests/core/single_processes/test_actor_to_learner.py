"""A learner gets what an actor played: fields and recurrent state of an unroll belong to the same steps."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.agents.impala import Impala
from core.env import Env, EnvParams, reset_timestep
from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.models.actor_critic import MLPAC, MLPACParams
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings
from core.runtime.options import ActorParams, LoggerParams
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RateLimiterParams, RunCounters, RunState
from core.single_processes.actor import actor
from core.specs import ArraySpec, Discrete, EnvSpec
from core.trajectory.ring_buffer import Layout
from core.types import TimeStep

LENGTH, ENVS, UNITS, BATCH = 5, 4, 6, 8
SPEC = EnvSpec("diary", ArraySpec((3,), "float32"), 0, Discrete(4))


class Diary(Env):
    """Keep what was returned and taken at each step; an observation names its environment, step and random number."""

    entries: dict  # environment -> list of its steps, shared by all instances of a test

    def __init__(self, params, game, num_envs, **ignored):
        self.spec, self._num_envs, self._first = SPEC, num_envs, 0

    def set_activity_marker(self, cell, first=0):
        self._first = first

    def reset(self, seed):
        self._random = np.random.default_rng(seed)
        self._timestep = reset_timestep(self._observe(0))
        self._write()
        return self._timestep

    def step(self, action):
        before, size = self._timestep, self._num_envs
        ended, terminated, life_lost = self._random.random((3, size)) < [[0.2], [0.5], [0.1]]
        last = ended & ~before.last
        discount = np.where((last & terminated) | (life_lost & ~before.last), 0, 1).astype(np.float32)
        reward = np.where(before.last, 0, self._random.normal(size=size)).astype(np.float32)
        for env, entry in enumerate(self._newest()):
            entry |= {"action": action[env], "reward": reward[env], "discount": discount[env]}
        observation = self._observe(int(before.observation[0, 1]) + 1)
        self._timestep = TimeStep(observation, reward, discount, before.last, last, reward)
        self._write()
        return self._timestep

    def _observe(self, step):
        columns = np.arange(self._num_envs) + self._first, np.full(self._num_envs, step)
        return np.stack([*columns, self._random.normal(size=self._num_envs)], 1).astype(np.float32)

    def _write(self):
        for env in range(self._num_envs):
            seen = {name: getattr(self._timestep, name)[env].copy() for name in ("observation", "first", "last")}
            self.entries.setdefault(self._first + env, []).append(seen)

    def _newest(self):
        return [self.entries[self._first + env][-1] for env in range(self._num_envs)]


def make_agent(spec, device="cpu", precision="float32"):
    make_model = partial(MLPAC, MLPACParams(lstm=UNITS, hidden=8), spec)
    agent = Impala(Impala.Params(unroll_length=LENGTH, batch_size=BATCH), spec, make_model)
    torch.nn.init.normal_(agent.model.policy.weight)  # it begins at almost zero, which would hide wrong states
    return agent


def make_context(learner, num_splits):
    params = MixedParams(
        json.dumps(
            [
                {"type": "queue", "capacity": ENVS, "sample_ratio": 0.5},
                {"type": "reservoir", "capacity": 3 * ENVS, "sample_ratio": 0.5},
            ]
        )
    )
    states = (ArraySpec((UNITS,), "float32"),) * 2
    sizes = {"capacity": 20 * LENGTH * ENVS, "num_actors": 1, "num_envs": ENVS, "chunk_length": LENGTH}
    layout = Layout.of(SPEC, learner.extras, **sizes, with_priority=False, states=states)
    options = SimpleNamespace(
        memory_class=MixedMemory,
        engine="inline",
        steps=None,
        device="cpu",
        num_actors=1,
        num_learners=1,
        num_envs_per_actor=ENVS,
        seed=1,
        game="diary",
        env=EnvParams(),
        env_class=Diary,
        actor=ActorParams(num_env_splits=num_splits),
        logger=LoggerParams(),
        profile=False,
        profile_trace=0,
        rate_limiter=RateLimiterParams(samples_per_insert=None, min_replay_size=1),
        log_folder=None,
        make_agent=make_agent,
    )
    memory = MixedMemory(params, layout, learner.window, 0)
    parameters = ParameterStore(ParameterStore.size_of(learner.model))
    parameters.publish(learner.model)
    shared = RunCounters(1, 1), RunState(1), LogRings(1)
    return Context(options, SPEC, (("actor", 0),), {0: memory}, parameters, *shared)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_unrolls_hold_what_was_played_and_its_policy(monkeypatch, num_splits):
    """A learner with the actor's parameters computes the stored logits and values again, from the stored states."""
    monkeypatch.setattr(Diary, "entries", {}, raising=False)
    learner = make_agent(SPEC)
    context = make_context(learner, num_splits)
    memory, running = context.memories[0], actor(context, 0)
    fresh, ends = [], {"terminated": 0, "truncated": 0, "at a border": 0, "replayed": 0}
    for _ in range(40 * LENGTH):
        next(running)
        if (batch := memory.sample(BATCH)) is None:
            continue
        window = batch.window
        with torch.inference_mode():
            output, _ = learner.unroll(window)
        for column in range(BATCH):
            env, start = (int(number) for number in window.observations[0, column, :2])
            if batch.fresh[column]:
                fresh.append((start, env))
            for t in range(LENGTH + 1):
                entry = Diary.entries[env][start + t]
                names = {"observation": window.observations, "first": window.firsts, "last": window.lasts}
                names |= {"action": window.actions, "reward": window.rewards, "discount": window.discounts}
                for name, field in [*names.items()][: 3 if t == LENGTH else 6]:
                    np.testing.assert_array_equal(field[t, column].numpy(), entry[name], name)
                if t < LENGTH:
                    stored = [window.extras[name][t, column] for name in ("logits", "value")]
                    computed = [output.logits[t, column], output.value[t, column]]
                    torch.testing.assert_close(computed, stored, rtol=1e-5, atol=1e-5)
                    ends["terminated" if entry["discount"] == 0 else "truncated"] += int(window.lasts[t + 1, column])
            ends["at a border"] += int(window.lasts[0, column]) + int(window.lasts[LENGTH, column])
            ends["replayed"] += int(not batch.fresh[column])
    running.close()
    assert all(count > 20 for count in ends.values()), ends
    assert sorted(fresh) == [
        (start, env) for start in range(0, LENGTH * len(fresh) // ENVS, LENGTH) for env in range(ENVS)
    ]
