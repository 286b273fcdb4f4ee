"""Two learners resume exactly, get one state from one seed, and save a checkpoint together or not at all."""

import shlex
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.acting.validated_env import random_actions
from core.checkpoint import run_checkpoint
from core.common.files import folder_lock
from core.distributed.learner_group import PeerLostError
from core.runtime.context import Context
from core.runtime.run_state import RunState
from core.single_processes.learner import _Learner, learner, restore
from core.trajectory.ring_buffer import Trajectories
from tests.reliability.test_inline import differences
from utils.config.command_line import read_options
from utils.launch import create_context

WORDS = shlex.split(
    "--machine test --timestamp one --num_learners 2 --num_actors 2 --num_envs_per_actor 2 --agent.batch_size 16"
)
WORDS += ["--rate_limiter.min_replay_size", "100", "--learner.checkpoint_replay", "true", "--learner.prefetch", "0"]
WORDS += shlex.split("--learner.sync_check_period 1 --memory_type prioritized --model.hidden 16 --memory.capacity 2000")
UPDATES, STEPS = 6, 200  # of each half; of each memory


class Joined:
    """Let a learner join a group that outlives it."""

    def __init__(self, group):
        self._group = group
        group.close = lambda failed=False: None

    def join(self, index, device):
        return self._group


def train(context: Context, index: int, updates: int, group) -> None:
    """Run learner `index` until it has made `updates` updates and has tried to save."""
    context.rendezvous = Joined(group)
    made = 0
    for busy in learner(context, index):
        made += busy
        if made == updates:
            context.run_state.stop()


def train_without_room(*call) -> None:
    """Train as `train` does, but lack the memory to copy the replay for a checkpoint."""

    def fail(trajectories):
        raise MemoryError("no room for the copies")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trajectories, "state_dict", fail)
        train(*call)


def train_late(context: Context, index: int, updates: int, group) -> list[int]:
    """Train as `train` does, but restore late. Returns the version of the parameters that are published by then."""

    def restore_late(*arguments):
        restored = yield from restore(*arguments)
        time.sleep(0.5)
        versions.append(context.parameters.version)
        return restored

    versions: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.single_processes.learner.restore", restore_late)
        train(context, index, updates, group)
    return versions


def started(root, *words: str) -> Context:
    context, _ = create_context(read_options(["--root", str(root), *words]))
    return context


def fill(context: Context) -> Context:
    """Write random play to the memory of each learner."""
    for index in range(2):
        memory, number = context.memory_of(index)
        generator, env = context.seed_everything("actor", index), context.make_env(2, training=True)
        writer, before = memory.writer(number), env.reset(context.seed("actor", index))
        extras = {name: np.zeros(2, np.float32) for name in memory.layout.extras}
        while memory.size() < STEPS:
            action = random_actions(env.spec.action, 2, generator)
            after = env.step(action)
            context.counters.count_agent_steps(index, writer.append(before, action, after, extras))
            before = after
        env.close()
    return context


@pytest.fixture
def trained(learners, alone, tmp_path):
    """Return a function that trains two learners from the start or by --resume; its result is the checkpoint."""

    def run(name: str, *words: str, updates: int = UPDATES, resumed: bool = False) -> dict:
        if resumed:
            context = started(tmp_path / name, "--resume", "test_one", *words)
        else:
            context = fill(started(tmp_path / name, "--config", "dqn-cartpole", *WORDS, *words))
        learners.call(*(partial(train, context, index, updates) for index in range(2)))
        state, _ = run_checkpoint.load(context.options.checkpoint_folder)
        return {name: part for name, part in state.items() if name != "metadata"}  # which names the folder of the run

    return run


def test_two_resumed_learners_equal_uninterrupted_ones(trained):
    straight = trained("straight", updates=2 * UPDATES)
    half = trained("halves")
    assert differences(half["agent"], straight["agent"])
    resumed = trained("halves", resumed=True)
    assert max(resumed["clock"]["updates"]) == 2 * UPDATES
    assert {"memory", "memory_1", "learner", "learner_1"} <= straight.keys()
    del straight["learner"]["version"], resumed["learner"]["version"]  # a resumed run publishes once more
    assert not differences(resumed, straight)


def test_no_learner_publishes_before_all_have_restored(learners, tmp_path):
    """Actors begin with the first parameters, and would write to a memory that is still being restored."""
    context = fill(started(tmp_path, "--config", "dqn-cartpole", *WORDS))
    assert learners.call(partial(train, context, 0, 1), partial(train_late, context, 1, 1))[1] == [0]


@pytest.mark.parametrize(("index", "saves"), [(1, 1), (2, 0)])
def test_one_learner_on_another_node_saves_if_learner_0_is_lost(tmp_path, index, saves):
    def save(group):
        saved.append(group.index)
        yield from ()

    saved, run_state = [], RunState(3)
    run_state.lose_learner(0)
    options = SimpleNamespace(checkpoint_folder=tmp_path)
    context = SimpleNamespace(memories={index: None}, run_state=run_state, options=options)
    params, group = SimpleNamespace(checkpoint_replay=False), SimpleNamespace(index=index)
    for _ in _Learner.save_alone(SimpleNamespace(context=context, params=params, group=group, save=save)):
        pass
    assert len(saved) == saves


def test_no_learner_saves_alone_while_learner_0_writes(tmp_path):
    """It would remove the files that learner 0 has not finished."""
    locked = []

    def gather(values):
        with folder_lock(tmp_path) as is_mine:
            locked.append(not is_mine)
        yield False
        raise PeerLostError("learner 2 was lost")

    counters = SimpleNamespace(totals=lambda: [{"updates": 1}])
    context = SimpleNamespace(options=SimpleNamespace(checkpoint_folder=tmp_path), counters=counters)
    learner = SimpleNamespace(context=context, write_parts=lambda index: {})
    with pytest.raises(PeerLostError):
        for _ in _Learner.save(learner, SimpleNamespace(index=0, size=3, gather=gather)):
            pass
    with folder_lock(tmp_path) as is_mine:
        assert is_mine and locked == [True]


def test_a_seed_determines_the_state_of_two_learners(trained):
    first, second, other = trained("a"), trained("b"), trained("c", "--seed", "2")
    assert not differences(first, second)
    assert differences(first["agent"]["model"], other["agent"]["model"])
    assert not torch.equal(first["learner"]["torch_rng"], first["learner_1"]["torch_rng"])


def test_learner_0_saves_nothing_if_learner_1_cannot(learners, tmp_path):
    context = fill(started(tmp_path, "--config", "dqn-cartpole", *WORDS))
    folder = context.options.checkpoint_folder
    stale = {"learner_1": {"torch_rng": torch.get_rng_state()}, "memory_1": {}}  # of a save that was killed
    run_checkpoint.save_parts(folder, stale)
    learners.call(partial(train, context, 0, UPDATES), partial(train_without_room, context, 1, UPDATES))
    assert not list(folder.glob("step_*"))
    assert context.run_state.failed_writers == [context.process_ind("learner", 0)]
