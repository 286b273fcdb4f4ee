"""`--check`: what a row is, what it needs, whether its parts keep their contracts, and about how long it will take. Nothing is trained,
written or left behind."""

import re
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

from gymnasium.utils.env_checker import check_env
from rich.console import Console
from rich.table import Table

from core.agent import Agent
from core.env import Discrete, Env, EnvSpec
from core.env_contract import play_randomly
from core.progress import count, duration
from core.shared import ArraySpec, available_bytes
from utils import probe, sizes
from utils.options import Options
from utils.refused import Refused
from utils.rows import from_row
from utils.settings_tree import flatten

PLAY_STEPS = 300      # agent steps of random play
PROBE_SECONDS = 2.0   # of acting, and of updates
WIDTH = 120           # columns of the tables where nobody says how wide the terminal is
COLOURS = re.compile(r"\x1b\[\d*m")


def check(options: Options, seconds: float = PROBE_SECONDS) -> None:
    """Print everything that can be said of these options, which have been validated. Raises Refused with all that is wrong."""
    options = probe.with_num_envs(options)
    console, problems = Console(highlight=False), list[str]()
    console.width = max(console.width, WIDTH)
    console.print(_settings(options))
    env = options.env_class(options.env, options.game, options.num_envs_per_actor, training=True, num_threads=options.actor.env_threads)
    agent, facts = options.make_agent(env.spec), Table.grid(padding=(0, 2))
    stages: list[tuple[str, Callable[[], tuple[str, list[str]]]]] = [
        ("random play", lambda: _random_play(options, env)), ("gymnasium", lambda: _gymnasium(options)),
        ("speed", lambda: _speed(options, agent, seconds))]
    with closing(env):
        for name, text in _parts(options, env.spec, agent):
            facts.add_row(name, text)
        for name, stage in stages:
            text, found = _tried(name, stage)
            problems += found
            if text:
                facts.add_row(name, text)
    console.print(facts)
    if env.spec.warning:
        console.print(f"warning: {env.spec.warning}")
    if problems:
        raise Refused(problems)
    console.print(f"{options.config}: no problem found")


def _tried(name: str, stage: Callable[[], tuple[str, list[str]]]) -> tuple[str, list[str]]:
    """What a stage says, or the error it died of: environments, models and agents may be anybody's."""
    try:
        return stage()
    except Exception as error:
        traceback.print_exc()
        return "", [f"{name}: {type(error).__name__}: {error}"]


# what it is -----------------------------------------------------------------------------------------------------------
def _settings(options: Options) -> Table:
    """Every option, and the default beside those that differ from it."""
    table = Table("option", "value", "default, where it differs", title=f"options of {options.config}", title_justify="left", box=None,
                  padding=(0, 2, 0, 0))
    chosen = {name: getattr(options, name) for name in ("agent_type", "env_type", "memory_type", "model_type", "game")}
    defaults = flatten(from_row({"name": options.config, **chosen})[0])
    for name, value in flatten(options).items():
        default = defaults.get(name, value)
        table.add_row(name, str(value), "" if default == value else str(default), style="" if default == value else "bold")
    return table


def _parts(options: Options, spec: EnvSpec, agent: Agent) -> list[tuple[str, str]]:
    rings, window = sizes.layouts(options, spec, agent), agent.window
    rows, stored = rings[0], sizes.stored_bytes(options, rings, window)
    parameters = sum(parameter.numel() for parameter in agent.model.parameters())
    actions = f"{spec.action.num_actions} actions" if isinstance(spec.action, Discrete) else \
        f"actions {_array(spec.action.array)} in {spec.action.low.min():g} .. {spec.action.high.max():g}"
    return [
        ("environment", f"{spec.name}: observations {_array(ArraySpec(spec.observation_shape, spec.frame.dtype))}, {actions}, "
                        f"frames a step: {spec.frames_per_step}; {options.num_actors} x {options.num_envs_per_actor} environments"),
        ("row", ", ".join(f"{name} {_array(array)}" for name, array in rows.fields.items())),
        ("recurrent state", ", ".join(map(_array, rows.states)) or "none"),
        ("network", f"{options.model_type} on {options.device}: {parameters:,} parameters"),
        ("batch", f"{options.agent.batch_size} windows of {window.length + 1} rows"),
        ("memory", f"{sizes.needed_bytes(options, stored):,} bytes needed, of which {stored:,} are the replay; "
                   f"{available_bytes():,} are free")]


def _array(array: ArraySpec) -> str:
    return f"{array.dtype} {list(array.shape)}" if array.shape else array.dtype


# whether it works -----------------------------------------------------------------------------------------------------
def _random_play(options: Options, env: Env) -> tuple[str, list[str]]:
    num_envs = options.num_envs_per_actor
    steps = -(-PLAY_STEPS // num_envs)
    found, episodes = play_randomly(env, num_envs, steps, options.seed)
    verdict = "broken" if found else "shapes, dtypes, values, ends are right"
    return f"{steps * num_envs} agent steps, {episodes} episodes ended: {verdict}", found


def _gymnasium(options: Options) -> tuple[str, list[str]]:
    """gymnasium's own checker on the environment as its author wrote it: its warnings are shown, its errors are problems."""
    env = options.env_class.gymnasium_env(options.env, options.game)
    if env is None:
        return "", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env, skip_render_check=True)
        except Exception as error:
            return "", [f"gymnasium's checker: {type(error).__name__}: {error}"]
        finally:
            env.close()
    said = [COLOURS.sub("", str(warning.message)) for warning in caught]
    return "\n".join(said) or "its checker found nothing", []


# how fast it is -------------------------------------------------------------------------------------------------------
def _speed(options: Options, agent: Agent, seconds: float) -> tuple[str, list[str]]:
    costs = probe.measure(options, agent.spec, seconds)
    rate = probe.steps_per_second(options, costs, agent.samples_per_window)
    text = (f"{1 / costs.act:,.0f} agent steps/s an actor, {1 / costs.update:,.1f} updates/s with {costs.threads} of {costs.cores} cores\n"
            f"estimate: {rate:,.0f} agent steps/s, if nothing is lost between processes and nothing else runs here\n"
            f"{_budget(options, costs, rate, agent)}")
    return text, [] if costs.sound else ["speed: the loss of the first updates was not finite, so they changed nothing"]


def _budget(options: Options, costs: probe.Costs, rate: float, agent: Agent) -> str:
    """How long until the run stops by itself."""
    def seconds_of(steps: float) -> float:
        filling = min(options.clock.learn_start, steps)
        return filling * costs.act / options.num_actors + (steps - filling) / rate

    times: dict[str, Any] = {}
    if options.steps is not None:
        times[f"{count(options.steps)} agent steps"] = seconds_of(options.steps)
    if options.updates is not None:
        samples = options.updates * options.agent.batch_size * agent.samples_per_window
        times[f"{count(options.updates)} updates"] = seconds_of(options.clock.learn_start + samples / probe.samples_per_step(options))
    if options.seconds is not None:
        times["as asked"] = options.seconds
    if not times:
        return f"no steps, updates or seconds say when to stop; a million agent steps take about {duration(seconds_of(1e6))}"
    what, least = min(times.items(), key=lambda item: item[1])
    return f"time to the budget: about {duration(least)} ({what})"
