"""The mirror: what processes on a learner's node count and report goes home, and all else of the run comes back.

The node of a learner that is not on main's has counters, run state and log rings of its own, in shared memory. Every
value in them has one writer, as at home: a process of this node, or the mirror, which writes what other nodes own.

- To home: the totals of this learner and its actors, the rows of their processes, and their log records.
- From home: the totals of all other learners, scores, flags (stop, checkpoint requests), and how often the supervisor
  has started each process.

Monotonic clocks of two machines differ, and their system clocks may. Therefore ages are sent in place of times.
"""

from collections.abc import Iterable
from typing import NamedTuple

from core.common.console import log_to_stderr
from core.runtime.context import Context
from core.runtime.log_buffers import Record
from core.runtime.run_state import ProcessState


class NodeReport(NamedTuple):
    """The values that a learner's node sends home."""

    learner: int
    totals: dict[str, int]
    replay_steps: int
    processes: dict[int, ProcessState]  # by process_ind
    records: dict[int, list[Record]]  # by process_ind; their times are ages in seconds


class RunSnapshot(NamedTuple):
    """The values that home sends back to a learner's node."""

    totals: list[dict[str, int]]  # of every learner
    scores: list[float]
    flags: list[int]
    starts: dict[int, float]  # of the node's processes, by process_ind


def snapshot(context: Context, processes: Iterable[int] = ()) -> RunSnapshot:
    """Return what the learner's node that has these processes must know of the run. Called at home."""
    counters, run_state = context.counters, context.run_state
    starts = {process_ind: run_state.starts(process_ind) for process_ind in processes}
    return RunSnapshot(counters.totals(), counters.scores_row(), run_state.flags(), starts)


def accept(context: Context, report: NodeReport) -> None:
    """Take over what a learner's node has reported. Called at home."""
    context.counters.set_totals(report.learner, report.totals)
    context.counters.record_replay_steps(report.learner, report.replay_steps)
    for process_ind, state in report.processes.items():
        context.run_state.set_process_state(process_ind, state)
    now = context.logs.now()
    for process_ind, records in report.records.items():
        context.logs.append(process_ind, (record._replace(time=now - record.time) for record in records))


class Mirror:
    """The mirror on the node of a learner."""

    def __init__(self, context: Context, learner: int):
        self._context, self._learner = context, learner
        self._processes = [
            process_ind
            for process_ind, (role, index) in enumerate(context.roles)
            if role in ("actor", "learner") and index % context.options.num_learners == learner
        ]
        self._unconfirmed: dict[int, list[Record]] = {}  # records that home has not confirmed

    def restore(self, run: RunSnapshot) -> None:
        """Take over everything at the start, this learner's own counts too."""
        self.follow(run)
        self._context.counters.set_totals(self._learner, run.totals[self._learner])

    def report(self) -> NodeReport:
        """Return the next report. Records of one that `follow` has not confirmed are sent again."""
        context, now = self._context, self._context.logs.now()
        for process_ind in () if self._unconfirmed else self._processes:
            records, dropped = context.logs.drain_process(process_ind)
            if dropped:
                log_to_stderr(f"{dropped} log records of learner {self._learner}'s node were lost: home was silent")
            if records:
                self._unconfirmed[process_ind] = records
        return NodeReport(
            self._learner,
            context.counters.totals()[self._learner],
            context.memories[self._learner].size(),
            {process_ind: context.run_state.process_state(process_ind) for process_ind in self._processes},
            {
                process_ind: [record._replace(time=now - record.time) for record in records]
                for process_ind, records in self._unconfirmed.items()
            },
        )

    def follow(self, run: RunSnapshot) -> None:
        """Take over what home has answered to a report."""
        self._unconfirmed = {}
        for learner, totals in enumerate(run.totals):
            if learner != self._learner:
                self._context.counters.set_totals(learner, totals)
        self._context.counters.set_scores_row(run.scores)
        self._context.run_state.set_flags(run.flags)
        for process_ind, starts in run.starts.items():
            self._context.run_state.set_starts(process_ind, starts)
