from itertools import pairwise

import numpy as np
import pytest

from core.envs.atari import PROTOCOLS, AtariEnv, AtariParams

MACHADO = {"protocol": "machado"}
PLAIN = {"noop_max": 0, "repeat_action_probability": 0.0}


def play(env, num_steps, seed=0):
    """Return the reset and `num_steps` random steps."""
    random = np.random.default_rng(seed)
    steps = [env.reset(seed)]
    for _ in range(num_steps):
        steps.append(env.step(random.integers(0, env.spec.action.num_actions, len(steps[0].reward))))
    return steps


@pytest.fixture(scope="module")
def breakout():
    """Return 600 random steps; a game of breakout has five lives and ends about every 180 steps."""
    env = AtariEnv(AtariParams(**PLAIN), "breakout", 3, num_threads=2)
    yield play(env, 600)
    env.close()


def test_the_stack_holds_the_newest_frames_padded_with_zeros(breakout):
    for env_ind in range(3):
        rows = []  # the newest frames of the running episode
        for step in breakout:
            if step.first[env_ind]:
                rows = [np.zeros((84, 84), np.uint8)] * 3
            rows = [*rows, step.observation[env_ind, -1]]
            np.testing.assert_array_equal(step.observation[env_ind], np.stack(rows[-4:]))
    assert sum(step.first.sum() for step in breakout) > 6, "the property must have met restarts"


def test_the_newest_frame_is_never_empty(breakout):
    assert all(step.observation[:, -1].any(axis=(1, 2)).all() for step in breakout)


def test_the_step_after_an_end_is_first_and_has_no_reward(breakout):
    assert breakout[0].first.all() and not breakout[0].last.any()
    for before, after in pairwise(breakout):
        np.testing.assert_array_equal(before.last, after.first)
        assert not after.raw_reward[after.first].any() and (after.discount[after.first] == 1).all()


def test_the_action_of_the_step_after_an_end_is_ignored():
    games = [AtariEnv(AtariParams(**PLAIN), "breakout", 1) for _ in range(2)]
    left, right = [play(game, 0) for game in games]
    while not left[-1].last[0]:  # serving without ever moving loses all lives
        left.append(games[0].step(np.array([1])))
        right.append(games[1].step(np.array([1])))
    assert right[-1].last[0]
    restarts = games[0].step(np.array([0])), games[1].step(np.array([2]))
    follow = games[0].step(np.array([0])), games[1].step(np.array([0]))
    for a, b in (restarts, follow):
        np.testing.assert_array_equal(a.observation, b.observation)


def test_a_lost_life_has_discount_zero_and_does_not_end_the_game(breakout):
    lost = [step.discount[env_ind] == 0 and not step.last[env_ind] for step in breakout for env_ind in range(3)]
    ended = [step.last[env_ind] for step in breakout for env_ind in range(3)]
    # With five lives each game loses four before the one that ends it.
    assert sum(ended) >= 6
    assert 4 * sum(ended) <= sum(lost) <= 4 * (sum(ended) + 3)


def test_a_lost_life_counts_neither_in_evaluation_nor_by_machado():
    cases = (AtariParams(**PLAIN), False), (AtariParams(protocol="machado"), True)
    for params, training in (*cases, (AtariParams(**PLAIN, life_loss=False), True)):
        steps = play(AtariEnv(params, "breakout", 2, training=training), 350)
        assert sum(step.last.sum() for step in steps) > 0
        assert all((step.discount == 1.0 - step.last).all() for step in steps)


@pytest.mark.parametrize(("frameskip", "ends"), [(4, [10, 21, 32]), (2, [20, 41])])
def test_an_episode_is_truncated_at_max_frames_with_discount_one(frameskip, ends):
    env = AtariEnv(AtariParams(**PLAIN, max_frames=40, frameskip=frameskip), "pong", 2, num_threads=2)
    steps = play(env, ends[-1] + 3)
    assert env.spec.frames_per_step == frameskip
    assert [t for t, step in enumerate(steps) if step.last.all()] == ends  # a step restarts after each
    assert all(steps[t].discount.all() for t in ends)
    assert [t for t, step in enumerate(steps) if step.first.all()] == [0, *(t + 1 for t in ends)]
    start = steps[ends[0] + 1].observation
    assert not start[:, :3].any() and start[:, 3].any()


def test_a_truncated_episode_ends_with_its_true_last_frame():
    short, long = (AtariEnv(AtariParams(**PLAIN, max_frames=frames), "pong", 1) for frames in (120, 108_000))
    cut, uncut = play(short, 30), play(long, 30)
    assert cut[30].last[0] and not uncut[30].last[0]
    np.testing.assert_array_equal(cut[30].observation, uncut[30].observation)


def test_a_truncation_restarts_its_own_environment_only():
    # the games end by themselves at different times
    env = AtariEnv(AtariParams(**PLAIN, max_frames=800), "breakout", 2)
    steps = play(env, 420)
    lasts, firsts = (np.array([getattr(step, name) for step in steps]) for name in ("last", "first"))  # [T, 2]
    assert (lasts[:, 0] ^ lasts[:, 1]).any()
    assert all(max(np.diff(np.flatnonzero(first))) <= 201 for first in firsts.T)
    for before, after in pairwise(steps):
        moved_on = (before.observation[:, 1:] == after.observation[:, :3]).all((1, 2, 3))
        assert (moved_on | after.first).all()


def test_environments_and_seeds_differ_and_a_seed_is_repeatable():
    def start(seed):
        return play(AtariEnv(AtariParams(), "breakout", 2, num_threads=2), 60, seed)[-1].observation

    again, other = start(5), start(6)
    np.testing.assert_array_equal(start(5), again)
    assert (again != other).any()
    assert len({observation.tobytes() for observation in again}) == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("action", [np.array([0, 4]), np.array([-1, 0])])
def test_an_action_outside_the_space_is_an_error(action):
    env = AtariEnv(AtariParams(), "breakout", 2)
    env.reset(0)
    with pytest.raises(ValueError, match=r"action (4 of environment 1|-1 of environment 0) is outside 0 .. 3"):
        env.step(action)
    with pytest.raises(ValueError, match="integers"):
        env.step(np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"\[2\]"):
        env.step(np.array([0]))
    env.step(np.array([0, 1], np.int32))


def test_rewards_are_clipped_in_training_but_scores_are_raw():
    train, evaluate = (
        play(AtariEnv(AtariParams(**PLAIN), "space_invaders", 2, training=training), 250) for training in (True, False)
    )
    raw = np.concatenate([step.raw_reward for step in train])
    assert raw.max() >= 5  # an invader scores 5 to 30
    np.testing.assert_array_equal(np.concatenate([step.reward for step in train]), (raw > 0) * 1.0)
    np.testing.assert_array_equal(np.concatenate([step.reward for step in evaluate]), raw)
    assert train[0].reward.dtype == train[1].reward.dtype == train[1].raw_reward.dtype == np.float32


def test_protocols_provide_defaults_that_params_override():
    assert AtariParams().rules() == PROTOCOLS["classic"]
    machado = AtariParams(protocol="machado", full_action_space=False).rules()
    assert (machado.noop_max, machado.repeat_action_probability, machado.full_action_space) == (0, 0.25, False)
    assert AtariEnv(AtariParams(protocol="machado"), "pong", 1).spec.action.num_actions == 18
    assert AtariEnv(AtariParams(), "pong", 1).spec.action.num_actions == 6


def test_episodes_start_after_at_most_noop_max_frames():
    def starts(noop_max, count):
        emulator = AtariEnv(AtariParams(noop_max=noop_max, use_fire_reset=False), "breakout", 1)._emulator
        emulator.reset(seed=np.array([3]))
        again = {"reset_mask": np.array([True])}
        return {int(emulator.reset(options=again)[1]["episode_frame_number"][0]) for _ in range(count)}

    assert starts(0, 5) == {0}
    assert starts(5, 60) == {0, 1, 2, 3, 4, 5}


def test_sticky_actions_repeat_the_last_action():
    """The emulator repeats NOOP for ever with probability 1, so the chosen action makes no difference."""
    stuck = [
        AtariEnv(AtariParams(noop_max=0, repeat_action_probability=1.0, use_fire_reset=False), "pong", 1)
        for _ in range(2)
    ]
    free = AtariEnv(AtariParams(**PLAIN, use_fire_reset=False), "pong", 1)
    last = []
    for env, action in zip([*stuck, free], (0, 2, 2)):
        env.reset(0)
        for _ in range(40):
            step = env.step(np.array([action]))
        last.append(step.observation)
    np.testing.assert_array_equal(last[0], last[1])
    assert (last[1] != last[2]).any()


def test_the_spec_describes_the_steps():
    for params in (
        AtariParams(),
        AtariParams(frame_stack=0),
        AtariParams(frame_stack=1, resolution=42),
        AtariParams(resolution=(64, 48)),
        AtariParams(grayscale=False),
    ):
        env = AtariEnv(params, "PongNoFrameskip-v4", 2)
        assert (env.spec.name, env.spec.frames_per_step, env.spec.max_value, env.spec.is_image) == (
            "pong",
            4,
            255.0,
            True,
        )
        for step in play(env, 5):
            assert step.observation.shape == (2, *env.spec.observation_shape)
            assert step.observation.dtype == env.spec.frame.dtype
    assert env.spec.observation_shape == (4, 84, 84, 3)


@pytest.mark.parametrize(
    "changes", [{}, {"grayscale": False}, {"resolution": (64, 48)}, {"maxpool": False, "frameskip": 3}]
)
def test_the_rendered_game_equals_the_thread_pools(changes):
    params = AtariParams(**PLAIN, **changes, max_frames=600)
    pooled = play(AtariEnv(params, "breakout", 1), 500)
    drawn_env = AtariEnv(params, "breakout", 1, render_mode="rgb_array")
    drawn = play(drawn_env, 500)
    assert sum(step.last.sum() for step in pooled) >= 2
    for a, b in zip(pooled, drawn):
        assert a.action_mask is b.action_mask is None
        for name in a._fields[:-1]:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
            assert getattr(a, name).dtype == getattr(b, name).dtype
    picture = drawn_env.render()
    assert picture.shape == (210, 160, 3) and picture.dtype == np.uint8 and picture.any()


def test_the_rendered_game_supports_no_ops_and_sticky_actions():
    env = AtariEnv(AtariParams(protocol="machado", noop_max=30), "space_invaders", 1, render_mode="rgb_array")
    assert len({env.reset(seed).observation.tobytes() for seed in range(8)}) > 1
    assert env.spec.action.num_actions == 18
    play(env, 50)


def test_bad_options_are_refused_when_the_environment_is_made():
    with pytest.raises(ValueError, match="pong"):
        AtariEnv(AtariParams(), "pomg", 1)
    with pytest.raises(NotImplementedError):
        AtariEnv(AtariParams(), "pong", 1).render()


@pytest.mark.parametrize("rendered", [None, "rgb_array"])
def test_an_evaluation_that_never_presses_fire_ends(rendered):
    """A greedy policy may never serve the ball in breakout; five lives without a paddle take about 150 steps."""
    env = AtariEnv(AtariParams(**PLAIN), "breakout", 1, training=False, render_mode=rendered)
    env.reset(0)
    assert any(env.step(np.array([0])).last[0] for _ in range(500))


@pytest.mark.parametrize("settings", [{"training": True}, {"params": {"use_fire_reset": False}}, {"params": MACHADO}])
def test_otherwise_the_ball_waits_for_the_agent(settings):
    params = AtariParams(**{**PLAIN, **settings.get("params", {})})
    env = AtariEnv(params, "breakout", 1, training=settings.get("training", False))
    env.reset(0)
    assert not any(env.step(np.array([0])).last[0] for _ in range(500))


def test_a_step_does_not_overwrite_earlier_steps():
    env = AtariEnv(AtariParams(), "pong", 2)
    kept = env.reset(0)
    copies = [field.copy() for field in kept if field is not None]
    for _ in range(20):
        env.step(np.array([2, 3]))
    for field, copy in zip(kept, copies):
        np.testing.assert_array_equal(field, copy)


def test_fewer_lives_after_a_restart_are_no_lost_life():
    """A game may be truncated while it holds bonus lives."""
    env = AtariEnv(AtariParams(**PLAIN, max_frames=4), "breakout", 1)
    env.reset(0)
    env.lives = np.array([9])
    env._ended, env._cut, env._steps = np.array([True]), np.array([True]), np.array([1])
    restart = env.step(np.array([0]))
    assert restart.first[0] and restart.discount[0] == 1 and env.lives[0] == 5
