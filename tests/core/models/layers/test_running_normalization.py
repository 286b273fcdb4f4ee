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


def test_normalization_uses_statistics_of_all_observations():
    vectors = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 2, 5, 0.1, 3]) + 7
    normalization = RunningNormalization(5)
    for batch in (vectors[0], vectors[1, :11], vectors[1, 11:], vectors[2]):
        normalization.update(batch)
    seen = vectors.flatten(0, 1).double()
    assert torch.allclose(normalization.mean.double(), seen.mean(0), rtol=1e-5)
    assert torch.allclose(normalization.variance.double(), seen.var(0, correction=0), rtol=1e-4)
    assert float(normalization.count) == 120
    normal = normalization(vectors.flatten(0, 1))
    assert torch.allclose(normal.mean(0), torch.zeros(5), atol=1e-3) and torch.allclose(
        normal.std(0), torch.ones(5), atol=0.02
    )
    assert normalization(torch.full((1, 5), 1e6)).tolist() == [[10.0] * 5]


@pytest.mark.parametrize("outlier", [1e20, -3e38])
@pytest.mark.parametrize("batch", [0, 7])
def test_one_outlier_does_not_ruin_the_statistics(batch, outlier):
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(50, 64, 5, generator=generator) * torch.tensor([1, 200, 0.1, 20, 3]) + 300
    rare = (torch.rand(50, 64, 1, generator=generator) < 0.1).float()
    vectors = torch.cat([vectors, rare, torch.full((50, 64, 1), 3.0)], 2)
    sound = vectors.double().flatten(0, 1)
    vectors[batch, 3] = outlier
    normalization = RunningNormalization(7)
    for part in vectors:
        normalization.update(part)
    deviation = sound.std(0)
    assert ((normalization.mean.double() - sound.mean(0)).abs() < 0.01 * deviation + 1e-3).all()
    assert torch.allclose(normalization.variance.double().sqrt(), deviation, rtol=0.05, atol=0.05)


def test_rare_and_moving_features_are_counted_exactly():
    generator = torch.Generator().manual_seed(2)
    rare = (torch.rand(200, 64, 1, generator=generator) < 0.05).float()  # 1 in a twentieth of all vectors, else 0
    moving = torch.randn(200, 64, 1, generator=generator) * 10.0 ** torch.linspace(-2, 3, 200).view(-1, 1, 1)
    vectors, normalization = torch.cat([rare, moving], 2), RunningNormalization(2)
    for part in vectors:
        normalization.update(part)
    seen = vectors.double().flatten(0, 1)
    assert torch.allclose(normalization.variance.double(), seen.var(0, correction=0), rtol=0.05)


def test_a_constant_feature_is_normalized_to_zero():
    normalization = RunningNormalization(2)
    normalization.update(torch.tensor([[3.0, 1.0], [3.0, 2.0]]))
    assert normalization(torch.tensor([[3.0, 1.5]])).tolist() == [[0.0, 0.0]]


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
