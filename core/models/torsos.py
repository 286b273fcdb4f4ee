"""Pixels to features: shared by every image model."""

import torch
from torch import Tensor, nn

from core.env import EnvSpec


def image_shape(spec: EnvSpec) -> tuple[int, int, int]:
    """Channels, height and width of what `scaled_image` makes of this environment's observations."""
    height, width = spec.frame.shape[:2]
    planes = spec.frame.shape[2] if len(spec.frame.shape) == 3 else 1
    return planes * max(spec.frame_stack, 1), height, width


def scaled_image(observation: Tensor, spec: EnvSpec) -> Tensor:
    """Stored observations [B, *observation_shape] as float32 [B, C, H, W] in 0 .. 1, channels_last in memory."""
    if len(spec.frame.shape) == 3:  # colour or planes: channels stand last
        observation = observation.movedim(-1, -3)
    image = observation.reshape(len(observation), *image_shape(spec))
    return image.contiguous(memory_format=torch.channels_last).to(torch.float32).mul_(1.0 / spec.max_value)  # bytes move cheaper


def num_features(torso: nn.Module, shape: tuple[int, int, int]) -> int:
    """Length of the flattened output of a convolutional torso. Raises ValueError for pictures too small for it."""
    try:
        with torch.no_grad():
            return torso(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        raise ValueError(f"pictures of {shape[1]}x{shape[2]} are too small for this network: {error}") from None


class DuelingHead(nn.Module):
    """Q = V + A - mean A (1511.06581, eq. 9), each stream with its own hidden layer."""

    def __init__(self, features: int, hidden: int, num_actions: int):
        super().__init__()
        self.value = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.advantage = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_actions))

    def forward(self, features: Tensor) -> Tensor:
        advantage = self.advantage(features)  # [B, A]
        return self.value(features) + advantage - advantage.mean(1, keepdim=True)


def q_head(features: int, hidden: int, num_actions: int, dueling: bool) -> nn.Module:
    if dueling:
        return DuelingHead(features, hidden, num_actions)
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_actions))
