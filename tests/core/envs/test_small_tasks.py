"""Catch and recall show and reward what they should, and their scores are known for skilled and random play."""

import numpy as np
import pytest

from core.acting.validated_env import random_actions
from core.envs.catch import CatchEnv, CatchParams
from core.envs.recall import RecallEnv, RecallParams
from core.envs.tictactoe import TicTacToeEnv, TicTacToeParams


def scores(env, policy, steps, seed=0):
    """Return the raw returns of the episodes that end within `steps`."""
    timestep, returns, running = env.reset(seed), [], np.zeros(len(env.reset(seed).first))
    for _ in range(steps):
        timestep = env.step(policy(timestep))
        running += timestep.raw_reward
        returns += running[timestep.last].tolist()
        running[timestep.last] = 0
    return np.array(returns)


def follow_the_ball(timestep):
    ball, paddle = np.moveaxis(timestep.observation, -1, 0)
    return np.sign(ball.any(1).argmax(1) - paddle.any(1).argmax(1)).astype(np.int64) + 1


def test_following_the_ball_catches_every_ball():
    returns = scores(CatchEnv(CatchParams(), "catch", 4), follow_the_ball, 200)
    assert len(returns) == 4 * 20 and (returns == 1).all()  # an episode has nine steps and the restart


def test_random_play_of_catch_scores_about_minus_six_tenths():
    random = np.random.default_rng(0)
    returns = scores(CatchEnv(CatchParams(), "catch", 50), lambda timestep: random.integers(3, size=50), 1000)
    assert -0.7 < returns.mean() < -0.5 and set(returns) == {-1.0, 1.0}


def test_the_ball_falls_one_row_per_step_to_the_bottom():
    env = CatchEnv(CatchParams(rows=4, columns=3), "Catch", 1)
    steps = [env.reset(0), *(env.step(np.array([1])) for _ in range(4))]
    rows = [int(step.observation[0, ..., 0].any(1).argmax()) for step in steps]
    assert rows == [0, 1, 2, 3, 0]
    assert [bool(step.first[0]) for step in steps] == [True, False, False, False, True]
    assert [bool(step.last[0]) for step in steps] == [False, False, False, True, False]
    assert [float(step.discount[0]) for step in steps] == [1, 1, 1, 0, 1] and steps[4].reward[0] == 0
    assert all(step.observation.sum() == 2 for step in steps) and steps[0].observation[0, -1, 1, 1] == 1


def test_catch_is_rendered_and_other_modes_are_refused():
    env = CatchEnv(CatchParams(), "catch", 1, render_mode="rgb_array")
    env.reset(0)
    picture = env.render()
    assert picture.shape == (320, 160, 3) and picture.dtype == np.uint8 and picture.any((0, 1)).all()
    for refused in (
        lambda: CatchEnv(CatchParams(), "catch", 1, render_mode="human"),
        lambda: CatchEnv(CatchParams(), "pong", 1),
        lambda: RecallEnv(RecallParams(), "recall", 1, render_mode="rgb_array"),
    ):
        with pytest.raises(ValueError):
            refused()


def test_recall_shows_the_cue_first_and_the_question_last():
    env = RecallEnv(RecallParams(cues=3, delay=2), "recall", 2)
    steps = [env.reset(1), *(env.step(np.array([0, 0])) for _ in range(4))]
    for env_ind in range(2):
        seen = np.array([step.observation[env_ind] for step in steps])
        assert seen[0, :3].sum() == 1 and not seen[1:4, :3].any() and seen[4, :3].sum() == 1  # step 3 ended the episode
        assert seen[:, 3].tolist() == [0, 0, 1, 0, 0]
    assert [step.last.all() for step in steps] == [False, False, False, True, False]
    cues = steps[0].observation[:, :3].argmax(1)
    assert steps[3].reward.tolist() == np.where(cues == 0, 1, -1).tolist() and (steps[3].discount == 0).all()
    assert not any(step.reward.any() for step in (*steps[:3], steps[4]))


def test_recall_rewards_memory_only():
    class Remember:
        cue = np.zeros(20, np.int64)

        def __call__(self, timestep):
            shown = timestep.observation[:, :3]
            self.cue = np.where(timestep.first, shown.argmax(1), self.cue)
            return self.cue

    random = np.random.default_rng(0)
    env = RecallEnv(RecallParams(), "recall", 20)
    assert (scores(env, Remember(), 300) == 1).all()
    assert abs(scores(env, lambda timestep: random.integers(3, size=20), 3000).mean() - (2 / 3 - 1)) < 0.05


def test_tic_tac_toe_is_played_by_its_rules():
    """Follow each game by the observations alone: one more cell for each side, and rewards for lines."""
    env, draw = TicTacToeEnv(TicTacToeParams(), "tictactoe", 50), np.random.default_rng(1)
    lines = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {0, 3, 6}, {1, 4, 7}, {2, 5, 8}, {0, 4, 8}, {2, 4, 6}]
    before, ends = env.reset(1), {1.0: 0, -1.0: 0, 0.0: 0}
    for _ in range(40):
        action = random_actions(env.spec.action, 50, draw, before.action_mask)
        after = env.step(action)
        for e in range(50):
            own, their = (set(np.flatnonzero(cells)) for cells in np.split(after.observation[e], 2))
            assert not own & their and set(np.flatnonzero(after.action_mask[e])) == set(range(9)) - own - their
            assert after.first[e] == before.last[e]
            if after.first[e]:
                assert not own and len(their) <= 1 and after.reward[e] == 0 and not after.last[e]
                continue
            old, old_their = (set(np.flatnonzero(cells)) for cells in np.split(before.observation[e], 2))
            won, lost = (any(line <= cells for line in lines) for cells in (own, their))
            full = len(own | their) == 9
            assert own == old | {action[e]} and action[e] not in old | old_their and old_their <= their
            assert len(their) == len(old_their) + (not won and len(own | old_their) < 9)
            assert after.reward[e] == won - lost and not (won and lost)
            assert after.last[e] == (won or lost or full) == (after.discount[e] == 0)
            if after.last[e]:
                ends[float(after.reward[e])] += 1
        before = after
    assert min(ends.values()) > 5 and sum(ends.values()) > 300
    begun = [len(np.flatnonzero(env.reset(seed).observation)) for seed in range(20)]
    assert 0.3 < np.mean(begun) / 50 < 0.7  # the opponent begins half of the games
    env.reset(1)
    with pytest.raises(ValueError, match=r"action \d of environment \d+ is illegal: that cell is taken"):
        env.step(env.step(np.full(50, 4)).action_mask.argmin(1))
    with pytest.raises(ValueError, match="draws no pictures"):
        TicTacToeEnv(TicTacToeParams(), "tictactoe", 1, render_mode="human")


def test_a_seed_is_repeatable_and_environments_differ():
    for env in (CatchEnv(CatchParams(), "catch", 8), RecallEnv(RecallParams(), "recall", 8)):
        play = [
            [env.reset(seed).observation, *(env.step(np.ones(8, np.int64)).observation for _ in range(30))]
            for seed in (3, 3, 4)
        ]
        assert np.array_equal(play[0], play[1]) and not np.array_equal(play[0], play[2])
        starts = np.array(play[0])
        assert any(not np.array_equal(starts[:, 0], starts[:, env_ind]) for env_ind in range(1, 8))
