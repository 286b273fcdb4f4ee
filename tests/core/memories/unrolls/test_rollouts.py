"""Rollouts are one chunk of every environment, and actors wait for what was learnt from the one before."""

import pytest

from core.memories.unrolls.rollouts import RolloutMemory
from core.memory import MemoryParams, batch_of, batch_state
from core.specs import WindowSpec
from core.types import slice_batch
from tests.core.tapes import CodedActor, check_coded_unrolls, coded_spec, unroll_memory
from utils.config.command_line import read_options

ENVS = 4  # two actors of two
LENGTH = 4


def make():
    memory = unroll_memory(RolloutMemory, MemoryParams(), coded_spec((2,), 4), batch_size=ENVS, num_actors=2)
    return memory, [CodedActor(memory, actor) for actor in range(2)]


def play(actor: CodedActor) -> int:
    """Let an actor play until it must wait; return its number of steps."""
    steps = 0
    while actor.step():
        steps += 1
    return steps


def rollout(number: int) -> list[tuple[int, int]]:
    return [(env, number * LENGTH) for env in range(ENVS)]


def test_an_actor_fills_one_chunk_and_waits_for_its_release():
    memory, (first, second) = make()
    for number in range(30):  # the rings hold a few
        assert play(second) == LENGTH and memory.sample(ENVS) is None
        assert play(first) == LENGTH and play(second) == 0
        batch = memory.sample(ENVS)
        assert check_coded_unrolls(memory.layout, batch.window) == rollout(number)
        assert batch.on_policy and batch.fresh.all()
        assert play(first) == play(second) == 0 and memory.sample(ENVS) is None  # drawn, but not learnt from
        memory.release_actors()


def test_the_successor_of_an_actor_adds_no_second_chunk():
    memory, (first, second) = make()
    play(first)
    assert not memory.writer(0).has_room()
    for _ in range(2):
        second.step()
    assert memory.writer(1).has_room()  # its predecessor had published nothing


def test_a_restored_memory_goes_on_where_the_first_was():
    memory, actors = make()
    for actor in actors:
        play(actor)
    memory.sample(ENVS)
    restored, _ = make()
    restored.load_state_dict(memory.state_dict())
    again = [restored.writer(actor) for actor in range(2)]
    assert restored.sample(ENVS) is None and not any(writer.has_room() for writer in again)
    restored.release_actors()
    assert all(writer.has_room() for writer in again)


def test_a_batch_stays_on_policy_in_parts_and_in_checkpoints():
    memory, actors = make()
    for actor in actors:
        play(actor)
    batch = memory.sample(ENVS)
    assert batch_of(batch_state(batch)).on_policy and slice_batch(batch, slice(0, 2)).on_policy


def test_windows_that_are_no_whole_chunks_are_refused():
    memory, _ = make()
    with pytest.raises(ValueError, match="unrolls are whole chunks"):
        RolloutMemory(MemoryParams(), memory.layout, WindowSpec(3, (0, 3), stride=3), 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--agent.batch_size", "6"), "agent.batch_size=6 must be 4, the number of a learner's environments"),
        (("--actor.num_env_splits", "2"), "actor.num_env_splits=2 must be 1 with"),
        (("--learner.publish_period", "2"), "learner.publish_period=2 must be 1 with"),
        (("--rate_limiter.min_replay_size", "9"), "rate_limiter.min_replay_size=9 must be 1 with"),
        (("--num_learners", "2", "--num_actors", "3"), "num_actors=3 must be a multiple of num_learners=2"),
        (("--engine", "ray"), "needs engine=local or inline"),
    ],
)
def test_settings_under_which_rollouts_would_be_stale_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        read_options(["--config", "ppo-cartpole", *words])
    assert message in capsys.readouterr().err


def test_a_batch_follows_the_number_of_environments():
    options = read_options(["--config", "ppo-cartpole", "--num_envs_per_actor", "6", "--num_actors", "2"])
    agent = options.make_agent(coded_spec((2,), 4))
    assert options.agent.batch_size == 0 and options.batch_size == agent.params.batch_size == 12
