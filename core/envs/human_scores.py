"""Human-normalised Atari scores: 0 plays at random, 1 as the human tester did (57 games, 30 no-op starts)."""

import csv
from functools import cache
from pathlib import Path

from core.envs.game_names import normalized_name

TABLE = Path(__file__).with_name("atari_human_random.csv")


@cache
def human_random_scores() -> dict[str, tuple[float, float]]:
    """Squeezed game name -> (human, random)."""
    with TABLE.open(newline="") as file:
        return {normalized_name(row["game"]): (float(row["human"]), float(row["random"])) for row in csv.DictReader(file)}


def human_normalized(name: str, score: float) -> float | None:
    """(score - random) / (human - random) of a game in any spelling; None for a game without a human score."""
    scores = human_random_scores().get(normalized_name(name))
    if scores is None:
        return None
    human, random = scores
    return (score - random) / (human - random)
