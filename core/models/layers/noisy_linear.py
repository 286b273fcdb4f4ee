"""Exploration by noise on the weights (Noisy Networks, 1706.10295), the factorised variant."""

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from core.common.settings import frozen_dataclass
from core.model import ModelParams

# Rows of an input, and weights of a layer, for which a second product costs less than adding the noise to the weights.
FEW_ROWS, MANY_WEIGHTS = 32, 2**20


@frozen_dataclass
class NoisyParams(ModelParams):
    noisy: bool = False
    """Explore by noise on the head's weights, in training only (1706.10295); let epsilon be 0 then."""
    sigma: float = Field(default=0.5, ge=0, le=1_000)
    """First standard deviation of noisy layers' noise, times the root of a layer's inputs (paper and Rainbow: 0.5;
    dqn_zoo and Dopamine: 0.1)."""
    noise_per_env: bool = True
    """Draw noise for each acting environment. If False, those of an actor share one draw, which costs less."""


class NoisyLinear(nn.Linear):
    """A linear layer with factorised noise on weights and biases.

        y = (mu_w + sigma_w * e_w) x + mu_b + sigma_b * e_b
        e_w = f(q) f(p)^T,    e_b = f(q),    f(x) = sign(x) sqrt |x|    (equations 9 to 11)

    p [inputs] and q [outputs] are unit Gaussians, drawn anew from torch's global generator at every forward in
    training: once for the whole batch, or with `noise_per_row` for each row. Evaluations have no noise. mu_w and mu_b
    are `weight` and `bias`: nn.Linear draws them as the paper does, uniform in +- 1 / sqrt(inputs). Both sigmas start
    at sigma / sqrt(inputs) (section 3.2).
    """

    noise_per_row = False

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5, noise_per_env: bool = True):
        super().__init__(in_features, out_features)
        self.noise_per_env = noise_per_env
        initial = sigma / math.sqrt(in_features)
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), initial))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), initial))

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        rows = [len(input), *[1] * (input.dim() - 2)] if self.noise_per_row else []
        # Drawn in float32 whatever the precision, so that all precisions see the same noise.
        noise = torch.randn(*rows, self.in_features + self.out_features, device=input.device)
        noise = (noise.sign() * noise.abs().sqrt()).to(input.dtype)
        inputs, outputs = torch.split(noise, [self.in_features, self.out_features], -1)
        few_rows = input.numel() <= FEW_ROWS * self.in_features
        # Rows with a noise of their own have no weights in common: the factors of e_w are applied one by one.
        if rows or (few_rows and self.weight.numel() > MANY_WEIGHTS):
            return super().forward(input) + outputs * F.linear(input * inputs, self.weight_sigma, self.bias_sigma)
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(outputs, inputs))
        return F.linear(input, weight, torch.addcmul(self.bias, self.bias_sigma, outputs))
