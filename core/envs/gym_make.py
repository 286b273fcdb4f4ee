"""Making one gymnasium environment, or one of the old gym through shimmy, with errors that say what to do."""

import difflib
import importlib
from typing import Any, NamedTuple

import gymnasium as gym

LEGACY_VERSIONS = ("none", "v26", "v21")
REGISTERED_BY = {"dm_control": ("shimmy", "dm-control")}  # namespace of an id -> module that registers it, extra that brings it


class Made(NamedTuple):
    env: gym.Env
    name: str
    max_steps: int | None  # the limit it was registered with, still to be applied
    reward_threshold: float | None = None  # that it was registered with


def make(game: str, legacy: str, render_mode: str | None) -> Made:
    """Raises ValueError for an unknown id (with the closest ones) and ImportError (with the pip command) for a missing package."""
    modes = {} if render_mode is None else {"render_mode": render_mode}  # not every constructor knows the word
    return _make(game, modes) if legacy == "none" else _make_legacy(game, legacy, modes)


def _make(game: str, modes: dict[str, Any]) -> Made:
    module, extra = REGISTERED_BY.get(game.partition("/")[0], (None, None))
    try:
        if module:
            importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{game}: {error}; pip install -e ".[{extra}]"') from error
    try:
        # Its own checker and time limit would meet a faulty value first and say less about it than CheckedEnv.
        env = gym.make(game, disable_env_checker=True, max_episode_steps=-1, **modes)
    except gym.error.DependencyNotInstalled as error:
        raise ImportError(f"{game}: {error}") from error
    except ModuleNotFoundError as error:
        raise ImportError(f"{game}: {error}; pip install the package that brings it") from error
    except (gym.error.UnregisteredEnv, gym.error.Error) as error:
        raise ValueError(f"{game}: {error}{_closest(game, gym.registry)}") from error
    except TypeError as error:
        if "incompatible with Gymnasium" in str(error):
            raise ValueError(f'{game}: {error} Or set legacy="v26" (shimmy\'s adapter, pip install -e ".[legacy-gym]")') from error
        raise
    name = env.unwrapped.spec.id if env.unwrapped.spec else game
    registered = gym.registry.get(name)
    return Made(env, name, registered.max_episode_steps, registered.reward_threshold) if registered else Made(env, name, None)


def _make_legacy(game: str, legacy: str, modes: dict[str, Any]) -> Made:
    try:
        old_gym = importlib.import_module("gym")
        shimmy = importlib.import_module("shimmy.openai_gym_compatibility")
    except ImportError as error:
        raise ImportError(f'{error}; old gym environments need: pip install -e ".[legacy-gym]"') from error
    four_values = {"apply_api_compatibility": True} if legacy == "v21" else {}
    try:
        # gym 0.26's own checker fails on numpy 2
        env = shimmy.GymV26CompatibilityV0(env=old_gym.make(game, disable_env_checker=True, **four_values, **modes))
    except old_gym.error.DependencyNotInstalled as error:
        raise ImportError(f"{game}: {error}") from error
    except old_gym.error.Error as error:
        raise ValueError(f"{game}: {error}{_closest(game, old_gym.envs.registration.registry)}") from error
    return Made(env, game, None)  # gym's own time limit is inside


def _closest(game: str, registry: Any) -> str:
    by_lower = {name.lower(): name for name in registry}
    near = difflib.get_close_matches(game.lower(), by_lower, n=3, cutoff=0.6)
    return f" The closest ids are {', '.join(by_lower[name] for name in near)}." if near else ""
