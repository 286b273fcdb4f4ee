"""Agent steps per second of training against stable-baselines3 and against this machine's own ceiling: `make bench`.

Same work on both sides: Pong, Nature CNN, plain DQN (no double, n = 1), uniform memory, 8 environments, 8 samples learnt from an agent
step (batch 32: one update every 4 agent steps; batch 256: one every 32), all cores of this machine. The sides take turns (A B A B) in
processes of their own; what is quoted is the median and the ratio of each pair. Start-up and the filling of the memory are not counted.
The ceiling is measured apart: environment and acting alone on one core, and the learner's update on a batch in memory alone,
combined as if nothing were lost between them.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.training import ROOT, after_start, rate, stable_baselines3_rate, train
from core.common.system import versions
from core.device.torch_runtime import use_threads

NUM_ENVS, SAMPLES_PER_STEP, LEARN_START = 8, 8, 2_000
START_SECONDS = 20  # of our side: processes, filling the memory, catching up


def ours(batch_size: int, seconds: float) -> float:
    """Agent steps per second of `python main.py`, read from the metrics file of the run."""
    rows = train(START_SECONDS + seconds, "--config", "dqn-pong-uniform", "--num_actors", "1",
                 "--num_envs_per_actor", str(NUM_ENVS), "--agent.batch_size", str(batch_size),
                 "--agent.nstep", "1", "--agent.double", "false", "--clock.learn_start", str(LEARN_START), "--clock.tolerance", "100",
                 "--clock.samples_per_insert", str(SAMPLES_PER_STEP))
    return rate([row for row in rows if row["values"].get("global/samples_per_insert", 0) > 0.85 * SAMPLES_PER_STEP])


def ours_acting(batch_size: int, seconds: float) -> float:
    """Agent steps per second of the actor alone, which learns nothing: writing rows, pulling parameters and reporting included."""
    rows = train(10 + seconds, "--config", "dqn-pong-uniform", "--num_actors", "1", "--num_envs_per_actor", str(NUM_ENVS),
                 "--memory.capacity", "50000", "--clock.learn_start", "1000000000")
    return rate(after_start(rows, 5))


def bare_acting(batch_size: int, seconds: float) -> float:
    return acting(seconds)


def stable_baselines3(batch_size: int, seconds: float) -> float:
    """Agent steps per second of stable-baselines3's DQN, in this process."""
    import ale_py
    import gymnasium
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=NUM_ENVS, seed=0), n_stack=4)
    steps_an_update = batch_size // SAMPLES_PER_STEP
    train_freq, gradient_steps = max(steps_an_update // NUM_ENVS, 1), max(NUM_ENVS // steps_an_update, 1)
    agent = DQN("CnnPolicy", env, buffer_size=100_000, learning_starts=LEARN_START, batch_size=batch_size, train_freq=train_freq,
                gradient_steps=gradient_steps, target_update_interval=10_000, seed=0)
    return stable_baselines3_rate(agent, LEARN_START + 1_000, seconds)


def acting(seconds: float, network: bool = True) -> float:
    """Agent steps per second of the bare vector environment on one core, with the network's forward or without."""
    import numpy as np
    import torch

    from core.envs.atari import AtariEnv, AtariParams
    from core.models.dqn import DQNCNN, DQNCNNParams

    use_threads(1)
    env = AtariEnv(AtariParams(), "pong", NUM_ENVS)
    model, timestep = DQNCNN(DQNCNNParams(), env.spec), env.reset(0)
    started, steps = time.perf_counter(), 0
    with torch.inference_mode():
        while (elapsed := time.perf_counter() - started) < seconds:
            if network:
                model(torch.from_numpy(timestep.observation))
            timestep = env.step(np.random.default_rng(steps).integers(6, size=NUM_ENVS))
            steps += NUM_ENVS
    env.close()
    return steps / elapsed


def updating(batch_size: int, threads: int, seconds: float) -> float:
    """Samples per second of the agent's update on a batch that is there already."""
    import numpy as np
    import torch

    from core.agents.dqn import DQN, DQNParams
    from core.models.dqn import DQNCNN, DQNCNNParams
    from core.specs import ArraySpec, Discrete, EnvSpec
    from core.types import Batch, SampleIds, Window

    use_threads(threads)
    spec = EnvSpec("pong", ArraySpec((84, 84), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)
    agent = DQN(DQNParams(batch_size=batch_size, nstep=1, double=False), spec, lambda: DQNCNN(DQNCNNParams(), spec))
    rows = torch.zeros(2, batch_size)
    window = Window(torch.randint(0, 256, (2, batch_size, 4, 84, 84), dtype=torch.uint8), rows.bool(), rows.bool(), rows.long(), rows,
                    rows + 1, {})
    batch = Batch(window, SampleIds(np.zeros(batch_size, np.int64), np.zeros(batch_size, np.int64)), torch.ones(batch_size))
    agent.init_learner()
    for _ in range(3):
        agent.learn(batch)
    started, samples = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        agent.learn(batch)
        samples += batch_size
    return samples / elapsed


def ceiling(batch_size: int, seconds: float) -> float:
    """Agent steps per second if acting and updates shared the cores without loss."""
    cores = len(os.sched_getaffinity(0))
    act = 1 / acting(seconds / 3)
    update_one = SAMPLES_PER_STEP / updating(batch_size, 1, seconds / 3)
    update_all = SAMPLES_PER_STEP / updating(batch_size, cores, seconds / 3)
    return max(1 / max(update_one, act), 1 / (update_all + act / cores))


def processor() -> str:
    """The model name that Linux gives."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


SIDES = {"ours": ours, "stable-baselines3": stable_baselines3, "ceiling": ceiling}
ACTING = {"actor": ours_acting, "bare environment and forward": bare_acting}


def measure_side(module: str, side: str, seconds: float, *words: str) -> float:
    """One side in a process of its own: the module prints its rate."""
    command = [sys.executable, "-m", module, "--side", side, "--seconds", str(seconds), *words]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def measure(side: str, batch_size: int, seconds: float) -> float:
    return measure_side("benchmarks.speed", side, seconds, "--batch_size", str(batch_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=[*SIDES, *ACTING])
    parser.add_argument("--batch_size", type=int, default=0, help="0: 32 and 256")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "speed.json")
    options = parser.parse_args()
    if options.side:
        print({**SIDES, **ACTING}[options.side](options.batch_size, options.seconds))
        return
    result: dict[str, object] = {"command": "python -m benchmarks.speed " + " ".join(sys.argv[1:]), "seconds": options.seconds,
                                 "processor": processor(), "cpus": len(os.sched_getaffinity(0)),
                                 "versions": {**versions(), "stable-baselines3": version("stable-baselines3")}}
    for batch_size in [options.batch_size] if options.batch_size else [32, 256]:
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.pairs):
            for side in SIDES:
                rates[side].append(measure(side, batch_size, options.seconds))
                print(f"batch {batch_size}: {side} {rates[side][-1]:.1f} agent steps/s", flush=True)
        against, fraction = ([mine / other for mine, other in zip(rates["ours"], rates[side])] for side in list(SIDES)[1:])
        result[f"batch {batch_size}"] = {**rates, "ours / stable-baselines3": against, "ours / ceiling": fraction}
        print(f"batch {batch_size}: median {statistics.median(rates['ours']):.1f} agent steps/s, {statistics.median(against):.2f} times "
              f"stable-baselines3, {statistics.median(fraction):.2f} of the ceiling")
    playing: dict[str, list[float]] = {side: [] for side in ACTING}
    for _ in range(options.pairs):
        for side in ACTING:
            playing[side].append(measure(side, 0, options.seconds / 2))
            print(f"acting only: {side} {playing[side][-1]:.0f} agent steps/s", flush=True)
    fraction = [mine / bare for mine, bare in zip(*playing.values())]
    result["acting only"] = {**playing, "actor / bare": fraction}
    print(f"acting only: {statistics.median(fraction):.2f} of the bare environment with the same network's forward")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
