"""Unrolls that the sampling thread had drawn when a run ended are learnt from when it goes on: actor and learner driven step by step."""

import gc
import time

import numpy as np

from core.single_processes import learner_setup
from core.single_processes.actor import actor
from core.single_processes.learner import learner
from utils.config.command_line import read_options
from utils.launch import create_context

WORDS = ("--config", "impala-cartpole", "--machine", "test", "--timestamp", "one", "--num_actors", "1", "--num_envs_per_actor", "4",
         "--agent.unroll_length", "5", "--agent.batch_size", "6", "--memory.capacity", "60", "--learner.prefetch", "4",
         "--learner.checkpoint_replay", "true", "--learner.threads", "1", "--actor.niceness", "0", "--clock.learn_start", "1")


def test_unrolls_that_were_drawn_and_not_learnt_from_survive_a_resume(tmp_path, monkeypatch):
    learnt, prefetchers = [], []

    class Noted(learner_setup.Prefetcher):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._depth = 3  # as if the learner had waited for batches
            prefetchers.append(self)

    learn_as_before = learner_setup.EagerUpdates.__call__
    monkeypatch.setattr(learner_setup, "Prefetcher", Noted)
    monkeypatch.setattr(learner_setup.EagerUpdates, "__call__", lambda self, batch: (
        learnt.extend(zip(*map(np.ndarray.tolist, batch.keys))), learn_as_before(self, batch))[1])

    def life(*words):
        context, _ = create_context(read_options(["--root", str(tmp_path), *words]))
        learning = learner(context, 0)
        next(learning)
        return context, learning

    def until(condition, *steps):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            for step in steps:
                next(step)

    context, learning = life(*WORDS)
    playing = actor(context, 0)
    until(lambda: len(learnt) >= 30, playing, playing, learning)
    until(lambda: len(prefetchers[0].drawn()) == 3, playing)
    context.clock.stop()
    assert not any(learning)  # it saves, and ends
    chunks, before = int(context.memories[0].trajectories.written()[0]) // 5, len(learnt)
    playing.close()
    del context, learning, playing
    gc.collect()  # the folder's lock

    context, learning = life("--resume", "test_one", "--root", str(tmp_path))
    published = [(env, chunk * 5) for chunk in range(chunks) for env in range(4)]
    until(lambda: len(learnt) > len(published) - 6, learning)
    learning.close()
    assert learnt == published[:len(learnt)] and len(learnt) - before >= 3 * 6
