"""Measure how actors and learners spend their time.

A process names each phase that it has just finished, and the time since the previous mark counts for that phase. The
phases of a process therefore add up to its whole time, and a mark costs one reading of the clock. Processes report
seconds; the logger converts them to shares, profile/<role>/<phase>, and prints a table at the end.
"""

import time
from collections import defaultdict
from collections.abc import Iterable

import torch
from rich.table import Table

from core.runtime.context import Context
from core.runtime.log_buffers import Record

PREFIX = "profile/"
SKIPPED_STEPS = 10  # before a trace, because the first steps are slower than the others
WARM_UP_STEPS = 3  # that torch.profiler runs without recording
Seconds = defaultdict[str, defaultdict[str, float]]  # role -> phase -> seconds


class Profile:
    """The phase timer of one process. If `options.profile` is off, each mark costs only the call.

    With `options.profile_trace`, torch.profiler also records that number of the learner's steps to
    logs/<signature>/trace_learner_<index>.json, which chrome://tracing and Perfetto open.
    """

    def __init__(self, context: Context, role: str, index: int, device: str = "cpu"):
        self._context, self._role, self._process_ind = context, role, context.process_ind(role, index)
        self._enabled, self._cuda_device = context.options.profile, device if device.startswith("cuda") else None
        self._seconds: dict[str, float] = {}
        has_folder = role == "learner" and context.send_home is None
        steps = context.options.profile_trace if has_folder else 0
        self._trace: torch.profiler.profile | None = None
        if steps:
            path = str(context.options.log_folder / f"trace_{role}_{index}.json")
            self._trace = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=SKIPPED_STEPS, warmup=WARM_UP_STEPS, active=steps, repeat=1),
                on_trace_ready=lambda ready: ready.export_chrome_trace(path),
            )
            self._trace.start()
        self._steps_left = SKIPPED_STEPS + WARM_UP_STEPS + steps
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Count the time since the last mark for `phase`. On CUDA, wait for the launched work first."""
        if not self._enabled:
            return
        if self._cuda_device is not None:
            torch.cuda.synchronize(self._cuda_device)
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def step(self) -> None:
        """Tell the trace that one step of the process is over."""
        if self._trace is not None:
            self._steps_left -= 1
            self._trace.step() if self._steps_left else self._end_trace()

    def report(self) -> None:
        """Send the seconds since the last report to the logger."""
        if self._enabled:
            values = {f"{PREFIX}{self._role}/{phase}": seconds for phase, seconds in self._seconds.items()}
            self._context.logs.write(self._process_ind, values, self._context.counters.agent_steps)
            self._seconds = dict.fromkeys(self._seconds, 0.0)

    def close(self) -> None:
        """Send the last report and write the trace."""
        self.report()
        self._end_trace()

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None


class Shares:
    """The logger's side of the profile, which converts seconds to shares and sums them over the run."""

    def __init__(self) -> None:
        self._totals: Seconds = defaultdict(lambda: defaultdict(float))  # of the run

    def take(self, records: Iterable[Record]) -> list[Record]:
        """Replace all records of a phase by one, its share of the seconds that all processes of the role reported.

        Records that are not of a profile are returned unchanged.
        """
        others, last = list[Record](), dict[tuple[str, str], Record]()  # of each role and phase
        period: Seconds = defaultdict(lambda: defaultdict(float))
        for record in records:
            if not record.name.startswith(PREFIX):
                others.append(record)
                continue
            _, role, phase = record.name.split("/", 2)
            period[role][phase] += record.value
            self._totals[role][phase] += record.value
            last[role, phase] = record
        for (role, phase), record in last.items():
            others.append(record._replace(value=period[role][phase] / (sum(period[role].values()) or 1.0)))
        return others

    def table(self) -> Table | None:
        """Return the phases of each role over the whole run, largest first; None if no process has reported any."""
        if not self._totals:
            return None
        table = Table("process", "phase", title="where the time went")
        table.add_column("share", justify="right")
        table.add_column("seconds", justify="right")
        for role, phases in sorted(self._totals.items()):
            total = sum(phases.values()) or 1.0
            for number, (phase, seconds) in enumerate(sorted(phases.items(), key=lambda item: -item[1]), 1):
                table.add_row(
                    role if number == 1 else "",
                    phase,
                    f"{seconds / total:.1%}",
                    f"{seconds:,.1f}",
                    end_section=number == len(phases),
                )
        return table
