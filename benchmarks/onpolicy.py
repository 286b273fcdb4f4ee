"""Compare V-trace training with the limit of this machine, and measure the cost of replay strategies and prefetching.

    python -m benchmarks.onpolicy                    speed and ceiling, then the replay strategies
    python -m benchmarks.onpolicy --only speed       one of them; the file keeps the results of the other

The task is Pong with the torso of the Nature network, unrolls of 20 steps, each sample used once, on all cores. The
ceiling combines two separate measurements as if nothing were lost between them: environment and acting on one core, and
one training pass over each step of a batch in memory. Sides take turns in processes of their own. Reported are medians
and the ratios of each round.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import speed
from benchmarks.arithmetic import ATARI, updates_per_second
from benchmarks.sides import description, last_line, ratios, take_turns, write
from benchmarks.training import RESULTS, after_start, rate, train
from core.agents.impala import Impala, ImpalaAgentParams
from core.models.actor_critic import NatureAC

NUM_ENVS, UNROLL, BATCH = 32, 20, 32
COMMON = (
    f"--config impala-pong --model_type nature-ac --num_actors 1 --num_envs_per_actor {NUM_ENVS} --learner.threads 1 "
    f"--agent.unroll_length {UNROLL} --agent.batch_size {BATCH}"
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
    return rate(after_start(train(15 + seconds, COMMON, f"--memory.capacity {BATCH}", *words), 10))


def strategy(name: str, seconds: float) -> float:
    """Return the samples learned from per second; half of them are replayed."""
    replay = json.dumps([QUEUE, {"capacity": 200, "sample_ratio": 0.5, **STRATEGIES[name]}])
    lines = train(15 + seconds, COMMON, "--memory_type mixed --memory.replay_parameters", replay)
    return 2 * rate(after_start(lines, 10))


def acting(seconds: float) -> float:
    """Return the agent steps per second of environment and network on one core."""
    agent = _agent()
    exploration = agent.exploration(0, 1, NUM_ENVS, np.random.default_rng(0))
    return speed.acting(NUM_ENVS, lambda timestep: agent.act(timestep, (), exploration).action, seconds)


def updating(threads: int, seconds: float) -> float:
    """Return the steps per second of one training pass over a batch in memory."""
    return BATCH * UNROLL * updates_per_second(_agent(), threads, seconds)


def _agent() -> Impala:
    params = ImpalaAgentParams(batch_size=BATCH, unroll_length=UNROLL)
    return Impala(params, ATARI, lambda: speed.as_in_runs(NatureAC(NatureAC.Params(), ATARI)))


def ceiling(seconds: float) -> float:
    """Return the agent steps per second if acting and updates shared the cores without loss."""
    cores = len(os.sched_getaffinity(0))
    act = 1 / acting(seconds / 3)
    update_one, update_all = 1 / updating(1, seconds / 3), 1 / updating(cores, seconds / 3)
    return max(1 / max(update_one, act), 1 / (update_all + act / cores), cores / (update_one + act) if cores > 1 else 0)


SPEED = {"queue": queue, "no prefetching": lambda seconds: queue(seconds, "--learner.prefetch 0"), "ceiling": ceiling}
SIDES = {**SPEED, **{name: (lambda seconds, name=name: strategy(name, seconds)) for name in STRATEGIES}}


def main() -> None:
    """Run the comparison, print it and write it as JSON; with --side, print the rate of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--only", choices=("speed", "rules"))
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "onpolicy.json")
    options = parser.parse_args()
    if options.side:
        print(SIDES[options.side](options.seconds))
        return

    def measure(side: str) -> float:
        return float(last_line("onpolicy", side=side, seconds=options.seconds))

    known = json.loads(options.output.read_text()) if options.only and options.output.exists() else {}
    result = {**known, **description("onpolicy")}
    if options.only != "rules":
        result["agent steps per second"] = rates = take_turns(SPEED, options.rounds, measure)
        for side in ("ceiling", "no prefetching"):
            result[f"queue / {side}"] = ratios(f"queue / {side}", rates["queue"], rates[side])
    if options.only != "speed":
        sides = ["queue", *STRATEGIES]
        result["samples per second"] = rates = take_turns(sides, options.rounds, measure, unit="samples/s")
        for name in STRATEGIES:
            result[f"{name} / queue"] = ratios(f"{name} / queue", rates[name], rates["queue"])
    write(options.output, result)


if __name__ == "__main__":
    main()
