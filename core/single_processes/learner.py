"""Learner: sample, learn, update priorities, publish parameters, save checkpoints when asked."""

import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.agent import Agent
from core.averaging import Group, LearnersParted
from core.context import Context
from core.device import use_tf32
from core.precision import PRECISIONS, precision_on
from core.profile import Profile
from core.settings import setting
from core.single_processes.agreement import News, Watch
from core.single_processes.learner_state import load_initial, restore, save, save_alone
from core.single_processes.updates import Batches, Learn, LearnersMemory, feature_source, learners_memory, updates


@dataclass(frozen=True)
class LearnerParams:
    threads: int = setting(0, low=0)                     # of torch; 0: all cores up to 4, then what the actors leave
    prefetch: int = setting(4, low=0)                    # most batches prepared ahead in a thread; the inline engine always uses 0
    batches_per_draw: int = setting(1, low=1)            # drawn from the memory at once, in that thread: cheaper where updates take little
    memory_device: str = setting("cpu", choices=("cpu", "learner"))  # where batches are drawn: learner: rows are copied to its device
    updates_per_replay: int = setting(1, low=1)          # updates in a row that python starts as one; with memory_device learner
    captured: str = setting("auto", choices=("auto", "yes", "no"))  # as a CUDA graph; auto: with memory_device learner where possible
    precision: str = setting("float32", choices=PRECISIONS)  # tf32 is for GPUs; auto: where there is one; bf16: of networks
    shrink_batch: bool = setting(False)                  # out of GPU memory: go on with batches in pieces that fit
    publish_period: int = setting(10, low=1)             # updates between publications of the parameters
    log_period: float = setting(2.0, above=0)            # seconds between reports
    max_bad_updates: int = setting(10, low=1)            # updates in a row with a non-finite loss before the run is given up
    compare_period: int = setting(1_000, low=0)          # of several learners: updates between checks that all are alike; 0: never
    checkpoint_period: float = setting(60.0, above=0)    # seconds between full checkpoints, not on engine inline; one more at the end
    checkpoint_steps: int = setting(0, low=0)            # agent steps between full checkpoints; 0: by seconds only
    checkpoint_keep: int = setting(2, low=1)             # newest full checkpoints kept
    checkpoint_replay: bool = setting(False)             # store the replay too: an exact continuation, large files


class TrainingDiverged(RuntimeError):
    """Too many updates in a row were not finite."""


def learner(context: Context, index: int) -> Iterator[bool]:
    """Yields True after an update, False while it waits for the actors. Its last act is a full checkpoint.

    Several learners update together, or save together, or end together: whoever is ready waits for the others' news. What they all do alike
    (publish, report, write the agent) learner 0 does.
    """
    with context.meeting.join(index, context.device_of(index)) as group:
        agent, memory = _make_agent(context, group), learners_memory(context, index)
        version = restore(context, agent, memory, index)
        batches, learn = updates(context, agent, memory, index)
        with closing(batches):
            try:
                yield from group.gather([])  # all have their rows: actors may begin
                if index == 0:
                    context.parameters.publish(agent.model, version)
                with closing(Profile(context, "learner", index, context.device_of(index))) as profile:
                    yield from _learn(context, agent, memory, batches, learn, group, profile)
                yield from save(context, agent, memory, batches, group)
            except LearnersParted:
                save_alone(context, agent, memory, batches, index)
                raise


def _learn(context: Context, agent: Agent, memory: LearnersMemory, batches: Batches, learn: Learn, group: Group,
           profile: Profile) -> Generator[bool, None, None]:
    """Until the run ends."""
    options, clock, first = context.options, context.clock, group.index == 0
    statistics, samples = Statistics(), options.agent.batch_size * agent.samples_per_window
    watch = Watch(agent, clock.updates, options.learner.compare_period if group.size > 1 else 0)
    bad_updates, reported, told, batch = 0, time.monotonic(), watch.updates, None

    def report() -> None:
        nonlocal reported, told
        reported, told = time.monotonic(), watch.updates
        context.report("learner", 0, {**statistics.take(), **learn.statistics(), **batches.statistics(), **batches.call(memory.statistics)})

    while True:
        profile.lap("wait")
        stopped, due = clock.stopped, clock.checkpoint_due
        if batch is None and not (stopped or due):
            batch = batches.get(timeout=0.1) if clock.may_learn(group.size * learn.count * samples) else None
            if batch is None:
                yield False
                continue
            profile.lap("wait" if batches.starved else "sample")
        news = watch.check((yield from group.gather(News(stopped, due, batch is not None, *watch.look()))))
        if news.stopped:
            if first and watch.updates > told:
                report()
            return
        if news.due:
            yield from save(context, agent, memory, batches, group)
            profile.lap("checkpoint")
        if batch is None or not news.ready:
            continue
        profile.lap("wait")
        output = yield from group.run(partial(learn, batch))
        profile.lap("update")
        if output.priorities is not None and batches.takes_priorities:
            batches.update_priorities(batch.keys, output.priorities.cpu().numpy())
            profile.lap("priorities")
        batch = None
        for _ in range(learn.count):
            clock.learnt(group.index, samples)
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


def _make_agent(context: Context, group: Group) -> Agent:
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


class Statistics:
    """Running sums of an agent's statistics, left as tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._skipped = 0

    def add(self, statistics: Mapping[str, Tensor], skipped: bool) -> None:
        self._skipped += skipped
        if skipped:
            return
        known = [name for name in statistics if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[name] for name in known], [statistics[name] for name in known])
        if len(known) < len(statistics):
            self._sums |= {name: value.to(torch.float32, copy=True) for name, value in statistics.items() if name not in self._sums}
        self._counts.update(statistics.keys())

    def take(self) -> dict[str, float]:
        """Means since the last call over the updates that had each, and the number of skipped updates so far."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, Counter()
        return {**means, "skipped_updates": float(self._skipped)}
