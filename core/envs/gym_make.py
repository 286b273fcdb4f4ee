"""Make one environment of gymnasium, or of the old gym through shimmy, with errors that say what to do."""

import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import traceback
from contextlib import suppress
from typing import Any, NamedTuple

import gymnasium as gym

from core.common.foreign_code import described

DEFAULT_FRAME_RATE = 30.0  # of gymnasium's recorder
# Namespace or module before an id -> (module that registers the id, extra that installs it)
REGISTERED_BY = {
    "dm_control": ("shimmy", "dm-control"),
    "gymnasium_robotics": ("gymnasium_robotics", "robotics"),
    "minigrid": ("minigrid", "minigrid"),
}
OLD_GYM = (
    'it is of the old gym: pip install -e ".[legacy-gym]" and set env.legacy to v21, or to v26 if its step '
    "returns five values"
)


class MadeEnv(NamedTuple):
    """An environment and what its id was registered with."""

    env: gym.Env[Any, Any]
    name: str
    max_steps: int | None  # limit of an episode, which has not been applied
    reward_threshold: float | None = None


def make_env(game: str, legacy: str, render_mode: str | None, kwargs: str = "{}") -> MadeEnv:
    """Make one environment.

    Args:
        game: Gymnasium id.
        legacy: As GymParams.legacy.
        render_mode: "human" or "rgb_array"; None renders nothing.
        kwargs: Arguments of the environment, a JSON object.

    Raises:
        ValueError: The id is unknown (the message has the closest ones), or the environment does not take an argument.
        ImportError: A package is missing; the message has the pip command.
    """
    arguments = parse_kwargs(kwargs)
    if "render_mode" in arguments:
        raise ValueError(
            "env.kwargs cannot have render_mode: --render, --record and evaluator.record_every show episodes"
        )
    arguments |= {} if render_mode is None else {"render_mode": render_mode}  # not every constructor knows it
    try:
        return _make(game, arguments) if legacy == "none" else _make_legacy(game, legacy, arguments)
    except TypeError as error:
        if kwargs == "{}":
            raise
        raise ValueError(f"env.kwargs={kwargs}: {error}") from error


def _make(game: str, arguments: dict[str, Any]) -> MadeEnv:
    module, extra = REGISTERED_BY.get(re.split("[/:]", game)[0], (None, None))
    try:
        if module:
            importlib.import_module(module)
    except Exception as error:  # versions that do not fit together can raise anything
        raise ImportError(f'{game}: {described(error)}; pip install -e ".[{extra}]"') from error
    try:
        # without gymnasium's own checker and time limit, which would report a faulty value less exactly than CheckedEnv
        env = gym.make(game, disable_env_checker=True, max_episode_steps=-1, **arguments)
    except gym.error.DependencyNotInstalled as error:
        raise ImportError(f"{game}: {error}") from error
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__, "name", error.name)
        what = OLD_GYM if missing == "gym" else "pip install the package that brings it"
        if missing == game.partition(":")[0]:
            what += ", or put a module of your own beside main.py"
        if missing and "." in missing and importlib.util.find_spec(missing.partition(".")[0]):
            what = f"is it a file of the package {missing.partition('.')[0]}?"
        raise ImportError(f"{game}: {error}; {what}") from error
    except gym.error.NamespaceNotFound as error:
        if extra:
            raise ImportError(f'{game}: {error}; pip install -e ".[{extra}]"') from error
        raise ValueError(f"{game}: {error}{_closest_ids(game, gym.registry)}") from error
    except gym.error.Error as error:
        # the module that the id names may have registered it with the old gym, as procgen does
        old = getattr(sys.modules.get("gym.envs.registration"), "registry", {})
        registered = game.rpartition(":")[2] in getattr(old, "env_specs", old)
        what = f" {OLD_GYM}" if registered else _closest_ids(game, gym.registry)
        if not what and ":" not in game:
            what = " An id of your own begins with the module that registers it, as package.module:MyEnv-v0"
        raise ValueError(f"{game}: {error}{what}") from error
    except TypeError as error:
        if "incompatible with Gymnasium" in str(error):
            raise ValueError(
                f'{game}: {error} Or set legacy="v26" (shimmy\'s adapter, pip install -e ".[legacy-gym]")'
            ) from error
        raise
    except Exception as error:
        if "site-packages" in traceback.extract_tb(error.__traceback__)[-1].filename:
            error.add_note(f"its package may want other versions than these, which are installed: {_versions()}")
        raise
    name = env.unwrapped.spec.id if env.unwrapped.spec else game
    spec = gym.registry.get(name)
    return MadeEnv(env, name, spec.max_episode_steps, spec.reward_threshold) if spec else MadeEnv(env, name, None)


def parse_kwargs(kwargs: str) -> dict[str, Any]:
    """Return env.kwargs as a dict. Raises ValueError if it is not a JSON object."""
    arguments = _from_json(kwargs)
    if not isinstance(arguments, dict):
        raise ValueError(f'env.kwargs={kwargs} is no JSON object such as {{"continuous": false}}')
    if "max_episode_steps" in arguments:
        raise ValueError(f"env.kwargs={kwargs}: set env.max_steps in place of max_episode_steps")
    return arguments


def _from_json(text: str) -> Any:
    """Return the value of a JSON text, or None if it is not valid."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)


def apply_wrappers(env: gym.Env[Any, Any], wrappers: str) -> gym.Env[Any, Any]:
    """Put env.wrappers around an environment, the first one innermost. Raises ValueError that names a wrong wrapper."""
    entries = _from_json(wrappers)
    if not isinstance(entries, list):
        raise ValueError(f'env.wrappers={wrappers} is no JSON list such as ["package.module:Wrapper"]')
    for entry in entries:
        name, arguments = entry if isinstance(entry, list) and len(entry) == 2 else (entry, {})
        if not (isinstance(name, str) and isinstance(arguments, dict)):
            raise ValueError(
                f'env.wrappers: {json.dumps(entry)} is neither "package.module:Wrapper" nor [that, {{its arguments}}]'
            )
        wrapper = _wrapper_class(name)
        try:
            env = wrapper(env, **arguments)
        except Exception as error:
            raise ValueError(
                f"env.wrappers: {name} cannot be put around the environment: {described(error)}"
            ) from error
    return env


def frame_rate(env: gym.Env[Any, Any]) -> float:
    """Return the environment's render_fps, pictures per second of real time; 30 if it has no valid one."""
    rate = env.metadata.get("render_fps")
    return float(rate) if isinstance(rate, int | float) and 0 < rate < 1_000 else DEFAULT_FRAME_RATE


def _wrapper_class(name: str) -> Any:
    """Import a gymnasium.Wrapper from "package.module:Wrapper". Raises ValueError if that is impossible."""
    module_name, _, attribute = name.partition(":")
    try:
        wrapper = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # importing a user's module can raise anything
        raise ValueError(f"env.wrappers: {name} cannot be imported: {described(error)}") from error
    if not (isinstance(wrapper, type) and issubclass(wrapper, gym.Wrapper)):
        raise ValueError(f"env.wrappers: {name} is no gymnasium.Wrapper")
    if issubclass(wrapper, gym.wrappers.FrameStackObservation):
        raise ValueError(f"env.wrappers: {name} would have every frame stored several times: set env.frame_stack")
    return wrapper


def _make_legacy(game: str, legacy: str, arguments: dict[str, Any]) -> MadeEnv:
    try:
        old_gym = importlib.import_module("gym")
        shimmy = importlib.import_module("shimmy.openai_gym_compatibility")
    except ImportError as error:
        raise ImportError(f'{error}; old gym environments need: pip install -e ".[legacy-gym]"') from error
    if legacy == "v21":  # step returns four values
        arguments = {"apply_api_compatibility": True, **arguments}
    try:
        # the checker of gym 0.26 fails with numpy 2
        env = shimmy.GymV26CompatibilityV0(env=old_gym.make(game, disable_env_checker=True, **arguments))
    except old_gym.error.DependencyNotInstalled as error:
        raise ImportError(f"{game}: {error}") from error
    except old_gym.error.Error as error:
        raise ValueError(f"{game}: {error}{_closest_ids(game, old_gym.envs.registration.registry)}") from error
    return MadeEnv(env, game, None)  # gym has applied the time limit


def _closest_ids(game: str, registry: Any) -> str:
    ids = {name.lower(): name for name in registry}
    close = difflib.get_close_matches(game.lower(), ids, n=3, cutoff=0.6)
    return f" The closest ids are {', '.join(ids[name] for name in close)}." if close else ""


def _versions() -> str:
    installed = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in ("gymnasium", "numpy", "mujoco") if name in installed)
