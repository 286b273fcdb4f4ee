import os
import signal
import time

import numpy as np
import pytest
import torch

from core.ops.returns import n_step_return
from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from core.trajectory import ring_buffer
from core.trajectory.frame_compression import StorageParams
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from tests.core.tapes import (
    CODE,
    RandomPlay,
    check_coded_window,
    coded_last,
    coded_spec,
    small_layout,
    started,
    write_coded_row,
)

ATARI = EnvSpec("pong", ArraySpec((84, 84), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)
SPEC = WindowSpec(2, (0, 2))


def fresh(rows: int = 24, chunk_length: int = 4, num_envs: int = 2, seed: int = 0):
    play = RandomPlay(seed, num_envs)
    trajectories = Trajectories(small_layout(play.spec, rows=rows, chunk_length=chunk_length, num_envs=num_envs))
    return play, trajectories, ChunkWriter(trajectories, 0, SPEC)


@pytest.mark.parametrize("capacity", [100_000, 1_000_000])
@pytest.mark.parametrize(("num_actors", "num_envs"), [(1, 8), (2, 8), (2, 16), (4, 16)])
@pytest.mark.parametrize("with_priority", [False, True])
def test_a_stored_atari_step_takes_at_most_7300_bytes(capacity, num_actors, num_envs, with_priority):
    layout = Layout.of(
        ATARI,
        {},
        capacity=capacity,
        num_actors=num_actors,
        num_envs=num_envs,
        chunk_length=8,
        with_priority=with_priority,
    )
    assert 7056 <= layout.nbytes / capacity <= 7300


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("chunk_length", [1, 8])
def test_a_full_ring_always_has_capacity_readable_steps(num_envs, chunk_length):
    spec = RandomPlay(0, num_envs).spec
    layout = Layout.of(
        spec, {}, capacity=100, num_actors=1, num_envs=num_envs, chunk_length=chunk_length, with_priority=False
    )
    trajectories, play = Trajectories(layout), RandomPlay(0, num_envs)
    writer = ChunkWriter(trajectories, 0, SPEC)
    play.play(writer, 2 * layout.ring_length)
    for _ in range(2 * chunk_length):
        play.play(writer, 1)
        assert 100 <= trajectories.size() < 100 + 5 * chunk_length * num_envs + 4 * num_envs


def test_append_counts_published_agent_steps_without_last_steps():
    play, _, writer = fresh()
    published = [play.play(writer, 1) for _ in range(40)]
    expected = [
        sum(not row.last for rows in play.rows for row in rows[serial - 3 : serial + 1]) if serial % 4 == 3 else 0
        for serial in range(40)
    ]
    assert published == expected and any(row.last for row in play.rows[0])


def test_an_unfinished_chunk_is_invisible():
    play, trajectories, writer = fresh()
    play.play(writer, 7)
    assert trajectories.written().tolist() == [4]
    assert [bound.tolist() for bound in trajectories.starts(2)] == [[0], [2]]
    play.play(writer, 1)
    assert [bound.tolist() for bound in trajectories.starts(2)] == [[0], [6]]


def test_steps_near_the_writer_are_no_starts_and_not_valid():
    play, trajectories, writer = fresh(rows=24, chunk_length=4)
    play.play(writer, 24 + 12)
    low, high = trajectories.starts(2)
    assert low[0] == 36 - 24 + 8 + 3 and high[0] == 34
    # steps below may be overwritten by the open chunk and the bootstrap step after it
    under_the_writer = 36 - 24 + 4 + 1
    stream = np.zeros(1, np.int64)
    # its stack reaches back three steps
    assert not trajectories.still_valid(stream, np.array([under_the_writer + 2]))[0]
    assert trajectories.still_valid(stream, np.array([under_the_writer + 3]))[0]


def test_a_new_writer_truncates_the_open_episodes_of_a_dead_one():
    play, trajectories, writer = fresh(seed=4)
    play.end = 0.0
    play.play(writer, 10)  # two chunks published, two steps lost
    for rows in play.rows:
        del rows[8:]
    play.restart()
    play.play(ChunkWriter(trajectories, 0, SPEC), 8)
    window = trajectories.gather(np.array([0, 1]), np.array([6, 6]), SPEC)
    assert window.lasts[1].all() and window.firsts[2].all() and (window.discounts[1] == 1).all()
    for stream in range(2):  # bootstraps from step 7, the last that the dead writer published
        np.testing.assert_array_equal(window.observations[1, stream].numpy(), play.rows[stream][7].observation)
        stack = trajectories.gather(np.array([stream]), np.array([8]), SPEC).observations[0, 0].numpy()
        # zeros before, nothing of the old episode
        np.testing.assert_array_equal(stack, play.rows[stream][8].observation)
        assert not stack[:3].any()


def test_a_new_writer_keeps_the_terminal_reward_of_a_dead_one():
    play, trajectories, writer = fresh(seed=4)
    play.end = 0.0
    play.play(writer, 8)
    trajectories.arrays["discount"][0, 7] = [0.0, 1.0]  # the episode of the first environment terminates here
    for rows in play.rows:
        del rows[8:]
    play.restart()
    play.play(ChunkWriter(trajectories, 0, SPEC), 8)
    window = trajectories.gather(np.array([0, 1]), np.array([6, 6]), SPEC)
    assert window.lasts[1].tolist() == [False, True] and window.firsts[2].all()
    returns, bootstrap = n_step_return(window.rewards, window.discounts, window.lasts, 0.5)
    rewards = [row[index].reward for row in play.rows[:1] for index in (6, 7)]
    assert returns[0] == pytest.approx(rewards[0] + 0.5 * rewards[1]) and bootstrap.tolist() == [0.0, 0.5]


# snapshots --------------------------------------------------------------------------------------------------------
def test_a_snapshot_restores_every_readable_step():
    for steps in (8, 60):
        play, trajectories, writer = fresh()
        play.play(writer, steps)
        restored = Trajectories(trajectories.layout)
        restored.load_state_dict(trajectories.state_dict())
        low, high = trajectories.starts(2)
        assert [bound.tolist() for bound in restored.starts(2)] == [low.tolist(), high.tolist()]
        serials = np.arange(low[0], high[0])
        for stream in range(2):
            streams = np.full(len(serials), stream)
            for stored, read in zip(
                trajectories.gather(streams, serials, SPEC)[:6], restored.gather(streams, serials, SPEC)[:6]
            ):
                assert stored.equal(read)


def test_a_snapshot_of_a_partly_filled_ring_is_small():
    play, trajectories, writer = fresh(rows=240)
    play.play(writer, 12)
    assert trajectories.state_dict()["frame"].shape[1] == 12 + 1


# the first chunk, the last that leaves steps free, the full ring, later rounds
@pytest.mark.parametrize("steps", [4, 16, 20, 24, 60])
def test_a_snapshot_restores_bootstrap_step_and_states(steps):
    play, trajectories, writer = fresh_unrolls()
    play.play(writer, steps)
    restored = Trajectories(trajectories.layout)
    restored.load_state_dict(trajectories.state_dict())
    key = np.arange(2), np.full(2, steps - 4)
    window, expected = restored.gather(*key, UNROLL), trajectories.gather(*key, UNROLL)
    assert (
        window.observations.equal(expected.observations)
        and window.lasts.equal(expected.lasts)
        and window.observations[-1].any()
    )
    assert window.states[0].equal(expected.states[0]) and window.states[0].all()


def test_steps_missing_from_a_snapshot_are_not_valid():
    play, trajectories, writer = fresh()
    play.play(writer, 24)
    state = trajectories.state_dict()
    state["oldest"][0, 0] = 15  # the writer had gone on while the steps were copied
    restored = Trajectories(trajectories.layout)
    restored.load_state_dict(state)
    streams = np.zeros(2, np.int64)
    # the first stack reaches back three steps
    assert restored.still_valid(streams, np.array([17, 18])).tolist() == [False, True]
    assert trajectories.still_valid(streams, np.array([17, 18])).all()


# writers ----------------------------------------------------------------------------------------------------------
UNROLL = WindowSpec(4, (0, 1, 2, 3, 4), stride=4)


def fresh_unrolls(may_begin_chunk=None):
    play = RandomPlay(0, 2)
    play.with_states = True
    trajectories = Trajectories(
        small_layout(play.spec, rows=24, chunk_length=4, num_envs=2, extras=play.extras, states=play.states)
    )
    return play, trajectories, ChunkWriter(trajectories, 0, UNROLL, may_begin_chunk=may_begin_chunk)


def test_room_is_asked_for_before_a_chunk_only():
    answers = [True, False, False, True]
    asked = []

    def room():
        asked.append(True)
        return answers[len(asked) - 1]

    play, _, writer = fresh_unrolls(room)
    assert writer.has_room() and len(asked) == 1
    for _ in range(3):
        play.play(writer, 1)
        assert writer.has_room() and len(asked) == 1  # a started chunk may be finished
    play.play(writer, 1)
    assert [writer.has_room() for _ in range(3)] == [False, False, True] and len(asked) == 4


def test_a_writer_without_a_room_function_always_has_room():
    play, _, writer = fresh()
    for _ in range(9):
        assert writer.has_room()
        play.play(writer, 1)


def test_missing_states_and_fields_are_errors_and_others_ignored():
    play, trajectories, writer = fresh_unrolls()
    step = play.timestep, np.zeros(2), play.timestep
    with pytest.raises(ValueError):
        writer.append(*step, {"features": np.zeros((2, 3))}, ())
    with pytest.raises(ValueError, match="extras declares 'features', which act has not returned"):
        writer.append(*step, {}, (torch.zeros(2, 2),))
    with pytest.raises(ValueError, match=r"'features' of the shape \[2, 1\], not \[2, 3\] as Agent.extras declares"):
        writer.append(*step, {"features": np.zeros((2, 1))}, (torch.zeros(2, 2),))
    writer.append(*step, {"features": np.ones((2, 3)), "value": np.ones(2)}, (torch.zeros(2, 2),))
    assert "value" not in trajectories.arrays


def test_numbers_are_not_rounded_to_the_dtype_of_a_field():
    play = RandomPlay(0, 2)
    extras = {"count": ArraySpec((), "int64")}
    layout = small_layout(play.spec, rows=24, chunk_length=4, num_envs=2, extras=extras)
    writer = ChunkWriter(Trajectories(layout), 0, WindowSpec.transition(1))
    step = play.timestep, np.zeros(2, np.int64), play.timestep
    writer.append(*step, {"count": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"act has returned 'count' as float32, and Agent.extras declares int64"):
        writer.append(*step, {"count": np.full(2, 0.5, np.float32)})


def test_integers_beyond_the_dtype_of_a_field_are_refused():
    play = RandomPlay(0, 2)
    layout = small_layout(play.spec, rows=24, chunk_length=4, num_envs=2, extras={"count": ArraySpec((), "uint8")})
    writer = ChunkWriter(Trajectories(layout), 0, WindowSpec.transition(1))
    step = play.timestep, np.zeros(2, np.int64), play.timestep
    writer.append(*step, {"count": np.array([0, 255])})
    for number in (256, -1):
        with pytest.raises(ValueError, match=r"act has returned 'count' beyond uint8, which Agent.extras declares"):
            writer.append(*step, {"count": np.array([0, number])})


@pytest.mark.parametrize("name", ["reward", "priority", "written", "packed", "block_start", "state 0"])
def test_fields_of_an_agent_replace_no_others(name):
    """An agent's field `reward` was learnt from in place of the environment's rewards."""
    with pytest.raises(ValueError, match=f"Agent.extras declares {name}, a name that is taken"):
        small_layout(
            coded_spec((2, 3), 4),
            rows=24,
            chunk_length=4,
            num_envs=2,
            extras={name: ArraySpec((), "float32")},
            states=(ArraySpec((2,), "float32"),),
            storage=StorageParams("lz4"),
        )


def test_a_snapshot_does_not_change_when_the_ring_goes_on():
    play, trajectories, writer = fresh()
    play.play(writer, 24)
    state = trajectories.state_dict()
    frames = state["frame"].clone()
    play.play(writer, 24)
    assert state["frame"].equal(frames)


@pytest.mark.parametrize(
    ("field", "change"), [("frame", lambda t: t[..., :1]), ("reward", lambda t: t.double()), ("written", None)]
)
def test_a_snapshot_that_does_not_fit_is_refused_by_field(field, change):
    play, trajectories, writer = fresh()
    play.play(writer, 8)
    state = trajectories.state_dict()
    if change is None:
        del state[field]
    else:
        state[field] = change(state[field])
    with pytest.raises(ValueError, match=r"stored replay does not fit: field"):
        Trajectories(trajectories.layout).load_state_dict(state)


def test_a_snapshot_without_memory_for_the_copy_is_an_error(monkeypatch):
    play, trajectories, writer = fresh(rows=2_400)
    play.play(writer, 8)
    monkeypatch.setattr(ring_buffer, "available_bytes", lambda: 100)
    with pytest.raises(MemoryError):
        trajectories.state_dict()
    # A ring that is hardly filled needs little.
    monkeypatch.setattr(ring_buffer, "available_bytes", lambda: trajectories.layout.nbytes // 2)
    assert len(trajectories.state_dict()["reward"][0]) < 100


def write_without_end(trajectories: Trajectories, actor_ind: int, ready) -> None:
    writer, serial = ChunkWriter(trajectories, actor_ind, SPEC), 0
    while True:
        write_coded_row(writer, trajectories.layout, actor_ind, serial)
        serial += 1
        if serial == 2 * trajectories.layout.ring_length:
            ready.set()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_snapshot_taken_while_writing_holds_whole_steps_only():
    # 32 MB: slow enough to be overtaken
    layout = small_layout(coded_spec((32, 32), 4), rows=2000, chunk_length=4, num_envs=2)
    trajectories, restored = Trajectories(layout), Trajectories(layout)
    overtaken = 0
    with started(write_without_end, trajectories, 0):
        for _ in range(8):
            state = trajectories.state_dict()
            restored.load_state_dict(state)
            overtaken += (
                int(state["oldest"][0, 0]) > int(state["written"][0, 0]) - layout.ring_length + layout.overwrite_margin
            )
            low, high = restored.starts(SPEC.length)
            serials = np.arange(low[0], high[0])
            serials = serials[~coded_last(serials)]
            for stream in range(2):
                streams = np.full(len(serials), stream)
                check_coded_window(layout, SPEC, streams, serials, restored.gather(streams, serials, SPEC))
    assert overtaken


# killed writers (F32) ---------------------------------------------------------------------------------------------
def write_into_a_chunk_and_stop(trajectories: Trajectories, rows: int, ready) -> None:
    writer = ChunkWriter(trajectories, 0, SPEC)
    for serial in range(rows):
        write_coded_row(writer, trajectories.layout, 0, serial)
    # half a step more: one environment, one field
    writer._fields["frame"][rows % trajectories.layout.ring_length, 0] = -1
    ready.set()
    time.sleep(600)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rows", [9, 41])  # the ring's first round, and after it wrapped
def test_a_torn_chunk_of_a_killed_writer_is_never_read(rows):
    layout = small_layout(coded_spec((3,), 4), rows=24, chunk_length=4, num_envs=2, num_actors=2)
    trajectories = Trajectories(layout)
    with started(write_into_a_chunk_and_stop, trajectories, rows) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    other = ChunkWriter(trajectories, 1, SPEC)
    for serial in range(12):
        write_coded_row(other, layout, 1, serial)
    published = rows // 4 * 4
    assert trajectories.written().tolist() == [published, 12]

    def check_all() -> None:
        low, high = trajectories.starts(SPEC.length)
        for stream in range(4):
            serials = np.arange(low[stream // 2], min(high[stream // 2], published - 2 if stream < 2 else 99))
            serials = serials[~coded_last(serials)]
            streams = np.full(len(serials), stream)
            assert len(serials)
            check_coded_window(layout, SPEC, streams, serials, trajectories.gather(streams, serials, SPEC))

    check_all()
    successor = ChunkWriter(trajectories, 0, SPEC)
    newest = trajectories.slots(np.arange(2), np.full(2, published - 1))
    assert (trajectories.flat("last")[newest] == (trajectories.flat("discount")[newest] != 0)).all()
    for serial in range(published, published + 8):
        write_coded_row(successor, layout, 0, serial, generation=1)
    high = trajectories.starts(SPEC.length)[1]
    assert high[0] == published + 8 - 2
    rows_after = trajectories.gather(np.zeros(4, np.int64), np.arange(published, published + 4), SPEC)
    # none of the dead writer's
    assert (rows_after.actions[0].numpy() == 1001 * CODE + np.arange(published, published + 4)).all()
