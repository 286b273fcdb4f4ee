"""Name configs that need an extra besides those of `make test`, and one config of each class."""

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
# One config of each class.
KINDS = list(dict.fromkeys({(name, row[name]): row["name"] for row in reversed(CONFIGS) for name in CLASSES}.values()))
# One config of each agent and memory, without Atari where possible, and one of each set of settings, whatever the game.
PAIRS = list(
    {
        (row["agent_type"], row["memory_type"]): row["name"]
        for row in [*CONFIGS, *(row for row in reversed(CONFIGS) if row["env_type"] != "atari")]
    }.values()
)
SETTINGS = list({str({**row, "name": "", "game": ""}): row["name"] for row in reversed(CONFIGS)}.values())


def skip_unless_installed(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
