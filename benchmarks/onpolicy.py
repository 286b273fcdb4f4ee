"""Agent steps per second of V-trace training against this machine's own ceiling, and what replay rules and prefetching cost.

    python -m benchmarks.onpolicy                    speed and ceiling, then the rules
    python -m benchmarks.onpolicy --only speed

Pong, the Nature network's torso, unrolls of 20 steps, each sample used once, every core of this machine. The ceiling is measured apart:
environment and acting alone on one core, and one training pass over each step on a batch in memory, combined as if nothing were lost
between them. Sides take turns in processes of their own; medians and ratios of each round are quoted.
"""

import argparse
import json
import os
import statistics
import sys

from benchmarks.speed import measure_side, processor
from benchmarks.training import ROOT, after_start, rate, train
from core.common.system import versions
from core.device.torch_runtime import use_threads

NUM_ENVS, UNROLL, BATCH = 32, 20, 32
COMMON = ("--config", "impala-pong", "--model_type", "nature-ac", "--num_actors", "1", "--num_envs_per_actor", str(NUM_ENVS),
          "--agent.unroll_length", str(UNROLL), "--agent.batch_size", str(BATCH), "--learner.threads", "1")
QUEUE = {"type": "queue", "capacity": BATCH, "sample_ratio": 0.5}
ELITE = {"type": "custom", "sample_strategy": "elite_sampling", "lambda_batch_multiplier": 3}
RULES = {  # half of every batch is replayed by it
    "standard": {"type": "standard"}, "reservoir": {"type": "reservoir"},
    "attentive": {"type": "attentive", "lambda_batch_multiplier": 3},
    "elite strategy1": {**ELITE, "elite_sampling_strategy": "strategy1"},
    "elite strategy3": {**ELITE, "elite_sampling_strategy": "strategy3"},
    "elite insertion": {**ELITE, "insert_strategy": "elite_insertion"}}


def queue(seconds: float, *words: str) -> float:
    return rate(after_start(train(15 + seconds, *COMMON, "--memory.capacity", str(BATCH), *words), 10))


def no_prefetch(seconds: float) -> float:
    return queue(seconds, "--learner.prefetch", "0")


def rule(name: str, seconds: float) -> float:
    """Samples learnt from per second; every fresh one comes with a replayed one."""
    replay = json.dumps([QUEUE, {"capacity": 200, "sample_ratio": 0.5, **RULES[name]}])
    rows = train(15 + seconds, *COMMON, "--memory_type", "mixed", "--memory.replay_parameters", replay)
    return 2 * rate(after_start(rows, 10))


def acting(seconds: float) -> float:
    """Agent steps per second of the environment and the network's forward on one core."""
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
    """Steps per second that one training pass over each takes on a batch in memory."""
    import time

    import numpy as np
    import torch

    from core.types import Batch, SampleIds, Window

    use_threads(threads)
    agent, rows = _agent(), torch.zeros(UNROLL + 1, BATCH)
    window = Window(torch.randint(0, 256, (UNROLL + 1, BATCH, 4, 84, 84), dtype=torch.uint8), rows.bool(), rows.bool(), rows.long(), rows,
                    rows + 1, {"logits": torch.zeros(UNROLL + 1, BATCH, 6), "value": rows})
    batch = Batch(window, SampleIds(np.zeros(BATCH, np.int64), np.zeros(BATCH, np.int64)), torch.ones(BATCH))
    agent.init_learner()
    agent.learn(batch)
    started, samples = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        agent.learn(batch)
        samples += BATCH * UNROLL
    return samples / elapsed


def _agent():
    from core.agents.impala import Impala, ImpalaAgentParams
    from core.models.actor_critic import NatureAC, NatureACParams
    from core.specs import ArraySpec, Discrete, EnvSpec

    spec = EnvSpec("pong", ArraySpec((84, 84), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)
    return Impala(ImpalaAgentParams(batch_size=BATCH, unroll_length=UNROLL), spec, lambda: NatureAC(NatureACParams(), spec))


def ceiling(seconds: float) -> float:
    """Agent steps per second if acting and updates shared the cores without loss."""
    cores = len(os.sched_getaffinity(0))
    act, one, every = 1 / acting(seconds / 3), 1 / updating(1, seconds / 3), 1 / updating(cores, seconds / 3)
    return max(1 / max(one, act), 1 / (every + act / cores), cores / (one + act) if cores > 1 else 0)


SPEED = {"queue": queue, "no prefetching": no_prefetch, "ceiling": ceiling}
SIDES = {**SPEED, **{name: (lambda seconds, name=name: rule(name, seconds)) for name in RULES}}


def compare(sides: list[str], rounds: int, seconds: float) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            rates[side].append(measure_side("benchmarks.onpolicy", side, seconds))
            print(f"{side}: {rates[side][-1]:.0f} /s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--only", choices=("speed", "rules"))
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.side:
        print(SIDES[options.side](options.seconds))
        return
    result: dict[str, object] = {"command": "python -m benchmarks.onpolicy " + " ".join(sys.argv[1:]), "processor": processor(),
                                 "cpus": len(os.sched_getaffinity(0)), "versions": versions()}
    if options.only != "rules":
        rates = compare(list(SPEED), options.rounds, options.seconds)
        result["agent steps per second"] = rates
        for side in ("ceiling", "no prefetching"):
            ratios = [mine / other for mine, other in zip(rates["queue"], rates[side])]
            result[f"queue / {side}"] = ratios
            print(f"queue / {side}: {statistics.median(ratios):.2f}")
    if options.only != "speed":
        rates = compare(["queue", *RULES], options.rounds, options.seconds)
        result["samples per second"] = rates
        for name in RULES:
            ratios = [theirs / mine for theirs, mine in zip(rates[name], rates["queue"])]
            result[f"{name} / queue"] = ratios
            print(f"{name}: {statistics.median(ratios):.2f} of the samples per second of the plain queue")
    path = ROOT / "docs" / "results" / "onpolicy.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
