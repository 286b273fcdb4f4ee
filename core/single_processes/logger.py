"""Logger: drains what the other processes report, into files, TensorBoard and the progress line."""

import time
from collections.abc import Iterator

from core.common.settings import dotted
from core.common.system import resident_memory_mb, versions
from core.metrics.aggregation import aggregate, with_human_normalized
from core.metrics.file_writers import MetricsFiles, run_name
from core.metrics.profiler import Shares
from core.metrics.progress import Progress
from core.metrics.trackers import feeders
from core.runtime.context import Context
from core.runtime.log_buffers import Record
from core.runtime.schedule import Schedule

SHORTEST_SPAN = 0.5  # seconds; over less, rates say nothing


def logger(context: Context, index: int) -> Iterator[bool]:
    """Runs until every other process has had its last word; what was reported by then is written."""
    book = _Book(context)
    try:
        while not context.clock.logger_may_end:
            due = book.due()
            if due:
                book.write_period()
            yield due or book.look()
    finally:
        book.close()


class _Book:
    def __init__(self, context: Context):
        options, step = context.options, context.clock.agent_steps
        self._context, self._period = context, options.logger.period
        options.log_folder.mkdir(parents=True, exist_ok=True)
        name = run_name(options.config, context.spec.name, options.agent_type, options.seed)
        self._files = MetricsFiles(options.log_folder, step, name, dotted(options.to_dict()), context.logs.now)
        self._files.write_facts("options", options.to_dict(), step)
        self._files.write_facts("versions", versions(), step)
        self._trackers = feeders(options)
        self._rates = _Rates(context)
        self._progress, self._shares = Progress(options, terminal=context.terminal), Shares()
        self._schedule, self._looked = Schedule(self._period, options.logger.steps, step), time.monotonic()
        self._by_steps, self._reported, self._lost = options.logger.steps > 0, list[Record](), 0

    def due(self) -> bool:
        return self._schedule.due(self._context.clock.agent_steps)

    def look(self) -> bool:
        """Take what was reported and show progress every period, where lines are due by steps: rings would overflow until then.

        Returns False where nothing was due.
        """
        due = self._by_steps and time.monotonic() - self._looked >= self._period
        if due:
            self._take()
        return due

    def write_period(self) -> None:
        values = self._take()
        step, reported, self._reported = self._context.clock.agent_steps, self._reported, []
        self._schedule.start(step)
        now = self._context.logs.now()
        records = aggregate(self._shares.take(reported)) + [Record(name, value, step, now) for name, value in values.items()]
        records = with_human_normalized(records, self._context.options.env_class, self._context.spec.name)
        for sink in self._trackers:
            sink.write(records)
        errors = self._files.errors
        self._files.write(records, step)
        self._context.clock.note_written(self._context.process_ind("logger", 0), self._files.errors == errors)

    def _take(self) -> dict[str, float]:
        """Returns the run's own values now."""
        self._looked = time.monotonic()
        reported, lost = self._context.logs.drain()
        self._reported += reported
        self._lost += lost
        values = self._global_values()
        for record in reported:
            if record.name == "evaluator/episodic_return_mean":
                self._progress.evaluation(record.step, record.value)
        self._progress.show(values, self._context.clock.scores)
        return values

    def close(self) -> None:
        self.write_period()
        self._progress.close(self._shares.table())
        for tracker in self._trackers:
            tracker.close(self._context.options.logger.tracker_timeout)

    def _global_values(self) -> dict[str, float]:
        errors = self._files.errors + sum(tracker.errors for tracker in self._trackers)
        clock, memories = self._context.clock, self._context.memories
        values = {**self._rates.update(), "samples_per_insert": clock.ratio(), "resident_memory_mb": resident_memory_mb(),
                  "restarts": clock.restarts, "lost_records": self._lost, "write_errors": errors,
                  "wall_seconds": self._files.seconds}
        if memories:
            values["memory_size"] = sum(memory.size() for memory in memories)
        return {f"global/{name}": float(value) for name, value in values.items()}


class _Rates:
    """Counters of the run, and their growth a second since the last look (or the look before, when that was just now)."""

    def __init__(self, context: Context):
        self._context = context
        self._before, self._time = self._read(), time.monotonic()
        self._rates: dict[str, float] = {}

    def update(self) -> dict[str, float]:
        counts, elapsed = self._read(), time.monotonic() - self._time
        if not self._rates or elapsed >= SHORTEST_SPAN:
            self._rates = {name: (count - self._before[name]) / max(elapsed, 1e-6) for name, count in counts.items()}
            self._before, self._time = counts, time.monotonic()
        return {**counts, "fps": self._rates["frames"], "agent_steps_per_second": self._rates["agent_steps"],
                "updates_per_second": self._rates["updates"], "samples_per_second": self._rates["samples"]}

    def _read(self) -> dict[str, float]:
        clock = self._context.clock
        steps = clock.agent_steps
        return {"agent_steps": steps, "frames": steps * self._context.spec.frames_per_step, "episodes": clock.episodes,
                "updates": clock.updates, "samples": clock.sampled}
