"""What the Ray engine costs: against the local engine on this machine, and on the way from an actor on another node to the ring.

    python -m benchmarks.ray_engine --seconds 30 --pairs 3

Speed: the same run on both engines in turns. Way: an actor plays as it would on another node (its chunks packed, nothing sent), the chunks
it made go through Ray to an ingest in a process of its own, and parameters that were published here are fetched as that actor would.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.speed import processor, updating
from benchmarks.training import ROOT, after_start, rate, train
from core.common.system import versions
from core.device.torch_runtime import use_threads

OFTEN = ("--num_actors", "2", "--logger.period", "0.5")
RUNS = {"dqn-minatar-breakout": ("--config", "dqn-minatar-breakout", *OFTEN),
        "impala-cartpole": ("--config", "impala-cartpole", *OFTEN)}
WAYS = {"Pong 84x84, raw": ("dqn-pong", "raw"), "Pong 84x84, lz4": ("dqn-pong", "lz4"),
        "MinAtar Breakout": ("dqn-minatar-breakout", "raw"),
        "CartPole": ("dqn-cartpole", "raw")}


class Collector:
    """In place of a Link: keeps what would have been sent."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.steps = 0

    def has_room(self) -> bool:
        return True

    def send(self, chunk: Any, steps: int) -> None:
        self.chunks.append(chunk)
        self.steps += steps


def prepared(row: str, codec: str) -> tuple[Any, Any]:
    from utils.config.command_line import read_options
    from utils.launch import prepare

    words = ["--config", row, "--engine", "inline", "--root", tempfile.mkdtemp(), "--storage.codec", codec, "--memory.capacity", "20000",
             "--clock.learn_start", "1000000000"]
    return prepare(read_options(words))


def play(context: Any, agent: Any, seconds: float) -> tuple[Collector, float]:
    """What an actor on another node makes in so long, and its agent steps a second, packing included."""
    from dataclasses import replace

    from core.engines.ray.remote_context import RemoteMemory, RemoteRunInfo
    from core.single_processes.actor import actor

    use_threads(1)
    collector, memory = Collector(), context.memories[0]
    context.parameters.publish(agent.model)
    run_info = RemoteRunInfo(context.options, context.spec, context.roles, memory.layout, memory.window, {})
    playing = actor(replace(context, memories=(RemoteMemory(run_info, collector),)), 0)  # type: ignore[arg-type]
    next(playing)  # environments and network are made
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or len(collector.chunks) < 10:
        next(playing)
    playing.close()  # type: ignore[attr-defined]
    return collector, collector.steps / elapsed


def way(row: str, codec: str, seconds: float) -> dict[str, float]:
    """Bytes of an agent step in what is sent; steps a second that one actor makes, and that one ingest takes from one sender."""
    import ray

    from core.engines.ray.connection import ServerConnection

    context, agent = prepared(row, codec)
    collector, played = play(context, agent, seconds)
    ingest = started_ingest(context, 0.0)
    link = ServerConnection(ingest, 0, context.options.ray.chunks_in_flight)
    steps_a_chunk = collector.steps / len(collector.chunks)
    sent, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        link.send(collector.chunks[sent % len(collector.chunks)], 0)
        sent += 1
    link.close()
    ray.kill(ingest)
    size = sum(len(chunk) for chunk in collector.chunks)
    return {"bytes per agent step": size / collector.steps, "agent steps per chunk": steps_a_chunk, "actor, agent steps per second": played,
            "ingest, chunks per second": sent / elapsed, "ingest, agent steps per second": sent * steps_a_chunk / elapsed}


def latency(row: str, seconds: float) -> dict[str, float]:
    """Milliseconds from a publication to the model that an actor on another node acts with; medians and 95th percentiles."""
    import ray

    from core.engines.ray.connection import ServerConnection
    from core.engines.ray.remote_context import RemoteParameters

    context, agent = prepared(row, "raw")
    ingest = started_ingest(context, 0.0)
    context.parameters.publish(agent.model)
    link, taken, known = ServerConnection(ingest, 0, 4), [], 0
    parameters, began = RemoteParameters(link), time.perf_counter()
    while time.perf_counter() - began < seconds:
        version, published = context.parameters.publish(agent.model), time.perf_counter()
        while known != version:
            link.status = ray.get(ingest.report.remote(0, 0, []))  # what comes with the answer to every chunk
            known = parameters.pull(agent.model, known)
        taken.append(1e3 * (time.perf_counter() - published))
    ray.kill(ingest)
    size = 4 * sum(tensor.numel() for tensor in agent.model.state_dict().values())
    return {"bytes": size, "median ms": statistics.median(taken), "95th percentile ms": sorted(taken)[int(0.95 * len(taken))]}


def started_ingest(context: Any, period: float) -> Any:
    import ray

    from core.engines.ray.trajectory_server import TrajectoryServer

    return ray.remote(TrajectoryServer).options(num_cpus=0).remote(context, period, os.getpid())


def on_ray(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """On a cluster of this machine alone."""
    from core.engines.launcher import ALLOCATOR_VARIABLES
    from core.engines.ray.cluster import Cluster
    from core.engines.ray.params import RayParams

    cluster = Cluster(RayParams(), {"ingest": {"CPU": 2.0, "GPU": 0.0}}, ALLOCATOR_VARIABLES)
    try:
        return measure()
    finally:
        cluster.close()


def speed(seconds: float, pairs: int) -> dict[str, Any]:
    """Agent steps a second of the same run on both engines, in turns."""
    found: dict[str, Any] = {}
    for name, words in RUNS.items():
        rates: dict[str, list[float]] = {"local": [], "ray": []}
        for _ in range(pairs):
            for engine in rates:
                rates[engine].append(rate(after_start(train(seconds + 15, *words, "--engine", engine), 5)))
                print(f"{name}: {engine} {rates[engine][-1]:.0f} agent steps/s", flush=True)
        ratios = [mine / other for mine, other in zip(rates["ray"], rates["local"])]
        found[name] = {**rates, "ray / local": ratios}
        print(f"{name}: {statistics.median(ratios):.2f} of the local engine")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=("speed", "way"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "ray.json")
    options = parser.parse_args()
    known = json.loads(options.output.read_text()) if options.only and options.output.exists() else {}
    result = {**known, "command": "python -m benchmarks.ray_engine " + " ".join(sys.argv[1:]), "processor": processor(),
              "cpus": len(os.sched_getaffinity(0)), "versions": versions()}
    if options.only != "way":
        result["speed"] = speed(options.seconds, options.pairs)
    if options.only != "speed":
        brief = options.seconds / 3
        result["way"] = on_ray(lambda: {name: way(*each, brief) for name, each in WAYS.items()})
        result["publication"] = on_ray(lambda: {row: latency(row, brief) for row in ("dqn-cartpole", "dqn-pong")})
        result["learner, samples per second"] = {str(size): updating(size, len(os.sched_getaffinity(0)), brief) for size in (32, 256, 512)}
        print(json.dumps({name: result[name] for name in ("way", "publication", "learner, samples per second")}, indent=1))
    result["load average"] = os.getloadavg()[1]  # of five minutes; this benchmark alone makes two to four
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
