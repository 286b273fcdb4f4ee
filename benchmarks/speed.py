"""Compare training speed with stable-baselines3 and with the limit of this machine: `make bench`.

    python -m benchmarks.speed                                        Pong, batches of 32 and of 256
    python -m benchmarks.speed --case cartpole --batch_size 64        CartPole, two layers of 128 units
    python -m benchmarks.speed --case minatar --batch_size 32         MinAtar Breakout, the network of its row

Both sides do the same work: plain DQN (no double, n = 1), uniform memory, 8 environments, 8 samples learned from per
agent step (batch 32: one update every 4 agent steps; batch 256: one every 32), all cores. The sides take turns (A B A
B) in processes of their own. Reported are the median and the ratio of each pair. Start-up and the filling of the memory
are not counted. Compiled, our side needs the compiler's files of an earlier run, or compiles while it is measured.

The ceiling, of Pong only, combines two separate measurements as if their work were spread over all cores without loss:
environment and acting on one core, updates on a batch in memory on one core, both in the precision of a run.
"""

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arithmetic import ATARI, updates_per_second
from benchmarks.sb3_minatar import environments, policy_of
from benchmarks.sides import calls_per_second, description, last_line, ratios, take_turns, write
from benchmarks.training import RESULTS, after_start, rate, stable_baselines3_rate, train
from core.agents.dqn import DQN, DQNParams
from core.device.torch_runtime import use_threads
from core.envs.atari import AtariEnv, AtariParams
from core.learning.precision import in_bf16, precision_on
from core.model import Model
from core.models.dqn import DQNCNN
from core.types import TimeStep
from utils.config.command_line import read_options

NUM_ENVS, SAMPLES_PER_STEP, LEARN_START = 8, 8, 2_000
START_SECONDS = 20  # Start-up of our side: processes, filling the memory, catching up.
CONFIGS = {"pong": "dqn-pong-uniform", "cartpole": "dqn-cartpole", "minatar": "dqn-minatar-breakout"}


def ours(case: str, batch_size: int, seconds: float, compiled: str = "no", precision: str = "auto") -> float:
    """Return the agent steps per second of `python main.py`."""
    lines = train(
        START_SECONDS + seconds,
        f"--config {CONFIGS[case]}",
        f"--num_actors 1 --num_envs_per_actor {NUM_ENVS}",
        f"--agent.batch_size {batch_size} --agent.n_step 1 --agent.double_q false",
        f"--rate_limiter.min_replay_size {LEARN_START} --rate_limiter.error_buffer 100",
        f"--rate_limiter.samples_per_insert {SAMPLES_PER_STEP} --steps 1000000000",
        f"--learner.compile {compiled} --learner.precision {precision} --actor.precision {precision}",
    )
    full = [line for line in lines if line["values"].get("global/samples_per_insert", 0) > 0.85 * SAMPLES_PER_STEP]
    return rate([line for line in full if line["time"] > full[-1]["time"] - seconds])


def ours_acting(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second of an actor without a learner, with storing, pulling and reporting."""
    lines = train(
        10 + seconds,
        f"--config dqn-pong-uniform --num_actors 1 --num_envs_per_actor {NUM_ENVS}",
        "--memory.capacity 50000 --rate_limiter.min_replay_size 1000000000",
    )
    return rate(after_start(lines, 5))


def bare_acting(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second of environment and network alone, on one core."""
    model, generator = network(), np.random.default_rng(0)

    def act(timestep: TimeStep) -> np.ndarray:
        model(torch.from_numpy(timestep.observation))
        return generator.integers(6, size=NUM_ENVS)

    with torch.inference_mode():
        return acting(NUM_ENVS, act, seconds)


def stable_baselines3(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second of stable-baselines3's DQN in this process."""
    import ale_py
    import gymnasium
    from stable_baselines3 import DQN as TheirDQN
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

    gymnasium.register_envs(ale_py)
    policy: dict[str, Any] = {}
    if case == "pong":
        env: VecEnv = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=NUM_ENVS, seed=0), n_stack=4)
    elif case == "cartpole":
        env, policy = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=0), {"net_arch": [128, 128]}
    else:
        options = read_options(["--config", CONFIGS[case]])
        env, policy = environments("breakout", NUM_ENVS, 0, options.env.max_steps), policy_of(options)
    steps_per_update = batch_size // SAMPLES_PER_STEP
    train_freq, gradient_steps = max(steps_per_update // NUM_ENVS, 1), max(NUM_ENVS // steps_per_update, 1)
    agent = TheirDQN(
        "MlpPolicy" if case == "cartpole" else "CnnPolicy",
        env,
        buffer_size=100_000,
        learning_starts=LEARN_START,
        batch_size=batch_size,
        train_freq=train_freq,
        gradient_steps=gradient_steps,
        target_update_interval=10_000,
        policy_kwargs=policy,
        seed=0,
    )
    return stable_baselines3_rate(agent, LEARN_START + 1_000, seconds)


def network() -> Model:
    """Return the network of the Nature paper in the precision that runs choose on this machine."""
    return as_in_runs(DQNCNN(DQNCNN.Params(), ATARI))


def as_in_runs(model: Model) -> Model:
    """Return a network of Atari in the precision that runs choose on this machine."""
    return in_bf16(model) if precision_on("cpu", "auto", ATARI) == "bf16" else model


def acting(num_envs: int, act: Callable[[TimeStep], np.ndarray], seconds: float) -> float:
    """Return the agent steps per second of Pong on one core, with the actions that `act` chooses."""
    use_threads(1)
    with closing(AtariEnv(AtariParams(), "pong", num_envs)) as env:
        timestep = env.reset(0)

        def step() -> None:
            nonlocal timestep
            timestep = env.step(act(timestep))

        return num_envs * calls_per_second(step, seconds)


def updating(batch_size: int, threads: int, seconds: float) -> float:
    """Return the samples per second of the agent's update on a batch in memory."""
    agent = DQN(DQNParams(batch_size=batch_size, n_step=1, double_q=False), ATARI, network)
    return batch_size * updates_per_second(agent, threads, seconds)


def ceiling(case: str, batch_size: int, seconds: float) -> float:
    """Return the agent steps per second if acting and updates were spread over the cores without loss."""
    act = 1 / bare_acting(case, batch_size, seconds / 2)
    update = SAMPLES_PER_STEP / updating(batch_size, 1, seconds / 2)
    return len(os.sched_getaffinity(0)) / (act + update)


SMALL = {"ours": ours, "ours, compiled": partial(ours, compiled="yes"), "stable-baselines3": stable_baselines3}
SIDES: dict[str, dict[str, Callable[..., float]]] = {
    "pong": {
        "ours": ours,
        "stable-baselines3": stable_baselines3,
        "ceiling": ceiling,
        "ours, float32": partial(ours, precision="float32"),
    },
    "cartpole": SMALL,
    "minatar": SMALL,
}
ACTING = {"actor": ours_acting, "bare environment and forward": bare_acting}


def measure(side: str, case: str, batch_size: int, seconds: float) -> float:
    """Return the rate of one side, which runs in a process of its own."""
    return float(last_line("speed", side=side, case=case, batch_size=batch_size, seconds=seconds))


def main() -> None:
    """Run the comparison, print it and write it as JSON; with --side, print the rate of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side")
    parser.add_argument("--case", choices=SIDES, default="pong")
    parser.add_argument("--batch_size", type=int, default=0, help="batch size; 0 stands for 32 and 256")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "speed.json")
    options = parser.parse_args()
    if options.side:
        print({**SIDES[options.case], **ACTING}[options.side](options.case, options.batch_size, options.seconds))
        return
    result: dict[str, Any] = {**description("speed"), "seconds": options.seconds}
    result["versions"]["stable-baselines3"] = version("stable-baselines3")
    for batch_size in [options.batch_size] if options.batch_size else [32, 256]:
        title = f"batch {batch_size}"
        rates = take_turns(
            SIDES[options.case],
            options.pairs,
            lambda side, size=batch_size: measure(side, options.case, size, options.seconds),
            f"{title}: ",
        )
        result[title] = rates | {
            f"ours / {side}": ratios(f"{title}: ours / {side}", rates["ours"], rates[side]) for side in list(rates)[1:]
        }
    if options.case == "pong":
        rates = take_turns(ACTING, options.pairs, lambda side: measure(side, "pong", 0, options.seconds / 2))
        result["acting only"] = rates | {"actor / bare": ratios("actor / bare", *rates.values())}
    write(options.output, result)


if __name__ == "__main__":
    main()
