"""Spectral normalisation of convolutions (Miyato et al. 2018, 1802.05957)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.model import keep_float32

FIRST_ITERATIONS = 15  # of the power method when a layer is made


class SpectralConv2d(nn.Conv2d):
    """A convolution whose weight, as a matrix [outputs, inputs * kernel], is divided by its largest singular value.

    - The singular value is estimated by the power method (algorithm 1): one iteration at each forward with gradients.
      Its vector `u` is a buffer, so that it is saved and published with the weights, and copied to a target network.
    - Actors, evaluations and frozen weights have no iteration. The forward passes of a target network, whose number
      differs between learners because they are computed ahead, therefore change nothing.
    - It computes in float32 in every precision. The estimate depends on the weight in the gradient.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        keep_float32(self)
        self.u: Tensor
        self.register_buffer("u", F.normalize(torch.randn(self.out_channels), dim=0))
        for _ in range(FIRST_ITERATIONS):
            self._iterate(self.weight.detach().flatten(1))

    def normalized_weight(self) -> Tensor:
        """Return the weight that is applied."""
        matrix = self.weight.flatten(1)
        if self.training and self.weight.requires_grad and torch.is_grad_enabled():
            self._iterate(matrix.detach())
        with torch.no_grad():
            right = F.normalize(self.u @ matrix, dim=0)
            # A copy, because the buffer changes before the gradient is computed if a forward follows. The buffer of a
            # target that follows slowly is a mean of unit vectors, and shorter.
            left = F.normalize(self.u, dim=0)
        weight: Tensor = self.weight / (left @ (matrix @ right))
        return weight

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._conv_forward(input, self.normalized_weight(), self.bias)
        return output

    @torch.no_grad()
    def _iterate(self, matrix: Tensor) -> None:
        right = F.normalize(self.u @ matrix, dim=0)
        self.u.copy_(F.normalize(matrix @ right, dim=0))
