"""Compare updates in float32 and bfloat16, eager and compiled, by MKL and by oneDNN: python -m benchmarks.arithmetic.

Each case is one update of an agent on a batch in memory, on one thread. The two sides take turns. Times are those of
the processor for this process (`time.process_time`), so that other programs disturb them less. Reported are the medians
and the median ratio of the pairs.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.sides import calls_per_second, description, write
from benchmarks.training import RESULTS, ROOT
from core.agent import Agent
from core.agents.d4pg import D4PG
from core.agents.ddpg import DDPG
from core.agents.dqn import DQN
from core.agents.impala import Impala
from core.agents.rainbow import Rainbow
from core.agents.sac import SAC
from core.agents.td3 import TD3
from core.device.recorded_work import CompiledCallable
from core.device.torch_runtime import use_threads
from core.learning.precision import has_large_products, in_bf16, use_onednn_products
from core.learning.updates import EagerUpdates, GraphedUpdate, StagedBatches, Updater
from core.models.actor_critic import ImpalaCNN, MinAtarAC, SmallAC
from core.models.dqn import DQNCNN, DQNMLP, DQNMinAtar, DQNSmall, RainbowCNN, RainbowMinAtar
from core.models.policy_critic import D4PGMLP, DDPGMLP, SACMLP, TD3MLP
from core.specs import ArraySpec, Continuous, Discrete, EnvSpec
from core.types import Batch, SampleIds, Window

Work = Callable[[], object]
ATARI, SMALL = (
    EnvSpec("images", ArraySpec((size, size), "uint8"), 4, Discrete(6), is_image=True, max_value=255.0)
    for size in (84, 42)
)
MINATAR = EnvSpec("images", ArraySpec((10, 10, 4), "uint8"), 0, Discrete(6), is_image=True)
VECTORS = EnvSpec("vectors", ArraySpec((4,), "float32"), 0, Discrete(2))
HOPPER = EnvSpec(
    "vectors", ArraySpec((11,), "float32"), 0, Continuous(np.full(3, -1, np.float32), np.full(3, 1, np.float32))
)
# Name: agent, network, environment, settings of the agent.
PRECISIONS: dict[str, tuple[Any, Any, EnvSpec, dict[str, Any]]] = {
    "DQN, Nature CNN 84x84, 32": (DQN, DQNCNN, ATARI, {"batch_size": 32}),
    "DQN, Nature CNN 84x84, 256": (DQN, DQNCNN, ATARI, {"batch_size": 256}),
    "Rainbow, 84x84, 32": (Rainbow, RainbowCNN, ATARI, {"batch_size": 32}),
    "V-trace, shallow IMPALA 84x84, 20 x 8": (Impala, ImpalaCNN, ATARI, {"batch_size": 8}),
    "DQN, small CNN 42x42, 32": (DQN, DQNSmall, SMALL, {"batch_size": 32}),
    "V-trace, small CNN 42x42, 20 x 8": (Impala, SmallAC, SMALL, {"batch_size": 8}),
    "DQN, MinAtar 10x10, 32": (DQN, DQNMinAtar, MINATAR, {"batch_size": 32}),
    "V-trace, MinAtar 10x10, 20 x 8": (Impala, MinAtarAC, MINATAR, {"batch_size": 8}),
    "DQN, vectors, 128": (DQN, DQNMLP, VECTORS, {"batch_size": 128}),
    "DDPG, vectors, 256": (DDPG, DDPGMLP, HOPPER, {"batch_size": 256}),
}
CONTROL: dict[str, tuple[Any, Any, EnvSpec, dict[str, Any]]] = {
    "DDPG": (DDPG, DDPGMLP, HOPPER, {"batch_size": 256}),
    "TD3": (TD3, TD3MLP, HOPPER, {"batch_size": 256}),
    "D4PG": (D4PG, D4PGMLP, HOPPER, {"batch_size": 256, "v_min": -5.0, "v_max": 5.0}),
    "SAC": (SAC, SACMLP, HOPPER, {"batch_size": 256}),
}
COMPILED = {
    "DQN, vectors, 64": (DQN, DQNMLP, VECTORS, {"batch_size": 64}),
    "DQN, MinAtar 10x10, 32": PRECISIONS["DQN, MinAtar 10x10, 32"],
    "Rainbow, MinAtar 10x10, 32": (Rainbow, RainbowMinAtar, MINATAR, {"batch_size": 32}),
    "DQN, small CNN 42x42, 32": PRECISIONS["DQN, small CNN 42x42, 32"],
    **CONTROL,
}
PRODUCTS = {
    "DQN, vectors, 64": COMPILED["DQN, vectors, 64"],
    "DQN, MinAtar 10x10, 32": PRECISIONS["DQN, MinAtar 10x10, 32"],
    "V-trace, MinAtar 10x10, 20 x 8": PRECISIONS["V-trace, MinAtar 10x10, 20 x 8"],
    "DQN, Nature CNN 84x84, 32": PRECISIONS["DQN, Nature CNN 84x84, 32"],
    **CONTROL,
}


def make_update(
    case: tuple[Any, Any, EnvSpec, dict[str, Any]],
    bf16: bool = False,
    compiled: bool = False,
    by_onednn: bool | None = None,
) -> Work:
    """Return a function that makes one update of a new agent.

    Args:
        case: Agent, network, environment, settings.
        bf16: The network computes in bfloat16.
        compiled: The update is compiled.
        by_onednn: Large products are computed by oneDNN. If None, where a learner lets oneDNN do so.
    """
    kind, network, spec, settings = case
    torch.manual_seed(0)

    def make_model() -> Any:
        model = network(network.Params(), spec)
        return in_bf16(model) if bf16 else model

    agent = kind(kind.Params(**settings), spec, make_model)
    agent.init_learner()
    batch, updates = make_batch(agent), cast(Updater, EagerUpdates(agent, microbatch_on_oom=False))
    if compiled:

        def compiled_work(work: Callable[[], None], cycle: int) -> CompiledCallable:
            return CompiledCallable(work, cycle, ROOT / ".cache" / "compiled")

        updates = GraphedUpdate(agent, StagedBatches(agent.device), capture=False, compiled=compiled_work)
    if by_onednn is None:
        by_onednn = not bf16 and has_large_products(agent.model, agent.params.batch_size * agent.samples_per_window)
    products = "bf16" if use_onednn_products(by_onednn) else "ieee"

    def update() -> None:
        torch.backends.mkldnn.matmul.fp32_precision = products
        updates(batch)

    return update


def make_batch(agent: Agent) -> Batch:
    """Return a batch of random steps without ends of episodes."""
    size, steps, shape = agent.params.batch_size, agent.window.length + 1, agent.spec.observation_shape
    if agent.spec.frame.dtype == "uint8":
        largest = int(agent.spec.max_value) + 1
        observations = torch.randint(0, largest, (len(agent.window.observations), size, *shape), dtype=torch.uint8)
    else:
        observations = torch.randn(len(agent.window.observations), size, *shape)
    if isinstance(agent.spec.action, Discrete):
        actions = torch.randint(0, agent.spec.action.num_actions, (steps, size))
    else:
        actions = torch.rand(steps, size, *agent.spec.action.low.shape) * 2 - 1
    no = torch.zeros(steps, size, dtype=torch.bool)
    extras = {name: torch.randn(steps, size, *field.shape) for name, field in agent.extras.items()}
    window = Window(observations, no, no, actions, torch.randn(steps, size), torch.ones(steps, size), extras)
    return Batch(window, SampleIds(np.zeros(size, np.int64), np.arange(size)), torch.ones(size))


def updates_per_second(agent: Agent, threads: int, seconds: float) -> float:
    """Return the updates per second of an agent on a batch in memory, with these threads."""
    use_threads(threads)
    agent.init_learner()
    batch = make_batch(agent)
    return calls_per_second(lambda: agent.learn(batch), seconds, uncounted=3)


def compare(sides: dict[str, Work], seconds: float, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of each side in each round, and the ratios of the first to the second."""
    for work in sides.values():
        for _ in range(9):  # the compiler is called in one of them, for TD3 in two
            work()
    started = time.process_time()
    next(iter(sides.values()))()
    count = max(1, round(seconds / (2 * rounds) / max(time.process_time() - started, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            started = time.process_time()
            for _ in range(count):
                work()
            times[name].append(1_000 * (time.process_time() - started) / count)
    first, second = times.values()
    return {**times, "ratio": statistics.median(one / other for one, other in zip(first, second))}


def _sides(case: tuple[Any, Any, EnvSpec, dict[str, Any]], arguments: dict[str, dict[str, bool]]) -> dict[str, Work]:
    return {side: make_update(case, **each) for side, each in arguments.items()}


def main() -> None:
    """Run all cases, print their medians and write all times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time of each case")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default="", help="measure only cases whose name contains this")
    parser.add_argument("--output", type=Path, default=RESULTS / "arithmetic.json")
    options = parser.parse_args()
    use_threads(1)
    result: dict[str, Any] = {
        **description("arithmetic"),
        "capabilities": {name: torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16")},
        "allocator": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    }
    cases: dict[str, Callable[[], dict[str, Work]]] = {}
    for name, case in PRECISIONS.items():
        cases[name] = partial(_sides, case, {"float32": {}, "bfloat16": {"bf16": True}})
    for name, case in COMPILED.items():
        cases[f"{name}, compiled"] = partial(_sides, case, {"eager": {}, "compiled": {"compiled": True}})
    for name, case in PRODUCTS.items():
        products = {"MKL": {"by_onednn": False}, "oneDNN": {"by_onednn": True}}
        cases[f"{name}, products"] = partial(_sides, case, products)
    for name in [name for name in cases if options.cases in name]:
        sides = cases[name]()
        result[name] = compare(sides, options.seconds, options.rounds)
        medians = ", ".join(f"{side} {statistics.median(result[name][side]):.2f} ms" for side in sides)
        print(f"{name}: {medians}, ratio {result[name]['ratio']:.2f}", flush=True)
        write(options.output, result)


if __name__ == "__main__":
    main()
