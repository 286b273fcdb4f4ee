"""Run a learner: sample, update, publish parameters, save checkpoints when asked."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from core.agent import Agent
from core.common.console import log_to_stderr
from core.device.compiled_work import CompiledCallable, missing_compiler
from core.device.torch_runtime import use_onednn_products, use_tf32
from core.distributed.learner_group import LearnerGroup, LearnerStatus, PeerLostError, SyncChecker
from core.learning.batch_source import BatchSource, InPlaceBatchSource, Prefetcher
from core.learning.graphed_update import DeviceReplayBatches, GraphedUpdate, StagedBatches, can_capture
from core.learning.precision import has_large_images, has_large_products
from core.learning.updates import EagerUpdates, Updates
from core.memory import DeviceMemory, Memory
from core.metrics.profiler import Profile
from core.runtime.context import Context
from core.runtime.run_state import RunState
from core.single_processes.learner_checkpoint import load_initial, restore, save, save_alone
from core.specs import Discrete
from core.types import Batch, Window, batch_size

# With learner.compile auto, compiling, which takes up to a minute, is for runs of this many compiled calls and more.
MIN_COMPILED_CALLS = 100_000


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


def learner(context: Context, index: int) -> Iterator[bool]:
    """Yield True after an update, False while waiting for actors. The last act is a full checkpoint.

    Several learners update, save and end together. A learner that is ready waits until all others have reported.
    Learner 0 also does what all would do alike: report, write the agent. The first one of a node publishes there.
    """
    with context.rendezvous.join(index, context.device_of(index)) as group:
        group.heartbeat = partial(_heartbeat, context.run_state, context.process_ind("learner", index))
        group.gradient_dtype = torch.bfloat16 if context.options.learner.gradient_dtype == "bfloat16" else None
        agent, memory = _make_agent(context, group), _make_memory(context, index)
        version, ready_batches = yield from restore(context, agent, memory, group)
        batches, updates = _make_updates(context, agent, memory, index, ready_batches)
        with closing(batches):
            try:
                yield from group.gather([])  # all have restored their replays, so actors may begin
                if context.publishes(index):
                    context.parameters.publish(agent.model, version)
                with closing(Profile(context, "learner", index, context.device_of(index))) as profile:
                    yield from _learn(context, agent, memory, batches, updates, group, profile)
                yield from save(context, agent, memory, batches, group)
            except PeerLostError:
                yield from save_alone(context, agent, memory, batches)
                raise


def _heartbeat(run_state: RunState, process_ind: int) -> None:
    """Send a heartbeat while the learner waits for the others. Raises PeerLostError if the supervisor has lost one.

    The network says nothing about a node without power.
    """
    run_state.heartbeat(process_ind)
    if (lost := run_state.lost_learner) is not None:
        raise PeerLostError(f"learner {lost} was lost")


def _learn(
    context: Context,
    agent: Agent,
    memory: Memory | DeviceMemory,
    batches: BatchSource,
    updates: Updates,
    group: LearnerGroup,
    profile: Profile,
) -> Generator[bool, None, None]:
    """Update until the run ends."""
    params, run_state, is_first = context.options.learner, context.run_state, group.index == 0
    shared_memory = context.memories[group.index]
    # Samples of all learners' next updates.
    samples = group.size * updates.count * context.options.batch_size * agent.samples_per_window
    checker = SyncChecker(agent, context.counters.updates, params.sync_check_period if group.size > 1 else 0)
    reported_at, reported_updates, batch = time.monotonic(), checker.updates, None

    def report() -> None:
        nonlocal reported_at, reported_updates
        reported_at, reported_updates = time.monotonic(), checker.updates
        context.report(
            "learner", 0, {**updates.statistics(), **batches.statistics(), **batches.call(memory.statistics)}
        )

    while True:
        profile.mark("wait")
        stopped, checkpoint_due = run_state.stopped, run_state.checkpoint_due
        if batch is None and not (stopped or checkpoint_due):
            batch = batches.get(timeout=0.1) if context.rate_limiter.can_sample(samples) else None
            if batch is None:
                yield False
                continue
            profile.mark("wait" if batches.starved else "sample")
        own_status = LearnerStatus(stopped, checkpoint_due, batch is not None, *checker.local_status())
        status = checker.merge_statuses((yield from group.gather(own_status)))
        if batch is not None and (status.stopped or status.checkpoint_due):
            batches.put_back(batch)  # so that a checkpoint has it
            batch = None
        if status.stopped:
            if is_first and checker.updates > reported_updates:
                report()
            return
        if status.checkpoint_due:
            yield from save(context, agent, memory, batches, group)
            profile.mark("checkpoint")
        if batch is None or not status.has_batch:
            continue
        profile.mark("wait")
        output = group.run(partial(updates, batch))
        profile.mark("update")
        if output.priorities is not None and batches.takes_priorities:
            batches.update_priorities(batch.keys, output.priorities.cpu().numpy())
            profile.mark("priorities")
        context.counters.count_update(group.index, updates.samples(batch), updates.count)
        batch = None
        checker.updates += updates.count
        if context.publishes(group.index) and checker.updates % params.publish_period < updates.count:
            context.parameters.publish(agent.model)
            profile.mark("publish")
        if shared_memory.on_policy:
            yield from group.gather([])  # the first learner has published
            shared_memory.release_actors()
        if updates.consecutive_skipped >= params.max_nonfinite_updates:
            raise TrainingDiverged(
                f"the loss was not finite in {updates.consecutive_skipped} updates in a row, which changed nothing. "
                "A smaller agent.learning_rate or agent.clip_norm may help"
            )
        if is_first and time.monotonic() - reported_at >= params.log_period:
            report()
            profile.report()
        profile.mark("report")
        profile.step()
        yield True


def _make_agent(context: Context, group: LearnerGroup) -> Agent:
    """Make an agent that can learn. Several learners draw the same weights, then each has its own random state."""
    context.seed_everything("learner", 0)
    memory, device = context.memories[group.index], context.device_of(group.index)
    precision = context.options.learner.precision
    use_tf32(precision != "float32")
    agent = context.make_agent(device, precision)
    rows = context.options.batch_size * agent.samples_per_window
    in_float32 = device == "cpu" and agent.model.precision == "float32"
    use_onednn_products(in_float32 and has_large_products(agent.model, rows))
    if memory.feature_dtype(context.options.memory):
        memory.features_of = feature_source(context, device)
    if context.resume_from is None and context.initial_weights is not None and group.index == 0:
        load_initial(agent, context.initial_weights)
    agent.init_learner()  # after the initial weights, which the target copies
    if group.size > 1:
        context.seed_everything("learner", group.index)
    return agent


def feature_source(context: Context, device: str) -> Callable[[Window], Tensor]:
    """Return a function that computes the features of windows, for the thread that samples.

    Its network is a second one, which follows the published parameters: the learner's own weights may be half updated.
    It is made at once, because that draws from torch's random state, which belongs to the learner.
    """
    shadow_agent, version = context.make_agent(device), 0
    model = shadow_agent.model

    def features_of(window: Window) -> Tensor:
        nonlocal version
        version = context.parameters.pull(model, version)
        return shadow_agent.features(window)

    return features_of


def _make_memory(context: Context, index: int) -> Memory | DeviceMemory:
    """Return the learner's memory: the shared one that actors write to, or a replay on the device that follows it."""
    memory = context.memories[index]
    if context.options.learner.replay_device != "learner":
        return memory
    assert memory.device_class is not None, "the options were not validated"
    device_memory: DeviceMemory = memory.device_class(memory, torch.device(context.device_of(index)))
    return device_memory


def _make_updates(
    context: Context, agent: Agent, memory: Memory | DeviceMemory, index: int, ready_batches: Sequence[Batch]
) -> tuple[BatchSource, Updates]:
    """Return where the learner's batches come from, and what updates the agent on them.

    Of `ready_batches`, which a checkpoint had, those come first that fit the batch size and the windows of this start.
    """
    options, params, device = context.options, context.options.learner, torch.device(context.device_of(index))
    on_gpu, size = device.type == "cuda", options.batch_size
    if isinstance(memory, DeviceMemory):
        count = params.updates_per_graph_launch
        capture = (
            on_gpu
            and params.cuda_graph != "off"
            and options.num_learners == 1
            and can_capture(type(agent), agent.params, count)
        )
        device_batches = DeviceReplayBatches(agent, memory, size, count, device)
        return InPlaceBatchSource(memory), GraphedUpdate(agent, device_batches, capture=capture)
    depth = 0 if options.engine == "inline" else params.prefetch
    fitting = [batch for batch in ready_batches if batch_size(batch) == size and memory.window.fits(batch.window)]
    limiter = context.rate_limiter
    prefetcher = Prefetcher(
        memory, size, depth, params.batches_per_sample, fitting, is_warming_up=lambda: limiter.is_warming_up
    )
    if params.cuda_graph == "on":
        return prefetcher, GraphedUpdate(agent, StagedBatches(agent, device), capture=on_gpu)
    if not on_gpu and _compiles(context, agent):
        # The inline engine waits, so that the same seed gives the same run.
        in_background = options.engine != "inline"

        def compiled(work: Callable[[], None], cycle: int) -> CompiledCallable:
            return CompiledCallable(work, options.compile_cache, cycle, in_background)

        return prefetcher, GraphedUpdate(agent, StagedBatches(agent, device), capture=False, compiled=compiled)
    return prefetcher, EagerUpdates(agent, params.microbatch_on_oom)


def _compiles(context: Context, agent: Agent) -> bool:
    """Return True if updates on this CPU are compiled. Where only a compiler is missing, say so."""
    options = context.options
    if options.learner.compile != "auto":
        return options.learner.compile == "yes"
    updates, calls = options.updates_of_run(agent.samples_per_window), agent.compiled_calls(agent.params)
    is_measured = calls > 1 or (agent.samples_per_window == 1 and isinstance(context.spec.action, Discrete))
    pays = (
        options.engine != "inline"  # so that a resumed run equals one that was not stopped
        and options.num_learners == 1
        and not options.learner.microbatch_on_oom
        and type(agent).supports_cuda_graphs
        and is_measured
        and not has_large_images(context.spec)
        and (updates is None or updates * calls >= MIN_COMPILED_CALLS)
    )
    if pays and (reason := missing_compiler()):
        log_to_stderr(f"updates are not compiled, which would be faster: {reason} (learner.compile no ends this line)")
        return False
    return pays
