"""Statistics over seeds and games equal sums written out, enumerated resamples and the library rliable."""

import itertools

import numpy as np
import pytest

from utils.plot.figures import (
    bootstrap,
    interquartile_mean,
    interval,
    mean,
    median,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
)

GAMES = [np.array([0.2, 0.9, 1.4, 0.4]), np.array([2.5, 0.1, 0.7, 3.0]), np.array([-0.3, 0.0, 0.6, 0.5])]
UNEVEN = [np.array([1.0, 3.0]), np.array([10.0]), np.array([0.0, 0.5, 4.0, 8.0])]


def test_the_interquartile_mean_averages_the_middle_half():
    assert interquartile_mean([np.array([100.0, 1, 2, 3, 4, -50, 5, 6])]) == (2 + 3 + 4 + 5) / 4
    assert interquartile_mean(UNEVEN) == (0.5 + 1 + 3 + 4 + 8) / 5  # of seven runs one is cut at each end
    assert interquartile_mean([np.array([1.0, 2.0, 9.0])]) == 4


def test_mean_and_median_are_over_games():
    assert mean(UNEVEN) == pytest.approx((2 + 10 + 3.125) / 3) and median(UNEVEN) == 3.125


def test_the_optimality_gap_ignores_scores_above_one():
    assert optimality_gap([np.array([0.5, 3.0]), np.array([-1.0, 1.0])]) == pytest.approx((0.25 + 1) / 2)


def test_a_performance_profile_is_the_share_above_each_threshold():
    profile = performance_profile([np.array([0.0, 1.0]), np.array([2.0])], np.array([-1.0, 0.0, 0.5, 1.0, 2.0]))
    assert profile.tolist() == [1, 0.75, 0.75, 0.5, 0]


def test_the_probability_of_improvement_counts_pairs_of_runs_in_each_game():
    one, other = [np.array([1.0, 5.0]), np.array([2.0])], [np.array([1.0, 3.0, 9.0]), np.array([2.0, 0.0])]
    assert probability_of_improvement([*one, *other]) == pytest.approx(((0.5 + 2) / 6 + (0.5 + 1) / 2) / 2)
    assert probability_of_improvement([*other, *one]) == pytest.approx(1 - ((0.5 + 2) / 6 + (0.5 + 1) / 2) / 2)


def test_statistics_preserve_other_axes():
    curves = np.array([[1.0, 3.0, 8.0], [0.0, 0.0, 6.0]])  # [P, runs]
    assert mean([curves]).tolist() == [4, 2] and interquartile_mean([curves]).tolist() == [4, 2]


def test_an_interval_matches_that_of_all_possible_resamples():
    runs = np.array([1.0, 2.0, 7.0, 11.0])
    every = [np.mean(drawn) for drawn in itertools.product(runs, repeat=4)]
    drawn = bootstrap([runs], mean, 20_000)
    # percentiles lie a step apart
    assert np.allclose(interval(drawn), np.percentile(every, (2.5, 97.5)), atol=0.26)
    assert drawn.mean() == pytest.approx(np.mean(every), abs=0.05) and drawn.std() == pytest.approx(
        np.std(every), rel=0.02
    )


def test_runs_are_resampled_within_their_game():
    apart = [np.zeros(3), np.full(5, 10.0)]
    assert set(bootstrap(apart, mean, 200)) == {5.0}
    assert np.std(bootstrap([np.concatenate(apart)], mean, 200)) > 1


def test_all_points_of_a_curve_are_resampled_together():
    curves = np.array([[0.0, 1.0], [0.0, 1.0]])  # a run with 1 at one point has 1 at the other
    drawn = bootstrap([curves], mean, 100)
    assert drawn.shape == (2, 100) and np.array_equal(drawn[0], drawn[1]) and set(drawn[0]) == {0.0, 0.5, 1.0}


@pytest.mark.slow
def test_statistics_equal_those_of_rliable():
    # one of its requirements fails with pandas 3
    library = pytest.importorskip("rliable.library", exc_type=(ImportError, TypeError))
    from rliable import metrics

    scores = np.stack(GAMES, 1)  # runs x games
    theirs = {
        mean: metrics.aggregate_mean,
        median: metrics.aggregate_median,
        interquartile_mean: metrics.aggregate_iqm,
        optimality_gap: metrics.aggregate_optimality_gap,
    }
    points, bounds = library.get_interval_estimates(
        {"x": scores},
        lambda drawn: np.array([their(drawn) for their in theirs.values()]),
        reps=1_000,
        random_state=np.random.RandomState(0),
    )
    assert np.allclose([ours(GAMES) for ours in theirs], points["x"], atol=1e-12)
    for ours, expected in zip(theirs, bounds["x"].T):
        low, high = interval(bootstrap(GAMES, ours, 20_000))
        assert [low, high] == pytest.approx(expected.tolist(), abs=0.12)  # a median over few runs moves in steps of 0.1
    above = np.stack([0.5 + GAMES[0], GAMES[1][::-1], GAMES[2] * 2], 1)
    chance, bounds = library.get_interval_estimates(
        {"x,y": (above, scores)}, metrics.probability_of_improvement, reps=1_000, random_state=np.random.RandomState(0)
    )
    both = [*above.T, *GAMES]
    assert probability_of_improvement(both) == pytest.approx(float(chance["x,y"]), abs=1e-12)
    low, high = interval(bootstrap(both, probability_of_improvement, 20_000))
    assert [low, high] == pytest.approx(bounds["x,y"].ravel().tolist(), abs=0.03)
    thresholds = np.linspace(-1, 4, 26)
    profiles, _ = library.create_performance_profile({"x": scores}, thresholds, reps=10)
    assert np.allclose(performance_profile(GAMES, thresholds), profiles["x"], atol=1e-12)
