"""Measure the cost of the Ray engine, against the local engine and from node to node.

    python -m benchmarks.ray_engine --seconds 30 --pairs 3

- speed: The same run on both engines, which take turns.
- way: An actor plays as on another node, with compressed chunks that are not sent. Its chunks then go through Ray to a
  trajectory server (ingest) in a process of its own. Parameters that are published here are pulled as by that actor.
"""

import argparse
import atexit
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sides import description, ratios, take_turns, write
from benchmarks.speed import updating
from benchmarks.training import RESULTS, after_start, rate, train
from core.device.torch_runtime import use_threads

RUNS = ("dqn-minatar-breakout", "impala-cartpole")
WAYS = {
    "Pong 84x84, raw": ("dqn-pong", "raw"),
    "Pong 84x84, lz4": ("dqn-pong", "lz4"),
    "MinAtar Breakout": ("dqn-minatar-breakout", "raw"),
    "CartPole": ("dqn-cartpole", "raw"),
}


class Collector:
    """A stand-in for ServerConnection that keeps the chunks it should send."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.steps = 0

    def has_room(self) -> bool:
        """Return True: a collector never blocks."""
        return True

    def send(self, chunk: Any, steps: int) -> None:
        """Keep a chunk and count its agent steps."""
        self.chunks.append(chunk)
        self.steps += steps


def prepared(row: str, codec: str) -> tuple[Any, Any]:
    """Return context and agent of a row."""
    from utils.config.command_line import read_options
    from utils.launch import create_context

    options = f"--config {row} --engine inline --replay.frame_compression {codec} --memory.capacity 20000"
    words = f"{options} --rate_limiter.min_replay_size 1000000000 --steps 1000000000".split()
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return create_context(read_options([*words, "--root", folder]))


def play(context: Any, agent: Any, seconds: float) -> tuple[Collector, float]:
    """Return the chunks of an actor on another node, and its agent steps per second, compression included."""
    from dataclasses import replace

    from core.engines.ray.remote_context import RemoteMemory, RemoteRunInfo
    from core.single_processes.actor import actor

    use_threads(1)
    collector, memory = Collector(), context.memories[0]
    context.parameters.publish(agent.model)
    run_info = RemoteRunInfo(context.options, context.spec, context.roles, memory.layout, memory.window, {})
    playing = actor(replace(context, memories={0: RemoteMemory(run_info, collector)}), 0)  # type: ignore[arg-type]
    next(playing)  # Creates environments and network.
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or len(collector.chunks) < 10:
        next(playing)
    playing.close()  # type: ignore[attr-defined]
    return collector, collector.steps / elapsed


def way(row: str, codec: str, seconds: float) -> dict[str, float]:
    """Return the bytes sent per agent step, and the steps per second of one actor and of one ingest with one sender."""
    import ray

    from core.engines.ray.remote_context import ServerConnection

    context, agent = prepared(row, codec)
    collector, played = play(context, agent, seconds)
    ingest = started_ingest(context)
    link = ServerConnection(ingest, 0, context.options.ray.chunks_in_flight)
    steps_a_chunk = collector.steps / len(collector.chunks)
    sent, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        link.send(collector.chunks[sent % len(collector.chunks)], 0)
        sent += 1
    link.close()
    ray.kill(ingest)
    size = sum(chunk.nbytes for chunk in collector.chunks)
    return {
        "bytes per agent step": size / collector.steps,
        "agent steps per chunk": steps_a_chunk,
        "actor, agent steps per second": played,
        "ingest, chunks per second": sent / elapsed,
        "ingest, agent steps per second": sent * steps_a_chunk / elapsed,
    }


def latency(row: str, seconds: float) -> dict[str, float]:
    """Return median and 95th percentile of the milliseconds from a publication to the acting model on another node."""
    import ray

    from core.engines.ray.remote_context import RemoteParameters, ServerConnection

    context, agent = prepared(row, "raw")
    ingest = started_ingest(context)
    context.parameters.publish(agent.model)
    link, taken, known = ServerConnection(ingest, 0, 4), [], 0
    parameters, began = RemoteParameters(link), time.perf_counter()
    while time.perf_counter() - began < seconds:
        version, published = context.parameters.publish(agent.model), time.perf_counter()
        while known != version:
            link.status = ray.get(ingest.report.remote(0, 0, []))  # An actor receives this with each answer.
            known = parameters.pull(agent.model, known)
        taken.append(1e3 * (time.perf_counter() - published))
    ray.kill(ingest)
    size = 4 * sum(tensor.numel() for tensor in agent.model.state_dict().values())
    return {
        "bytes": size,
        "median ms": statistics.median(taken),
        "95th percentile ms": sorted(taken)[int(0.95 * len(taken))],
    }


def started_ingest(context: Any) -> Any:
    """Start a trajectory server as a Ray actor, which answers with every version, and return its handle."""
    from dataclasses import replace

    import ray

    from core.engines.ray.trajectory_server import TrajectoryServer

    options = replace(context.options, ray=replace(context.options.ray, parameters_period=0.0))
    return ray.remote(TrajectoryServer).options(num_cpus=0).remote(replace(context, options=options), os.getpid())


def on_ray(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns on a Ray cluster of this machine alone."""
    from core.engines.ray.cluster import Cluster
    from core.runtime.options import RayParams

    cluster = Cluster(RayParams(), {"ingest": {"CPU": 2.0, "GPU": 0.0}})
    try:
        return measure()
    finally:
        cluster.close()


def speed(seconds: float, pairs: int) -> dict[str, Any]:
    """Return the agent steps per second of the same runs on both engines, which take turns."""
    results: dict[str, Any] = {}
    for row in RUNS:

        def measure(engine: str, row: str = row) -> float:
            words = f"--config {row} --num_actors 2 --logger.period 0.5 --engine {engine}"
            return rate(after_start(train(seconds + 15, words), 5))

        rates = take_turns(["local", "ray"], pairs, measure, f"{row}: ")
        results[row] = {**rates, "ray / local": ratios(f"{row}: ray / local", rates["ray"], rates["local"])}
    return results


def main() -> None:
    """Measure, print the results and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=("speed", "way"))
    parser.add_argument("--output", type=Path, default=RESULTS / "ray.json")
    options = parser.parse_args()
    known = json.loads(options.output.read_text()) if options.only and options.output.exists() else {}
    result = {**known, **description("ray_engine")}
    if options.only != "way":
        result["speed"] = speed(options.seconds, options.pairs)
    if options.only != "speed":
        brief = options.seconds / 3
        result["way"] = on_ray(lambda: {name: way(*each, brief) for name, each in WAYS.items()})
        result["publication"] = on_ray(lambda: {row: latency(row, brief) for row in ("dqn-cartpole", "dqn-pong")})
        result["learner, samples per second"] = {
            str(size): updating(size, len(os.sched_getaffinity(0)), brief) for size in (32, 256, 512)
        }
        print(
            json.dumps({name: result[name] for name in ("way", "publication", "learner, samples per second")}, indent=1)
        )
    result["load average"] = os.getloadavg()[1]  # Over five minutes; this benchmark alone causes two to four.
    write(options.output, result)


if __name__ == "__main__":
    main()
