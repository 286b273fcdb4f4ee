"""Configs that need an extra which excludes an extra of `make test`."""

import pytest

from utils.options import CONFIGS

NEEDS = {"d4pg-walker-walk": "shimmy", "ddpg-pendulum-legacy": "gym", "dqn-carracing": "Box2D"}
PLAYABLE = [row["name"] for row in CONFIGS if row["name"] not in NEEDS]


def skip_unless_installed(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
