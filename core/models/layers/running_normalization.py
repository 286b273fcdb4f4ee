"""Observation normalisation whose statistics travel with the parameters."""

import torch
from torch import Tensor, nn

from core.distributed.learner_group import all_reduce_mean, num_learners

LARGEST = 10.0  # of a normalised number, on either side
EPSILON = 1e-8
SMALLEST = 0.1          # deviation that is assumed at least where outliers are told from the rest, so that 0 and 1 pass as they are
BOUND = 1e15            # of a number that counts: its square is far from the largest float32
MEDIAN_TO_DEVIATION = 1.4826  # deviation of a normal distribution, in medians of its absolute differences from the median


class RunningNormalization(nn.Module):
    """(x - mean) / deviation of all vectors [F] seen by `update`, clipped to +- 10; before the first, x clipped.

    Mean and variance are merged batch by batch (Chan, Golub, LeVeque 1979). They are buffers: published, saved and loaded with the network.
    Numbers are clipped to +- 10 deviations before they count, so that one faulty observation does not decide what all later ones become.
    No sum is kept, so float32 is enough: a mean moves by its share of a difference.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(()))

    @torch.no_grad()
    def update(self, vectors: Tensor, wanted: bool | Tensor = True) -> None:
        """Count vectors [B, F], and those of the other learners, if they are `wanted`: a tensor where python may not look at it."""
        if wanted is False:
            return
        variance, mean = torch.var_mean(self._without_outliers(vectors), 0, correction=0)
        number = len(vectors) * num_learners()
        of_all = all_reduce_mean(mean)
        mean, variance = of_all, all_reduce_mean(variance + (mean - of_all).square())
        counted = number * wanted
        total = self.count + counted
        share = counted / total.clamp(min=1)
        difference = mean - self.mean
        self.mean += share * difference
        self.variance.mul_(1 - share).add_(share * variance + share * (1 - share) * difference.square())
        self.count.copy_(total)

    def _without_outliers(self, vectors: Tensor) -> Tensor:
        """Return vectors [B, F] clipped to 10 deviations around the mean so far, or around this batch's median where that is wider.

        The median serves the first batch and distributions that move; its deviation is that of a normal distribution.
        """
        vectors = vectors.clamp(-BOUND, BOUND)
        middle = len(vectors) // 2 + 1  # of two numbers in the middle the larger
        median = vectors.kthvalue(middle, 0).values
        spread = (vectors - median).abs().kthvalue(middle, 0).values * MEDIAN_TO_DEVIATION
        reach = LARGEST * spread.clamp(min=SMALLEST)
        known, reach_of_known = torch.where(self.count > 0, self.mean, median), LARGEST * self.variance.sqrt() * (self.count > 0)
        lower, upper = torch.minimum(median - reach, known - reach_of_known), torch.maximum(median + reach, known + reach_of_known)
        return vectors.clamp(lower, upper)

    def forward(self, vectors: Tensor) -> Tensor:
        return ((vectors - self.mean) * (self.variance + EPSILON).rsqrt()).clamp(-LARGEST, LARGEST)
