"""Run a learner: sample, update, publish parameters, save checkpoints when asked.

Learner 0 writes the agent, which all learners have alike, the counters, and its own files: random state and, if asked,
its memory. The files of the other learners are named by their index.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from core.agent import Agent
from core.checkpoint import model_file, run_checkpoint
from core.checkpoint.run_checkpoint import CheckpointError, storable
from core.common.console import log_to_stderr
from core.common.files import folder_lock
from core.device.recorded_work import CompiledCallable, missing_compiler
from core.device.torch_runtime import use_threads
from core.distributed.learner_group import LearnerGroup, LearnerStatus, PeerLostError, SingleLearner, SyncChecker
from core.learning.batch_source import Prefetcher
from core.learning.precision import has_large_images, has_large_products, precision_on, use_onednn_products, use_tf32
from core.learning.updates import (
    BatchSource,
    DeviceReplayBatches,
    EagerUpdates,
    GraphedUpdate,
    StagedBatches,
    Updater,
    can_capture,
)
from core.memory import DeviceMemory, Memory, batch_of, batch_state
from core.metrics.profiler import Profile
from core.runtime.context import Context
from core.runtime.options import RunOptions
from core.runtime.run_state import COUNTS, RunState, Schedule
from core.types import Batch, Window

# With learner.compile auto, compiling, which takes up to a minute, is for runs of this many compiled calls and more. A
# call of DQN, Rainbow or LASER on MinAtar is 1 to 4 ms shorter than an eager one.
MIN_COMPILED_CALLS = 40_000
Result = TypeVar("Result")
LOST_LEARNER_TIMEOUT = 10.0  # seconds until a learner on another node must know which learner was lost


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


def learner(context: Context, index: int) -> Iterator[bool]:
    """Yield True after an update, False while waiting for actors. It ends by saving a checkpoint.

    Several learners update, save and end together. A learner that is ready waits until all others have reported.
    Learner 0 also does what all would do alike: report, write the agent. The first one of a node publishes there.
    """
    with context.rendezvous.join(index, context.device_of(index)) as group:
        group.heartbeat = partial(_heartbeat, context.run_state, context.process_ind("learner", index))
        group.gradient_dtype = torch.bfloat16 if context.options.learner.gradient_dtype == "bfloat16" else None
        agent, shared_memory = _make_agent(context, group), context.memories[index]
        memory: Memory | DeviceMemory = shared_memory
        if context.options.learner.replay_device == "learner":
            memory = shared_memory.device_class(shared_memory, torch.device(context.device_of(index)))  # follows it
        version, ready_batches = yield from restore(context, agent, memory, group)
        if shared_memory.feature_dtype(context.options.memory):
            shared_memory.features_of = feature_source(context, agent)
        batches, updater = _make_updater(context, agent, memory, index, ready_batches)
        with closing(batches), closing(Profile(context, "learner", index, context.device_of(index))) as profile:
            learning = _Learner(context, group, agent, memory, batches, updater, profile)
            try:
                yield from group.barrier()  # all have restored their replays, so actors may begin
                if context.publishes(index):
                    context.parameters.publish(agent.model, version)
                yield from learning.learn()
                yield from learning.save(group)
                profile.mark("checkpoint")
            except PeerLostError:
                yield from learning.save_alone()
                raise


def _heartbeat(run_state: RunState, process_ind: int) -> None:
    """Send a heartbeat while the learner waits for the others. Raises PeerLostError if the supervisor has lost one.

    The network says nothing about a node without power.
    """
    run_state.heartbeat(process_ind)
    if (lost := run_state.lost_learner) is not None:
        raise PeerLostError(f"learner {lost} was lost")


def _is_running(context: Context, index: int) -> bool:
    """Send a heartbeat while the learner waits for the compiler. Return False if the run stops."""
    context.run_state.heartbeat(context.process_ind("learner", index))
    return not context.run_state.stopped


@dataclass(eq=False)
class _Learner:
    """Hold what a learner learns with: its agent, its memory, the source of its batches, and what updates on them."""

    context: Context
    group: LearnerGroup
    agent: Agent
    memory: Memory | DeviceMemory
    batches: BatchSource
    updater: Updater
    profile: Profile

    def __post_init__(self) -> None:
        options, counters = self.context.options, self.context.counters
        self.params, updates = options.learner, counters.updates
        self.checker = SyncChecker(self.agent, updates, self.params.sync_check_period if self.group.size > 1 else 0)
        self.reports = Schedule(options.logger.period, options.logger.steps, counters.agent_steps)
        self.reported_updates = updates
        self.publishes = self.context.publishes(self.group.index)
        self.checkpoint_errors = 0

    def learn(self) -> Generator[bool, None, None]:
        """Update until the run ends."""
        context, run_state, group, checker = self.context, self.context.run_state, self.group, self.checker
        batches, profile, batch = self.batches, self.profile, None
        # of all learners' next updates
        windows = group.size * self.updater.updates_per_call * context.options.batch_size
        while True:
            profile.mark("wait")
            stopped, checkpoint_due = run_state.stopped, run_state.checkpoint_due
            if batch is None and not (stopped or checkpoint_due):
                done = context.options.updates is not None and checker.updates >= context.options.updates
                may_sample = not done and context.rate_limiter.can_sample(windows * self.agent.samples_per_window)
                batch = batches.get(timeout=0.1) if may_sample else None
                if may_sample:
                    profile.mark("wait" if batches.starved else "sample")
                if batch is None:
                    yield False
                    continue
            steps = context.counters.agent_steps
            own_status = LearnerStatus(stopped, checkpoint_due, batch is not None, steps, *checker.local_status())
            status = checker.merge_statuses((yield from group.gather(own_status)))
            if batch is not None and (status.stopped or status.checkpoint_due):
                batches.put_back(batch)  # so that a checkpoint has it
                batch = None
            if status.stopped:
                if group.index == 0 and checker.updates > self.reported_updates:
                    self.report()
                return
            if status.checkpoint_due:
                yield from self.save(group)
                profile.mark("checkpoint")
            elif status.has_batch:
                progress = context.options.progress(status.agent_steps, checker.updates, self.agent.samples_per_window)
                self.agent.run_progress = progress
                yield from self.update(batch)
                batch = None
                yield True

    def update(self, batch: Any) -> Generator[bool, None, None]:
        """Update the agent on a batch. Tell the memory, the counters, the actors and the logger of it."""
        context, params, group, profile = self.context, self.params, self.group, self.profile
        batches, updater, checker = self.batches, self.updater, self.checker
        profile.mark("wait")
        output = group.run(partial(updater, batch))
        profile.mark("update")
        if batches.takes_priorities and not output.skipped:
            if output.priorities is None:
                raise ValueError(
                    f"priorities of an update are missing: memory_type={context.options.memory_type} needs them, and "
                    f"{type(self.agent).__name__}.learn returned none"
                )
            priorities = output.priorities.cpu().numpy()
            if not (updater.is_planned and np.isnan(priorities).all()):  # of a planned update that was skipped
                batches.update_priorities(batch.keys, priorities)
            profile.mark("priorities")
        if isinstance(batch, Batch):
            samples = self.agent.count_samples(batch)
        else:  # a replay on the device, where counting the steps that end an episode would wait for the device
            samples = updater.updates_per_call * context.options.batch_size * self.agent.samples_per_window
        context.counters.count_update(group.index, samples, updater.updates_per_call)
        checker.updates += updater.updates_per_call
        if self.publishes and checker.updates % params.publish_period < updater.updates_per_call:
            context.parameters.publish(self.agent.model)
            profile.mark("publish")
        shared_memory = context.memories[group.index]
        if shared_memory.on_policy:
            yield from group.barrier()  # the first learner has published
            shared_memory.release_actors()
        if updater.metrics.consecutive_skipped >= params.max_nonfinite_updates:
            raise TrainingDiverged(
                f"a loss or gradient was not finite in {updater.metrics.consecutive_skipped} updates in a row, which "
                "were left out. Smaller rewards, agent.learning_rate or agent.clip_norm may help"
            )
        if group.index == 0 and self.reports.due(context.counters.agent_steps):
            self.report()
            profile.report()
        profile.mark("report")
        profile.step()

    def report(self) -> None:
        self.reports.start(self.context.counters.agent_steps)
        self.reported_updates = self.checker.updates
        values = {**self.updater.statistics(), **self.batches.statistics()}
        self.context.report("learner", 0, values | self.batches.call(self.memory.statistics))

    # checkpoints ------------------------------------------------------------------------------------------------------
    def save(self, group: LearnerGroup) -> Generator[bool, None, None]:
        """Publish the parameters, then write a checkpoint together with the others of the group.

        A full disk is reported and counted; training continues.
        """
        context, index = self.context, group.index
        with ExitStack() as stack:
            if index == 0 and group.size > 1:  # before the exchange, after which another may lose a peer and save alone
                folder = context.options.checkpoint_folder
                with suppress(OSError):  # the writing reports it
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(folder_lock(folder))
            own_parts = _unless_it_cannot_be_written(partial(self.write_parts, index))
            rows = yield from group.gather([own_parts is not None, *context.counters.totals()[index].values()])
            if context.publishes(index):
                context.parameters.publish(self.agent.model)
            if index:
                return
            checkpoint = None
            if own_parts is not None and all(row[0] for row in rows):
                checkpoint = _unless_it_cannot_be_written(partial(self.write_checkpoint, own_parts, rows))
            context.run_state.record_write(context.process_ind("learner", index), checkpoint is not None)
            if checkpoint is None:
                self.checkpoint_errors += 1
                context.report("learner", index, {"checkpoint_errors": float(self.checkpoint_errors)})
            context.run_state.confirm_checkpoint()

    def write_parts(self, index: int) -> dict[str, Any]:
        """Return what a checkpoint has of learner `index` alone. Of all but learner 0 it is written to files."""
        learner_file, memory_file = _files_of(index)
        device = self.agent.device
        device_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0, dtype=torch.uint8)
        parts: dict[str, Any] = {learner_file: {"torch_rng": torch.get_rng_state(), "device_rng": device_rng}}
        if self.params.checkpoint_replay:
            memory, batches = self.memory, self.batches
            parts[memory_file] = batches.call(
                lambda: {**memory.state_dict(), "drawn": [batch_state(batch) for batch in batches.ready_batches()]}
            )
        for path in run_checkpoint.save_parts(self.context.options.checkpoint_folder, parts) if index else ():
            self.send_home(path)
        return parts

    def write_checkpoint(self, own_parts: dict[str, Any], rows: list[list[int]]) -> Path:
        """Write the checkpoint of learners, the others of which have written their files, and return its folder.

        Args:
            own_parts: What `write_parts` has returned.
            rows: A list of each learner: True if its files are written, then its totals. Totals of learners on other
                nodes are exact here, while this node has them late.
        """
        context = self.context
        elsewhere = {
            learner: dict(zip(COUNTS, row[1:])) for learner, row in enumerate(rows) if learner not in context.memories
        }
        own_parts["learner"]["version"] = context.parameters.version
        checkpoint = run_checkpoint.save(
            context.options.checkpoint_folder,
            {
                "agent": self.agent.state_dict(),
                "clock": {**context.counters.state_dict(elsewhere), **context.rate_limiter.state_dict()},
                "metadata": context.model_metadata(context.counters.agent_steps),
                **own_parts,
            },
            context.counters.agent_steps,
            self.params.checkpoint_keep,
            [name for learner in range(1, len(rows)) for name in _files_of(learner)[: len(own_parts)]],
        )
        self.send_home(checkpoint)
        return checkpoint

    def send_home(self, path: Path) -> None:
        if self.context.send_home is not None:
            self.context.send_home(path)

    def save_alone(self) -> Generator[bool, None, None]:
        """Save a checkpoint after another learner was lost. All learners are alike, so the first one to come saves.

        Learners on other nodes than learner 0 have no lock in common if they do not see the run's folder. Therefore
        only learner 1 saves there, and only if learner 0 is lost, for which it waits. With learner.checkpoint_replay
        nothing is saved, because the memory of the lost learner is lost, too.
        """
        context = self.context
        if self.params.checkpoint_replay:
            return
        if 0 not in context.memories:
            if self.group.index != 1:
                return
            deadline = time.monotonic() + LOST_LEARNER_TIMEOUT
            while (lost := context.run_state.lost_learner) is None and time.monotonic() < deadline:
                yield False
            if lost != 0:
                return
        folder, first = context.options.checkpoint_folder, True
        with ExitStack() as stack:
            with suppress(OSError):  # `save` reports it
                folder.mkdir(parents=True, exist_ok=True)
                first = stack.enter_context(folder_lock(folder))
            if first:
                yield from self.save(SingleLearner())


def _make_agent(context: Context, group: LearnerGroup) -> Agent:
    """Make an agent that can learn. Several learners draw the same weights, then each has its own random state."""
    context.seed_everything("learner", 0)
    device, precision = context.device_of(group.index), context.options.learner.precision
    use_tf32(precision != "float32")
    agent = context.make_agent(device, precision)
    rows = context.options.batch_size * agent.samples_per_window
    in_float32 = device == "cpu" and agent.model.precision == "float32"
    use_onednn_products(in_float32 and has_large_products(agent.model, rows))
    path = context.initial_weights
    if context.resume_from is None and path is not None and group.index == 0:
        model_file.load_into(agent.model, model_file.load_weights(path, is_verified=True)[0], path)
    agent.init_learner()  # after the initial weights, which the target copies
    storable(agent.state_dict(), "agent")  # else a user's agent would fail at the first checkpoint
    if group.size > 1:
        context.seed_everything("learner", group.index)
    return agent


def feature_source(context: Context, agent: Agent) -> Callable[[Window], Tensor]:
    """Return a function that computes the features of windows, for the thread that samples.

    Its network is a second one, which begins with the learner's weights and follows the published parameters: the
    learner's own weights may be half updated. It computes in the precision of the actors, with whose stored features
    elite replay compares.
    """
    precision = precision_on(context.device_of_actor(0), context.options.actor.precision, context.spec)
    # The random state belongs to the learner.
    with torch.random.fork_rng([agent.device] if agent.device.type == "cuda" else []):
        shadow_agent, version = context.make_agent(str(agent.device), precision), 0
        model = shadow_agent.model
    model.load_state_dict(agent.model.state_dict())

    def features_of(window: Window) -> Tensor:
        nonlocal version
        version = context.parameters.pull(model, version)
        return shadow_agent.features(window)

    return features_of


def _make_updater(
    context: Context, agent: Agent, memory: Memory | DeviceMemory, index: int, ready_batches: Sequence[Batch]
) -> tuple[BatchSource, Updater]:
    """Return where the learner's batches come from, and what updates the agent on them.

    Of `ready_batches`, which a checkpoint had, those come first that fit the batch size and the windows of this start.
    """
    options, params, device = context.options, context.options.learner, torch.device(context.device_of(index))
    on_gpu, size = device.type == "cuda", options.batch_size
    if isinstance(memory, DeviceMemory):
        count = params.updates_per_graph_launch
        wanted = on_gpu and params.cuda_graph != "off" and options.num_learners == 1
        capture = wanted and can_capture(type(agent), agent.params, count)
        batches = DeviceReplayBatches(memory, size, count, device)
        return batches, GraphedUpdate(agent, batches, capture=capture)
    depth = 0 if options.engine == "inline" else params.prefetch
    fitting = [batch for batch in ready_batches if len(batch.weights) == size and memory.window.fits(batch.window)]
    limiter = context.rate_limiter  # of which the thread keeps no context
    prefetcher = partial(
        Prefetcher, memory, size, depth, params.batches_per_sample, fitting, lambda: limiter.is_warming_up
    )
    if params.cuda_graph == "on":
        return prefetcher(), GraphedUpdate(agent, StagedBatches(device), capture=on_gpu)
    if not on_gpu and compiles_updates(options, agent):
        compiled = partial(
            CompiledCallable, cache=options.compile_cache, keep_waiting=partial(_is_running, context, index)
        )
        return prefetcher(), GraphedUpdate(agent, StagedBatches(device), capture=False, compiled=compiled)
    updater = EagerUpdates(agent, params.microbatch_on_oom)
    if on_gpu or not _precomputes(context, agent):
        return prefetcher(), updater
    if not params.threads:  # One core is left to the thread that computes ahead, beside which more threads would wait.
        use_threads(max(torch.get_num_threads() - 1, 1))
    return prefetcher(precompute=agent.precompute), updater


def _precomputes(context: Context, agent: Agent) -> bool:
    """Return True if the thread that samples computes a part of eager updates on this CPU.

    Small networks are left out: their updates are mostly Python, of which only one thread runs at a time.
    """
    options = context.options
    has_thread = options.engine != "inline" and options.learner.prefetch > 0
    return has_thread and has_large_images(context.spec) and type(agent).can_precompute(agent.params)


def compiles_updates(options: RunOptions, agent: Agent) -> bool:
    """Return True if updates on a CPU are compiled. If only a compiler or `supports_cuda_graphs` is missing, say so."""
    if options.learner.compile != "auto":
        return options.learner.compile == "yes"
    updates, calls = options.updates_of_run(agent.samples_per_window), agent.compiled_calls(agent.params)
    pays = (
        options.engine != "inline"  # so that a resumed run equals one that was not stopped
        and options.num_learners == 1
        and not options.learner.microbatch_on_oom
        and not agent.model.initial_state(1)  # compiled, R2D2 with its LSTM is half as fast
        and not has_large_images(agent.spec)
        and (updates is None or updates * calls >= MIN_COMPILED_CALLS)
    )
    lacking = f"{type(agent).__name__} does not itself set supports_cuda_graphs"
    if pays and (reason := missing_compiler() if agent.supports_cuda_graphs else lacking):
        log_to_stderr(f"updates are not compiled, which would be faster: {reason} (learner.compile no hides this line)")
        return False
    return pays


def restore(
    context: Context, agent: Agent, memory: Memory | DeviceMemory, group: LearnerGroup
) -> Generator[bool, None, tuple[int, list[Batch]]]:
    """Restore agent, memory and random state if the run continues another.

    Learner 0 reads the agent and sends it to the others, each of which reads only its own files. The weights of a
    model file, with which learner 0 has made its agent, are sent likewise.

    Returns:
        The version of the parameters, and the batches that were sampled but not learned from.

    Raises:
        CheckpointError: the checkpoint is intact but not of such a run.
    """
    if context.resume_from is None:
        if context.initial_weights is not None and group.size > 1:
            agent.load_state_dict((yield from group.broadcast(storable(agent.state_dict(), "agent"))))
        return 1, []
    learner_file, memory_file = _files_of(group.index)
    shared = ("agent", "learner") if group.index == 0 else ()
    state = run_checkpoint.read(context.resume_from, (*shared, learner_file, memory_file), is_verified=True)
    sent = {"agent": state.pop("agent"), "version": state["learner"]["version"]} if shared else None
    sent = yield from group.broadcast(sent)
    ready_batches: list[Batch] = []
    try:
        agent.load_state_dict(sent["agent"])
        if memory_file in state:
            memory.load_state_dict(state[memory_file])
            ready_batches = [batch_of(stored) for stored in state[memory_file]["drawn"]]
        else:
            memory.continue_at(context.counters.updates)
        if learner_file in state:
            torch.set_rng_state(state[learner_file]["torch_rng"])
            device_rng = state[learner_file]["device_rng"]
            if agent.device.type == "cuda" and len(device_rng):  # else the checkpoint is of another kind of device
                torch.cuda.set_rng_state(device_rng, agent.device)
        return sent["version"], ready_batches
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = (
            f"checkpoint {context.resume_from} does not fit this run ({type(error).__name__}: {error}): "
            "start a new one, or leave the options as they were"
        )
        raise CheckpointError(problem) from error


def _files_of(index: int) -> tuple[str, str]:
    """Return the names of a learner's own file and of its memory's."""
    suffix = f"_{index}" if index else ""
    return f"learner{suffix}", f"memory{suffix}"


def _unless_it_cannot_be_written(write: Callable[[], Result]) -> Result | None:
    """Return what `write` returns. If a part of a checkpoint cannot be written, log it and return None."""
    try:
        return write()
    except (CheckpointError, MemoryError) as error:
        log_to_stderr(f"checkpoint not written, an older one stays: {error}")
        return None
