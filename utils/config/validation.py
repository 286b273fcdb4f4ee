"""Validation of options together: names, combinations of classes, devices, and what this machine cannot do.

pydantic has validated each option by itself.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from typing import Any

import torch

from core.common.shared_arrays import next_multiple
from core.device.recorded_work import missing_compiler
from core.runtime.options import make_env
from core.specs import Continuous, Discrete, EnvSpec, Mixed, MultiDiscrete
from utils import run_registry
from utils.config import memory_budget
from utils.config.rows import SECTIONS, missing_classes
from utils.errors import ConfigurationError, describe_exception, import_extra, problems_of
from utils.factory import EnginesDict, why_not
from utils.options import Options

MAX_NAME_BYTES = 255  # of a file name, on Linux's file systems
FILE_NAME = re.compile(r"[\w.+-]+")
COUNTS = tuple(2**exponent for exponent in range(2, 10))  # 4 .. 512, environments that num_envs_per_actor=0 tries
# Options and sections that the memory budget is computed from.
SIZED = {"agent", "memory", "model", "actor", "learner", "rate_limiter", "replay", "num_actors", "num_envs_per_actor",
         "num_learners"}  # fmt: skip


def problems(options: Options, refused: Iterable[str] = ()) -> list[str]:
    """Return every problem of options that are well-formed each, one sentence each.

    The `refused` ones have other values than those given. Memory that is computed from them is not judged.
    """
    if options.num_envs_per_actor == 0:  # numbers are tried out later, beginning with the smallest
        options = dataclasses.replace(options, num_envs_per_actor=env_counts(options)[0])
    found = [*names(options), *_mode(options), *device_problems(options)]
    if missing_classes(options):  # which was reported
        return found
    found += [*_classes(options), *_on_policy(options), *_schedule(options), *_captured(options), *_compiled(options)]
    found += [*_minibatches(options), *_placement(options), *problems_of(options.agent_class, options.agent)]
    game = f"game={options.game} (env_type={options.env_type})"
    try:
        spec = environment_spec(options)
    except (ValueError, ImportError) as error:
        return [*found, f"{game}: {error}", *_head(options)]
    except Exception as error:  # the code of an environment can fail in any way
        return [*found, f"{game} cannot be made: {describe_exception(error)}", *_head(options)]
    mismatches = [*_actions(options, spec), *_head(options), *_observations(options, spec)]
    found += [*_video(options), *mismatches]
    sized = SIZED & {name.partition(".")[0] for name in refused}
    if not mismatches and not sized and options.num_actors >= options.num_learners:
        found += memory_budget.problems(resolved(options), spec) or _replay(options)
    return found


def env_counts(options: Options) -> list[int]:
    """Return the numbers that num_envs_per_actor=0 tries, smallest first, with equally many in every split."""
    return list(dict.fromkeys(next_multiple(count, options.actor.num_env_splits) for count in COUNTS))


def environment_spec(options: Options) -> EnvSpec:
    """Return the spec of the environment.

    Raises:
        ValueError: an unknown game, a spec that contradicts itself, or no mask where the options say.
        ImportError: a missing package.
    """
    with closing(make_env(options, 1, training=options.mode == 1)) as env:
        if env.spec.has_action_mask:
            env.reset(0)  # which raises ValueError if there is no mask where the options say
        return env.spec


# names and modes ------------------------------------------------------------------------------------------------------
def names(options: Options) -> Iterator[str]:
    """Yield problems of the names of a run's files, of its engine, and of the split of its environments."""
    parts = {"machine": options.machine, "timestamp": options.timestamp}
    if wrong := [name for name, value in parts.items() if value is None or not FILE_NAME.fullmatch(value)]:
        for name in wrong:
            yield f"{name}={parts[name]!r} may hold letters, digits and . _ + - only: it names files"
    elif (size := len(os.fsencode(run_registry.longest_name(options.signature)))) > MAX_NAME_BYTES:
        yield (
            f"machine={options.machine!r} and timestamp={options.timestamp!r} make file names of {size} bytes, and no "
            f"file system takes more than {MAX_NAME_BYTES}: shorten them"
        )
    try:
        engine = EnginesDict[options.engine]
    except Exception as error:  # a module of the user's own can fail in any way
        yield why_not(f"engine={options.engine}", error)
    else:
        yield from engine.problems(options) if hasattr(engine, "problems") else ()
    count, splits = options.num_envs_per_actor, options.actor.num_env_splits
    if count % splits:
        yield f"actor.num_env_splits={splits} must divide num_envs_per_actor={count}"


def _mode(options: Options) -> Iterator[str]:
    if options.mode == 1:
        if options.record:
            yield "record=True is for mode 2: set evaluator.record_every to record episodes while a run trains"
        if options.render:
            yield "render=True is for mode 2: a run that trains opens no window"
        if options.resume is not None and options.model_file is not None:
            yield (
                "resume and model_file exclude each other: continue a run with everything, or start a new one from "
                "weights"
            )
        before = options.rate_limiter.min_replay_size
        if options.resume is None and options.steps is not None and options.steps < before:
            yield f"steps={options.steps} ends the run before its first update: rate_limiter.min_replay_size={before}"
        if options.engine == "inline" and options.num_learners > 1:
            yield f"num_learners={options.num_learners} needs engine=local or ray: engine=inline runs one learner"
        if options.supervisor.elastic and options.engine in ("local", "inline"):
            yield f"supervisor.elastic={options.supervisor.elastic} needs engine=ray, whose nodes come and go"
        for name in ("wandb", "mlflow"):
            if (project := getattr(options.logger, name)) is not None and not find_spec(name):
                yield f'logger.{name}={project} needs a package that is not installed: pip install -e ".[{name}]"'
        return
    if options.check:
        yield "check looks at a training: it is for mode 1"
    if options.resume is not None:
        yield "resume is for mode 1; mode 2 takes its run by machine and timestamp, or a model_file"
    if options.render and options.record:
        yield "render and record exclude each other"
    if options.render and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        yield "render=True needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set: use --record"


def _video(options: Options) -> Iterator[str]:
    """Yield why nothing can be shown or recorded: a missing package, or an environment that fails to draw."""
    every, testing = options.evaluator.record_every, options.mode == 2
    if testing and options.render and not options.record:
        yield from _drawing(options, "human", "render=True")
    if not (options.record if testing else every):
        return
    asked = "record=True" if testing else f"evaluator.record_every={every}"
    try:
        for name in ("imageio", "imageio_ffmpeg"):
            import_extra(asked, name, "video")
    except ConfigurationError as error:
        yield str(error)
    else:
        yield from _drawing(options, "rgb_array", asked)


def _drawing(options: Options, render_mode: str, asked: str) -> Iterator[str]:
    try:
        with closing(make_env(options, 1, training=False, render_mode=render_mode)) as env:
            env.reset(0)
            if render_mode == "rgb_array":
                env.render()
    except (ValueError, ImportError, NotImplementedError) as error:
        yield f"{asked}: {error}"
    except Exception as error:  # the code that draws can fail in any way
        yield f"{asked}: game={options.game} (env_type={options.env_type}) cannot be drawn: {describe_exception(error)}"


# combinations ---------------------------------------------------------------------------------------------------------
def _classes(options: Options) -> Iterator[str]:
    """Yield why the agent does not learn from the memory's batches or the environment's rewards."""
    kinds, held = options.agent_class.window_kinds, options.memory_class.window_kinds
    agent, memory = f"agent_type={options.agent_type}", f"memory_type={options.memory_type}"
    if not set(held) & set(kinds):
        fitting = _could("memory_type", lambda memory: bool(set(memory.window_kinds) & set(kinds)))
        yield f"{memory} holds {' and '.join(held)}, and {agent} learns from {' or '.join(kinds)}; {fitting}"
    elif (together := options.learner.batches_per_sample) > 1 and not {"transitions", "sequences"} & set(held):
        yield f"learner.batches_per_sample={together} must be 1 with {memory}, whose batches cannot be drawn together"
    clipping = getattr(options.env, "reward_clipping", "none")
    if options.mode == 1 and clipping != "none" and options.agent_class.refuses_clipped_rewards(options.agent):
        yield (
            f"env.reward_clipping={clipping} does not fit {agent}, which learns from raw rewards: set "
            "env.reward_clipping=none or agent.allow_clipped_rewards=True"
        )


def _replay(options: Options) -> Iterator[str]:
    """Yield why options of the agent do nothing: no step is replayed. The memory's own options have no problem."""
    is_replay = options.memory_class.samples_per_step(options.memory) is None or options.samples_per_step > 1
    if (for_replay := options.agent_class.replay_options(options.agent)) and not is_replay:
        acting, memory = (f"agent.{name}={getattr(options.agent, name)}" for name in for_replay), options.memory_type
        yield (
            f"{' and '.join(acting)} needs replayed steps, and memory_type={memory} gives every step once; "
            "memory_type=mixed replays"
        )


def _on_policy(options: Options) -> Iterator[str]:
    """Yield why rollouts would not be whole, or not by the newest parameters."""
    if not options.memory_class.on_policy or options.mode != 1:
        return
    actors, rest = divmod(options.num_actors, options.num_learners)
    total = actors * options.num_envs_per_actor
    for name, value, expected, meaning in (
        ("agent.batch_size", options.batch_size, total, ", the number of a learner's environments,"),
        ("actor.num_env_splits", options.actor.num_env_splits, 1, ""),
        ("learner.publish_period", options.learner.publish_period, 1, ""),
        ("rate_limiter.min_replay_size", options.rate_limiter.min_replay_size, 1, ""),
    ):
        if value != expected:
            yield (
                f"{name}={value} must be {expected}{meaning} with memory_type={options.memory_type}, which collects "
                "whole rollouts by the newest parameters"
            )
    if rest:
        yield (
            f"num_actors={options.num_actors} must be a multiple of num_learners={options.num_learners} with "
            f"memory_type={options.memory_type}, whose rollouts are of one size"
        )
    if options.engine == "ray":
        yield (
            f"memory_type={options.memory_type} needs engine=local or inline: with ray, actors on other nodes get "
            "parameters late; memory_type=queue corrects for that"
        )


def _schedule(options: Options) -> Iterator[str]:
    """Yield why a schedule of the learning rate has no length or no end."""
    agent: Any = options.agent
    schedule = getattr(agent, "lr_schedule", "constant")
    if options.mode != 1 or schedule == "constant":
        return
    if schedule == "step" and agent.lr_decay > 1:
        yield f"agent.lr_schedule=step with agent.lr_decay={agent.lr_decay} would raise the rate without end: at most 1"
    for name in ("learning_rate", "critic_learning_rate"):
        if schedule == "step" and agent.lr_end > (rate := getattr(agent, name, agent.lr_end)):
            yield f"agent.lr_schedule=step with agent.lr_end={agent.lr_end} would begin above agent.{name}={rate}"
    if agent.lr_schedule_updates is not None:
        return
    if schedule == "step":
        yield "agent.lr_schedule=step needs agent.lr_schedule_updates, the updates between two steps"
    elif options.steps is None and options.updates is None:
        yield f"agent.lr_schedule={schedule} needs agent.lr_schedule_updates, or steps or updates, which end the run"


def _minibatches(options: Options) -> Iterator[str]:
    """Yield why advantages that are normalised in each minibatch would all be 0."""
    agent: Any = options.agent
    if options.mode != 1 or not getattr(agent, "normalize_advantages", False):
        return
    steps = agent.unroll_length if getattr(options.model, "lstm", 0) else 1  # in a sample of a minibatch
    samples = options.batch_size * agent.unroll_length // steps
    size = max(samples // agent.minibatches, 1) * steps * options.num_learners
    if size < 2:
        yield (
            "agent.normalize_advantages=True needs 2 samples in each minibatch, and "
            f"agent.minibatches={agent.minibatches} divides {samples}"
        )


def _actions(options: Options, spec: EnvSpec) -> Iterator[str]:
    chosen, game = f"agent_type={options.agent_type}", f"game={options.game}"
    if isinstance(spec.action, options.agent_class.actions):
        if spec.has_action_mask and not options.agent_class.uses_action_masks:
            able = _could(
                "agent_type", lambda other: other.uses_action_masks and isinstance(spec.action, other.actions)
            )
            yield f"{chosen} would take illegal actions of {game}, because it does not use masks; {able}"
        return
    fitting = _could("agent_type", lambda other: isinstance(spec.action, other.actions))
    if not isinstance(spec.action, MultiDiscrete):
        kind = {Discrete: "discrete", Continuous: "continuous", Mixed: "mixed"}[type(spec.action)]
        yield f"{chosen} cannot take the {kind} actions of {game}; {fitting}"
    elif limit := options.agent_class.max_joint_actions(options.agent):
        yield (
            f"{chosen} would take the {spec.action.description} of {game} as {spec.action.num_joint_actions:,} joint "
            f"actions, more than agent.max_joint_actions={limit}: raise it, or {fitting}"
        )
    else:
        yield f"{chosen} cannot take the {spec.action.description} of {game}; {fitting}"


def _head(options: Options) -> Iterator[str]:
    given, needed = options.model_class.output_kind, options.agent_class.required_output
    if given != needed:
        fitting = _could("model_type", lambda other: other.output_kind == needed)
        gives, needs = f"model_type={options.model_type} gives", f"agent_type={options.agent_type} needs"
        yield f"{gives} {given!r} and {needs} {needed!r}; {fitting}"


def _observations(options: Options, spec: EnvSpec) -> Iterator[str]:
    kind, model = "image" if spec.is_image else "vector", options.model_class
    network, game = f"model_type={options.model_type}", f"game={options.game} (env_type={options.env_type})"
    if model.observations != kind:
        wanted = options.agent_class.required_output, kind
        fitting = _could("model_type", lambda other: (other.output_kind, other.observations) == wanted)
        yield f"{network} takes {model.observations} observations and {game} gives {kind} ones; {fitting}"
    elif spec.vector_size and not model.reads_vectors:
        yield (
            f"{network} reads pictures alone, and {game} has {spec.vector_size} numbers beside them: keep the pictures "
            "with env.observation_keys"
        )


def _could(field: str, suits: Callable[[Any], bool]) -> str:
    """Return which of the classes that can be imported here an option could name instead."""
    names, factory = list[str](), dict(SECTIONS.values())[field]
    for name in factory:
        with suppress(ImportError):
            names += [name] if suits(factory[name]) else []
    return f"{field} could be {' or '.join(names)}" if names else f"no {field} fits yet"


# devices --------------------------------------------------------------------------------------------------------------
def resolved(options: Options) -> Options:
    """Return the options with the devices that "auto" means on this machine."""
    actor = dataclasses.replace(options.actor, device=resolved_device(options.actor.device))
    return dataclasses.replace(options, device=resolved_device(options.device), actor=actor)


def resolved_device(device: str) -> str:
    """Return cuda or cpu for "auto", and any other device as it is."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def device_problems(options: Options) -> list[str]:
    """Return a sentence for each device that is not here, and for each option that needs a missing kind of device."""
    learner, training = options.learner, options.mode == 1
    here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    named = {"device": options.device} | ({"actor.device": options.actor.device} if training else {})
    found = [*_learners(options)] if training and options.num_learners > 1 else []
    found += [
        f"{name}={device!r} is not on this machine, which has {', '.join(here)}"
        for name, device in named.items()
        if {"auto": "cpu", "cuda": "cuda:0"}.get(device, device) not in here
    ]
    if found or not training:
        return found
    return [
        f"{name}={value} needs a CUDA device and {of}={named[of]!r} is none; this machine has {', '.join(here)}"
        for name, value, of in (
            ("learner.cuda_graph", learner.cuda_graph, "device"),
            ("learner.precision", learner.precision, "device"),
            ("actor.cuda_graph", options.actor.cuda_graph, "actor.device"),
        )
        if value in ("on", "tf32") and not resolved_device(named[of]).startswith("cuda")
    ]


def _learners(options: Options) -> Iterator[str]:
    """Yield what several learners lack: an actor each, or a GPU each."""
    count, device, gpus = options.num_learners, resolved_device(options.device), torch.cuda.device_count()
    if options.num_actors < count:
        yield f"num_learners={count} need an actor each: num_actors={options.num_actors} must be at least {count}"
    if device.startswith("cuda:"):
        yield f"num_learners={count} need a GPU each and device={device!r} is one: device must be cuda or cpu"
    elif device == "cuda" and 0 < gpus < len(options.learners_at_home):
        yield f"num_learners={count} need a GPU each and this machine has {gpus}: take fewer or device=cpu"


def _captured(options: Options) -> Iterator[str]:
    """Yield why updates cannot be captured in a CUDA graph although learner.cuda_graph=on asks for it."""
    learner, agent, count = options.learner, options.agent_class, options.learner.updates_per_graph_launch
    if learner.cuda_graph != "on":
        return
    if not agent.supports_cuda_graphs:
        able = _could("agent_type", lambda other: other.supports_cuda_graphs)
        yield f"learner.cuda_graph=on: agent_type={options.agent_type} does not itself set supports_cuda_graphs; {able}"
    elif (period := agent.update_cycle(options.agent)) and count % period:
        yield (
            f"learner.cuda_graph=on: learner.updates_per_graph_launch={count} must be a multiple of {period}, after "
            f"which updates of agent_type={options.agent_type} repeat"
        )
    if options.num_learners > 1:
        yield (
            f"learner.cuda_graph=on is for one learner, and num_learners={options.num_learners}: what they tell each "
            "other between two updates is not captured"
        )


def _compiled(options: Options) -> Iterator[str]:
    """Yield why updates cannot be compiled although learner.compile=yes asks for it."""
    learner = options.learner
    if learner.compile != "yes" or options.mode != 1:
        return
    if not options.agent_class.supports_cuda_graphs:
        able = _could("agent_type", lambda other: other.supports_cuda_graphs)
        yield f"learner.compile=yes: agent_type={options.agent_type} does not itself set supports_cuda_graphs; {able}"
    if resolved_device(options.device) != "cpu":
        yield f"learner.compile=yes is for device=cpu, not {options.device}: GPUs have learner.cuda_graph"
    for name, value, needed in (
        ("num_learners", options.num_learners, 1),
        ("learner.replay_device", learner.replay_device, "cpu"),
        ("learner.microbatch_on_oom", learner.microbatch_on_oom, False),
    ):
        if value != needed:
            yield f"learner.compile=yes needs {name}={needed}, not {value}"
    if reason := missing_compiler():
        yield f"learner.compile=yes: {reason}; learner.compile=auto runs without"


def _placement(options: Options) -> Iterator[str]:
    """Yield what does not go together with the device of the replay."""
    learner, count = options.learner, options.learner.updates_per_graph_launch
    if learner.replay_device == "cpu":
        if count > 1:
            yield f"learner.updates_per_graph_launch={count} needs learner.replay_device=learner"
        if learner.cuda_graph == "on" and learner.microbatch_on_oom:
            both = "learner.microbatch_on_oom=True does not go with learner.cuda_graph=on"
            yield f"{both}: captured batches have one size"
        return
    if options.memory_class.device_class is None:
        able = _could("memory_type", lambda other: other.device_class is not None)
        yield f"memory_type={options.memory_type} cannot be on the learner's device; {able}"
    if learner.microbatch_on_oom:
        yield (
            "learner.microbatch_on_oom=True needs learner.replay_device=cpu: batches drawn on the learner's device "
            "have one size"
        )
