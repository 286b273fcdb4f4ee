"""Run the logger: write what the other processes report to files, trackers and the progress line."""

import time
from collections.abc import Iterator

from core.common.settings import dotted
from core.common.system import rss_mb, versions
from core.metrics.aggregation import aggregate, with_human_normalized
from core.metrics.file_writers import MetricsFiles, run_name
from core.metrics.profiler import Shares
from core.metrics.progress import Progress
from core.metrics.trackers import make_tracker_threads
from core.runtime.context import Context
from core.runtime.log_buffers import Record
from core.runtime.schedule import Schedule

MIN_RATE_SECONDS = 0.5  # rates over a shorter time are too noisy


def logger(context: Context, index: int) -> Iterator[bool]:
    """Run until every other process has sent its last report, and write all reports. Yield True after work."""
    run_log = _RunLog(context)
    try:
        while not context.run_state.logger_may_end:
            due = run_log.is_due()
            if due:
                run_log.write()
            yield due or run_log.collect_if_due()
    finally:
        run_log.close()


class _RunLog:
    """Reports that were collected, and the sinks that they are written to."""

    def __init__(self, context: Context):
        options, step = context.options, context.counters.agent_steps
        self._context, self._period = context, options.logger.period
        options.log_folder.mkdir(parents=True, exist_ok=True)
        name = run_name(options.config, context.spec.name, options.agent_type, options.seed)
        self._files = MetricsFiles(options.log_folder, step, name, dotted(options.to_dict()), context.logs.now)
        self._files.write_facts("options", options.to_dict(), step)
        self._files.write_facts("versions", versions(), step)
        self._trackers = make_tracker_threads(options)
        self._rates = _Rates(context)
        self._progress, self._shares = Progress(options, terminal=context.terminal), Shares()
        self._schedule, self._collected_at = Schedule(self._period, options.logger.steps, step), time.monotonic()
        self._is_due_by_steps, self._records, self._dropped = options.logger.steps > 0, list[Record](), 0

    def is_due(self) -> bool:
        return self._schedule.due(self._context.counters.agent_steps)

    def collect_if_due(self) -> bool:
        """Collect records and show progress every period, if files are written by agent steps; else the rings overflow.

        Returns:
            True if records were collected.
        """
        due = self._is_due_by_steps and time.monotonic() - self._collected_at >= self._period
        if due:
            self._collect()
        return due

    def write(self) -> None:
        """Aggregate the records since the last call, and write them to all sinks."""
        values = self._collect()
        step, records, self._records = self._context.counters.agent_steps, self._records, []
        self._schedule.start(step)
        now = self._context.logs.now()
        records = aggregate(self._shares.take(records))
        records += [Record(name, value, step, now) for name, value in values.items()]
        records = with_human_normalized(records, self._context.options.env_class, self._context.spec.name)
        for tracker in self._trackers:
            tracker.write(records)
        errors = self._files.errors
        self._files.write(records, step)
        self._context.run_state.record_write(self._context.process_ind("logger", 0), self._files.errors == errors)

    def _collect(self) -> dict[str, float]:
        """Collect records and show progress. Return the current values of the run itself."""
        self._collected_at = time.monotonic()
        records, dropped = self._context.logs.drain()
        self._records += records
        self._dropped += dropped
        values = self._global_values()
        for record in records:
            if record.name == "evaluator/episodic_return_mean":
                self._progress.evaluation(record.step, record.value)
        self._progress.show(values, self._context.counters.scores)
        return values

    def close(self) -> None:
        self.write()
        self._progress.close(self._shares.table())
        for tracker in self._trackers:
            tracker.close(self._context.options.logger.tracker_timeout)

    def _global_values(self) -> dict[str, float]:
        context = self._context
        values = {
            **self._rates.update(),
            "samples_per_insert": context.rate_limiter.ratio(),
            "rss_mb": rss_mb(),
            "restarts": context.run_state.restarts,
            "dropped_log_records": self._dropped,
            "wall_seconds": self._files.seconds,
            "metric_write_errors": self._files.errors + sum(tracker.errors for tracker in self._trackers),
        }
        if context.memories:
            here = sum(memory.size() for memory in context.memories.values())
            values["replay_steps"] = here + context.counters.remote_replay_steps
        return {f"global/{name}": float(value) for name, value in values.items()}


class _Rates:
    """Counts of the run and their growth per second, over at least MIN_RATE_SECONDS."""

    def __init__(self, context: Context):
        self._context = context
        self._previous, self._time = self._counts(), time.monotonic()
        self._rates: dict[str, float] = {}

    def update(self) -> dict[str, float]:
        counts, elapsed = self._counts(), time.monotonic() - self._time
        if not self._rates or elapsed >= MIN_RATE_SECONDS:
            self._rates = {name: (count - self._previous[name]) / max(elapsed, 1e-6) for name, count in counts.items()}
            self._previous, self._time = counts, time.monotonic()
        return {
            **counts,
            "fps": self._rates["frames"],
            "agent_steps_per_second": self._rates["agent_steps"],
            "updates_per_second": self._rates["updates"],
            "samples_per_second": self._rates["samples"],
        }

    def _counts(self) -> dict[str, float]:
        counters = self._context.counters
        steps = counters.agent_steps
        return {
            "agent_steps": steps,
            "frames": steps * self._context.spec.frames_per_step,
            "episodes": counters.episodes,
            "updates": counters.updates,
            "samples": counters.sampled,
        }
