"""Name configs that need an extra besides those of `make test`, and configs that differ from each other."""

from typing import Any

import pytest

from utils.options import CONFIGS

NEEDS = {
    "d4pg-walker-walk": "shimmy",
    "ddpg-pendulum-legacy": "gym",
    "dqn-carracing": "Box2D",
    "ppo-minigrid-doorkey": "minigrid",
    "sac-point-maze": "gymnasium_robotics",
}
# One config of each agent and memory, without Atari where possible, and one of each set of settings, whatever the game
# and the numbers.
PAIRS = list(
    {
        (row["agent_type"], row["memory_type"]): row["name"]
        for row in [*CONFIGS, *(row for row in reversed(CONFIGS) if row["env_type"] != "atari")]
    }.values()
)


NOT_PLAYED = "name", "game", "learner.compile"  # the inline engine, which plays them, compiles nothing


def _settings(row: dict[str, Any]) -> str:
    numbers = {name for name, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return str({name: value for name, value in row.items() if name not in {*NOT_PLAYED, *numbers}})


SETTINGS = list({_settings(row): row["name"] for row in reversed(CONFIGS)}.values())


def skip_unless_installed(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
