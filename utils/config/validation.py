"""Validation of options together: names, combinations of classes, devices, and what this machine cannot do.

pydantic has validated each option by itself.
"""

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from core.common.foreign_code import foreign_code
from core.common.shared_arrays import next_multiple
from core.device.compiled_work import missing_compiler
from core.memories.unrolls.unroll_memory import UnrollMemory
from core.runtime.options import make_env
from core.specs import Continuous, Discrete, EnvSpec, Mixed, MultiDiscrete
from utils import run_registry
from utils.config import memory_budget
from utils.config.rows import SECTIONS, missing_classes
from utils.errors import describe_exception
from utils.factory import EnginesDict, why_not
from utils.options import Options

MAX_NAME_BYTES = 255  # of a file name, on Linux's file systems
FILE_NAME = re.compile(r"[\w.+-]+")
COUNTS = tuple(2**exponent for exponent in range(2, 10))  # 4 .. 512, environments that num_envs_per_actor=0 tries
SIZED = {
    "agent",
    "memory",
    "model",
    "actor",
    "learner",
    "rate_limiter",
    "replay",
    "num_actors",
    "num_envs_per_actor",
    "num_learners",
}  # options and sections that the memory budget is computed from


def problems(options: Options, refused: Iterable[str] = ()) -> list[str]:
    """Return every problem of options that are well-formed each, one sentence each.

    Args:
        options: judged together.
        refused: names of options that have other values, because those given were refused. Memory that is computed from
            such options is not judged.
    """
    if options.num_envs_per_actor == 0:  # numbers are tried out later, beginning with the smallest
        options = dataclasses.replace(options, num_envs_per_actor=env_counts(options)[0])
    found = _names(options) + _mode(options) + device_problems(options)
    if missing_classes(options):  # which was reported
        return found
    found += (
        _memory_type(options)
        + _clipped_rewards(options)
        + _on_policy(options)
        + _schedule(options)
        + _placement(options)
        + options.agent_class.problems(options.agent)
    )
    game = f"game={options.game} (env_type={options.env_type})"
    try:
        spec = environment_spec(options)
    except (ValueError, ImportError) as error:
        return [*found, f"{game}: {error}", *_head(options)]
    except Exception as error:  # the code of an environment can fail in any way
        return [*found, f"{game} cannot be made: {describe_exception(error)}", *_head(options)]
    mismatches = _actions(options, spec) + _head(options) + _observations(options, spec)
    found += _video(options) + mismatches
    sized = SIZED & {name.partition(".")[0] for name in refused}
    if not mismatches and not sized and options.num_actors >= options.num_learners:
        found += memory_budget.problems(resolved(options), spec)
    return found


def env_counts(options: Options) -> list[int]:
    """Return the numbers that num_envs_per_actor=0 tries, smallest first, with equally many in every group."""
    return list(dict.fromkeys(next_multiple(count, options.actor.num_env_splits) for count in COUNTS))


def environment_spec(options: Options) -> EnvSpec:
    """Return the spec of the environment. Raises ValueError for an unknown game, ImportError for a missing package."""
    env = make_env(options, 1, training=options.mode == 1)
    try:
        return env.spec
    finally:
        env.close()


# names and modes ------------------------------------------------------------------------------------------------------
def _names(options: Options) -> list[str]:
    found = [
        f"{name}={value!r} may hold letters, digits and . _ + - only: it names files"
        for name, value in (("machine", options.machine), ("timestamp", options.timestamp))
        if value is None or not FILE_NAME.fullmatch(value)
    ]
    if (size := len(os.fsencode(run_registry.longest_name(options.signature)))) > MAX_NAME_BYTES and not found:
        found.append(
            f"machine={options.machine!r} and timestamp={options.timestamp!r} make file names of {size} bytes, and no "
            f"file system takes more than {MAX_NAME_BYTES}: shorten them"
        )
    try:
        engine = EnginesDict[options.engine]
    except Exception as error:  # a module of the user's own can fail in any way
        found.append(why_not(f"engine={options.engine}", error))
    else:
        found += engine.problems(options) if hasattr(engine, "problems") else []
    if options.num_envs_per_actor % options.actor.num_env_splits:
        found.append(
            f"actor.num_env_splits={options.actor.num_env_splits} must divide "
            f"num_envs_per_actor={options.num_envs_per_actor}"
        )
    return found


def _mode(options: Options) -> list[str]:
    found = []
    if options.mode == 1:
        if options.record:
            found.append("record=True is for mode 2: set evaluator.record_every to record episodes while a run trains")
        if options.render:
            found.append("render=True is for mode 2: a run that trains opens no window")
        if options.resume is not None and options.model_file is not None:
            found.append(
                "resume and model_file exclude each other: continue a run with everything, or start a new one from "
                "weights"
            )
        if options.engine == "inline" and options.num_learners > 1:
            found.append(
                f"num_learners={options.num_learners} needs engine=local or ray: engine=inline runs one learner"
            )
        if options.supervisor.elastic and options.engine in ("local", "inline"):
            found.append(f"supervisor.elastic={options.supervisor.elastic} needs engine=ray, whose nodes come and go")
        found += [
            f"logger.{name}={getattr(options.logger, name)} needs a package that is not installed: pip install -e "
            f'".[{name}]"'
            for name in ("wandb", "mlflow")
            if getattr(options.logger, name) is not None and not find_spec(name)
        ]
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


def _video(options: Options) -> list[str]:
    """Return why videos cannot be recorded: a missing package, or an environment that fails to draw one picture."""
    every, testing = options.evaluator.record_every, options.mode == 2
    if not (options.record if testing else every):
        return []
    asked = "record=True" if testing else f"evaluator.record_every={every}"
    for name in ("imageio", "imageio_ffmpeg"):
        try:
            with foreign_code(name, may_lack_packages=True):
                importlib.import_module(name)
        except Exception as error:  # a package that is there may be broken in any way
            return [
                f"{asked} needs {name}, which cannot be imported ({describe_exception(error)}): pip install -e "
                '".[video]"'
            ]
    try:
        env = make_env(options, 1, training=False, render_mode="rgb_array")
        try:
            env.reset(0)
            env.render()
        finally:
            env.close()
    except (ValueError, ImportError, NotImplementedError) as error:
        return [f"{asked}: {error}"]
    except Exception as error:  # the code that draws can fail in any way
        return [
            f"{asked}: game={options.game} (env_type={options.env_type}) cannot be drawn: {describe_exception(error)}"
        ]
    return []


# combinations ---------------------------------------------------------------------------------------------------------
def _memory_type(options: Options) -> list[str]:
    kinds, together = options.agent_class.window_kinds, options.learner.batches_per_sample
    held = options.memory_class.window_kinds
    if not set(held) & set(kinds):
        fitting = _could("memory_type", lambda memory: bool(set(memory.window_kinds) & set(kinds)))
        return [
            f"memory_type={options.memory_type} holds {' and '.join(held)}, and agent_type={options.agent_type} learns "
            f"from {' or '.join(kinds)}; {fitting}"
        ]
    if together > 1 and issubclass(options.memory_class, UnrollMemory):
        return [
            f"learner.batches_per_sample={together} must be 1 with memory_type={options.memory_type}, whose batches "
            "have parts"
        ]
    return []


def _clipped_rewards(options: Options) -> list[str]:
    clipping = getattr(options.env, "reward_clipping", "none")
    if options.mode == 2 or clipping == "none" or not options.agent_class.refuses_clipped_rewards(options.agent):
        return []
    return [
        f"env.reward_clipping={clipping} does not fit agent_type={options.agent_type}, which learns from raw rewards: "
        "set env.reward_clipping=none or agent.allow_clipped_rewards=True"
    ]


def _on_policy(options: Options) -> list[str]:
    """Return why rollouts would not be whole, or not by the newest parameters."""
    memory_class = options.memory_class
    if not memory_class.on_policy or options.mode != 1:
        return []
    actors, rest = divmod(options.num_actors, options.num_learners)
    total = actors * options.num_envs_per_actor
    wanted = [
        ("agent.batch_size", options.batch_size, total, ", the number of a learner's environments,"),
        ("actor.num_env_splits", options.actor.num_env_splits, 1, ""),
        ("learner.publish_period", options.learner.publish_period, 1, ""),
        ("rate_limiter.min_replay_size", options.rate_limiter.min_replay_size, 1, ""),
    ]
    found = [
        f"{name}={value} must be {expected}{meaning} with memory_type={options.memory_type}, which collects whole "
        "rollouts by the newest parameters"
        for name, value, expected, meaning in wanted
        if value != expected
    ]
    if rest:
        found.append(
            f"num_actors={options.num_actors} must be a multiple of num_learners={options.num_learners} with "
            f"memory_type={options.memory_type}, whose rollouts are of one size"
        )
    if options.engine == "ray":
        found.append(
            f"memory_type={options.memory_type} needs engine=local or inline: with ray, actors on other nodes get "
            "parameters late; memory_type=queue corrects for that"
        )
    return found


def _schedule(options: Options) -> list[str]:
    """Return why a schedule of the learning rate has no length."""
    schedule = getattr(options.agent, "lr_schedule", "constant")
    if options.mode != 1 or schedule == "constant" or options.agent.lr_schedule_updates is not None:  # type: ignore[attr-defined]
        return []
    if schedule == "step":
        return ["agent.lr_schedule=step needs agent.lr_schedule_updates, the updates between two steps"]
    paced = options.rate_limiter.samples_per_insert or options.memory_class.is_rate_limited(options.memory)
    if options.updates is not None or (options.steps is not None and paced):
        return []
    return [
        f"agent.lr_schedule={schedule} needs agent.lr_schedule_updates, or "
        + ("steps, which say how long it is" if paced else "updates, because actors and learners are not paced")
    ]


def _actions(options: Options, spec: EnvSpec) -> list[str]:
    if isinstance(spec.action, options.agent_class.actions):
        if not spec.has_action_mask or options.agent_class.uses_action_masks:
            return []
        able = _could("agent_type", lambda agent: agent.uses_action_masks and isinstance(spec.action, agent.actions))
        return [
            f"agent_type={options.agent_type} would take illegal actions of game={options.game}, because it does not "
            f"use masks; {able}"
        ]
    fitting = _could("agent_type", lambda agent: isinstance(spec.action, agent.actions))
    if not isinstance(spec.action, MultiDiscrete):
        kind = {Discrete: "discrete", Continuous: "continuous", Mixed: "mixed"}[type(spec.action)]
        return [f"agent_type={options.agent_type} cannot take the {kind} actions of game={options.game}; {fitting}"]
    space = f"the {spec.action.description} of game={options.game}"
    if not (limit := options.agent_class.max_joint_actions(options.agent)):
        return [f"agent_type={options.agent_type} cannot take {space}; {fitting}"]
    return [
        f"agent_type={options.agent_type} would take {space} as {spec.action.num_joint_actions:,} joint actions, more "
        f"than agent.max_joint_actions={limit}: raise it, or {fitting}"
    ]


def _head(options: Options) -> list[str]:
    agent, model = options.agent_class, options.model_class
    if model.output_kind == agent.required_output:
        return []
    fitting = _could("model_type", lambda other: other.output_kind == agent.required_output)
    return [
        f"model_type={options.model_type} gives {model.output_kind!r} and agent_type={options.agent_type} needs "
        f"{agent.required_output!r}; {fitting}"
    ]


def _observations(options: Options, spec: EnvSpec) -> list[str]:
    kind, agent, model = "image" if spec.is_image else "vector", options.agent_class, options.model_class
    if model.observations != kind:
        fitting = _could(
            "model_type", lambda other: (other.output_kind, other.observations) == (agent.required_output, kind)
        )
        return [
            f"model_type={options.model_type} takes {model.observations} observations and game={options.game} "
            f"(env_type={options.env_type}) gives {kind} ones; {fitting}"
        ]
    if spec.vector_size and not model.reads_vectors:
        return [
            f"model_type={options.model_type} reads pictures alone, and game={options.game} "
            f"(env_type={options.env_type}) has {spec.vector_size} numbers beside them: keep the pictures with "
            "env.observation_keys"
        ]
    return []


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
    found = _learners(options) + [
        f"{name}={device!r} is not on this machine, which has {', '.join(here)}"
        for name, device in named.items()
        if {"auto": "cpu", "cuda": "cuda:0"}.get(device, device) not in here
    ]
    if found or not training:
        return found
    return [
        f"{name}={value} needs a CUDA device and {of}={device!r} is none; this machine has {', '.join(here)}"
        for name, value, of, device in (
            ("learner.cuda_graph", learner.cuda_graph, "device", options.device),
            ("learner.precision", learner.precision, "device", options.device),
            ("actor.cuda_graph", options.actor.cuda_graph, "actor.device", options.actor.device),
        )
        if value in ("on", "tf32") and not resolved_device(device).startswith("cuda")
    ]


def _learners(options: Options) -> list[str]:
    """Return what several learners lack: an actor each, or a GPU each."""
    count, found = options.num_learners, []
    if options.mode != 1 or count == 1:
        return []
    if options.num_actors < count:
        found.append(
            f"num_learners={count} need an actor each: num_actors={options.num_actors} must be at least {count}"
        )
    device = resolved_device(options.device)
    if device.startswith("cuda:"):
        found.append(f"num_learners={count} need a GPU each and device={device!r} is one: device must be cuda or cpu")
    elif device == "cuda" and 0 < torch.cuda.device_count() < len(options.learners_at_home):
        found.append(
            f"num_learners={count} need a GPU each and this machine has {torch.cuda.device_count()}: take fewer or "
            "device=cpu"
        )
    return found


def _placement(options: Options) -> list[str]:
    """Return what does not go together with the options of learner.* that place, capture, compile or split updates."""
    learner, memory, found = options.learner, options.memory_class, _captured(options) + _compiled(options)
    if learner.replay_device != "learner":
        if learner.updates_per_graph_launch > 1:
            found.append(
                f"learner.updates_per_graph_launch={learner.updates_per_graph_launch} needs "
                f"learner.replay_device=learner"
            )
        if learner.cuda_graph == "on" and learner.microbatch_on_oom:
            found.append(
                "learner.microbatch_on_oom=True does not go with learner.cuda_graph=on: captured batches have one size"
            )
        return found
    if memory.device_class is None:
        found.append(
            f"memory_type={options.memory_type} cannot be on the learner's device; "
            + _could("memory_type", lambda other: other.device_class is not None)
        )
    if learner.microbatch_on_oom:
        found.append(
            "learner.microbatch_on_oom=True needs learner.replay_device=cpu: batches drawn on the learner's "
            "device have one size"
        )
    return found


def _compiled(options: Options) -> list[str]:
    """Return why updates cannot be compiled although learner.compile=yes asks for it."""
    learner, agent = options.learner, options.agent_class
    if learner.compile != "yes" or options.mode != 1:
        return []
    found = []
    if not agent.supports_cuda_graphs:
        found.append(
            f"learner.compile=yes: updates of agent_type={options.agent_type} cannot be recorded; "
            + _could("agent_type", lambda other: other.supports_cuda_graphs)
        )
    if resolved_device(options.device) != "cpu":
        found.append(f"learner.compile=yes is for device=cpu, not {options.device}: GPUs have learner.cuda_graph")
    for name, value, needed in (
        ("num_learners", options.num_learners, 1),
        ("learner.replay_device", learner.replay_device, "cpu"),
        ("learner.microbatch_on_oom", learner.microbatch_on_oom, False),
    ):
        if value != needed:
            found.append(f"learner.compile=yes needs {name}={needed}, not {value}")
    if reason := missing_compiler():
        found.append(f"learner.compile=yes: {reason}; learner.compile=auto goes on without")
    return found


def _captured(options: Options) -> list[str]:
    """Return why updates cannot be captured in a CUDA graph although learner.cuda_graph=on asks for it."""
    learner, agent = options.learner, options.agent_class
    if learner.cuda_graph != "on":
        return []
    found, count = [], learner.updates_per_graph_launch
    if not agent.supports_cuda_graphs:
        found.append(
            f"learner.cuda_graph=on: updates of agent_type={options.agent_type} cannot be captured; "
            + _could("agent_type", lambda other: other.supports_cuda_graphs)
        )
    elif (period := agent.update_cycle(options.agent)) and count % period:
        found.append(
            f"learner.cuda_graph=on: learner.updates_per_graph_launch={count} must be a multiple of {period}, after "
            f"which updates of agent_type={options.agent_type} repeat"
        )
    if options.num_learners > 1:
        found.append(
            f"learner.cuda_graph=on is for one learner, and num_learners={options.num_learners}: what they tell each "
            "other between two updates is not captured"
        )
    return found
