"""Configs that need an extra besides those of `make test`, and one of each kind of config."""

import pytest

from utils.options import CONFIGS

NEEDS = {
    "d4pg-walker-walk": "shimmy",
    "ddpg-pendulum-legacy": "gym",
    "dqn-carracing": "Box2D",
    "ppo-minigrid-doorkey": "minigrid",
    "sac-point-maze": "gymnasium_robotics",
}
CLASSES = ("agent_type", "env_type", "memory_type", "model_type")
KINDS = list({tuple(row[name] for name in CLASSES): row["name"] for row in reversed(CONFIGS)}.values())


def skip_unless_installed(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
