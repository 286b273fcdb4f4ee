"""Run `--check`: print what a row is and needs, test the contracts of its parts, and estimate its speed.

Nothing is trained, and no file is written.
"""

import dataclasses
import io
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.utils.env_checker import check_env
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from core.acting.validated_env import play_randomly, random_actions
from core.agent import Agent, LearnerOutput
from core.checkpoint.run_checkpoint import storable
from core.common.foreign_code import described, foreign_code, text_of
from core.common.system import available_bytes
from core.env import Env
from core.memory import Memory
from core.metrics.progress import count, duration
from core.model import Model
from core.models.layers.torsos import PictureAndVectorTorso
from core.runtime.log_buffers import check_names
from core.runtime.options import make_env
from core.single_processes.learner import compiles_updates
from core.specs import ArraySpec, EnvSpec, ObservationPart, PartKind
from core.types import Batch
from utils.config import memory_budget, throughput, validation
from utils.config.rows import CHOICES, class_defaults, flatten
from utils.errors import ConfigurationError, describe_exception
from utils.options import Options

PLAY_STEPS = 300  # Agent steps of random play.
PROBE_SECONDS = 2.0  # Duration of acting, and of updates.
PLAY_SECONDS = 3.0  # Limit of random play, and of gymnasium's checker.
CHECKER_CALLS = 16  # Approximate number of resets and steps that gymnasium's checker makes.
STEP_SECONDS = 0.5  # Limit of a step of all environments; fewer slow environments are played.
WIDTH = 120  # Minimum columns of tables.
TABLE: dict[str, Any] = {"title_justify": "left", "box": None, "padding": (0, 2, 0, 0)}
MAX_LAYERS = 4  # Layers of one kind that are listed; more are counted.
COLORS = re.compile(r"\x1b\[\d*m")


def check(options: Options, seconds: float = PROBE_SECONDS) -> None:
    """Print what these validated options are, need and cost.

    An error that would end a training is a problem; one that a training would survive is a warning.

    Raises:
        ConfigurationError: problems were found; it lists all of them.
    """
    if options.num_envs_per_actor == 0:
        options = throughput.resolve_num_envs(options)
    console, problems = wide_console(), list[str]()
    console.print(_settings(options))
    console.print(f"other options have their defaults; --config {options.config} --help lists all")
    spec = validation.environment_spec(options)
    warnings_found = [spec.warning] if spec.warning else []
    agent, facts, pace = options.make_agent(spec), Table.grid(padding=(0, 2)), Pace(0.0, 0.0)
    console.print(table(spec, agent.model))
    for name, text in _parts(options, agent):
        facts.add_row(name, text)
    with suppress(Exception), foreign_code("the environment", may_lack_packages=True):
        pace = _pace(options)  # The stages below report the error.
    for name, stage in (
        ("random play", partial(_random_play, options, pace)),
        ("gymnasium", partial(_gymnasium, options, spec, pace)),
        ("speed", partial(_speed, options, agent, seconds, pace)),
    ):
        try:
            with foreign_code("the environment", may_lack_packages=True):
                text, more = stage()
        except Exception as error:  # User classes may raise anything.
            traceback.print_exc()
            problems.append(f"{name}: {describe_exception(error)}")
        else:
            warnings_found += more
            if text:
                facts.add_row(name, text)
    console.print(facts)
    for warning in warnings_found:
        console.print(f"warning: {warning}")
    if problems:
        raise ConfigurationError(problems)
    number = f", {len(warnings_found)} warnings" if warnings_found else ""
    console.print(f"{options.config}: no problem found{number}")


class Pace(NamedTuple):
    """Seconds that a reset and a step of one environment take."""

    reset: float
    step: float

    def num_envs(self, options: Options) -> int:
        """Return the number of environments to play: the run's, or as many as can step within STEP_SECONDS."""
        return min(options.num_envs_per_actor, max(int(STEP_SECONDS / max(self.step, 1e-9)), 1))


def _pace(options: Options) -> Pace:
    """Time a reset and the second step of one environment, because the first step includes lazy initialisation."""
    with closing(_environments(options, 1)) as env:
        generator, times = np.random.default_rng(options.seed), [time.perf_counter()]
        timestep = env.reset(options.seed)
        for _ in range(2):
            times.append(time.perf_counter())
            timestep = env.step(random_actions(env.spec.action, 1, generator, timestep.action_mask))
        times.append(time.perf_counter())
    return Pace(times[1] - times[0], times[3] - times[2])


def _environments(options: Options, count: int) -> Env:
    """Create `count` environments as an actor does."""
    return make_env(options, count, training=True, num_threads=options.actor.env_threads)


# description ----------------------------------------------------------------------------------------------------------
def _settings(options: Options) -> Table:
    """Return a table of the classes, the game, and the options that differ from their defaults."""
    table = Table("option", "value", "default", title=f"options of {options.config}", **TABLE)
    settings, defaults = flatten(options), class_defaults(options)
    for name in CHOICES:
        table.add_row(name, str(settings[name]), "")
    for name, value in settings.items():
        if name != "check" and (default := defaults.get(name, value)) != value:
            table.add_row(name, str(value), str(default))
    return table


def _parts(options: Options, agent: Agent) -> list[tuple[str, str]]:
    rings, spec, window = memory_budget.layouts(options, agent), agent.spec, agent.window
    layout, stored = rings[0], memory_budget.stored_bytes(options, rings, window)
    parameters = sum(parameter.numel() for parameter in agent.model.parameters())
    return [
        (
            "environment",
            f"observations {describe(ArraySpec(spec.observation_shape, spec.frame.dtype))}, frames per step: "
            f"{spec.frames_per_step}; {options.num_actors} x {options.num_envs_per_actor} environments",
        ),
        ("step", ", ".join(f"{name} {describe(array)}" for name, array in layout.fields.items())),
        ("recurrent state", ", ".join(map(describe, layout.states)) or "none"),
        ("network", f"{options.model_type} on {options.device}: {parameters:,} parameters"),
        ("batch", f"{options.batch_size} windows of {window.length + 1} steps"),
        (
            "memory",
            f"{memory_budget.needed_bytes(options, spec, stored):,} bytes needed, of which {stored:,} are the replay "
            f"and its batches; {available_bytes():,} are free",
        ),
    ]


# tests ----------------------------------------------------------------------------------------------------------------
def _random_play(options: Options, pace: Pace) -> tuple[str, list[str]]:
    """Play at random and return a verdict and warnings about broken clauses of the environment's contract.

    Errors that would end a run are raised.
    """
    num_envs = pace.num_envs(options)
    steps = min(-(-PLAY_STEPS // num_envs), max(int(PLAY_SECONDS / max(pace.step * num_envs, 1e-9)), 1))
    with closing(_environments(options, num_envs)) as env:
        violations, episodes = play_randomly(env, num_envs, steps, options.seed)
    right = f"shapes, dtypes, values{', ends are right' if episodes else ' are right, no end was seen'}"
    verdict = "broken" if violations else right
    return f"{steps * num_envs} agent steps, {episodes} episodes ended: {verdict}", violations


def _gymnasium(options: Options, spec: EnvSpec, pace: Pace) -> tuple[str, list[str]]:
    """Run gymnasium's checker on the unwrapped environment; return its warnings as text, and its error as a warning."""
    env = options.env_class.gymnasium_env(options.env, options.game)
    if env is None:
        return "", []
    with warnings.catch_warnings(record=True, action="always") as caught, closing(env):
        if CHECKER_CALLS * max(pace) > PLAY_SECONDS:
            return f"its checker is left out: a reset takes {pace.reset:.2f} s and a step {pace.step:.2f} s", []
        if spec.has_action_mask:
            return "its checker is left out: it takes illegal actions", []
        try:
            check_env(env, skip_render_check=True)
        except Exception as error:
            return "", [f"gymnasium's checker: {described(error)}"]
    return "\n".join(COLORS.sub("", str(warning.message)) for warning in caught) or "its checker found nothing", []


# speed ----------------------------------------------------------------------------------------------------------------
def _speed(options: Options, agent: Agent, seconds: float, pace: Pace) -> tuple[str, list[str]]:
    """Measure acting and learning and return the estimate.

    Raises:
        ValueError: no update changed any parameter, with which a run would end; or the name of a metric is too long,
            the memory cannot use the updates' priorities, or a checkpoint cannot restore the agent.
    """
    played = options
    if (num_envs := pace.num_envs(options)) != options.num_envs_per_actor:
        actor = dataclasses.replace(options.actor, num_env_splits=1)
        played = dataclasses.replace(options, num_envs_per_actor=num_envs, actor=actor)
    costs, learner, output, batch = throughput.measure(played, agent.spec, seconds)
    costs = costs._replace(update=costs.update * options.batch_size / played.batch_size)
    check_names(f"learner/{name}" for name in output.statistics)
    _test_priorities(options, output)
    warnings_found = [*_untrained(options, learner, batch), *_test_checkpoint(options, learner, batch)]
    if not costs.sound:
        raise ValueError("the loss of the first updates was not finite, so they changed nothing")
    rate = throughput.steps_per_second(options, costs, agent.samples_per_window)
    compiled = options.device == "cpu" and compiles_updates(options, agent)
    text = (
        f"{1 / costs.act:,.0f} agent steps/s an actor, "
        f"{1 / costs.update:,.1f} updates/s with {costs.threads} of {costs.cores} cores\n"
        f"{'updates will be compiled, which makes them faster than this' if compiled else 'updates run eagerly'}\n"
        f"estimate: {rate:,.0f} agent steps/s, if nothing is lost between processes and nothing else runs here\n"
        f"{_budget(options, costs, rate, agent)}"
    )
    return text, warnings_found


def _test_priorities(options: Options, output: LearnerOutput) -> None:
    """Raise ValueError if the memory cannot use an update's priorities."""
    if options.memory_class.update_priorities is not Memory.update_priorities and not output.skipped:
        given = output.priorities
        if given is None:
            found = "none"
        elif [*given.shape] != [options.batch_size]:
            found = f"some of shape {[*given.shape]}"
        elif ((given >= 0) & given.isfinite()).all():
            return
        else:
            found = "some that are negative or not finite"
        raise ValueError(
            f"memory_type={options.memory_type} needs priorities [{options.batch_size}] of an update, and "
            f"{options.agent_type} returned {found}"
        )


def _untrained(options: Options, agent: Agent, batch: Batch) -> list[str]:
    """Return a warning if an update leaves parameters of the agent as they were, although they have a gradient."""
    parameters = dict(_parameters(vars(agent), options.agent_type))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.zero_()  # in place, because it may be a view
    if agent.learn(batch).skipped:
        return []
    unchanged = [
        name
        for name, parameter in parameters.items()
        if parameter.grad is not None and parameter.grad.any() and torch.equal(parameter, before[name])
    ]
    return [f"no optimiser changes {', '.join(unchanged)}, of which the loss is a function"] if unchanged else []


def _parameters(tree: Any, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of an agent's attributes, with their paths."""
    if isinstance(tree, nn.Parameter):
        yield name, tree
    elif isinstance(tree, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in tree.named_parameters())
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _parameters(value, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _parameters(value, f"{name}[{index}]")


def _test_checkpoint(options: Options, agent: Agent, batch: Batch) -> list[str]:
    """Return a warning if one more update of this batch differs after a checkpoint has restored the agent.

    Raises:
        ValueError: a checkpoint cannot restore the agent.
    """
    resumed = options.make_agent(agent.spec, str(agent.device), options.learner.precision)
    resumed.init_learner()
    stored = _stored_state(agent)
    try:
        resumed.load_state_dict(stored)
    except Exception as error:
        raise ValueError(f"{options.agent_type} cannot be restored from its checkpoint: {text_of(error)}") from error
    if name := _difference(stored, _stored_state(resumed), "agent"):
        raise ValueError(f"{options.agent_type} is not the same after it is restored from its checkpoint: {name}")
    if agent.device.type != "cpu":  # whose sums are not repeatable
        return []
    states = []
    for learner in (agent, resumed):
        torch.manual_seed(options.seed)
        output = learner.learn(batch)
        states.append({"statistics": output.statistics, "state": _stored_state(learner)})
    name = _difference(states[0], states[1], "update")
    return [f"the first update after a resume would differ ({name}): the checkpoint lacks a state"] if name else []


def _stored_state(agent: Agent) -> Any:
    """Return the agent's state as it is read from a checkpoint."""
    file = io.BytesIO()
    torch.save(storable(agent.state_dict(), "agent"), file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _difference(first: Any, second: Any, name: str) -> str | None:
    """Return where two states differ, None if nowhere."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        # Settings of an optimiser are those of this start, and its learning rate is set at every step.
        parts = [(first[key], second[key], f"{name}.{key}") for key in first if key != "param_groups"]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        parts = [(*pair, f"{name}[{index}]") for index, pair in enumerate(zip(first, second))]
    else:
        tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
        return None if (torch.equal(first, second) if tensors else first == second) else name
    return next(filter(None, (_difference(*part) for part in parts)), None)


def _budget(options: Options, costs: throughput.StepCosts, rate: float, agent: Agent) -> str:
    """Return a text about the time until the run stops by itself."""

    def seconds_of(steps: float) -> float:
        warmup = min(options.rate_limiter.min_replay_size, steps)
        return warmup * costs.act / options.num_actors + (steps - warmup) / rate

    times: dict[str, Any] = {}
    if options.steps is not None:
        times[f"{count(options.steps)} agent steps"] = seconds_of(options.steps)
    if options.updates is not None:
        samples = options.updates * options.num_learners * options.batch_size * agent.samples_per_window
        steps = options.rate_limiter.min_replay_size + samples / options.samples_per_step
        limiter, memory = options.rate_limiter, options.memory_class
        paced = limiter.samples_per_insert is not None or memory.samples_per_step(options.memory) is not None
        times[f"{count(options.updates)} updates"] = seconds_of(steps) if paced else options.updates * costs.update
    if options.seconds is not None:
        times["as asked"] = options.seconds
    if not times:
        million = duration(seconds_of(1e6))
        return f"no steps, updates or seconds say when to stop; a million agent steps take about {million}"
    budget, shortest = min(times.items(), key=lambda item: item[1])
    return f"time to the budget: about {duration(shortest)} ({budget})"


# spaces ---------------------------------------------------------------------------------------------------------------
def wide_console() -> Console:
    """Return a console in which tables are readable, whatever the terminal's width, and brackets stay as they are."""
    return Console(highlight=False, markup=False, width=max(Console().width, WIDTH))


def table(spec: EnvSpec, model: Model | None) -> Table:
    """Return a line for each part of an observation, with the layers of the model that read it, and for the action."""
    columns = ("part", "space", "kind", "stored", "network")
    lines = Table(*columns, title=f"spaces of {spec.name}", **TABLE)
    only = [ObservationPart("observation", "", "picture" if spec.is_image else "vector", spec.frame.shape)]
    if spec.vector_size:
        only.append(ObservationPart("beside it", "", "vector", (spec.vector_size,)))
    for part in spec.parts or only:
        network = describe_torso(model, part.kind) if model is not None and part.shape else ""
        lines.add_row(part.name, part.space, part.kind, _stored(part, spec), network)
    chosen = spec.action.description + (", those that a mask allows" if spec.has_action_mask else "")
    lines.add_row("action", "", type(spec.action).__name__.lower(), describe(spec.action.array), chosen)
    return lines


def describe(array: ArraySpec) -> str:
    """Return dtype and shape of an array."""
    return f"{array.dtype} {list(array.shape)}" if array.shape else array.dtype


def describe_torso(model: Model, kind: PartKind) -> str:
    """Return the layers of the model's first torso that parts of this kind pass, before they join others or a head."""
    torsos = (getattr(module, "torso", None) for module in model.modules())
    torso = next((torso for torso in torsos if isinstance(torso, nn.Module)), None)
    if torso is None:  # A model of a user need not have one.
        return type(model).__name__
    if joined := next((layer for layer in torso.modules() if isinstance(layer, PictureAndVectorTorso)), None):
        torso = joined.convolutions if kind == "picture" else joined.vector
    layers = [layer for layer in torso.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    counts = Counter(map(type, layers))
    listed = [_layer(layer) for layer in layers if counts[type(layer)] <= MAX_LAYERS]
    counted = [f"{count} {kind.__name__}" for kind, count in counts.items() if count > MAX_LAYERS]
    return ", ".join(counted + listed) or "none: the heads read the numbers"


def _layer(layer: nn.Module) -> str:
    if isinstance(layer, nn.Conv2d):
        (height, width), stride = layer.kernel_size, layer.stride[0]
        return f"Conv2d {layer.out_channels} {height}x{width}/{stride}"
    return f"Linear {layer.out_features}"


def _stored(part: ObservationPart, spec: EnvSpec) -> str:
    if not part.shape:
        return "not stored"
    is_picture = part.kind == "picture"
    array = ArraySpec(spec.picture_shape, spec.frame.dtype) if is_picture else ArraySpec(part.shape, "float32")
    return describe(array) + (f", {spec.frame_stack} seen together" if spec.frame_stack else "")
