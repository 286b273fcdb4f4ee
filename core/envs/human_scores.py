"""Provide human-normalised Atari scores: 0 is random play, 1 the human tester (57 games, 30 no-op starts)."""

import csv
from functools import cache
from pathlib import Path

from core.envs.game_names import normalized_name

TABLE = Path(__file__).with_name("atari_human_random.csv")


@cache
def human_random_scores() -> dict[str, tuple[float, float]]:
    """Return normalised game name -> (human score, random score)."""
    with TABLE.open(newline="") as file:
        return {
            normalized_name(row["game"]): (float(row["human"]), float(row["random"])) for row in csv.DictReader(file)
        }


def human_normalized(name: str, score: float) -> float | None:
    """Return (score - random) / (human - random) for a game in any spelling, or None without a human score."""
    scores = human_random_scores().get(normalized_name(name))
    if scores is None:
        return None
    human, random = scores
    return (score - random) / (human - random)
