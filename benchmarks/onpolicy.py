"""Compare V-trace training with the limit of this machine, and measure the cost of replay strategies and prefetching.

    python -m benchmarks.onpolicy                    speed and ceiling, then the replay strategies
    python -m benchmarks.onpolicy --only speed

The task is Pong with the torso of the Nature network, unrolls of 20 steps, each sample used once, on all cores. The
ceiling combines two separate measurements as if nothing were lost between them: environment and acting on one core, and
one training pass over each step of a batch in memory. Sides take turns in processes of their own. Reported are medians
and the ratios of each round.
"""

import argparse
import json
import os
import statistics
import sys
from typing import Any

from benchmarks.speed import measure_side, processor
from benchmarks.training import ROOT, after_start, rate, train
from core.common.system import versions
from core.device.torch_runtime import use_threads

NUM_ENVS, UNROLL, BATCH = 32, 20, 32
COMMON = (
    "--config",
    "impala-pong",
    "--model_type",
    "nature-ac",
    "--num_actors",
    "1",
    "--num_envs_per_actor",
    str(NUM_ENVS),
    "--agent.unroll_length",
    str(UNROLL),
    "--agent.batch_size",
    str(BATCH),
    "--learner.threads",
    "1",
)
QUEUE = {"type": "queue", "capacity": BATCH, "sample_ratio": 0.5}
ELITE: dict[str, Any] = {"type": "custom", "sample_strategy": "elite_sampling", "lambda_batch_multiplier": 3}
STRATEGIES: dict[str, dict[str, Any]] = {  # Each replays half of every batch.
    "standard": {"type": "standard"},
    "reservoir": {"type": "reservoir"},
    "attentive": {"type": "attentive", "lambda_batch_multiplier": 3},
    "elite strategy1": {**ELITE, "elite_sampling_strategy": "strategy1"},
    "elite strategy3": {**ELITE, "elite_sampling_strategy": "strategy3"},
    "elite insertion": {**ELITE, "insert_strategy": "elite_insertion"},
}


def queue(seconds: float, *words: str) -> float:
    """Return the agent steps per second with a queue."""
    return rate(after_start(train(15 + seconds, *COMMON, "--memory.capacity", str(BATCH), *words), 10))


def no_prefetch(seconds: float) -> float:
    """Return the agent steps per second with a queue and without prefetching."""
    return queue(seconds, "--learner.prefetch", "0")


def strategy(name: str, seconds: float) -> float:
    """Return the samples learned from per second; half of them are replayed."""
    replay = json.dumps([QUEUE, {"capacity": 200, "sample_ratio": 0.5, **STRATEGIES[name]}])
    lines = train(15 + seconds, *COMMON, "--memory_type", "mixed", "--memory.replay_parameters", replay)
    return 2 * rate(after_start(lines, 10))


def acting(seconds: float) -> float:
    """Return the agent steps per second of environment and network on one core."""
    import time

    import numpy as np

    from core.envs.atari import AtariEnv, AtariParams

    use_threads(1)
    env, agent = AtariEnv(AtariParams(), "pong", NUM_ENVS), _agent()
    timestep, exploration = env.reset(0), agent.exploration(0, 1, NUM_ENVS, np.random.default_rng(0))
    started, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        timestep = env.step(agent.act(timestep, (), exploration).action)
        steps += NUM_ENVS
    env.close()
    return steps / elapsed


def updating(threads: int, seconds: float) -> float:
    """Return the steps per second of one training pass over a batch in memory."""
    import time

    import numpy as np
    import torch

    from core.types import Batch, SampleIds, Window

    use_threads(threads)
    agent, zeros = _agent(), torch.zeros(UNROLL + 1, BATCH)
    window = Window(
        torch.randint(0, 256, (UNROLL + 1, BATCH, 4, 84, 84), dtype=torch.uint8),
        zeros.bool(),
        zeros.bool(),
        zeros.long(),
        zeros,
        zeros + 1,
        {"logits": torch.zeros(UNROLL + 1, BATCH, 6), "value": zeros},
    )
    batch = Batch(window, SampleIds(np.zeros(BATCH, np.int64), np.zeros(BATCH, np.int64)), torch.ones(BATCH))
    agent.init_learner()
    agent.learn(batch)
    started, samples = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        agent.learn(batch)
        samples += BATCH * UNROLL
    return samples / elapsed


def _agent() -> Any:
    from core.agents.impala import Impala, ImpalaAgentParams
    from core.models.actor_critic import NatureAC
    from core.specs import ArraySpec, Discrete, EnvSpec

    spec = EnvSpec("pong", ArraySpec((84, 84), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)
    return Impala(
        ImpalaAgentParams(batch_size=BATCH, unroll_length=UNROLL), spec, lambda: NatureAC(NatureAC.Params(), spec)
    )


def ceiling(seconds: float) -> float:
    """Return the agent steps per second if acting and updates shared the cores without loss."""
    cores = len(os.sched_getaffinity(0))
    act = 1 / acting(seconds / 3)
    update_one, update_all = 1 / updating(1, seconds / 3), 1 / updating(cores, seconds / 3)
    return max(1 / max(update_one, act), 1 / (update_all + act / cores), cores / (update_one + act) if cores > 1 else 0)


SPEED = {"queue": queue, "no prefetching": no_prefetch, "ceiling": ceiling}
SIDES = {**SPEED, **{name: (lambda seconds, name=name: strategy(name, seconds)) for name in STRATEGIES}}


def compare(sides: list[str], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the rates of each side, which take turns."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            rates[side].append(measure_side("benchmarks.onpolicy", side, seconds))
            print(f"{side}: {rates[side][-1]:.0f} /s", flush=True)
    return rates


def main() -> None:
    """Run the comparison, print it and write it as JSON; with --side, print the rate of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--only", choices=("speed", "rules"))
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.side:
        print(SIDES[options.side](options.seconds))
        return
    result: dict[str, object] = {
        "command": "python -m benchmarks.onpolicy " + " ".join(sys.argv[1:]),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions(),
    }
    if options.only != "rules":
        rates = compare(list(SPEED), options.rounds, options.seconds)
        result["agent steps per second"] = rates
        for side in ("ceiling", "no prefetching"):
            ratios = [mine / other for mine, other in zip(rates["queue"], rates[side])]
            result[f"queue / {side}"] = ratios
            print(f"queue / {side}: {statistics.median(ratios):.2f}")
    if options.only != "speed":
        rates = compare(["queue", *STRATEGIES], options.rounds, options.seconds)
        result["samples per second"] = rates
        for name in STRATEGIES:
            ratios = [theirs / mine for theirs, mine in zip(rates[name], rates["queue"])]
            result[f"{name} / queue"] = ratios
            print(f"{name}: {statistics.median(ratios):.2f} of the samples per second of the plain queue")
    path = ROOT / "docs" / "results" / "onpolicy.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
