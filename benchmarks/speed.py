"""Compare training speed with stable-baselines3 and with the limit of this machine: `make bench`.

    python -m benchmarks.speed                                        Pong, batches of 32 and of 256
    python -m benchmarks.speed --case cartpole --batch_size 64        CartPole, two layers of 128 units

Both sides do the same work: plain DQN (no double, n = 1), uniform memory, 8 environments, 8 samples learned from per
agent step (batch 32: one update every 4 agent steps; batch 256: one every 32), all cores. The sides take turns (A B A
B) in processes of their own. Reported are the median and the ratio of each pair. Start-up and the filling of the memory
are not counted. Compiled, our side needs the compiler's files of an earlier run, or compiles while it is measured.

The ceiling, of Pong only, combines two separate measurements as if their work were spread over all cores without loss:
environment and acting on one core, updates on a batch in memory on one core, both in the precision of a run.
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
from core.learning.precision import in_bf16, precision_on
from core.model import Model
from core.specs import EnvSpec

NUM_ENVS, SAMPLES_PER_STEP, LEARN_START = 8, 8, 2_000
START_SECONDS = 20  # Start-up of our side: processes, filling the memory, catching up.


def ours(case: str, batch_size: int, seconds: float, *words: str) -> float:
    """Return the agent steps per second of `python main.py`."""
    lines = train(
        START_SECONDS + seconds,
        "--config",
        {"pong": "dqn-pong-uniform", "cartpole": "dqn-cartpole"}[case],
        "--num_actors",
        "1",
        "--num_envs_per_actor",
        str(NUM_ENVS),
        "--agent.batch_size",
        str(batch_size),
        "--agent.n_step",
        "1",
        "--agent.double_q",
        "false",
        "--rate_limiter.min_replay_size",
        str(LEARN_START),
        "--rate_limiter.error_buffer",
        "100",
        "--rate_limiter.samples_per_insert",
        str(SAMPLES_PER_STEP),
        *words,
    )
    full = [line for line in lines if line["values"].get("global/samples_per_insert", 0) > 0.85 * SAMPLES_PER_STEP]
    return rate([line for line in full if line["time"] > full[-1]["time"] - seconds])


def ours_compiled(case: str, batch_size: int, seconds: float) -> float:
    """Return the same with compiled updates."""
    return ours(case, batch_size, seconds, "--steps", "1000000000", "--learner.compile", "yes")


def ours_acting(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second of an actor without a learner, with storing, pulling and reporting."""
    lines = train(
        10 + seconds,
        "--config",
        "dqn-pong-uniform",
        "--num_actors",
        "1",
        "--num_envs_per_actor",
        str(NUM_ENVS),
        "--memory.capacity",
        "50000",
        "--rate_limiter.min_replay_size",
        "1000000000",
    )
    return rate(after_start(lines, 5))


def bare_acting(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second of environment and network alone; every side takes case and batch size."""
    return acting(seconds)


def stable_baselines3(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second of stable-baselines3's DQN in this process."""
    import ale_py
    import gymnasium
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

    gymnasium.register_envs(ale_py)
    if case == "pong":
        env: VecEnv = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=NUM_ENVS, seed=0), n_stack=4)
    else:
        env = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=0)
    steps_per_update = batch_size // SAMPLES_PER_STEP
    train_freq, gradient_steps = max(steps_per_update // NUM_ENVS, 1), max(NUM_ENVS // steps_per_update, 1)
    agent = DQN(
        "CnnPolicy" if case == "pong" else "MlpPolicy",
        env,
        buffer_size=100_000,
        learning_starts=LEARN_START,
        batch_size=batch_size,
        train_freq=train_freq,
        gradient_steps=gradient_steps,
        target_update_interval=10_000,
        policy_kwargs={} if case == "pong" else {"net_arch": [128, 128]},
        seed=0,
    )
    return stable_baselines3_rate(agent, LEARN_START + 1_000, seconds)


def network(spec: EnvSpec) -> Model:
    """Return the network of the Nature paper in the precision that runs choose on this machine."""
    from core.models.dqn import DQNCNN

    model = DQNCNN(DQNCNN.Params(), spec)
    return in_bf16(model) if precision_on("cpu", "auto", spec) == "bf16" else model


def acting(seconds: float) -> float:
    """Return the agent steps per second of the environment with the network on one core."""
    import numpy as np
    import torch

    from core.envs.atari import AtariEnv, AtariParams

    use_threads(1)
    env = AtariEnv(AtariParams(), "pong", NUM_ENVS)
    model, timestep = network(env.spec), env.reset(0)
    started, steps = time.perf_counter(), 0
    with torch.inference_mode():
        while (elapsed := time.perf_counter() - started) < seconds:
            model(torch.from_numpy(timestep.observation))
            timestep = env.step(np.random.default_rng(steps).integers(6, size=NUM_ENVS))
            steps += NUM_ENVS
    env.close()
    return steps / elapsed


def updating(batch_size: int, threads: int, seconds: float) -> float:
    """Return the samples per second of the agent's update on a batch in memory."""
    import numpy as np
    import torch

    from core.agents.dqn import DQN, DQNParams
    from core.specs import ArraySpec, Discrete
    from core.types import Batch, SampleIds, Window

    use_threads(threads)
    spec = EnvSpec("pong", ArraySpec((84, 84), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)
    agent = DQN(DQNParams(batch_size=batch_size, n_step=1, double_q=False), spec, lambda: network(spec))
    zeros = torch.zeros(2, batch_size)
    window = Window(
        torch.randint(0, 256, (2, batch_size, 4, 84, 84), dtype=torch.uint8),
        zeros.bool(),
        zeros.bool(),
        zeros.long(),
        zeros,
        zeros + 1,
        {},
    )
    batch = Batch(
        window, SampleIds(np.zeros(batch_size, np.int64), np.zeros(batch_size, np.int64)), torch.ones(batch_size)
    )
    agent.init_learner()
    for _ in range(3):
        agent.learn(batch)
    started, samples = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        agent.learn(batch)
        samples += batch_size
    return samples / elapsed


def ceiling(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second if acting and updates were spread over the cores without loss."""
    act, update = 1 / acting(seconds / 2), SAMPLES_PER_STEP / updating(batch_size, 1, seconds / 2)
    return len(os.sched_getaffinity(0)) / (act + update)


def processor() -> str:
    """Return the processor's model name as Linux reports it."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


SIDES = {
    "pong": {"ours": ours, "stable-baselines3": stable_baselines3, "ceiling": ceiling},
    "cartpole": {"ours": ours, "ours, compiled": ours_compiled, "stable-baselines3": stable_baselines3},
}
ACTING = {"actor": ours_acting, "bare environment and forward": bare_acting}


def measure_side(module: str, side: str, seconds: float, *words: str) -> float:
    """Run one side in a process of its own and return the rate that the module prints."""
    command = [sys.executable, "-m", module, "--side", side, "--seconds", str(seconds), *words]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def measure(side: str, case: str, batch_size: int, seconds: float) -> float:
    """Return the rate of one side of this module."""
    return measure_side("benchmarks.speed", side, seconds, "--case", case, "--batch_size", str(batch_size))


def main() -> None:
    """Run the comparison, print it and write it as JSON; with --side, print the rate of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side")
    parser.add_argument("--case", choices=SIDES, default="pong")
    parser.add_argument("--batch_size", type=int, default=0, help="batch size; 0 stands for 32 and 256")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "speed.json")
    options = parser.parse_args()
    if options.side:
        print({**SIDES[options.case], **ACTING}[options.side](options.case, options.batch_size, options.seconds))
        return
    sides = SIDES[options.case]
    result: dict[str, object] = {
        "command": "python -m benchmarks.speed " + " ".join(sys.argv[1:]),
        "seconds": options.seconds,
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": {**versions(), "stable-baselines3": version("stable-baselines3")},
    }
    for batch_size in [options.batch_size] if options.batch_size else [32, 256]:
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.pairs):
            for side in sides:
                rates[side].append(measure(side, options.case, batch_size, options.seconds))
                print(f"batch {batch_size}: {side} {rates[side][-1]:.1f} agent steps/s", flush=True)
        ratios = {
            f"ours / {side}": [mine / other for mine, other in zip(rates["ours"], rates[side])]
            for side in list(sides)[1:]
        }
        result[f"batch {batch_size}"] = {**rates, **ratios}
        for name, of_pairs in ratios.items():
            print(f"batch {batch_size}: {name} {statistics.median(of_pairs):.2f}", flush=True)
    if options.case == "pong":
        result["acting only"] = _compare_acting(options.pairs, options.seconds / 2)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def _compare_acting(pairs: int, seconds: float) -> dict[str, list[float]]:
    playing: dict[str, list[float]] = {side: [] for side in ACTING}
    for _ in range(pairs):
        for side in ACTING:
            playing[side].append(measure(side, "pong", 0, seconds))
            print(f"acting only: {side} {playing[side][-1]:.0f} agent steps/s", flush=True)
    fraction = [mine / bare for mine, bare in zip(*playing.values())]
    print(f"acting only: {statistics.median(fraction):.2f} of the bare environment with the same network's forward")
    return {**playing, "actor / bare": fraction}


if __name__ == "__main__":
    main()
