"""Measure what foreign programs on the same cores cost a run: alone, beside two busy loops, and as two runs.

    python -m benchmarks.grace --rounds 2 --configs dqn-pong-small dqn-pong-uniform [CHECKOUT ...]

Every round measures each config in each checkout of the project, in turns. The results name a checkout as it is given.
The loops have the highest priority that users have. The results are written to docs/results/grace.json: agent steps
per second, of both runs together.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.sides import description, write
from benchmarks.training import RESULTS, ROOT, after_start, rate, train
from utils.plot.curves import markdown

START_SECONDS = 12  # start-up, filling the memory, catching up
WORDS = "--rate_limiter.min_replay_size 1000 --rate_limiter.error_buffer 100"  # of configs with replay


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


def speed(checkout: Path, config: str, num_runs: int, num_loops: int, seconds: float) -> float:
    """Return the agent steps per second of all runs together."""
    with busy_loops(num_loops), ThreadPoolExecutor(num_runs) as pool:
        words = f"--config {config} {WORDS}"
        runs = [pool.submit(train, START_SECONDS + seconds, words, checkout=checkout) for _ in range(num_runs)]
        return sum(rate(after_start(run.result(), START_SECONDS - 4)) for run in runs)


CASES = {"alone": (1, 0), "two busy loops": (1, 2), "two runs": (2, 0)}


def main() -> None:
    """Run the measurements, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--configs", nargs="+", default=["dqn-pong-small"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for config in options.configs:
            for case, (num_runs, num_loops) in CASES.items():
                for checkout in options.checkouts:
                    measured = results.setdefault(f"{config}, {checkout}", {}).setdefault(case, [])
                    measured.append(speed(checkout.resolve(), config, num_runs, num_loops, options.seconds))
                    print(f"{config}, {checkout}, {case}: {measured[-1]:.0f} agent steps/s", flush=True)
    lines = []
    for name, cases in results.items():
        medians = {case: median(values) for case, values in cases.items()}
        ratios = [medians["two busy loops"] / medians["alone"], medians["two runs"] / medians["alone"]]
        lines.append([name, *(f"{value:.0f}" for value in medians.values()), *(f"{ratio:.2f}" for ratio in ratios)])
    print(markdown(["config, checkout", *CASES, "beside loops / alone", "two runs / alone"], lines), end="")
    write(RESULTS / "grace.json", {**description("grace"), "results": results})


if __name__ == "__main__":
    main()
