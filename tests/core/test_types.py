import numpy as np
import pytest
import torch

from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import TimeStep
from tests.core.tapes import RandomPlay, assert_unroll_equals_twin, observed, small_layout, unroll_spec
from tests.selection import slow_except


def assert_equals_twin(trajectories: Trajectories, plays: list[RandomPlay], spec: WindowSpec) -> int:
    """Compare the window of every valid start with the reference, and return their number."""
    low, high = trajectories.starts(spec.length)
    num_envs, count = trajectories.layout.num_envs, 0
    for actor, play in enumerate(plays):
        starts = [
            (stream, serial)
            for stream in range(num_envs)
            for serial in range(low[actor], high[actor])
            if not play.rows[stream][serial].last
        ]
        if not starts:
            continue
        streams, serials = np.array(starts).T
        window = trajectories.gather(streams + actor * num_envs, serials, spec)
        assert trajectories.still_valid(streams + actor * num_envs, serials).all()
        for column, (stream, serial) in enumerate(starts):
            rows = play.rows[stream]
            expected = rows[serial : serial + spec.length + 1]
            assert window.firsts[:, column].tolist() == [row.first for row in expected]
            assert window.lasts[:, column].tolist() == [row.last for row in expected]
            assert window.actions[:, column].tolist() == [row.action for row in expected]
            assert window.rewards[:, column].tolist() == [row.reward for row in expected]
            assert window.discounts[:, column].tolist() == [row.discount for row in expected]
            for place, observation in enumerate(observed(rows, serial, spec)):
                np.testing.assert_array_equal(window.observations[place, column].numpy(), observation)
        count += len(starts)
    return count


@pytest.mark.parametrize("frame_stack", [0, 1, 4])
@pytest.mark.parametrize(
    ("length", "observations", "crosses"), [(1, (0, 1), False), (3, (0, 3), False), (5, (0, 2, 5), True)]
)
@pytest.mark.parametrize("chunk_length", [1, 4])
def test_every_window_equals_the_reference_through_wrap_around(
    frame_stack, length, observations, crosses, chunk_length
):
    spec = WindowSpec(length, observations, stride=int(crosses))
    plays = [RandomPlay(seed, 2, frame_stack=frame_stack) for seed in (1, 2)]
    layout = small_layout(plays[0].spec, rows=24, chunk_length=chunk_length, num_envs=2, num_actors=2)
    trajectories = Trajectories(layout)
    writers = [ChunkWriter(trajectories, actor, spec) for actor in range(2)]
    checked = 0
    for part in range(20):
        plays[0].play(writers[0], 3)
        plays[1].play(writers[1], 1 + part % 6)
        checked += assert_equals_twin(trajectories, plays, spec)
    assert int(trajectories.written().min()) > 2 * layout.ring_length and checked > 300


def test_the_last_steps_of_an_episode_are_starts():
    play = RandomPlay(0, 1, end=0.0)
    trajectories = Trajectories(small_layout(play.spec, rows=64, chunk_length=1, num_envs=1))
    writer = ChunkWriter(trajectories, 0, WindowSpec(3, (0, 3)))
    play.play(writer, 5)
    play.end = 1.0
    play.play(writer, 1)  # step 5 acts and ends the episode: step 6 is its last one
    play.end = 0.0
    play.play(writer, 8)
    assert play.rows[0][6].last and play.rows[0][7].first
    low, high = trajectories.starts(3)
    assert low[0] == 0 and high[0] == 14 - 3
    window = trajectories.gather(np.zeros(3, np.int64), np.array([3, 4, 5]), WindowSpec(3, (0, 3)))
    for column in range(3):
        np.testing.assert_array_equal(window.observations[1, column].numpy(), play.rows[0][6].observation)
        assert window.lasts[:, column].int().argmax() == 3 - column


def test_windows_without_observations_carry_everything_else():
    play = RandomPlay(6, 2)
    trajectories = Trajectories(small_layout(play.spec, rows=32, chunk_length=2, num_envs=2))
    play.play(ChunkWriter(trajectories, 0, WindowSpec(2, (0,))), 10)
    window = trajectories.gather(np.array([0, 1]), np.array([3, 4]), WindowSpec(2, ()))
    assert window.observations.shape[0] == 0 and window.actions.shape == (3, 2)
    assert window.actions[0].tolist() == [play.rows[0][3].action, play.rows[1][4].action]


@pytest.mark.parametrize("observations", [(0, 4), (-1, 3)])
def test_observations_outside_a_window_are_refused(observations):
    with pytest.raises(ValueError, match="must be 0 to 3"):
        WindowSpec(3, observations)


def test_rebuilt_stacks_equal_the_actors_on_a_real_atari_game():
    vector_env = pytest.importorskip("ale_py.vector_env")
    num_envs, steps = 2, 400
    env = vector_env.AtariVectorEnv(
        "breakout",
        num_envs,
        num_threads=1,
        reward_clipping=False,
        episodic_life=False,
        max_num_frames_per_episode=160,
        use_fire_reset=True,
    )
    spec = EnvSpec("breakout", ArraySpec((84, 84), "uint8"), 4, Discrete(4))
    layout = small_layout(spec, rows=128, chunk_length=8, num_envs=num_envs)
    trajectories, window = Trajectories(layout), WindowSpec(3, (0, 3))
    writer = ChunkWriter(trajectories, 0, window)
    generator, ones = np.random.default_rng(0), np.ones(num_envs, np.float32)
    observation, _ = env.reset(seed=np.arange(num_envs) + 7)
    seen: list[np.ndarray] = []
    lasts: list[np.ndarray] = []
    before = TimeStep(observation, 0 * ones, ones, ones > 0, ones < 0, 0 * ones)
    checked = 0
    for step in range(steps):
        action = generator.integers(4, size=num_envs)
        observation, reward, terminated, truncated, _ = env.step(action)
        after = TimeStep(
            observation,
            reward.astype(np.float32),
            1.0 - terminated.astype(np.float32),
            before.last,
            terminated | truncated,
            reward.astype(np.float32),
        )
        seen.append(before.observation.copy())
        lasts.append(before.last)
        writer.append(before, action, after, {})
        before = after
        if step % 16 == 15:
            low, high = trajectories.starts(window.length)
            serials = np.arange(low[0], high[0])
            for stream in range(num_envs):
                starts = np.array([serial for serial in serials if not lasts[serial][stream]], np.int64)
                stacks = trajectories.gather(np.full(len(starts), stream), starts, window).observations.numpy()
                for column, serial in enumerate(starts):
                    end = next((row for row in range(serial, serial + 3) if lasts[row][stream]), serial + 3)
                    assert (stacks[0, column] == seen[serial][stream]).all() and (
                        stacks[1, column] == seen[end][stream]
                    ).all()
                    checked += 1
    env.close()
    assert sum(flags.sum() for flags in lasts) >= 8 and checked > 1000
    assert int(trajectories.written()[0]) > 3 * layout.ring_length


# unrolls ----------------------------------------------------------------------------------------------------------
def assert_unrolls_equal_twin(trajectories: Trajectories, plays: list[RandomPlay], length: int) -> int:
    """Compare every readable chunk, bootstrap step included, with the reference, and return their number."""
    layout, written, count = trajectories.layout, trajectories.written(), 0
    low = -(-trajectories.starts(0)[0] // length) * length
    for actor, play in enumerate(plays):
        keys = [
            (stream, serial)
            for stream in range(layout.num_envs)
            for serial in range(low[actor], written[actor], length)
        ]
        if not keys:
            continue
        streams, serials = np.array(keys).T
        assert trajectories.still_valid(streams + actor * layout.num_envs, serials).all()
        window = trajectories.gather(streams + actor * layout.num_envs, serials, unroll_spec(length))
        for column, (stream, serial) in enumerate(keys):
            assert_unroll_equals_twin(window, column, play, stream, serial)
        count += len(keys)
    return count


@pytest.mark.parametrize("frame_stack", [0, 1, 4])
@pytest.mark.parametrize("length", slow_except([3], [1, 3, 8]))
def test_every_published_unroll_equals_the_reference(frame_stack, length):
    plays = [RandomPlay(seed, 2, frame_stack=frame_stack) for seed in (1, 2)]
    layout = small_layout(
        plays[0].spec,
        rows=max(24, 5 * length),
        chunk_length=length,
        num_envs=2,
        num_actors=2,
        extras=RandomPlay.extras,
        states=RandomPlay.states,
    )
    trajectories = Trajectories(layout)
    writers = [ChunkWriter(trajectories, actor, unroll_spec(length)) for actor in range(2)]
    checked = 0
    for part in range(25 * length):
        for actor, play in enumerate(plays):
            play.with_states = True
            play.play(writers[actor], 1 + (part + actor) % 3)
        checked += assert_unrolls_equal_twin(trajectories, plays, length)
    assert int(trajectories.written().min()) > 2 * layout.ring_length and checked > 50
    ends = [
        play.seen(stream, serial)[2]
        for play in plays
        for stream in range(2)
        for serial in range(0, len(play.rows[0]), length)
    ]
    assert any(ends) and any(
        row.first and serial % length == 0 for serial, row in enumerate(plays[0].rows[0]) if serial
    )


def test_the_bootstrap_step_stays_when_the_next_chunk_begins():
    play = RandomPlay(0, 2, end=0.5)
    trajectories = Trajectories(small_layout(play.spec, rows=24, chunk_length=4, num_envs=2))
    writer, keys = ChunkWriter(trajectories, 0, unroll_spec(4)), (np.arange(2), np.zeros(2, np.int64))
    play.play(writer, 4)
    before = trajectories.gather(*keys, unroll_spec(4))
    play.play(writer, 1)
    after = trajectories.gather(*keys, unroll_spec(4))
    for name in ("observations", "firsts", "lasts"):
        assert getattr(before, name).equal(getattr(after, name))


def test_an_unroll_of_a_replaced_writer_ends_with_its_last_step():
    play = RandomPlay(0, 2, end=0.0)
    trajectories = Trajectories(small_layout(play.spec, rows=24, chunk_length=4, num_envs=2))
    play.play(ChunkWriter(trajectories, 0, unroll_spec(4)), 6)  # one chunk published, two steps lost
    successor, keys = ChunkWriter(trajectories, 0, unroll_spec(4)), (np.arange(2), np.zeros(2, np.int64))
    for _ in range(2):
        window = trajectories.gather(*keys, unroll_spec(4))
        assert window.lasts.tolist() == [[False] * 2] * 3 + [[True] * 2] + [[False] * 2]
        play.restart()
        play.play(successor, 1)
    assert window.firsts[4].all()


def test_a_window_moves_to_a_device_whole():
    play = RandomPlay(0, 2)
    play.with_states = True
    trajectories = Trajectories(
        small_layout(play.spec, rows=24, chunk_length=4, num_envs=2, extras=play.extras, states=play.states)
    )
    play.play(ChunkWriter(trajectories, 0, unroll_spec(4)), 4)
    window = trajectories.gather(np.arange(2), np.zeros(2, np.int64), unroll_spec(4))
    moved = window.to(torch.device("meta"))
    assert {tensor.device.type for tensor in (*moved[:6], *moved.extras.values(), *moved.states)} == {"meta"}
    assert moved.extras.keys() == window.extras.keys() and len(moved.states) == 1
    for tensor, original in zip(
        (*moved[:6], *moved.extras.values(), *moved.states), (*window[:6], *window.extras.values(), *window.states)
    ):
        assert tensor.shape == original.shape and tensor.dtype == original.dtype
    same = window.to(torch.device("cpu"))
    assert same.observations.equal(window.observations) and same.states[0].equal(window.states[0])


def test_windows_are_tensors_of_the_stored_dtypes():
    play = RandomPlay(8, 2)
    trajectories = Trajectories(small_layout(play.spec, rows=32, chunk_length=2, num_envs=2))
    play.play(ChunkWriter(trajectories, 0, WindowSpec(2, (0,))), 10)
    window = trajectories.gather(np.array([0, 1, 1]), np.array([3, 4, 5]), WindowSpec(2, (0, 2)))
    assert window.observations.dtype == torch.uint8 and window.observations.shape == (2, 3, 4, 2, 3)
    assert window.firsts.dtype == window.lasts.dtype == torch.bool and window.firsts.shape == (3, 3)
    assert window.rewards.dtype == window.discounts.dtype == torch.float32 and window.actions.dtype == torch.int64
