"""Observation normalisation whose statistics travel with the parameters."""

import torch
from torch import Tensor, nn

from core.averaging import averaged, num_learners

LARGEST = 10.0  # of a normalised number, on either side
EPSILON = 1e-8
TAIL = 0.05     # share of a batch on either side that says nothing of how wide its numbers spread
BEYOND = 10.0   # such spreads, or ones, beyond the rest of its batch that a number counts for at most
BOUND = 1e15    # of a number that counts: its square is far from the largest float32


class RunningNormalization(nn.Module):
    """(x - mean) / deviation of all vectors [F] seen by `update`, clipped to +- 10; before the first, x clipped.

    Mean and variance are merged batch by batch (Chan, Golub, LeVeque 1979). They are buffers: published, saved and loaded with the network.

    One faulty observation must not spoil them for good: what enters is clipped by `within_the_batch`, so that a single number weighs at
    most as much as ten times the spread of its batch. No sum is kept, so float32 is enough: a mean moves by its share of a difference, and
    that share stops shrinking when the count, which grows in batches, has 24 bits of them.
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
        variance, mean = torch.var_mean(within_the_batch(vectors), 0, correction=0)
        number = len(vectors) * num_learners()
        of_all = averaged(mean)
        mean, variance = of_all, averaged(variance + (mean - of_all).square())
        counted = number * wanted
        total = self.count + counted
        share = counted / total.clamp(min=1)
        difference = mean - self.mean
        self.mean += share * difference
        self.variance.mul_(1 - share).add_(share * variance + share * (1 - share) * difference.square())
        self.count.copy_(total)

    def forward(self, vectors: Tensor) -> Tensor:
        return ((vectors - self.mean) * (self.variance + EPSILON).rsqrt()).clamp(-LARGEST, LARGEST)


def within_the_batch(vectors: Tensor) -> Tensor:
    """Clip each column of [B, F] to where all but its outermost numbers are, widened on either side by ten times their spread, or by ten
    where they hardly differ. The result is bounded by 1e15."""
    ordered, cut = vectors.sort(0).values, min(max(int(TAIL * len(vectors)), 1), (len(vectors) - 1) // 2)
    low, high = ordered[cut], ordered[-1 - cut]
    margin = BEYOND * (high - low).clamp(min=1)
    return vectors.clamp(low - margin, high + margin).clamp(-BOUND, BOUND)
