"""`--check`: what a row is, what it needs, whether its parts keep their contracts, and about how long it will take. Nothing is trained,
written or left behind."""

import contextlib
import dataclasses
import re
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from gymnasium.utils.env_checker import check_env
from rich.console import Console
from rich.table import Table

from core.acting.env_conformance import play_randomly, random_actions
from core.agent import Agent
from core.common.foreign_code import foreign_code, text_of
from core.common.system import available_bytes
from core.env import Env
from core.metrics.progress import count, duration
from core.runtime.options import make_env
from core.specs import ArraySpec, Discrete, EnvSpec
from utils.config import memory_budget, validation
from utils.config.dotted_settings import flatten
from utils.config.rows import from_row
from utils.errors import ConfigurationError
from utils.options import Options
from utils.preflight import throughput

PLAY_STEPS = 300      # agent steps of random play
PROBE_SECONDS = 2.0   # of acting, and of updates
PLAY_SECONDS = 3.0    # of random play at most, of gymnasium's checker too
CHECKER_CALLS = 16    # of reset and step, that gymnasium's checker makes, roughly
STEP_SECONDS = 0.5    # that a step of all environments played here may take; where they are slower fewer are played
WIDTH = 120           # columns of the tables where nobody says how wide the terminal is
COLOURS = re.compile(r"\x1b\[\d*m")


def check(options: Options, seconds: float = PROBE_SECONDS) -> None:
    """Print everything that can be said of these options, which have been validated. Raises Refused with all that is wrong.

    A problem is what training ends with too; whatever it would go on with is a warning.
    """
    options = throughput.resolve_num_envs(options)
    console, problems = Console(highlight=False), list[str]()
    console.width = max(console.width, WIDTH)
    console.print(_settings(options))
    spec = validation.environment_spec(options)
    warned = [spec.warning] if spec.warning else []
    agent, facts, pace = options.make_agent(spec), Table.grid(padding=(0, 2)), Pace(0.0, 0.0)
    stages: list[tuple[str, Callable[[], tuple[str, list[str]]]]] = [
        ("random play", lambda: _random_play(options, pace)), ("gymnasium", lambda: _gymnasium(options, pace)),
        ("speed", lambda: _speed(options, agent, seconds, pace))]
    for name, text in _parts(options, spec, agent):
        facts.add_row(name, text)
    with contextlib.suppress(Exception), foreign_code("the environment", may_lack_packages=True):  # the stages say of what
        pace = _pace(options)
    for name, stage in stages:
        try:
            with foreign_code("the environment", may_lack_packages=True):
                text, found = stage()
        except Exception as error:  # environments, models and agents may be anybody's
            traceback.print_exc()
            problems.append(f"{name}: {type(error).__name__}: {text_of(error)}")
        else:
            warned += found
            if text:
                facts.add_row(name, text)
    console.print(facts)
    for warning in warned:
        console.print(f"warning: {warning}", markup=False)
    if problems:
        raise ConfigurationError(problems)
    console.print(f"{options.config}: no problem found" + (f", {len(warned)} warnings" if warned else ""))


class Pace(NamedTuple):
    """Seconds that one environment takes."""

    reset: float
    step: float

    def streams(self, options: Options) -> int:
        """Return how many environments are played here: the run's, or as many as step within STEP_SECONDS."""
        return min(options.num_envs_per_actor, max(int(STEP_SECONDS / max(self.step, 1e-9)), 1))


def _pace(options: Options) -> Pace:
    """Time a reset and the second step of one environment: the first makes what is made on first use."""
    with closing(_environments(options, 1)) as env:
        generator, times = np.random.default_rng(options.seed), [time.perf_counter()]
        env.reset(options.seed)
        for _ in range(2):
            times.append(time.perf_counter())
            env.step(random_actions(env.spec.action, 1, generator))
        times.append(time.perf_counter())
    return Pace(times[1] - times[0], times[3] - times[2])


def _environments(options: Options, count: int) -> Env:
    """Make so many, as an actor would play them."""
    return make_env(options, count, training=True, num_threads=options.actor.env_threads)


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
    rings, window = memory_budget.layouts(options, spec, agent), agent.window
    rows, stored = rings[0], memory_budget.stored_bytes(options, rings, window)
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
        ("memory", f"{memory_budget.needed_bytes(options, spec, stored):,} bytes needed, of which {stored:,} are the replay; "
                   f"{available_bytes():,} are free")]


def _array(array: ArraySpec) -> str:
    return f"{array.dtype} {list(array.shape)}" if array.shape else array.dtype


# whether it works -----------------------------------------------------------------------------------------------------
def _random_play(options: Options, pace: Pace) -> tuple[str, list[str]]:
    """Play at random. What ends a run raises as it does there; clauses of the contract that are broken besides are warnings."""
    num_envs = pace.streams(options)
    steps = min(-(-PLAY_STEPS // num_envs), max(int(PLAY_SECONDS / max(pace.step * num_envs, 1e-9)), 1))
    with closing(_environments(options, num_envs)) as env:
        found, episodes = play_randomly(env, num_envs, steps, options.seed)
    verdict = "broken" if found else "shapes, dtypes, values, ends are right"
    return f"{steps * num_envs} agent steps, {episodes} episodes ended: {verdict}", found


def _gymnasium(options: Options, pace: Pace) -> tuple[str, list[str]]:
    """Run gymnasium's own checker on the environment as its author wrote it: its warnings are shown, its error is a warning here."""
    env = options.env_class.gymnasium_env(options.env, options.game)
    if env is None:
        return "", []
    if CHECKER_CALLS * max(pace) > PLAY_SECONDS:
        env.close()
        return f"its checker is left out: a reset takes {pace.reset:.2f} s and a step {pace.step:.2f} s", []
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
def _speed(options: Options, agent: Agent, seconds: float, pace: Pace) -> tuple[str, list[str]]:
    """Measure acting and learning. Raises ValueError where no update changed anything: a run would end with that."""
    played = pace.streams(options)
    few = dataclasses.replace(options, num_envs_per_actor=played, actor=dataclasses.replace(options.actor, groups=1))
    costs = throughput.measure(options if played == options.num_envs_per_actor else few, agent.spec, seconds)
    if not costs.sound:
        raise ValueError("the loss of the first updates was not finite, so they changed nothing")
    rate = throughput.steps_per_second(options, costs, agent.samples_per_window)
    text = (f"{1 / costs.act:,.0f} agent steps/s an actor, {1 / costs.update:,.1f} updates/s with {costs.threads} of {costs.cores} cores\n"
            f"estimate: {rate:,.0f} agent steps/s, if nothing is lost between processes and nothing else runs here\n"
            f"{_budget(options, costs, rate, agent)}")
    return text, []


def _budget(options: Options, costs: throughput.StepCosts, rate: float, agent: Agent) -> str:
    """How long until the run stops by itself."""
    def seconds_of(steps: float) -> float:
        filling = min(options.clock.learn_start, steps)
        return filling * costs.act / options.num_actors + (steps - filling) / rate

    times: dict[str, Any] = {}
    if options.steps is not None:
        times[f"{count(options.steps)} agent steps"] = seconds_of(options.steps)
    if options.updates is not None:
        samples = options.updates * options.agent.batch_size * agent.samples_per_window
        times[f"{count(options.updates)} updates"] = seconds_of(options.clock.learn_start + samples / throughput.samples_per_step(options))
    if options.seconds is not None:
        times["as asked"] = options.seconds
    if not times:
        return f"no steps, updates or seconds say when to stop; a million agent steps take about {duration(seconds_of(1e6))}"
    what, least = min(times.items(), key=lambda item: item[1])
    return f"time to the budget: about {duration(least)} ({what})"
