"""Statistics of observations equal numpy's in float64 and tolerate one outlier."""

import numpy as np
import pytest
import torch

from core.models.layers.running_normalization import RunningNormalization


def seen(batches):
    normalization = RunningNormalization(batches[0].shape[1])
    for batch in batches:
        normalization.update(torch.from_numpy(batch.astype(np.float32)))
    return normalization


def batches_of(generator, count=50, size=64):
    """Return batches with columns near 1000, around 0, rarely 1, large, and constant."""

    def batch():
        return np.stack(
            [
                1000 + generator.normal(size=size),
                generator.normal(size=size),
                generator.random(size) < 0.1,
                1e6 * generator.normal(size=size),
                np.full(size, 3.0),
            ],
            1,
        )

    return [batch() for _ in range(count)]


def test_statistics_equal_those_of_all_observations():
    batches = batches_of(np.random.default_rng(1))
    normalization, whole = seen(batches), np.concatenate(batches)
    assert normalization.mean.tolist() == pytest.approx(whole.mean(0).tolist(), rel=1e-4, abs=1e-3 * 1e6 / 50)
    assert normalization.variance.tolist() == pytest.approx(whole.var(0).tolist(), rel=1e-2, abs=1e-6)
    assert float(normalization.count) == len(whole)


@pytest.mark.parametrize("at", [0, 25])
@pytest.mark.parametrize("fault", [1e20, -1e38])
def test_one_outlier_does_not_spoil_the_statistics(at, fault):
    batches = batches_of(np.random.default_rng(2))
    sound = seen(batches)
    batches[at] = batches[at].copy()
    batches[at][7] = fault
    spoilt = seen(batches)
    deviation = sound.variance.sqrt()
    assert ((spoilt.mean - sound.mean).abs() <= 0.2 * deviation.clamp(min=0.1)).all()
    assert (spoilt.variance.sqrt() <= 2 * deviation + 1).all() and torch.isfinite(spoilt.variance).all()
    ordinary = torch.from_numpy(batches[1].astype(np.float32))
    assert (spoilt(ordinary)[:, :2].std(0) > 0.4).all()  # the normalized observations remain distinct


def test_large_observations_do_not_overflow():
    normalization = seen([np.full((8, 1), 3e38) * np.array([1, -1] * 4)[:, None] for _ in range(5)])
    assert (
        torch.isfinite(normalization.variance).all() and torch.isfinite(normalization(torch.full((2, 1), 3e38))).all()
    )


def test_a_shift_of_all_observations_is_followed():
    normalization = seen([np.random.default_rng(3).normal(size=(64, 1)) + 500 * (number > 5) for number in range(200)])
    whole = np.concatenate([np.full(6 * 64, 0.0), np.full(194 * 64, 500.0)])
    assert float(normalization.mean) == pytest.approx(whole.mean(), rel=1e-2)


def test_normalised_numbers_are_within_ten_deviations():
    normalization, far = seen(batches_of(np.random.default_rng(5))), torch.full((1, 5), 1e9)
    assert normalization(torch.cat([far, -far])).tolist() == [[10.0] * 5, [-10.0] * 5]
    assert RunningNormalization(2)(torch.tensor([[3.0, -50.0]])).tolist() == [[3.0, -10.0]]


def test_the_first_batch_is_clipped_around_its_median():
    """The differences from the median 0 have the median 0.02, so numbers count up to 10 * 1.4826 * 0.02 or 10 * 0.1."""
    batch = np.array([-0.02, -0.02, -0.02, 0, 0, 0.02, 0.02, 0.02, 5.0])[:, None]
    assert float(seen([batch]).mean) == pytest.approx((3 * 0.02 - 3 * 0.02 + 1.0) / 9, rel=1e-5)
