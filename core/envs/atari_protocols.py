"""Provide the settings of Atari, and the two protocols under which results are reported."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from core.common.settings import frozen_dataclass
from core.env import EnvParams
from core.envs.preprocessing import Clipping, Size


@dataclass(frozen=True)
class Protocol:
    """The settings in which the protocols of Atari results differ. Its fields are those of AtariParams."""

    noop_max: int
    repeat_action_probability: float
    life_loss: bool
    full_action_space: bool
    use_fire_reset: bool


PROTOCOLS = {
    # DQN (Nature 2015) to LASER. FIRE starts the games that wait for that button (OpenAI baselines).
    "classic": Protocol(
        noop_max=30, repeat_action_probability=0.0, life_loss=True, full_action_space=False, use_fire_reset=True
    ),
    # Machado et al. 2018 (1709.06009): sticky actions instead of no-ops, no knowledge of the game's lives or actions.
    "machado": Protocol(
        noop_max=0, repeat_action_probability=0.25, life_loss=False, full_action_space=True, use_fire_reset=False
    ),
}


@frozen_dataclass
class AtariParams(EnvParams):
    """Options of the Atari environment. Options that are None follow `protocol`."""

    protocol: Literal["classic", "machado"] = "classic"
    """Protocol that the settings which are None follow."""
    noop_max: int | None = Field(default=None, ge=0, le=10_000)
    """Largest number of no-op frames (FIRE is one) that an episode starts with; the number is drawn."""
    repeat_action_probability: float | None = Field(default=None, ge=0.0, le=1.0)
    """Probability of each frame that the last action is repeated (sticky actions)."""
    life_loss: bool | None = None
    """Set the discount to 0 at a lost life, in training only; the game goes on."""
    full_action_space: bool | None = None
    """Offer all 18 actions instead of those that the game reads."""
    use_fire_reset: bool | None = None
    """Press FIRE where the game has it: at the start and, in evaluations, after a lost life."""
    frameskip: int = Field(default=4, ge=1, le=1_000)
    """Frames of an agent step."""
    frame_stack: int = Field(default=4, ge=0, le=64)
    """Agent steps whose pictures are seen together; 0 is one picture, without a stack axis."""
    resolution: Size = 84
    """Height and width of the pictures in pixels; one number stands for both."""
    grayscale: bool = True
    """See grey pictures; without it they are coloured, [H, W, 3]."""
    maxpool: bool = True
    """Take the maximum of the last two frames, so that sprites that flicker stay visible."""
    reward_clipping: Clipping = "sign"
    """Clipping of rewards, in training only."""
    max_frames: int = Field(default=108_000, ge=1, le=10**9)
    """Frames after which an episode is truncated (30 minutes)."""

    @property
    def max_steps(self) -> int:
        """Return the agent steps after which an episode is truncated."""
        return max(1, self.max_frames // self.frameskip)

    def rules(self) -> Protocol:
        """Return the protocol, in which settings that are not None replace those of the protocol."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(Protocol)}
        changes = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(PROTOCOLS[self.protocol], **changes)
