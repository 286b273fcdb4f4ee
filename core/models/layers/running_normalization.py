"""Observation normalisation whose statistics are published and saved with the parameters."""

import torch
from torch import Tensor, nn

from core.distributed.learner_group import all_reduce_mean, num_learners

MAX_DEVIATIONS = 10.0  # size of the largest normalised number
EPSILON = 1e-8
MIN_DEVIATION = 0.1  # lower bound of the deviation by which outliers are found, so that 0 and 1 are no outliers
MAX_VALUE = 1e15  # bound of the numbers that count: its square is far below the largest float32
# Ratio of a normal distribution's deviation to the median of its absolute differences from the median.
MEDIAN_TO_DEVIATION = 1.4826


class RunningNormalization(nn.Module):
    """(x - mean) / deviation of all vectors [F] seen by `update`, clipped to +- 10; before the first update, x clipped.

    - Mean and variance are merged batch by batch (Chan, Golub, LeVeque 1979). They are buffers: published, saved and
      loaded with the network.
    - With `clips_outliers`, numbers are clipped to +- 10 deviations before they count, so that one faulty observation
      does not decide the normalisation of all later ones. Numbers that are rarely not 0 would hardly count then.
    - No sum is kept, so float32 is enough: a mean moves by its share of a difference.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int, clips_outliers: bool = True):
        super().__init__()
        self._clips_outliers = clips_outliers
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    @torch.no_grad()
    def update(self, vectors: Tensor) -> None:
        """Count vectors [B, F], or observations [B, ...] of F numbers, of this learner and of the others; B > 0."""
        vectors = vectors.to(self.mean.device).float().flatten(1).clamp(-MAX_VALUE, MAX_VALUE)
        if self._clips_outliers:
            vectors = self._clip_outliers(vectors)
        variance, mean = torch.var_mean(vectors, 0, correction=0)
        size = torch.full_like(self.count, len(vectors))
        mean_size = all_reduce_mean(size)
        weight = size / mean_size  # of this learner
        group_mean = all_reduce_mean(weight * mean)
        mean, variance = group_mean, all_reduce_mean(weight * (variance + (mean - group_mean).square()))
        number = mean_size * num_learners()
        total = self.count + number
        share = number / total
        difference = mean - self.mean
        self.mean += share * difference
        self.variance.mul_(1 - share).add_(share * variance + share * (1 - share) * difference.square())
        self.count.copy_(total)

    def _clip_outliers(self, vectors: Tensor) -> Tensor:
        """Clip vectors [B, F] to 10 deviations around the mean so far, or around the batch's median if that is wider.

        The median serves the first batch and distributions that move. Its deviation is that of a normal distribution.
        """
        middle = len(vectors) // 2 + 1  # the larger of two middle numbers
        median = vectors.kthvalue(middle, 0).values
        deviation = (vectors - median).abs().kthvalue(middle, 0).values * MEDIAN_TO_DEVIATION
        reach = MAX_DEVIATIONS * deviation.clamp(min=MIN_DEVIATION)
        known = torch.where(self.count > 0, self.mean, median)
        known_reach = MAX_DEVIATIONS * self.variance.sqrt() * (self.count > 0)
        lower = torch.minimum(median - reach, known - known_reach)
        upper = torch.maximum(median + reach, known + known_reach)
        return vectors.clamp(lower, upper)

    def forward(self, vectors: Tensor) -> Tensor:
        return ((vectors - self.mean) * (self.variance + EPSILON).rsqrt()).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
