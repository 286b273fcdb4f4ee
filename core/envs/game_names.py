"""One game, many spellings: `Pong`, `pong`, `PongNoFrameskip-v4` and `ALE/Pong-v5` all mean "pong".

What the suffixes used to say (frameskip, stickiness, action set) is said by the settings, never by the name.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache

TWO_PLAYERS_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})  # the emulator ends the process on these ROMs


def normalized_name(name: str) -> str:
    """The letters that matter: no namespace, no suffix, no underscores or capitals."""
    name = re.sub(r"^(ALE|MinAtar)/", "", name, flags=re.IGNORECASE)
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[\s_-]", "", name).lower()


def closest(name: str, known: Iterable[str]) -> str:
    """The canonical one of `known` that this name means. Raises ValueError with the closest names."""
    by_key = {normalized_name(canonical): canonical for canonical in known}
    key = normalized_name(name)
    if key in by_key:
        return by_key[key]
    near = [by_key[other] for other in difflib.get_close_matches(key, by_key, n=3, cutoff=0.5)]
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sorted(by_key.values()))}"
    raise ValueError(f"unknown game {name!r}; {hint}")


@cache
def atari_games() -> tuple[str, ...]:
    """Every game that ale_py brings and one player can play. Raises ImportError without ale_py."""
    try:
        from ale_py import roms
    except ImportError as error:
        raise ImportError(f'{error}; Atari needs: pip install "ale-py>=0.12" "gymnasium>=1.1"') from error
    return tuple(sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS_ONLY))


def atari_game(name: str) -> str:
    """The canonical name ("pong", "ms_pacman") of an Atari game in any spelling. Raises ValueError with the closest names."""
    return closest(name, atari_games())
