"""Measure what foreign programs on the same cores cost a run, by how long OpenMP's threads spin before they sleep.

    python -m benchmarks.grace --rounds 2

Every round measures `dqn-pong-small` with each spin count (GOMP_SPINCOUNT of libgomp, with which torch is built on
Linux; 300,000 is its default), alone, beside two busy loops of the same priority, and as two runs side by side.
The results are written to docs/results/grace.json: agent steps per second, of both runs together.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median

from benchmarks.training import RESULTS, after_start, rate, train
from core.common.system import versions

START_SECONDS = 12  # start-up, filling the memory, catching up
WORDS = ("--config", "dqn-pong-small", "--rate_limiter.min_replay_size", "1000", "--rate_limiter.error_buffer", "100")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run programs that each need a core, at priority 0."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def speed(num_runs: int, num_loops: int, seconds: float) -> float:
    """Return the agent steps per second of all runs together."""
    with busy_loops(num_loops), ThreadPoolExecutor(num_runs) as pool:
        runs = [pool.submit(train, START_SECONDS + seconds, *WORDS) for _ in range(num_runs)]
        return sum(rate(after_start(run.result(), START_SECONDS - 4)) for run in runs)


CASES = {"alone": (1, 0), "two busy loops": (1, 2), "two runs": (2, 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--spin_counts", type=int, nargs="+", default=[300_000, 10_000, 0])
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for spin_count in options.spin_counts:
            os.environ["GOMP_SPINCOUNT"] = str(spin_count)
            for case, (num_runs, num_loops) in CASES.items():
                measured = results.setdefault(str(spin_count), {}).setdefault(case, [])
                measured.append(speed(num_runs, num_loops, options.seconds))
                print(f"spin count {spin_count:>7}, {case}: {measured[-1]:.0f} agent steps/s", flush=True)
    print("| spin count | " + " | ".join(CASES) + " | beside loops / alone | two runs / alone |")
    print("|---" * (len(CASES) + 3) + "|")
    for count, cases in results.items():
        medians = {case: median(values) for case, values in cases.items()}
        ratios = [medians["two busy loops"] / medians["alone"], medians["two runs"] / medians["alone"]]
        cells = [f"{value:.0f}" for value in medians.values()] + [f"{ratio:.2f}" for ratio in ratios]
        print(f"| {int(count):,} | " + " | ".join(cells) + " |")
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), **versions()}
    (RESULTS / "grace.json").write_text(json.dumps({"results": results, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
