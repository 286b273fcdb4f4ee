"""Where the time of actors and learners goes: a process names what it has just done, and the time since it last did so counts for that.

So the phases of a process add up to its whole time, and a phase costs one reading of the clock. Processes report seconds; the logger
makes shares of them, profile/<role>/<phase>, and a table at the end.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from rich.table import Table

from core.runtime.context import Context
from core.runtime.log_buffers import Record

PREFIX = "profile/"
SKIPPED, WARM_UP = 10, 3  # steps before a trace: the first ones are not like the others, and the profiler itself needs some


class Profile:
    """The laps of one process; with `options.profile` off they cost a call each. With `options.profile_trace` the learner's steps of
    that number are recorded by torch.profiler too, into logs/<signature>/trace_learner_<index>.json (chrome://tracing, Perfetto)."""

    def __init__(self, context: Context, role: str, index: int, device: str = "cpu"):
        self._context, self._role, self._process_ind = context, role, context.process_ind(role, index)
        self._on, self._cuda = context.options.profile, device if device.startswith("cuda") else None
        self._seconds: dict[str, float] = {}
        steps = context.options.profile_trace if role == "learner" else 0
        self._trace = _trace(context.options.log_folder / f"trace_{role}_{index}.json", steps) if steps else None
        self._left = SKIPPED + WARM_UP + steps
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Everything since the last lap was `phase`; on a GPU also what it has been given to do since."""
        if not self._on:
            return
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def step(self) -> None:
        """One round of the process is over."""
        if self._trace is not None:
            self._left -= 1
            self._trace.step() if self._left else self._end_trace()

    def report(self) -> None:
        """Send the seconds since the last report to the logger."""
        if self._on:
            values = {f"{PREFIX}{self._role}/{phase}": seconds for phase, seconds in self._seconds.items()}
            self._context.logs.write(self._process_ind, values, self._context.counters.agent_steps)
            self._seconds = dict.fromkeys(self._seconds, 0.0)

    def close(self) -> None:
        self.report()
        self._end_trace()

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None


class Shares:
    """The logger's side: seconds in, shares out, and sums over the run."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def take(self, records: Iterable[Record]) -> list[Record]:
        """The records, those of profiles replaced by one a phase: its share of the seconds that all processes of that role reported."""
        others: list[Record] = []
        newest: dict[str, Record] = {}
        for record in records:
            if not record.name.startswith(PREFIX):
                others.append(record)
                continue
            before = newest[record.name].value if record.name in newest else 0.0
            newest[record.name] = record._replace(value=before + record.value)
        for name, record in newest.items():
            self._totals[name] = self._totals.get(name, 0.0) + record.value
        sums = _sums({name: record.value for name, record in newest.items()})
        return others + [record._replace(value=record.value / (sums[_role(name)] or 1.0)) for name, record in newest.items()]

    def table(self) -> Table | None:
        """Every role's phases over the whole run, largest first; None if nobody reported any."""
        if not self._totals:
            return None
        table, sums = Table(title="where the time went"), _sums(self._totals)
        for heading, side in (("process", "left"), ("phase", "left"), ("share", "right"), ("seconds", "right")):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]
        for role in sorted(sums):
            own = {name.removeprefix(f"{PREFIX}{role}/"): seconds for name, seconds in self._totals.items() if _role(name) == role}
            for number, (phase, seconds) in enumerate(sorted(own.items(), key=lambda item: -item[1]), 1):
                table.add_row(role if number == 1 else "", phase, f"{seconds / (sums[role] or 1.0):.1%}", f"{seconds:,.1f}",
                              end_section=number == len(own))
        return table


def _role(name: str) -> str:
    """profile/actor/wait: actor"""
    return name.split("/")[1]


def _sums(seconds: dict[str, float]) -> dict[str, float]:
    """Over the phases of each role."""
    sums: dict[str, float] = {}
    for name, value in seconds.items():
        sums[_role(name)] = sums.get(_role(name), 0.0) + value
    return sums


def _trace(path: Any, steps: int) -> torch.profiler.profile:
    """A started profiler that writes its trace to `path` once it has seen so many steps, or when it is stopped before."""
    schedule = torch.profiler.schedule(wait=SKIPPED, warmup=WARM_UP, active=steps, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)))
    profiler.start()
    return profiler
