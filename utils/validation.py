"""What is wrong with Options that are well-formed: bounds, names, combinations of classes, and what this machine cannot do."""

import os
import re
from importlib.util import find_spec
from typing import Any

from core import settings
from core.agent import Agent
from core.env import Discrete, EnvSpec
from core.frames import RAW
from core.memories.unrolls import UnrollMemory
from core.shared import ArraySpec, available_bytes
from core.trajectory import Layout, WindowSpec
from utils import devices, env_counts
from utils.factory import AgentsDict, EnginesDict, Factory, MemoriesDict, ModelsDict, suggestion, why_not
from utils.options import Options
from utils.refused import told

FILE_NAME = re.compile(r"[\w.+-]+")
SIZED = {"agent", "memory", "model", "actor", "learner", "clock", "storage", "num_actors", "num_envs_per_actor",
         "num_learners"}  # what sizes are computed from
PROCESS_BYTES = 150 << 20  # memory of its own that a process needs beside the shared rows, roughly
RAY_BYTES = 500 << 20      # the same of Ray's own processes


def problems(options: Options) -> list[str]:
    """Every problem, one sentence each. Classes that could not be had (Params None) were reported before and are passed over."""
    if options.num_envs_per_actor == 0 and options.actor.groups > 0:  # to be tried out: at least so many
        options = env_counts.with_count(options, env_counts.counts(options)[0])
    found = settings.problems(options)
    out_of_bounds = {re.split("[.=]", sentence)[0] for sentence in found}  # "agent.lr=-1 must be ...": agent
    found += _names(options) + _mode(options) + _trackers(options) + devices.problems(options)
    if None in (options.agent, options.env, options.memory, options.model):
        return found
    found += _memory_type(options) + devices.combinations(options) + options.agent_class.problems(options.agent)
    if "env" in out_of_bounds:
        return found + _head(options)
    try:
        spec = environment_spec(options)
    except (ValueError, ImportError) as error:
        return [*found, f"game={options.game} (env_type={options.env_type}): {error}", *_head(options)]
    except Exception as error:  # the code of an environment can fail in any way
        return [*found, f"game={options.game} (env_type={options.env_type}) cannot be made: {told(error)}", *_head(options)]
    found += _video(options)
    mismatches = _actions(options, spec) + _head(options) + _observations(options, spec)
    found += mismatches
    if not mismatches and not out_of_bounds & SIZED and options.num_actors >= options.num_learners:
        found += _sizes(options, spec)
    return found


def environment_spec(options: Options) -> EnvSpec:
    """Raises ValueError for an unknown game, ImportError for a missing package."""
    env = options.env_class(options.env, options.game, 1, training=options.mode == 1)
    try:
        return env.spec
    finally:
        env.close()


def layout(options: Options, spec: EnvSpec, agent: Agent, learner: int = 0) -> Layout:
    """The rows that all actors of a learner share; learner 0 has the most."""
    memory, num_actors = options.memory_class, actors_of(options, learner)
    extras, feature_dtype = dict(agent.extras), memory.feature_dtype(options.memory)
    if feature_dtype:
        extras["features"] = ArraySpec(agent.feature_field.shape, feature_dtype)
    sizes = options.agent.batch_size, agent.window.length, num_actors
    capacity = memory.ring_steps(options.memory, *sizes)
    kept = -(-memory.kept_steps(options.memory, *sizes) // (num_actors * options.num_envs_per_actor))
    states = tuple(ArraySpec(tuple(tensor.shape[1:]), "float32") for tensor in agent.initial_state(1))
    return Layout.of(spec, extras, capacity=capacity, num_actors=num_actors, num_envs=options.num_envs_per_actor,
                     chunk_length=agent.window.stride or options.actor.chunk_length, with_priority=memory.with_priority, states=states,
                     storage=options.storage, kept_rows=agent.window.length + kept)


def actors_of(options: Options, learner: int) -> int:
    """How many actors i there are with i modulo num_learners = learner."""
    return len(range(learner, options.num_actors, options.num_learners))


def layouts(options: Options, spec: EnvSpec, agent: Agent) -> list[Layout]:
    """Of every learner's rows."""
    return [layout(options, spec, agent, learner) for learner in range(options.num_learners)]


def stored_bytes(options: Options, rings: list[Layout], window: WindowSpec) -> int:
    """Of the replay in main memory: the rings, what the rule keeps outside them, copies that learners have of them there, and those that
    are made to store them."""
    own_bytes, copies = options.memory_class.own_bytes, 1 + options.learner.checkpoint_replay
    return sum(copies * (rows.nbytes + own_bytes(options.memory, rows, window.length)) + devices.copied_bytes(options, rows, window)
               for rows in rings)


def needed_bytes(options: Options, stored: int) -> int:
    """Of a run with such a replay, roughly."""
    outside = options.ray.object_store_bytes + RAY_BYTES if options.engine == "ray" else 0
    return stored + outside + PROCESS_BYTES * (options.num_actors + options.num_learners + 3)


# names and modes ------------------------------------------------------------------------------------------------------
def _names(options: Options) -> list[str]:
    found = [f"{name}={value!r} may hold letters, digits and . _ + - only: it names files"
             for name, value in (("machine", options.machine), ("timestamp", options.timestamp))
             if value is None or not FILE_NAME.fullmatch(value)]
    if options.engine not in EnginesDict and ":" not in options.engine:
        found.append(f"engine={options.engine!r} is unknown{suggestion(options.engine, EnginesDict)}; there are {', '.join(EnginesDict)}")
    else:
        try:
            engine = EnginesDict[options.engine]
        except Exception as error:  # a module of the user's own can fail in any way
            found.append(why_not(f"engine={options.engine}", error))
        else:
            found += engine.problems(options) if hasattr(engine, "problems") else []
    if options.actor.groups > 0 and options.num_envs_per_actor % options.actor.groups:
        found.append(f"actor.groups={options.actor.groups} must divide num_envs_per_actor={options.num_envs_per_actor}")
    return found


def _mode(options: Options) -> list[str]:
    found = []
    if options.mode == 1:
        if options.resume is not None and options.model_file is not None:
            found.append("resume and model_file exclude each other: continue a run with everything, or start a new one from weights")
        return found
    if options.check:
        found.append("check looks at a training: it is for mode 1")
    if options.resume is not None:
        found.append("resume is for mode 1; mode 2 takes its run by machine and timestamp, or a model_file")
    if options.render and options.record:
        found.append("render and record exclude each other")
    if options.render and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        found.append("render=True needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set: use --record")
    return found


def _recorded(options: Options) -> str | None:
    """The setting that asks for videos, as it was given."""
    if options.mode == 2:
        return "record=True" if options.record else None
    return f"evaluator.record_every={options.evaluator.record_every}" if options.evaluator.record_every else None


def _video(options: Options) -> list[str]:
    """Packages, and an environment that draws: whatever can keep it from that is found by drawing once."""
    asked = _recorded(options)
    if asked is None:
        return []
    if not (find_spec("imageio") and find_spec("imageio_ffmpeg")):
        return [f"{asked} needs packages that are not installed: pip install -e \".[video]\""]
    try:
        env = options.env_class(options.env, options.game, 1, training=False, render_mode="rgb_array")
        try:
            env.reset(0)
            env.render()
        finally:
            env.close()
    except (ValueError, ImportError, NotImplementedError) as error:
        return [f"{asked}: {error}"]
    return []


def _trackers(options: Options) -> list[str]:
    return [f"logger.{name}={getattr(options.logger, name)} needs a package that is not installed: pip install -e \".[{name}]\""
            for name in ("wandb", "mlflow") if options.mode == 1 and getattr(options.logger, name) is not None and not find_spec(name)]


# combinations ---------------------------------------------------------------------------------------------------------
def _memory_type(options: Options) -> list[str]:
    allowed, together = options.agent_class.memories, options.learner.batches_per_draw
    if options.memory_type not in MemoriesDict:  # a memory of the user's own
        return []
    if options.memory_type not in allowed:
        return [f"memory_type={options.memory_type} does not suit agent_type={options.agent_type}, "
                f"which learns from memory_type {' or '.join(allowed)}"]
    if together > 1 and issubclass(options.memory_class, UnrollMemory):
        return [f"learner.batches_per_draw={together} must be 1 with memory_type={options.memory_type}, whose batches have parts"]
    return []


def _actions(options: Options, spec: EnvSpec) -> list[str]:
    if isinstance(spec.action, options.agent_class.actions):
        return []
    kind = "discrete" if isinstance(spec.action, Discrete) else "continuous"
    fitting = _fitting(AgentsDict, lambda agent: isinstance(spec.action, agent.actions))
    return [f"agent_type={options.agent_type} cannot take the {kind} actions of game={options.game}; {_could('agent_type', fitting)}"]


def _head(options: Options) -> list[str]:
    agent, model = options.agent_class, options.model_class
    if model.head == agent.head:
        return []
    fitting = _fitting(ModelsDict, lambda other: other.head == agent.head)
    return [f"model_type={options.model_type} gives {model.head!r} and agent_type={options.agent_type} needs {agent.head!r}; "
            f"{_could('model_type', fitting)}"]


def _observations(options: Options, spec: EnvSpec) -> list[str]:
    kind, agent, model = "image" if spec.is_image else "vector", options.agent_class, options.model_class
    if model.observations == kind:
        return []
    fitting = _fitting(ModelsDict, lambda other: other.head == agent.head and other.observations == kind)
    return [f"model_type={options.model_type} takes {model.observations} observations and game={options.game} "
            f"(env_type={options.env_type}) gives {kind} ones; {_could('model_type', fitting)}"]


def _fitting(factory: Factory, suits: Any) -> list[str]:
    names = []
    for name in factory:
        try:
            if suits(factory[name]):
                names.append(name)
        except ImportError:
            continue
    return names


def _could(field: str, names: list[str]) -> str:
    return f"{field} could be {' or '.join(names)}" if names else f"no {field} fits yet"


# sizes ----------------------------------------------------------------------------------------------------------------
def _sizes(options: Options, spec: EnvSpec) -> list[str]:
    agent = options.make_agent(spec)
    try:
        _ = agent.model
    except ValueError as error:
        return [f"model_type={options.model_type} cannot see game={options.game}: {error}"]
    except Exception as error:  # as can that of a model
        return [f"model_type={options.model_type} cannot be made for game={options.game}: {told(error)}"]
    if options.mode == 2:
        return []
    found = options.memory_class.problems(options.memory, options.agent.batch_size)
    return found or _ring(options, spec, agent) + _storage(options, spec, agent) + _limiter(options, agent.samples_per_window)


def _ring(options: Options, spec: EnvSpec, agent: Agent) -> list[str]:
    """The rows must hold a window of every stream, fit into what is free, and one must be whole before actors have to wait."""
    streams, length = actors_of(options, 0) * options.num_envs_per_actor, agent.window.length  # of a learner
    capacity, clock = getattr(options.memory, "capacity", None), options.clock
    in_steps = not issubclass(options.memory_class, UnrollMemory)  # theirs count unrolls
    if in_steps and capacity is not None and capacity < streams * (length + 2):
        return [f"memory.capacity={capacity} is too small for two windows of {length + 1} rows in each of "
                f"{streams} environments: at least {streams * (length + 2)}"]
    rings = layouts(options, spec, agent)
    streams = options.num_actors * options.num_envs_per_actor
    chunk_length = rings[0].chunk_length
    first = streams * -(-(length + 2 * in_steps) // chunk_length) * chunk_length
    if clock.samples_per_insert is not None and clock.learn_start + clock.tolerance < first:
        return [f"clock.learn_start={clock.learn_start} plus clock.tolerance={clock.tolerance} must be at least {first} agent steps, which "
                f"{streams} environments take to store the first windows of {length + 1} rows"]
    stored = stored_bytes(options, rings, agent.window)
    needed, free = needed_bytes(options, stored), available_bytes()
    if needed <= free:
        return devices.device_memory(options, rings[0], agent.window)
    each = f" for each of {options.num_learners} learners" if len(rings) > 1 else ""
    if capacity is None:
        return [f"the replay rows of memory_type={options.memory_type}{each} need {needed:,} bytes and {free:,} are free; lower its "
                "capacities"]
    fitting = max(int((free - (needed - stored)) / (stored / capacity)), 0)
    return [f"memory.capacity={capacity}{each} needs {needed:,} bytes and {free:,} are free; about {fitting:,} would fit"]


def _storage(options: Options, spec: EnvSpec, agent: Agent) -> list[str]:
    """Packing is for pictures, and what an arena holds however badly it compresses, or raw rows, must do for windows."""
    storage, num_actors, length = options.storage, actors_of(options, 0), agent.window.length
    if storage.codec == RAW:
        kept = options.memory_class.kept_steps(options.memory, options.agent.batch_size, length, num_actors)
        least = max(num_actors * options.num_envs_per_actor * (length + 2), kept) * spec.frame.nbytes
    elif spec.is_image:
        least = layout(options, spec, agent).arena_bytes * num_actors
    else:
        return [f"storage.codec={storage.codec} packs pictures and game={options.game} (env_type={options.env_type}) gives vectors"]
    if storage.bytes is None or storage.bytes >= least:
        return []
    return [f"storage.bytes={storage.bytes} is too small for windows of {length + 1} rows in each of "
            f"{num_actors * options.num_envs_per_actor} environments: at least {least}"]


def _limiter(options: Options, samples_per_window: int) -> list[str]:
    """Actors must be allowed far enough ahead to owe each learner one batch, or both wait for ever."""
    ratio, tolerance = options.clock.samples_per_insert, options.clock.tolerance
    replays = options.learner.updates_per_replay
    batch_size = options.agent.batch_size * samples_per_window * options.num_learners * replays
    if ratio is not None and options.memory_class.paces(options.memory):
        return [f"clock.samples_per_insert={ratio} must be None with memory_type={options.memory_type}: a queue is learnt from once "
                "and sets the pace itself"]
    if ratio is None and options.engine == "inline" and not options.memory_class.paces(options.memory):
        return [f"clock.samples_per_insert=None with memory_type={options.memory_type} never ends with engine=inline, whose learner learns "
                "as long as it may before actors go on: give a number"]
    if ratio is None or tolerance * ratio >= batch_size:
        return []
    return [f"clock.tolerance={tolerance} times clock.samples_per_insert={ratio} must be at least the {batch_size} samples of "
            + ("a batch" if options.num_learners == 1 else f"{options.num_learners} learners' batches")
            + (" times learner.updates_per_replay" if replays > 1 else "")]
