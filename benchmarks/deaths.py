"""Measure how many seconds a run takes to end after each kind of signal.

    python -m benchmarks.deaths --rounds 3

Each round starts dqn-minatar-breakout with two actors, a checkpoint and an evaluation every five seconds, waits for
5,000 agent steps, and ends the run: learner killed, main killed, SIGINT, SIGTERM, and a second SIGINT while the
learner cannot save. The results are written to docs/results/deaths.json. benchmarks.soak measures the deaths that a
run survives.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.sides import write
from benchmarks.soak import Run
from benchmarks.training import RESULTS

STEPS = 5_000


def interrupt_twice(run: Run) -> None:
    """Send SIGINT twice while the learner is stopped; time counts from the second signal."""
    run.children()["learner 0"].suspend()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)


ENDS: dict[str, Callable[[Run], None]] = {
    "learner killed": lambda run: run.children()["learner 0"].kill(),
    "main killed": lambda run: run.process.kill(),
    "SIGINT": lambda run: run.process.send_signal(signal.SIGINT),
    "SIGTERM": lambda run: run.process.send_signal(signal.SIGTERM),
    "second SIGINT": interrupt_twice,
}


def measure(run: Run, end: Callable[[Run], None]) -> dict[str, float | int]:
    """End a run after STEPS agent steps.

    Returns:
        The exit code, the seconds until main and all processes had ended, and the one-minute load average.
    """
    steps = 0
    try:
        while steps < STEPS:
            time.sleep(0.2)
            steps = max([steps, *(int(done[0]) for _, done in run.new_progress())])
            run.children()
        load = os.getloadavg()[0]
        end(run)
        signalled = time.monotonic()
        exit_code = run.process.wait(120)
        main_seconds = time.monotonic() - signalled
        _, alive = psutil.wait_procs(run.seen.values(), timeout=60)
        assert not alive, alive
        return {
            "exit_code": exit_code,
            "main_seconds": round(main_seconds, 2),
            "all_seconds": round(time.monotonic() - signalled, 2),
            "load": load,
        }
    finally:
        for process in (run.process, *run.seen.values()):
            if process.is_running():
                process.kill()


def main() -> None:
    """Measure all rounds, print the results and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "deaths.json")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float | int]]] = {name: [] for name in ENDS}
    for number in range(arguments.rounds):
        for name, end in ENDS.items():
            options = argparse.Namespace(
                victim=name.replace(" ", "-"), config="dqn-minatar-breakout", seed=number, actors=2
            )
            with TemporaryDirectory(ignore_cleanup_errors=True) as root:
                results[name].append(measure(Run(options, Path(root)), end))
            print(name, results[name][-1], flush=True)
    write(arguments.output, results)


if __name__ == "__main__":
    main()
