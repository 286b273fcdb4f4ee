import pytest

from core.env import resolve_name
from core.envs.atari import AtariEnv, atari_games, human_random_scores
from core.envs.catch import CatchEnv


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("pong", "pong"),
        ("Pong", "pong"),
        ("PongNoFrameskip-v4", "pong"),
        ("ALE/Pong-v5", "pong"),
        ("PongDeterministic-v0", "pong"),
        ("ms_pacman", "ms_pacman"),
        ("MsPacman", "ms_pacman"),
        ("mspacman", "ms_pacman"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("surround", "surround"),
        ("SurroundNoFrameskip-v4", "surround"),
        ("UpNDown-v4", "up_n_down"),
        ("space-invaders", "space_invaders"),
    ],
)
def test_every_spelling_selects_the_game(spelling, canonical):
    assert resolve_name(spelling, atari_games()) == canonical


@pytest.mark.parametrize(
    ("misspelt", "meant"), [("pomg", "pong"), ("SpaceInvader-v4", "space_invaders"), ("breakuot", "breakout")]
)
def test_a_misspelt_game_is_refused_with_the_closest(misspelt, meant):
    with pytest.raises(ValueError, match=f"unknown game '{misspelt}'; did you mean .*{meant}"):
        resolve_name(misspelt, atari_games())


def test_an_unrecognizable_name_is_refused_with_all_games():
    with pytest.raises(ValueError, match="adventure"):
        resolve_name("qqqqqqqq", atari_games())


def test_two_player_games_are_unknown():
    with pytest.raises(ValueError, match="unknown game"):
        resolve_name("combat", atari_games())


def test_every_game_with_a_human_score_exists():
    assert len(human_random_scores()) == 57
    assert {resolve_name(name, atari_games()) for name in human_random_scores()} <= set(atari_games())


def test_human_normalized_is_zero_for_random_and_one_for_human():
    # Wang et al. 2016, table of 30 no-op starts
    assert AtariEnv.human_normalized("ALE/Pong-v5", -20.7) == pytest.approx(0.0)
    assert AtariEnv.human_normalized("pong", 14.6) == pytest.approx(1.0)
    assert AtariEnv.human_normalized("Breakout", 1.7 + 2 * 28.8) == pytest.approx(2.0)
    assert AtariEnv.human_normalized("pacman", 100.0) is None
    assert AtariEnv.human_normalized("CartPole-v1", 500.0) is None
    assert CatchEnv.human_normalized("catch", 1.0) is None
