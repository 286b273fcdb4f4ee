"""Run the logger: write what the other processes report to files, trackers and the progress line."""

import re
import time
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from core.common.settings import dotted
from core.common.system import rss_mb, versions
from core.env import Env
from core.metrics.file_writers import MetricsFiles
from core.metrics.profiler import Shares
from core.metrics.progress import Progress, QuietConsole
from core.metrics.trackers import make_tracker_threads
from core.runtime.context import Context
from core.runtime.log_buffers import EVALUATOR, MIN_RATE_SECONDS, Record
from core.runtime.run_state import Schedule

EPISODIC = "episodic_"  # prefix of the names that actors report once an episode
TOTAL = re.compile(r"learner/(checkpoint_errors|nonfinite_updates|\w+_(inserted|dropped))(_\d+)?")


def logger(context: Context, index: int) -> Iterator[bool]:
    """Run until every other process has sent its last report, and write all reports. Yield True after work."""
    run_log = _RunLog(context)
    try:
        while not context.run_state.logger_may_end:
            yield run_log.work()
    finally:
        run_log.close()


class _RunLog:
    """Reports that were collected, and the sinks that they are written to."""

    def __init__(self, context: Context):
        options, step = context.options, context.counters.agent_steps
        self._context, self._params = context, options.logger
        options.log_folder.mkdir(parents=True, exist_ok=True)
        name = f"{options.config}__{context.spec.name}__{options.agent_type}__seed{options.seed}"
        self._files = MetricsFiles(
            options.log_folder,
            step,
            name,
            dotted(options.to_dict()),
            context.logs.now,
            context.logs.began,
            partial(context.run_state.heartbeat, context.process_ind("logger", 0)),
        )
        self._files.write_facts("options", options.to_dict(), step)
        self._files.write_facts("versions", versions(), step)
        self._trackers = make_tracker_threads(options)
        seconds = context.logs.now() - context.logs.began  # a logger that replaces another goes on
        self._progress, self._shares = Progress(options, QuietConsole(context.terminal), seconds), Shares()
        self._period_schedule = Schedule(self._params.period, self._params.steps, step)
        self._progress_schedule = Schedule(self._params.period, 0, step)
        self._records = list[Record]()  # of the period, without evaluations
        self._dropped = 0  # records since the start that came too late
        self._rates, self._counts, self._counted_at = dict[str, float](), self._read_counts(), time.monotonic()
        self._has_ended = False
        if self._files.continues:  # Readers drop earlier lines of later steps.
            step, now = int(self._counts["agent_steps"]), context.logs.now()
            counts = [Record(f"global/{name}", value, step, now) for name, value in self._counts.items()]
            self._files.write(counts, step)

    def work(self) -> bool:
        """Do what is due. Return True if there was anything to do.

        An evaluation is written at once, because the next checkpoint counts it as made. Other records wait in shared
        memory until the period ends, or until their ring is half full. A run that ends keeps the rates of that moment,
        and `close` writes its last line.
        """
        agent_steps = self._context.counters.agent_steps
        if not self._has_ended and (self._context.run_state.stopped or self._context.reached_limits()):
            self._show(self._global_values(restart_rates=False))
            self._has_ended = True
        if not self._has_ended and self._period_schedule.due(agent_steps):
            self._end_period()
            return True
        if evaluations := self._collect(from_share=0.5):
            self._write(evaluations, agent_steps)
        if shows := self._progress_schedule.due(agent_steps):
            self._show(self._global_values(restart_rates=False))
        return bool(evaluations) or shows

    def close(self) -> None:
        self._end_period()
        self._progress.close(self._shares.table())
        for tracker in self._trackers:
            tracker.end()
        deadline = time.monotonic() + self._params.tracker_timeout
        for tracker in self._trackers:
            tracker.join(max(deadline - time.monotonic(), 0.0))

    def _collect(self, from_share: float) -> list[Record]:
        """Empty the evaluator's ring and those that are filled to a share, and keep what is not of evaluations.

        Returns:
            The records of evaluations.
        """
        context = self._context
        evaluators = [number for number, (role, _) in enumerate(context.roles) if role == "evaluator"]
        rings = [context.logs.drain(from_share), *map(context.logs.drain_process, evaluators)]
        records = [record for new, _ in rings for record in new]
        self._dropped += sum(dropped for _, dropped in rings)
        evaluations = [record for record in records if record.name.startswith(EVALUATOR)]
        self._records += [record for record in records if not record.name.startswith(EVALUATOR)]
        for record in evaluations:
            if record.name == "evaluator/episodic_return_mean":
                self._progress.evaluation(record.step, record.value)
        return evaluations

    def _end_period(self) -> None:
        """Aggregate the records since the last call, and write them and the current values of the run."""
        evaluations, values = self._collect(from_share=0.0), self._global_values(restart_rates=True)
        step, now = int(values["global/agent_steps"]), self._context.logs.now()
        records, self._records = aggregate(self._shares.take(self._records)), []
        self._period_schedule.start(step)
        records += [*evaluations, *(Record(name, value, step, now) for name, value in values.items())]
        self._write(records, step)
        self._show(values)

    def _show(self, values: dict[str, float]) -> None:
        self._progress_schedule.start(self._context.counters.agent_steps)
        self._progress.show(values, self._context.counters.scores)

    def _write(self, records: list[Record], step: int) -> None:
        """Write records to all sinks."""
        context, errors = self._context, self._files.errors
        records = records + _human_normalized(records, context.options.env_class, context.spec.name)
        for tracker in self._trackers:
            tracker.write(records)
        self._files.write(records, step)
        context.run_state.record_write(context.process_ind("logger", 0), self._files.errors == errors)

    def _global_values(self, restart_rates: bool) -> dict[str, float]:
        """Return the run's counts, rates and sizes by metric name.

        Rates are means since the last call with `restart_rates`.
        """
        context, counts = self._context, self._read_counts()
        elapsed = time.monotonic() - self._counted_at
        if not self._rates or (elapsed >= MIN_RATE_SECONDS and not self._has_ended):
            self._rates = {name: (count - self._counts[name]) / max(elapsed, 1e-6) for name, count in counts.items()}
            if restart_rates:
                self._counts, self._counted_at = counts, time.monotonic()
        replay_steps = sum(memory.size() for memory in context.memories.values())  # on this node
        values = {
            **counts,
            "fps": self._rates["frames"],
            **{f"{name}_per_second": self._rates[name] for name in ("agent_steps", "updates", "samples")},
            "samples_per_insert": context.rate_limiter.ratio(),
            "rss_mb": rss_mb(),
            "restarts": context.run_state.restarts,
            "dropped_log_records": self._dropped,
            "wall_seconds": self._files.seconds,
            "metric_write_errors": self._files.errors + sum(tracker.errors for tracker in self._trackers),
            "replay_steps": replay_steps + context.counters.remote_replay_steps,
        }
        return {f"global/{name}": float(value) for name, value in values.items()}

    def _read_counts(self) -> dict[str, float]:
        counters = self._context.counters
        steps = counters.agent_steps
        return {
            "agent_steps": steps,
            "frames": steps * self._context.spec.frames_per_step,
            "episodes": counters.episodes,
            "updates": counters.updates,
            "samples": counters.sampled,
        }


def aggregate(records: Iterable[Record]) -> list[Record]:
    """Return one record per name: the mean over the period, at the step and time of the last report.

    Of totals, which only grow, it is the last value.
    Names such as "actor/episodic_return" become _mean, _std (of the population) and _median over the period's episodes.
    """
    aggregated, by_name = list[Record](), dict[str, list[Record]]()
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    for name, same in by_name.items():
        values, last = np.array([record.value for record in same]), sorted(same, key=lambda record: record.time)[-1]
        statistics = {"": last.value if TOTAL.fullmatch(name) else values.mean()}
        if name.rpartition("/")[2].startswith(EPISODIC):
            statistics = {"_mean": values.mean(), "_std": values.std(), "_median": np.median(values)}
        aggregated += [last._replace(name=name + kind, value=float(value)) for kind, value in statistics.items()]
    return aggregated


def _human_normalized(records: Iterable[Record], env_class: type[Env], game: str) -> list[Record]:
    """Return <namespace>/human_normalized for each <namespace>/episodic_return_mean if it is known."""
    return [
        record._replace(name=record.name.replace("episodic_return_mean", "human_normalized"), value=score)
        for record in records
        if record.name.endswith("/episodic_return_mean")
        and (score := env_class.human_normalized(game, record.value)) is not None
    ]
