"""Unrolls that were prefetched when a run ended are learnt from after a resume."""

import gc
import shlex
import time

import numpy as np

from core.single_processes import learner as learner_module
from core.single_processes.actor import actor
from core.single_processes.learner import learner
from utils.config.command_line import read_options
from utils.launch import create_context

WORDS = shlex.split(
    "--config impala-cartpole --machine test --timestamp one --num_actors 1 --num_envs_per_actor 4 "
    "--agent.unroll_length 5 --agent.batch_size 6 --memory.capacity 60 --learner.prefetch 3 "
    "--learner.checkpoint_replay true --learner.threads 1 --actor.niceness 0 "
    "--rate_limiter.min_replay_size 1"
)


def test_prefetched_unrolls_survive_a_resume(tmp_path, monkeypatch):
    learnt, prefetchers = [], []

    class Noted(learner_module.Prefetcher):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            prefetchers.append(self)

    learn_as_before = learner_module.EagerUpdates.__call__
    monkeypatch.setattr(learner_module, "Prefetcher", Noted)
    monkeypatch.setattr(
        learner_module.EagerUpdates,
        "__call__",
        lambda self, batch: (learnt.extend(zip(*map(np.ndarray.tolist, batch.keys))), learn_as_before(self, batch))[1],
    )

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
    until(lambda: len(prefetchers[0].ready_batches()) == 3, playing)
    context.run_state.stop()
    assert not any(learning)  # it saves and ends
    chunks, before = int(context.memories[0].trajectories.written()[0]) // 5, len(learnt)
    playing.close()
    del context, learning, playing
    gc.collect()  # releases the lock of the run's folder

    context, learning = life("--resume", "test_one", "--root", str(tmp_path))
    published = [(env, chunk * 5) for chunk in range(chunks) for env in range(4)]
    until(lambda: len(learnt) > len(published) - 6, learning)
    learning.close()
    assert learnt == published[: len(learnt)] and len(learnt) - before >= 3 * 6
