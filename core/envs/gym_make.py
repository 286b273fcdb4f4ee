"""Making one gymnasium environment, or one of the old gym through shimmy, with errors that say what to do."""

import difflib
import importlib
import importlib.metadata
import json
import sys
import traceback
from typing import Any, NamedTuple

import gymnasium as gym

from core.common.foreign_code import text_of

DEFAULT_FRAME_RATE = 30.0  # of gymnasium's recorder
REGISTERED_BY = {"dm_control": ("shimmy", "dm-control")}  # namespace of an id -> module that registers it, extra that brings it
OLD_GYM = ('it is of the old gym: pip install -e ".[legacy-gym]" and set env.legacy to v21, or to v26 if its step returns five values')


class Made(NamedTuple):
    env: gym.Env
    name: str
    max_steps: int | None  # the limit it was registered with, still to be applied
    reward_threshold: float | None = None  # that it was registered with


def make(game: str, legacy: str, render_mode: str | None, kwargs: str = "{}", wrappers: str = "[]") -> Made:
    """Make one environment with these arguments, inside these wrappers; both are JSON (core/envs/gym.py).

    Raises ValueError for an unknown id (with the closest ones), for arguments it does not take and for wrappers that are none, and
    ImportError (with the pip command) for a missing package.
    """
    arguments = arguments_of(kwargs) | ({} if render_mode is None else {"render_mode": render_mode})  # not every constructor knows it
    try:
        made = _make(game, arguments) if legacy == "none" else _make_legacy(game, legacy, arguments)
    except TypeError as error:
        if kwargs == "{}":
            raise
        raise ValueError(f"env.kwargs={kwargs}: {error}") from error
    return made._replace(env=wrapped(made.env, wrappers))


def _make(game: str, arguments: dict[str, Any]) -> Made:
    module, extra = REGISTERED_BY.get(game.partition("/")[0], (None, None))
    try:
        if module:
            importlib.import_module(module)
    except Exception as error:  # versions that do not go together fail in any way
        raise ImportError(f'{game}: {_said(error)}; pip install -e ".[{extra}]"') from error
    try:
        # Its own checker and time limit would meet a faulty value first and say less about it than CheckedEnv.
        env = gym.make(game, disable_env_checker=True, max_episode_steps=-1, **arguments)
    except gym.error.DependencyNotInstalled as error:
        raise ImportError(f"{game}: {error}") from error
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", error.name)
        what = OLD_GYM if missing == "gym" else "pip install the package that brings it"
        raise ImportError(f"{game}: {error}; {what}") from error
    except gym.error.NamespaceNotFound as error:
        if extra:
            raise ImportError(f'{game}: {error}; pip install -e ".[{extra}]"') from error
        raise ValueError(f"{game}: {error}{_closest(game, gym.registry)}") from error
    except gym.error.Error as error:
        what = f" {OLD_GYM}" if _is_of_old_gym(game) else _closest(game, gym.registry)
        raise ValueError(f"{game}: {error}{what}") from error
    except TypeError as error:
        if "incompatible with Gymnasium" in str(error):
            raise ValueError(f'{game}: {error} Or set legacy="v26" (shimmy\'s adapter, pip install -e ".[legacy-gym]")') from error
        raise
    except Exception as error:
        if "site-packages" in traceback.extract_tb(error.__traceback__)[-1].filename:
            error.add_note(f"its package may want other versions than these, which are installed: {_versions()}")
        raise
    name = env.unwrapped.spec.id if env.unwrapped.spec else game
    registered = gym.registry.get(name)
    return Made(env, name, registered.max_episode_steps, registered.reward_threshold) if registered else Made(env, name, None)


def arguments_of(kwargs: str) -> dict[str, Any]:
    """Read env.kwargs. Raises ValueError."""
    try:
        arguments = json.loads(kwargs)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f'env.kwargs={kwargs} is no JSON object such as {{"continuous": false}}')
    if "max_episode_steps" in arguments:
        raise ValueError(f"env.kwargs={kwargs}: set env.max_steps in place of max_episode_steps")
    return arguments


def wrapped(env: gym.Env, wrappers: str) -> gym.Env:
    """Put env.wrappers around an environment, the first one innermost. Raises ValueError naming the wrapper at fault."""
    try:
        listed = json.loads(wrappers)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list):
        raise ValueError(f'env.wrappers={wrappers} is no JSON list such as ["package.module:Wrapper"]')
    for entry in listed:
        name, arguments = entry if isinstance(entry, list) and len(entry) == 2 else (entry, {})
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise ValueError(f'env.wrappers: {json.dumps(entry)} is neither "package.module:Wrapper" nor [that, {{its arguments}}]')
        wrapper = _wrapper(name)
        try:
            env = wrapper(env, **arguments)
        except Exception as error:
            raise ValueError(f"env.wrappers: {name} cannot be put around the environment: {_said(error)}") from error
    return env


def frame_rate(env: gym.Env) -> float:
    """Return the environment's render_fps, pictures a second of real time; gymnasium's 30 where it names none that can be."""
    given = env.metadata.get("render_fps")
    return float(given) if isinstance(given, int | float) and 0 < given < 1_000 else DEFAULT_FRAME_RATE


def _wrapper(name: str) -> type[gym.Wrapper]:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # a module of the user's own can fail in any way
        raise ValueError(f"env.wrappers: {name} cannot be imported: {_said(error)}") from error
    if not (isinstance(found, type) and issubclass(found, gym.Wrapper)):
        raise ValueError(f"env.wrappers: {name} is no gymnasium.Wrapper")
    if issubclass(found, gym.wrappers.FrameStackObservation):
        raise ValueError(f"env.wrappers: {name} would have every frame stored several times: set env.frame_stack")
    return found


def _make_legacy(game: str, legacy: str, arguments: dict[str, Any]) -> Made:
    try:
        old_gym = importlib.import_module("gym")
        shimmy = importlib.import_module("shimmy.openai_gym_compatibility")
    except ImportError as error:
        raise ImportError(f'{error}; old gym environments need: pip install -e ".[legacy-gym]"') from error
    four_values = {"apply_api_compatibility": True} if legacy == "v21" else {}
    try:
        # gym 0.26's own checker fails on numpy 2
        env = shimmy.GymV26CompatibilityV0(env=old_gym.make(game, disable_env_checker=True, **four_values, **arguments))
    except old_gym.error.DependencyNotInstalled as error:
        raise ImportError(f"{game}: {error}") from error
    except old_gym.error.Error as error:
        raise ValueError(f"{game}: {error}{_closest(game, old_gym.envs.registration.registry)}") from error
    return Made(env, game, None)  # gym's own time limit is inside


def _closest(game: str, registry: Any) -> str:
    by_lower = {name.lower(): name for name in registry}
    near = difflib.get_close_matches(game.lower(), by_lower, n=3, cutoff=0.6)
    return f" The closest ids are {', '.join(by_lower[name] for name in near)}." if near else ""


def _is_of_old_gym(game: str) -> bool:
    """Return True if the module that the id names registered it with the old gym, as procgen does."""
    registry = getattr(sys.modules.get("gym.envs.registration"), "registry", {})
    return game.rpartition(":")[2] in getattr(registry, "env_specs", registry)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def _versions() -> str:
    installed = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in ("gymnasium", "numpy", "mujoco") if name in installed)
