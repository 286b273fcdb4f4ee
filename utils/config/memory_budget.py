"""Sizes of the memory that the processes of a run share, and their validation.

The replay must hold whole windows, fit into the free memory, and let actors and learners never wait for each other.
The devices of the options are those that "auto" means here.
"""

from typing import Any

import numpy as np
import torch

from core.agent import Agent
from core.common.shared_arrays import next_multiple
from core.common.system import available_bytes
from core.device.torch_runtime import free_bytes
from core.memories.unrolls.unroll_memory import UnrollMemory
from core.runtime.options import ActorParams
from core.specs import ArraySpec, EnvSpec, WindowSpec
from core.trajectory.frame_compression import RAW
from core.trajectory.ring_buffer import Layout
from utils.errors import describe_exception, problems_of
from utils.options import Options

PROCESS_BYTES = 150 << 20  # of a process beside shared memory, roughly
DEVICE_BYTES = 4 << 30  # of a GPU for networks, activations and libraries, roughly
RAY_BYTES = 500 << 20  # of Ray's own processes
ENV_BYTES, ENV_OBSERVATIONS = 16 << 10, 64  # of an environment: a constant, and so many observations


def layout(options: Options, agent: Agent, learner: int = 0) -> Layout:
    """Return the layout of the rings that the actors of a learner share; that of learner 0 is the largest."""
    memory, num_actors = options.memory_class, actors_of(options, learner)
    extras, feature_dtype = dict(agent.extras), memory.feature_dtype(options.memory)
    if feature_dtype:
        extras["features"] = ArraySpec(agent.feature_field.shape, feature_dtype)
    sizes = options.batch_size, agent.window.length, num_actors
    capacity = memory.ring_steps(options.memory, *sizes)
    kept = -(-memory.kept_steps(options.memory, *sizes) // (num_actors * options.num_envs_per_actor))
    initial = agent.initial_state(1)
    states = tuple(ArraySpec(tuple(part.shape[1:]), str(part.dtype).removeprefix("torch.")) for part in initial)
    return Layout.of(
        agent.spec,
        extras,
        capacity=capacity,
        num_actors=num_actors,
        num_envs=options.num_envs_per_actor,
        chunk_length=agent.window.stride or options.actor.chunk_length,
        with_priority=memory.with_priority,
        states=states,
        storage=options.replay,
        kept_steps_per_env=agent.window.length + kept,
    )


def actors_of(options: Options, learner: int) -> int:
    """Return the number of actors i with i modulo num_learners = learner."""
    return len(range(learner, options.num_actors, options.num_learners))


def layouts(options: Options, agent: Agent) -> list[Layout]:
    """Return the layout of every learner's rings."""
    return [layout(options, agent, learner) for learner in range(options.num_learners)]


def stored_bytes(options: Options, rings: list[Layout], window: WindowSpec) -> int:
    """Return the bytes of the replay and of its batches in main memory.

    They hold the replay itself and a copy that is made for checkpoints. They also hold the copies on a learner's device
    if that is the CPU.
    """
    stored = (1 + options.learner.checkpoint_replay) * replay_bytes(options, rings, window)
    stored += sum(batch_bytes(options, ring, window) for ring in rings)
    if not options.device.startswith("cuda"):
        stored += sum(copied_bytes(options, ring, window) for ring in rings)
    return stored


def replay_bytes(options: Options, rings: list[Layout], window: WindowSpec) -> int:
    """Return the bytes of the rings and of what a memory keeps outside them."""
    own_bytes = options.memory_class.own_bytes
    return sum(ring.nbytes + own_bytes(options.memory, ring, window) for ring in rings)


def copied_bytes(options: Options, ring: Layout, window: WindowSpec) -> int:
    """Return the bytes of the copies of a learner's rings on its device."""
    if options.learner.replay_device == "cpu" or options.memory_class.device_class is None:
        return 0
    return int(options.memory_class.device_class.nbytes(ring, window))


def batch_bytes(options: Options, ring: Layout, window: WindowSpec) -> int:
    """Return an upper bound of the bytes of the batches that a learner holds in main memory.

    Every batch of a sample is a view that keeps the whole sample. So the samples of the learner's batch and of the
    newest one are there, the batches ready between them, and one that is being copied. The sampling thread of a learner
    on a CPU may convert their observations to float32 too.
    """
    learner, frame = options.learner, ring.fields["frame"]
    if copied_bytes(options, ring, window):
        return 0
    observations = len(window.observations) * max(ring.frame_stack, 1) * frame.nbytes
    steps = (window.length + 1) * sum(spec.nbytes for name, spec in ring.fields.items() if name != "frame")
    if not options.device.startswith("cuda") and options.agent_class.can_precompute(options.agent):
        observations += observations * 4 // np.dtype(frame.dtype).itemsize
    window_bytes = observations + steps + sum(state.nbytes for state in ring.states)
    return (learner.prefetch + 2 * learner.batches_per_sample) * options.batch_size * window_bytes


def needed_bytes(options: Options, spec: EnvSpec, stored: int) -> int:
    """Return roughly the bytes of a run: the `stored` ones of replay and batches, processes, and all environments.

    For an environment, CartPole's 4 kB and Atari's 1.7 MB (with observations of 28 kB) were measured.
    """
    each = ENV_BYTES + ENV_OBSERVATIONS * spec.frame.nbytes * max(spec.frame_stack, 1)
    evaluated = min(options.evaluator.num_envs, options.evaluator.episodes if options.mode == 1 else options.episodes)
    if options.mode == 2:
        return PROCESS_BYTES * 2 + evaluated * each
    ray = options.ray.object_store_bytes + RAY_BYTES if options.engine == "ray" else 0
    envs = options.num_actors * options.num_envs_per_actor + evaluated
    return stored + ray + PROCESS_BYTES * (options.num_actors + options.num_learners + 3) + envs * each


def problems(options: Options, spec: EnvSpec) -> list[str]:
    """Return why the network cannot be made, or why the rings do not fit or would stall actors and learners."""
    try:
        agent = options.make_agent(spec)
    except ValueError as error:
        return [str(error)]
    except Exception as error:  # the code of an agent can fail in any way
        return [f"agent_type={options.agent_type} cannot be made for game={options.game}: {describe_exception(error)}"]
    try:
        _ = agent.model
    except Exception as error:  # so can the code of a model
        return [f"model_type={options.model_type} cannot be made for game={options.game}: {describe_exception(error)}"]
    if options.mode == 2:
        return _beside_the_replay(options, spec)
    if found := problems_of(options.memory_class, options.memory, options.batch_size):
        return found
    try:
        window, rings = agent.window, layouts(options, agent)
        _ = replay_bytes(options, rings, window)
    except Exception as error:  # so can that of a memory
        chosen = f"agent_type={options.agent_type} with memory_type={options.memory_type} and game={options.game}"
        return [f"{chosen} cannot be used: {describe_exception(error)}"]
    if (stride := window.stride) and options.actor.chunk_length not in (stride, ActorParams().chunk_length):
        return [
            f"actor.chunk_length={options.actor.chunk_length} does nothing with agent_type={options.agent_type}, which "
            f"publishes the {stride} steps of an unroll, or from one sequence's start to the next: leave it out"
        ]
    found = _ring(options, spec, rings, window) + _storage(options, spec, rings[0], window.length)
    return found + _limiter(options, agent.samples_per_window)


def _ring(options: Options, spec: EnvSpec, rings: list[Layout], window: WindowSpec) -> list[str]:
    """Return why the ring is too small for windows, why no window is whole before actors wait, or what does not fit."""
    envs, length = actors_of(options, 0) * options.num_envs_per_actor, window.length  # of a learner
    capacity, rate_limiter = getattr(options.memory, "capacity", None), options.rate_limiter
    in_steps = not issubclass(options.memory_class, UnrollMemory)  # theirs count unrolls
    if in_steps and capacity is not None and capacity < envs * (length + 2):
        return [
            f"memory.capacity={capacity} is too small for two windows of {length + 1} steps in each of "
            f"{envs} environments: at least {envs * (length + 2)}"
        ]
    envs = options.num_actors * options.num_envs_per_actor
    first = envs * next_multiple(length + 2 * in_steps, rings[0].chunk_length)
    if rate_limiter.samples_per_insert is not None and rate_limiter.min_replay_size + rate_limiter.error_buffer < first:
        return [
            f"rate_limiter.min_replay_size={rate_limiter.min_replay_size} plus "
            f"rate_limiter.error_buffer={rate_limiter.error_buffer} must be at least {first} agent steps, which "
            f"{envs} environments take to store the first windows of {length + 1} steps"
        ]
    if found := _beside_the_replay(options, spec):
        return found
    rings = [rings[learner] for learner in options.learners_at_home]
    stored = stored_bytes(options, rings, window)
    needed, free = needed_bytes(options, spec, stored), available_bytes()
    if needed <= free:
        return _gpu(options, copied_bytes(options, rings[0], window), capacity)
    each = f" for each of {len(rings)} learners" if len(rings) > 1 else ""
    batches = sum(batch_bytes(options, ring, window) for ring in rings)
    held = f"; batches need {batches / 1e6:,.0f} MB of them (learner.prefetch, learner.batches_per_sample)"
    held = held if 10 * batches > stored else ""
    if capacity is None:
        return [
            f"the rings of memory_type={options.memory_type}{each} need {needed:,} bytes and {free:,} are free; "
            f"lower its capacities{held}"
        ]
    fitting = max(int((free - (needed - stored) - batches) / ((stored - batches) / capacity)), 0)
    needs = f"memory.capacity={capacity}{each} needs {needed:,} bytes and {free:,} are free"
    return [f"{needs}; about {fitting:,} would fit{held}"]


def _gpu(options: Options, copied: int, capacity: Any) -> list[str]:
    """Return a sentence if the learner's GPU has no room for the rings, before anything is allocated there."""
    device, gpus = options.device, [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not copied or {"cuda": "cuda:0"}.get(device, device) not in gpus:
        return []
    count = len(options.learners_at_home)
    devices = gpus[:count] if device == "cuda" and count > 1 else [device]
    free, fullest = min((free_bytes(torch.device(each)), each) for each in devices)
    if copied + DEVICE_BYTES <= free:
        return []
    fitting = max(int((free - DEVICE_BYTES) / (copied / capacity)), 0)
    return [
        f"memory.capacity={capacity} on the learner's device needs {copied + DEVICE_BYTES:,} bytes and {free:,} are "
        f"free on {fullest}; about {fitting:,} would fit"
    ]


def _beside_the_replay(options: Options, spec: EnvSpec) -> list[str]:
    """Return a sentence if processes and environments do not fit even without a replay."""
    needed, free = needed_bytes(options, spec, 0), available_bytes()
    if needed <= free:
        return []
    training = f"num_actors={options.num_actors}, num_envs_per_actor={options.num_envs_per_actor}"
    return [
        f"processes and environments need {needed:,} bytes beside the replay and {free:,} are free: lower one of "
        f"{training if options.mode == 1 else f'episodes={options.episodes}'}, "
        f"evaluator.num_envs={options.evaluator.num_envs}"
    ]


def _storage(options: Options, spec: EnvSpec, ring: Layout, length: int) -> list[str]:
    """Return why frames cannot be compressed, or why replay.max_frame_bytes is too small for incompressible windows."""
    storage, num_actors = options.replay, actors_of(options, 0)
    if storage.frame_compression == RAW:
        least = ring.num_slots * spec.frame.nbytes  # the layout is at its minimum if this exceeds the limit
    elif spec.is_image:
        least = ring.arena_bytes * num_actors
    else:
        return [
            f"replay.frame_compression={storage.frame_compression} packs pictures and game={options.game} "
            f"(env_type={options.env_type}) gives vectors"
        ]
    if storage.max_frame_bytes is None or storage.max_frame_bytes >= least:
        return []
    return [
        f"replay.max_frame_bytes={storage.max_frame_bytes} is too small for windows of {length + 1} steps in each of "
        f"{num_actors * options.num_envs_per_actor} environments: at least {least}"
    ]


def _limiter(options: Options, samples_per_window: int) -> list[str]:
    """Return why actors and learners would wait for each other for ever.

    Actors must be allowed far enough ahead for a batch of each learner.
    """
    ratio, error_buffer = options.rate_limiter.samples_per_insert, options.rate_limiter.error_buffer
    paces_itself = options.memory_class.samples_per_step(options.memory) is not None
    updates = options.learner.updates_per_graph_launch
    samples = options.batch_size * samples_per_window * options.num_learners * updates
    if ratio is not None and paces_itself:
        return [
            f"rate_limiter.samples_per_insert={ratio} must be None with memory_type={options.memory_type}, "
            "which limits the samples of an agent step itself"
        ]
    if ratio is None and options.engine == "inline" and not paces_itself:
        return [
            f"rate_limiter.samples_per_insert=None with memory_type={options.memory_type} never ends with "
            "engine=inline, whose learner learns as long as it may before actors go on: give a number"
        ]
    if ratio is None or error_buffer * ratio >= samples:
        return []
    return [
        f"rate_limiter.error_buffer={error_buffer} times rate_limiter.samples_per_insert={ratio} must be at least the "
        f"{samples} samples of "
        + ("a batch" if options.num_learners == 1 else f"{options.num_learners} learners' batches")
        + (" times learner.updates_per_graph_launch" if updates > 1 else "")
    ]
