"""Learner: sample, learn, update priorities, publish parameters, save checkpoints when asked."""

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from core.agent import Agent
from core.common.settings import setting
from core.device.torch_runtime import use_tf32
from core.distributed.consensus import LearnerStatus, SyncChecker
from core.distributed.learner_group import LearnerGroup, PeerLostError
from core.learning.batch_source import Batches, Learn
from core.learning.metric_accumulator import Statistics
from core.learning.precision import PRECISIONS, precision_on
from core.metrics.profiler import Profile
from core.runtime.context import Context
from core.single_processes.learner_checkpoint import load_initial, restore, save, save_alone
from core.single_processes.learner_setup import LearnersMemory, feature_source, learners_memory, updates


@dataclass(frozen=True)
class LearnerParams:
    threads: int = setting(0, low=0, high=1_024)  # Torch threads of a learner; 0 is all cores up to 4, then what the actors leave.
    prefetch: int = setting(4, low=0, high=256)  # Batches prepared ahead in a thread, at most; the inline engine always uses 0.
    batches_per_draw: int = setting(1, low=1, high=1_024)  # Batches drawn from the memory at once; more are cheaper where updates take
                                                           # little.
    memory_device: str = setting("cpu", choices=("cpu", "learner"))  # Device that batches are drawn on; with `learner` the replay is copied
                                                                     # to the learner's device.
    updates_per_replay: int = setting(1, low=1, high=1_024)  # Updates that Python starts as one; more than 1 needs memory_device learner.
    captured: str = setting("auto", choices=("auto", "yes", "no"))  # Run updates as a CUDA graph; auto does with memory_device learner
                                                                    # where possible.
    precision: str = setting("float32", choices=PRECISIONS)  # Precision of products: tf32 is for GPUs, auto is tf32 where there is one,
                                                             # bf16 is of networks.
    shrink_batch: bool = setting(False)  # Take one gradient of pieces of a batch when GPU memory runs out.
    publish_period: int = setting(10, low=1, high=10**9)  # Updates between publications of the parameters.
    log_period: float = setting(2.0, above=0, high=1e9)  # Seconds between the learner's reports.
    max_bad_updates: int = setting(10, low=1, high=10**9)  # Updates in a row with a non-finite loss before the run is given up.
    compare_period: int = setting(1_000, low=0, high=10**9)  # Updates between checks that several learners are alike; 0 checks never.
    checkpoint_period: float = setting(60.0, above=0, high=1e9)  # Seconds between full checkpoints, not on engine inline; one more comes
                                                                 # at the end.
    checkpoint_steps: int = setting(0, low=0, high=10**12)  # Agent steps between full checkpoints; 0 leaves it to checkpoint_period.
    checkpoint_keep: int = setting(2, low=1, high=10_000)  # Newest full checkpoints that are kept.
    checkpoint_replay: bool = setting(False)  # Store the replay in checkpoints too, for an exact continuation; files are large.


class TrainingDiverged(RuntimeError):
    """Too many updates in a row were not finite."""


def learner(context: Context, index: int) -> Iterator[bool]:
    """Yields True after an update, False while it waits for the actors. Its last act is a full checkpoint.

    Several learners update together, or save together, or end together: whoever is ready waits for the others' news. What they all do alike
    (publish, report, write the agent) learner 0 does.
    """
    with context.meeting.join(index, context.device_of(index)) as group:
        group.heartbeat = partial(context.clock.heartbeat, context.process_ind("learner", index))
        agent, memory = _make_agent(context, group), learners_memory(context, index)
        version, drawn = restore(context, agent, memory, index)
        batches, learn = updates(context, agent, memory, index, drawn)
        with closing(batches):
            try:
                yield from group.gather([])  # all have their rows: actors may begin
                if index == 0:
                    context.parameters.publish(agent.model, version)
                with closing(Profile(context, "learner", index, context.device_of(index))) as profile:
                    yield from _learn(context, agent, memory, batches, learn, group, profile)
                yield from save(context, agent, memory, batches, group)
            except PeerLostError:
                save_alone(context, agent, memory, batches)
                raise


def _learn(context: Context, agent: Agent, memory: LearnersMemory, batches: Batches, learn: Learn, group: LearnerGroup,
           profile: Profile) -> Generator[bool, None, None]:
    """Until the run ends."""
    options, clock, first = context.options, context.clock, group.index == 0
    statistics, samples = Statistics(), options.agent.batch_size * agent.samples_per_window
    watch = SyncChecker(agent, clock.updates, options.learner.compare_period if group.size > 1 else 0)
    bad_updates, reported, told, batch = 0, time.monotonic(), watch.updates, None

    def report() -> None:
        nonlocal reported, told
        reported, told = time.monotonic(), watch.updates
        context.report("learner", 0, {**statistics.take(), **learn.statistics(), **batches.statistics(), **batches.call(memory.statistics)})

    while True:
        profile.lap("wait")
        stopped, due = clock.stopped, clock.checkpoint_due
        if batch is None and not (stopped or due):
            batch = batches.get(timeout=0.1) if clock.can_sample(group.size * learn.count * samples) else None
            if batch is None:
                yield False
                continue
            profile.lap("wait" if batches.starved else "sample")
        own_status = LearnerStatus(stopped, due, batch is not None, *watch.local_status())
        status = watch.merge_statuses((yield from group.gather(own_status)))
        if batch is not None and (status.stopped or status.checkpoint_due):
            batches.put_back(batch)  # the checkpoint has what is not learnt from
            batch = None
        if status.stopped:
            if first and watch.updates > told:
                report()
            return
        if status.checkpoint_due:
            yield from save(context, agent, memory, batches, group)
            profile.lap("checkpoint")
        if batch is None or not status.has_batch:
            continue
        profile.lap("wait")
        output = group.run(partial(learn, batch))
        profile.lap("update")
        if output.priorities is not None and batches.takes_priorities:
            batches.update_priorities(batch.keys, output.priorities.cpu().numpy())
            profile.lap("priorities")
        clock.count_update(group.index, learn.samples(batch), learn.count)
        batch = None
        watch.updates += learn.count
        if first and watch.updates % options.learner.publish_period < learn.count:
            context.parameters.publish(agent.model)
            profile.lap("publish")
        bad_updates = max(bad_updates + 1 if output.skipped else 0, learn.bad)
        if bad_updates >= options.learner.max_bad_updates:
            raise TrainingDiverged(f"the loss was not finite in {bad_updates} updates in a row, which changed nothing. "
                                   "A smaller agent.lr or agent.clip_norm may help")
        statistics.add(output.statistics, bool(output.skipped))
        if first and time.monotonic() - reported >= options.learner.log_period:
            report()
            profile.report()
        profile.lap("report")
        profile.step()
        yield True


def _make_agent(context: Context, group: LearnerGroup) -> Agent:
    """Of several learners all draw the same first weights; then each goes on with a random state of its own."""
    context.seed_everything("learner", 0)
    memory, device = context.memories[group.index], context.device_of(group.index)
    precision = precision_on(device, context.options.learner.precision)
    use_tf32(precision != "float32")
    agent = context.make_agent(device, precision)
    if memory.feature_dtype(context.options.memory):
        memory.features_of = feature_source(context, device)
    if context.resume_from is None and context.initial_weights is not None:
        load_initial(agent, context.initial_weights)
    if group.size > 1:
        agent.state_dict()  # everything that is made on first use, a target of these weights too
        context.seed_everything("learner", group.index)
    return agent
