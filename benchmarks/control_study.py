"""Compare learning curves of continuous control with stable-baselines3's DDPG, TD3 and SAC, with the same options.

    python -m benchmarks.control_study pendulum reacher --seeds 1 2 3
    python -m benchmarks.control_study hopper --steps 300000 --sides ddpg d4pg stable-baselines3-ddpg

Each task gets a plot with bands and a table over all sides and seeds. `--jobs` runs are trained at a time, each on
its share of the cores. Our sides are rows; those of stable-baselines3 have the options of the row ddpg-<task>, and
SAC those of sac-<task>. Both are scored by the mean raw return of 10 episodes without noise in separate environments,
twenty times a run. A complete run is not repeated, so that the study can be stopped and continued. Runs that the files
hold of other sides and seeds stay in them, if they are of as many steps. Needs matplotlib.
"""

import argparse
import csv
import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.sides import output_of
from benchmarks.training import RESULTS, ROOT
from utils.config.command_line import read_options, refusing
from utils.errors import ConfigurationError
from utils.options import CONFIGS
from utils.plot import curves, figures
from utils.sweep.subprocess_run import ChildRun, Runner, options_of, seeded, words_of

OTHERS = {"stable-baselines3-ddpg": "DDPG", "stable-baselines3-td3": "TD3", "stable-baselines3-sac": "SAC"}
OURS = ("ddpg", "d4pg", "td3", "sac")
SIDES = (*OURS, *OTHERS)
EPISODES, EVALUATIONS = 10, 20
TASKS = {row["name"].removeprefix("ddpg-"): row for row in CONFIGS if row["name"].startswith("ddpg-")}


def ours(side: str, task: str, seed: int, steps: int) -> ChildRun:
    """Return a run of the row <side>-<task>."""
    words = f"--steps {steps} --evaluator.steps {steps // EVALUATIONS} --evaluator.episodes {EPISODES}".split()
    options = options_of(f"{side}-{task}", words, "control", str(ROOT))
    (options,) = seeded(options, f"{task}-{side}", [seed])
    options = dataclasses.replace(options, timestamp=f"{options.timestamp}-{steps}")
    return ChildRun(options, words, options.log_folder.with_suffix(".txt"))


def other(side: str, task: str, seed: int, steps: int, threads: int) -> Path:
    """Return the evaluations of a run of stable-baselines3, trained in a process of its own unless it is complete."""
    path = ROOT / "logs" / f"control_{task}-{side}-seed{seed}-{steps}.csv"
    if not path.exists():
        words = words_of({"sides": side, "seeds": seed, "steps": steps, "result": path})
        output_of("control_study", [task, *words], {"OMP_NUM_THREADS": str(threads)})
    return path


def train_other(side: str, task: str, seed: int, steps: int, path: Path) -> None:
    """Train stable-baselines3 with the options of our row; write the evaluations as CSV."""
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.noise import NormalActionNoise

    from benchmarks.sb3_evaluation import Evaluation

    row = f"sac-{task}" if side == "stable-baselines3-sac" else f"ddpg-{task}"
    options = read_options(["--config", row])
    agent, env, evaluation_env = options.agent, gymnasium.make(options.game), gymnasium.make(options.game)
    evaluation_env.reset(seed=seed + 1_000_000)
    callback = Evaluation(path.stem, evaluation_env, EPISODES, steps, deterministic=True)
    size = env.action_space.shape[0]  # type: ignore[index]
    scale = 0.0 if agent.noise == "none" else agent.noise_scale  # Both scales are for actions in [-1, 1].
    noise = NormalActionNoise(np.zeros(size), np.full(size, scale))
    getattr(stable_baselines3, OTHERS[side])(
        "MlpPolicy",
        env,
        learning_rate=agent.critic_learning_rate,
        buffer_size=min(options.memory.capacity, steps),
        gamma=agent.gamma,
        learning_starts=options.rate_limiter.min_replay_size,
        batch_size=agent.batch_size,
        tau=agent.target_update_tau,
        train_freq=1,
        gradient_steps=1,
        action_noise=noise,
        policy_kwargs={"net_arch": list(options.model.hidden)},
        seed=seed,
        device="cpu",
    ).learn(steps, callback=callback)
    callback.write(path)


def study(task: str, sides: Sequence[str], seeds: Sequence[int], steps: int, jobs: int, output: Path) -> int:
    """Train what is missing of a task and write its results; return 0 if all of our runs are complete."""
    keys = list(itertools.product(seeds, sides))
    for name, run in held(task, output).items():
        length = run.curves[curves.SCORE].steps[-1]
        if name not in {f"{side}-seed{seed}" for seed, side in keys} and abs(length - steps) > steps / EVALUATIONS:
            wish = "choose its --steps or another --output"
            raise ConfigurationError(f"control-{task}.csv holds {name} of {length:,.0f} steps: {wish}")
    children = {(side, seed): ours(side, task, seed, steps) for seed, side in keys if side in OURS}
    code = Runner(list(children.values()), jobs).run()
    if code or not all(child.complete for child in children.values()):
        return code or 1
    threads = max(len(os.sched_getaffinity(0)) // jobs, 1)
    with ThreadPoolExecutor(jobs) as pool:
        others = {
            (side, seed): pool.submit(other, side, task, seed, steps, threads) for seed, side in keys if side in OTHERS
        }
    sources = {key: child.options.log_folder for key, child in children.items()}
    sources |= {key: future.result() for key, future in others.items()}
    write(task, sources, steps, output)
    return 0


def held(task: str, output: Path) -> dict[str, curves.Run]:
    """Return the runs that the data file of a task holds, by name."""
    data = output / f"control-{task}.csv"
    return {run.name: run for run in curves.read([data], list(curves.COLUMNS))} if data.exists() else {}


def write(task: str, sources: Mapping[tuple[str, int], Path], steps: int, output: Path) -> None:
    """Write curves, plot and table of a task: of these runs and of those that its data file holds.

    Args:
        task: Key of TASKS.
        sources: (side, seed) -> log folder or CSV file of the run, which replaces the one in the data file.
        steps: Agent steps of a run.
        output: Folder of the files.
    """
    path, metrics = output / f"control-{task}", list(curves.COLUMNS)
    found = held(task, output)
    for (side, seed), source in sources.items():
        (run,), name = curves.read([source], metrics), f"{side}-seed{seed}"
        until = {metric: curves.until(curve, steps) for metric, curve in run.curves.items()}
        found[name] = run._replace(name=name, curves=until)
    runs: dict[str, dict[int, curves.Run]] = {}
    for name, run in found.items():
        side, _, seed = name.rpartition("-seed")
        runs.setdefault(side, {})[int(seed)] = run
    runs = {side: dict(sorted(by_seed.items())) for side, by_seed in runs.items()}
    curves.write_csv(path.with_name(f"{path.name}.csv"), [run for by_seed in runs.values() for run in by_seed.values()])
    scored = {
        side: [run._replace(curves={curves.SCORE: run.curves[curves.SCORE]}) for run in by_seed.values()]
        for side, by_seed in runs.items()
    }
    figures.save(figures.draw_curves(scored, ["steps"], "mean", TASKS[task]["game"]), path, ["png"])
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    with path.with_name(f"{path.name}-table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["side", "mean over seeds", *(f"seed {seed}" for seed in seeds), "best evaluation", "minutes a run"]
        )
        for side, by_seed in runs.items():
            each = {seed: run.curves[curves.SCORE] for seed, run in by_seed.items()}
            scores = {seed: curves.late_score(curve, steps) for seed, curve in each.items()}
            mean, best = np.mean(list(scores.values())), np.mean([curve.values.max() for curve in each.values()])
            minutes = np.mean([curve.seconds[-1] for curve in each.values()]) / 60
            cells = (f"{scores[seed]:.1f}" if seed in scores else "" for seed in seeds)
            writer.writerow([side, f"{mean:.1f}", *cells, f"{best:.1f}", f"{minutes:.1f}"])
            listed = [round(score, 1) for score in scores.values()]
            print(f"{task}: {side} {mean:.1f} from {listed}, best {best:.1f}, {minutes:.1f} minutes a run", flush=True)


def main() -> int:
    """Run the study of each task; return 0 if all of its runs are complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--steps", type=int, help="agent steps per run, a multiple of 20; default: those of the row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=["ddpg", "d4pg", "stable-baselines3-ddpg", "stable-baselines3-td3"]
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for task in options.tasks:
        steps = options.steps or TASKS[task]["steps"]
        if options.result:
            train_other(options.sides[0], task, options.seeds[0], steps, options.result)
            return 0
        names = {row["name"] for row in CONFIGS}
        sides = [side for side in options.sides if side in OTHERS or f"{side}-{task}" in names]
        with refusing():
            if code := study(task, sides, options.seeds, steps, options.jobs, options.output):
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
