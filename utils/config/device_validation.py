"""Validation of options that name devices, or that need what only a CUDA device has."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from core.common.console import log_to_stderr
from core.device.compiled_work import missing_compiler
from core.device.torch_runtime import free_bytes
from core.specs import WindowSpec
from core.trajectory.layout import Layout
from utils.config.dotted_settings import flatten
from utils.factory import AgentsDict, Factory, MemoriesDict
from utils.options import Options

RESERVED_BYTES = 4 << 30  # of a GPU for networks, activations and libraries, roughly


def resolved(options: Options) -> Options:
    """Return the options with the devices that "auto" means on this machine."""
    actor = dataclasses.replace(options.actor, device=resolved_device(options.actor.device))
    chosen = dataclasses.replace(options, device=resolved_device(options.device), actor=actor)
    if (
        options.device == "auto"
        and chosen.device == "cpu"
        and options.mode == 1
        and options.learner.replay_device == "learner"
    ):
        log_to_stderr("device=auto is cpu, where learner.replay_device=learner is slow: torch sees no CUDA device here")
    return chosen


def resolved_device(device: str) -> str:
    """Return cuda or cpu for "auto", and any other device as it is."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def problems(options: Options) -> list[str]:
    """Return a sentence for each device that is not here, and for each option that needs a missing kind of device."""
    learner, available, training = options.learner, ", ".join(_available()), options.mode == 1
    named = {"device": options.device} | ({"actor.device": options.actor.device} if training else {})
    found = _learners(options)
    found += [
        f"{name}={device!r} is not on this machine, which has {available}"
        for name, device in named.items()
        if not _is_here(device)
    ]
    if found or not training:
        return found
    return [
        f"{name}={value} needs a CUDA device and {of}={device!r} is none; this machine has {available}"
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


def combinations(options: Options) -> list[str]:
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
            f"memory_type={options.memory_type} cannot be on the learner's device; memory_type could be "
            + _names(MemoriesDict, lambda other: other.device_class is not None)
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
            f"learner.compile=yes: updates of agent_type={options.agent_type} cannot be recorded; agent_type could be "
            + _names(AgentsDict, lambda other: other.supports_cuda_graphs)
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
            f"learner.cuda_graph=on: updates of agent_type={options.agent_type} cannot be "
            f"captured; agent_type could be " + _names(AgentsDict, lambda other: other.supports_cuda_graphs)
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


def copied_bytes(options: Options, rows: Layout, window: WindowSpec) -> int:
    """Return the bytes of main memory for copies of the rows on the learner's device; 0 if that is a GPU."""
    if not _is_on_device(options) or resolved_device(options.device).startswith("cuda"):
        return 0
    return int(options.memory_class.device_class.nbytes(rows, window))


def device_memory(options: Options, rows: Layout, window: WindowSpec) -> list[str]:
    """Return a sentence if the learner's GPU has no room for the rows, before anything is allocated there."""
    if (
        not _is_on_device(options)
        or not _is_here(options.device)
        or not resolved_device(options.device).startswith("cuda")
    ):
        return []
    device, count = resolved_device(options.device), len(options.learners_at_home)
    devices = [f"cuda:{learner}" for learner in range(count)] if device == "cuda" and count > 1 else [device]
    copied, capacity = options.memory_class.device_class.nbytes(rows, window), flatten(options)["memory.capacity"]
    free, fullest = min((free_bytes(torch.device(each)), each) for each in devices)
    if copied + RESERVED_BYTES <= free:
        return []
    fitting = max(int((free - RESERVED_BYTES) / (copied / capacity)), 0)
    return [
        f"memory.capacity={capacity} on the learner's device needs {copied + RESERVED_BYTES:,} bytes and {free:,} are "
        f"free on {fullest}; about {fitting:,} would fit"
    ]


def _is_on_device(options: Options) -> bool:
    return options.learner.replay_device == "learner" and options.memory_class.device_class is not None


def _available() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _is_here(device: str) -> bool:
    return {"auto": "cpu", "cuda": "cuda:0"}.get(device, device) in _available()


def _names(factory: Factory, suits: Callable[[Any], bool]) -> str:
    return " or ".join(name for name in factory if suits(factory[name]))
