"""Learner: sample, learn, update priorities, publish parameters, save checkpoints when asked."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.agent import Agent, LearnerOutput, joined
from core.averaging import Group, LearnersParted
from core.context import Context
from core.memory import Batch, batch_size, piece
from core.notices import notice
from core.prefetch import Prefetcher
from core.profile import Profile
from core.settings import setting
from core.single_processes.agreement import News, Watch
from core.single_processes.learner_state import restore, save, save_alone
from core.trajectory import Window


@dataclass(frozen=True)
class LearnerParams:
    threads: int = setting(0, low=0)                     # of torch; 0: all cores up to 4, then what the actors leave
    prefetch: int = setting(4, low=0)                    # most batches prepared ahead in a thread; the inline engine always uses 0
    batches_per_draw: int = setting(1, low=1)            # drawn from the memory at once, in that thread: cheaper where updates take little
    shrink_batch: bool = setting(False)                  # out of GPU memory: go on with batches in pieces that fit
    publish_period: int = setting(10, low=1)             # updates between publications of the parameters
    log_period: float = setting(2.0, above=0)            # seconds between reports
    max_bad_updates: int = setting(10, low=1)            # updates in a row with a non-finite loss before the run is given up
    compare_period: int = setting(1_000, low=0)          # of several learners: updates between checks that all are alike; 0: never
    checkpoint_period: float = setting(600.0, above=0)   # seconds between full checkpoints; one more is written at the end
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
    with closing(context.meeting.join(index, context.device_of(index))) as group:
        agent = _make_agent(context, group)
        version = restore(context, agent, index)
        depth = 0 if context.options.engine == "inline" else context.options.learner.prefetch
        with closing(Prefetcher(context.memories[index], context.options.agent.batch_size, depth,
                                context.options.learner.batches_per_draw)) as prefetcher:
            try:
                yield from group.gather([])  # all have their rows: actors may begin
                if index == 0:
                    context.parameters.publish(agent.model, version)
                with closing(Profile(context, "learner", index, context.device_of(index))) as profile:
                    yield from _learn(context, agent, prefetcher, group, profile)
                yield from save(context, agent, prefetcher, group)
            except LearnersParted:
                save_alone(context, agent, prefetcher, index)
                raise


def _learn(context: Context, agent: Agent, prefetcher: Prefetcher, group: Group, profile: Profile) -> Generator[bool, None, None]:
    """Until the run ends."""
    options, clock, first = context.options, context.clock, group.index == 0
    learn, statistics = Pieces(agent, options.learner.shrink_batch), Statistics()
    samples = options.agent.batch_size * agent.samples_per_window
    watch = Watch(agent, clock.updates, options.learner.compare_period if group.size > 1 else 0)
    bad_updates, reported, batch = 0, time.monotonic(), None
    while True:
        profile.lap("wait")
        stopped, due = clock.stopped, clock.checkpoint_due
        if batch is None and not (stopped or due):
            batch = prefetcher.get(timeout=0.1) if clock.may_learn(group.size * samples) else None
            if batch is None:
                yield False
                continue
            profile.lap("wait" if prefetcher.starved else "sample")
        news = watch.check((yield from group.gather(News(stopped, due, batch is not None, *watch.look()))))
        if news.stopped:
            return
        if news.due:
            yield from save(context, agent, prefetcher, group)
            profile.lap("checkpoint")
        if batch is None or not news.ready:
            continue
        profile.lap("wait")
        output = yield from group.run(partial(learn, batch))
        profile.lap("update")
        if output.priorities is not None:
            prefetcher.update_priorities(batch.keys, output.priorities.cpu().numpy())
            profile.lap("priorities")
        batch = None
        clock.learnt(group.index, samples)
        watch.updates += 1
        if first and watch.updates % options.learner.publish_period == 0:
            context.parameters.publish(agent.model)
            profile.lap("publish")
        bad_updates = bad_updates + 1 if output.skipped else 0
        if bad_updates >= options.learner.max_bad_updates:
            raise TrainingDiverged(f"the loss was not finite in {bad_updates} updates in a row; the last checkpoint is sound. "
                                   "A smaller agent.lr or agent.clip_norm may help")
        statistics.add(output.statistics, output.skipped)
        if first and time.monotonic() - reported >= options.learner.log_period:
            reported = time.monotonic()
            context.report("learner", 0, {**statistics.take(), **learn.statistics(), **prefetcher.statistics(),
                                          **prefetcher.call(context.memories[0].statistics)})
            profile.report()
        profile.lap("report")
        profile.step()
        yield True


def _make_agent(context: Context, group: Group) -> Agent:
    """Of several learners all draw the same first weights; then each goes on with a random state of its own."""
    context.seed_everything("learner", 0)
    memory, device = context.memories[group.index], context.device_of(group.index)
    agent = context.make_agent(device)
    if memory.feature_dtype(context.options.memory):
        memory.features_of = _feature_source(context, device)
    if group.size > 1:
        agent.state_dict()  # everything that is made on first use
        context.seed_everything("learner", group.index)
    return agent


class Pieces:
    """An agent's `learn`, on the whole batch or, once that did not fit into the GPU's memory, on pieces of it one after another."""

    def __init__(self, agent: Agent, shrink: bool):
        self._agent, self._shrink, self._size = agent, shrink, 0

    def __call__(self, batch: Batch) -> LearnerOutput:
        total, start, outputs = batch_size(batch), 0, []
        self._size = self._size or total
        while start < total:
            part = batch if self._size >= total else piece(batch, slice(start, start + self._size))
            try:
                outputs.append(self._agent.learn(part))
            except torch.OutOfMemoryError:
                if not self._shrink or self._size == 1:
                    raise
            else:
                start += self._size
                continue
            self._halve(total)  # the error is forgotten, and with it the tensors of its frames
        return outputs[0] if len(outputs) == 1 else joined(outputs)

    def _halve(self, total: int) -> None:
        self._size = -(-self._size // 2)
        torch.cuda.empty_cache()
        notice(f"out of GPU memory: batches of {total} are learnt in pieces of {self._size} from now on")

    def statistics(self) -> dict[str, float]:
        return {"batch_size": float(self._size)} if self._shrink else {}


class Statistics:
    """Running sums of an agent's statistics, left as tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = self._skipped = 0

    def add(self, statistics: Mapping[str, Tensor], skipped: bool) -> None:
        self._skipped += skipped
        if not skipped:
            self._sums = {name: self._sums[name] + value if name in self._sums else value for name, value in statistics.items()}
            self._count += 1

    def take(self) -> dict[str, float]:
        """Means since the last call, and the number of skipped updates so far."""
        means = {name: float(total) / self._count for name, total in self._sums.items()} if self._count else {}
        self._sums, self._count = {}, 0
        return {**means, "skipped_updates": float(self._skipped)}


def _feature_source(context: Context, device: str) -> Callable[[Window], Tensor]:
    """A second network for the thread that samples: it follows the published parameters, so that nobody reads weights in the making.

    It is made at once: that draws from torch's random state, which is the learner's.
    """
    scout, version = context.make_agent(device), 0
    model = scout.model

    def features_of(window: Window) -> Tensor:
        nonlocal version
        version = context.parameters.pull(model, version)
        return scout.features(window)

    return features_of
