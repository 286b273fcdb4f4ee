"""Measure how long a run takes to its first agent step and to its end, in two checkouts in turns.

    python -m benchmarks.start ../before . --runs 5

Each run is `python main.py --config dqn-cartpole --steps 2000` in its checkout, from the start of the program:

- first step: seconds until an actor has stepped an environment, which notes the time itself;
- total: seconds until the program has ended;
- CPU: seconds of the program and of all processes that it waited for, in user and system mode.

The results, with the load average before each run, are written to docs/results/start.json.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.sides import write
from benchmarks.training import RESULTS
from utils.plot.curves import markdown

# Runs that end before their first update, which needs 1,000 steps, are refused.
COMMAND = ("main.py", "--config", "dqn-cartpole", "--steps", "2000", "--game", "timed_cartpole:Timed-v1")
ENVIRONMENT = """
import os, time
import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

class Timed(CartPoleEnv):
    def step(self, action):
        if os.environ.get("NOTE") and open("/proc/self/comm").read().startswith("actor"):
            with open(os.environ.pop("NOTE"), "w") as file:
                file.write(repr(time.time()))
        return super().step(action)

gymnasium.register("Timed-v1", entry_point=Timed, max_episode_steps=500)
"""
MEASURES = ("first step", "total", "CPU")


def measure(checkout: Path) -> dict[str, float]:
    """Return the seconds of one run of this checkout, and the load average before it."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "first_step"
        (Path(folder) / "timed_cartpole.py").write_text(ENVIRONMENT)
        load, began, before = os.getloadavg()[0], time.time(), os.times()
        done = subprocess.run(
            [sys.executable, *COMMAND, "--root", folder],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), folder]), "NOTE": str(note)},
            capture_output=True,
            text=True,
        )
        ended, after = time.time(), os.times()
        if done.returncode:
            raise RuntimeError(done.stderr)
        return {
            "first step": float(note.read_text()) - began,
            "total": ended - began,
            "CPU": sum(after[2:4]) - sum(before[2:4]),
            "load": load,
        }


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return medians and ranges of each checkout as a table, and the ratio of the second's to the first's medians."""
    lines, medians = [], []
    for checkout, runs in results.items():
        columns = {name: sorted(run[name] for run in runs) for name in MEASURES}
        medians.append({name: median(values) for name, values in columns.items()})
        cells = [f"{median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})" for values in columns.values()]
        lines.append([checkout, *cells])
    lines.append(["ratio", *(f"{medians[1][name] / medians[0][name]:.2f}" for name in MEASURES)])
    return markdown(["checkout", *(f"{name}, s" for name in MEASURES)], lines)


def main() -> None:
    """Measure all runs, print the table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout")
    parser.add_argument("after", type=Path, help="checkout that is compared with it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "start.json")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(arguments.runs):
        for name in results:
            results[name].append(measure(getattr(arguments, name).resolve()))
            print(name, {key: round(value, 2) for key, value in results[name][-1].items()}, flush=True)
    write(arguments.output, results)
    print(table(results), end="")


if __name__ == "__main__":
    main()
