"""Measure sides in turns, each in a process of its own, and write the rates with command and machine."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.training import ROOT
from core.common.system import versions
from utils.sweep.subprocess_run import end_with, words_of


def calls_per_second(call: Callable[[], object], seconds: float, uncounted: int = 0) -> float:
    """Return the calls per second of `seconds`, after calls that are not counted."""
    for _ in range(uncounted):
        call()
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        call()
        count += 1
    return count / elapsed


def output_of(module: str, words: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Run a benchmark in a process of its own and return what it prints.

    The process ends if this one is killed.

    Args:
        module: Name of the module in benchmarks/.
        words: Words of its command line.
        variables: Environment variables besides those of this process.
    """
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *words],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(end_with, os.getpid()),
    ).stdout


def last_line(module: str, variables: Mapping[str, str] | None = None, **options: object) -> str:
    """Run a benchmark with these options as `output_of` does, and return the last line that it prints."""
    return output_of(module, words_of(options), variables).splitlines()[-1]


def take_turns(
    sides: Iterable[str], rounds: int, measure: Callable[[str], float], title: str = "", unit: str = "agent steps/s"
) -> dict[str, list[float]]:
    """Return the rate of each side in each round, and print it."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in rates:
            rates[side].append(measure(side))
            print(f"{title}{side} {rates[side][-1]:.1f} {unit}", flush=True)
    return rates


def ratios(name: str, rates: Iterable[float], others: Iterable[float]) -> list[float]:
    """Return the ratio of two sides in each round, and print the median under this name."""
    found = [one / other for one, other in zip(rates, others)]
    print(f"{name}: {statistics.median(found):.2f}", flush=True)
    return found


def description(module: str) -> dict[str, Any]:
    """Return the command of this process, the processor, its cores and the versions of packages."""
    return {
        "command": " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]]),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions(),
    }


def processor() -> str:
    """Return the processor's model name as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
