"""Resolve the spellings of a game: `Pong`, `pong`, `PongNoFrameskip-v4` and `ALE/Pong-v5` all mean "pong".

Frameskip, sticky actions and the action set, which gymnasium encodes in suffixes, are set by options only.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache

# Games for two players only, on whose ROMs the emulator ends the process
TWO_PLAYERS_ONLY = frozenset({"combat", "joust", "maze_craze", "warlords"})


def normalized_name(name: str) -> str:
    """Return the name in lower case without namespace, suffix, spaces, hyphens and underscores."""
    name = re.sub(r"^(ALE|MinAtar)/", "", name, flags=re.IGNORECASE)
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[\s_-]", "", name).lower()


def resolve_name(name: str, known: Iterable[str]) -> str:
    """Return the canonical name among `known`. Raises ValueError with the closest names."""
    canonical_names = {normalized_name(canonical): canonical for canonical in known}
    key = normalized_name(name)
    if key in canonical_names:
        return canonical_names[key]
    close = [canonical_names[other] for other in difflib.get_close_matches(key, canonical_names, n=3, cutoff=0.5)]
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(sorted(canonical_names.values()))}"
    raise ValueError(f"unknown game {name!r}; {hint}")


@cache
def atari_games() -> tuple[str, ...]:
    """Return the games of ale_py that one player can play. Raises ImportError without ale_py."""
    try:
        from ale_py import roms
    except ImportError as error:
        raise ImportError(f'{error}; Atari needs: pip install "ale-py>=0.12" "gymnasium>=1.1"') from error
    return tuple(sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS_ONLY))


def atari_game(name: str) -> str:
    """Return the canonical name of an Atari game, such as "ms_pacman". Raises ValueError with the closest names."""
    return resolve_name(name, atari_games())
