"""Measure what learners' exchange of gradients costs: time of an all-reduce by size, and updates with and without it.

    python -m benchmarks.allreduce --part sizes
    python -m benchmarks.allreduce --part updates

- The links are the loopback interface and, for root, links of 1 and 10 Gbit/s between network namespaces: a veth pair
  for each process and a bridge, shaped by tc's token bucket in both directions.
- Each process has one thread. The ways to exchange take turns in the same processes.
- "flat" sends one tensor after the backward pass, "overlapped" sends buckets during it
  (core/learning/gradients.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arithmetic import ATARI, make_batch
from benchmarks.sides import description, write
from benchmarks.training import RESULTS, ROOT
from core.agents.dqn import DQN
from core.agents.impala import Impala
from core.device.torch_runtime import use_threads
from core.distributed.torch_group import TorchGroup
from core.learning import gradients
from core.learning.gradients import GradientExchange
from core.learning.precision import in_bf16
from core.models.actor_critic import ImpalaResNet
from core.models.dqn import DQNCNN

LINKS = {"loopback": None, "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit"}
SIZES = [1_000 * 4**power for power in range(9)]  # bytes: 1 kB to 66 MB
PREFIX = "allreduce"  # of the network namespaces
# Name: agent, network, settings, arithmetic of the layers.
CASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "DQN, Nature CNN, 32": (DQN, DQNCNN, {"batch_size": 32}, "float32"),
    "DQN, Nature CNN, 32, layers in bfloat16": (DQN, DQNCNN, {"batch_size": 32}, "bf16"),
    "V-trace, deep IMPALA ResNet, 20 x 1": (Impala, ImpalaResNet, {"batch_size": 1}, "float32"),
}
# Name: bytes from which a bucket is sent, numbers in which gradients are sent. The first has no exchange.
WAYS: dict[str, tuple[float, torch.dtype | None]] = {
    "no exchange": (0, None),
    "flat": (float("inf"), None),
    "overlapped": (gradients.BUCKET_BYTES, None),
    "flat, sent in bfloat16": (float("inf"), torch.bfloat16),
    "overlapped, sent in bfloat16": (gradients.BUCKET_BYTES, torch.bfloat16),
}


@contextmanager
def shaped_network(count: int, rate: str) -> Iterator[list[list[str]]]:
    """Yield the command prefixes of `count` processes that reach each other at 10.77.0.<n> over links of this rate."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    with ExitStack() as stack:
        names = [f"{PREFIX}{index}" for index in range(count)]
        bridge = f"{PREFIX}b"
        for name in (bridge, *names):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)  # left by a run that was killed
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("-n", bridge, "link", "add", "name", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "dev", "bridge", "up")
        for index, name in enumerate(names):
            port = f"port{index}"
            ip("link", "add", "name", "link", "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "link")
            ip("-n", bridge, "link", "set", "dev", port, "master", "bridge")
            for namespace, device in ((name, "lo"), (name, "link"), (bridge, port)):
                ip("-n", namespace, "link", "set", "dev", device, "up")
            for namespace, device in ((name, "link"), (bridge, port)):
                shape = f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate} burst 256kb latency 50ms"
                subprocess.run(shape.split(), check=True)
        yield [["ip", "netns", "exec", name] for name in names]


def run_group(link: str, count: int, work: list[str]) -> Any:
    """Return what the first of `count` processes, which run `--worker` on such a link, writes."""
    rate = LINKS[link]
    with ExitStack() as stack:
        prefixes = stack.enter_context(shaped_network(count, rate)) if rate else [[]] * count
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        host, interface = ("10.77.0.1", "link") if rate else ("127.0.0.1", "lo")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "MASTER_ADDR": host, "MASTER_PORT": "29577"}
        processes = []
        for index, prefix in enumerate(prefixes):
            rank = {"RANK": str(index), "WORLD_SIZE": str(count)}
            command = [*prefix, sys.executable, "-m", "benchmarks.allreduce", "--worker", f"{folder}/result", *work]
            process = subprocess.Popen(command, cwd=ROOT, env={**environment, **rank}, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        if any(process.wait(timeout=600) for process in processes):
            raise RuntimeError(f"a process of a group of {count} on {link} failed: {work}")
        return json.loads(Path(folder, "result").read_text())


def time_sizes(group: TorchGroup, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of the sum of a float32 tensor, by its bytes."""
    result = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        group.sum(tensor)
        dist.barrier()
        started = time.perf_counter()
        group.sum(tensor)
        repetitions = torch.tensor([max(3, min(1_000, round(seconds / (time.perf_counter() - started))))])
        dist.broadcast(repetitions, 0)
        times = []
        for _ in range(int(repetitions)):
            started = time.perf_counter()
            group.sum(tensor)
            times.append(1e3 * (time.perf_counter() - started))
        result[str(size)] = statistics.median(times)
    return result


def time_updates(group: TorchGroup, case: str, rounds: int, updates: int) -> dict[str, Any]:
    """Return the milliseconds of an update in each round, for each way, and the bytes that a learner sends."""
    kind, network, settings, arithmetic = CASES[case]
    torch.manual_seed(0)

    def make_model() -> Any:
        model = network(network.Params(), ATARI)
        return in_bf16(model) if arithmetic == "bf16" else model

    agent = kind(kind.Params(**settings), ATARI, make_model)
    agent.init_learner()
    torch.manual_seed(group.index)
    batch, optimizer = make_batch(agent), agent._optimizer
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name, (bucket_bytes, group.gradient_dtype) in WAYS.items():
            gradients.BUCKET_BYTES = bucket_bytes  # type: ignore[assignment]
            optimizer._exchange = GradientExchange(optimizer._parameters)
            if group.size > 1:
                dist.barrier()
            started = time.perf_counter()
            for _ in range(updates):
                if name == "no exchange":
                    agent.learn(batch)
                else:
                    group.run(lambda: agent.learn(batch))
            if number:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - started) / updates)
    return {"gradient bytes": 4 * sum(parameter.numel() for parameter in optimizer._parameters), "ms": times}


def work(options: argparse.Namespace) -> None:
    """Measure in this process, one of a group that finds itself by torch's environment variables."""
    use_threads(1)
    dist.init_process_group("gloo")
    group = TorchGroup(dist.get_rank(), dist.get_world_size())
    if options.case:
        result = time_updates(group, options.case, options.rounds, options.updates)
    else:
        result = time_sizes(group, options.seconds)
    if group.index == 0:
        options.worker.write_text(json.dumps(result))
    dist.barrier()
    group.close()


def main() -> None:
    """Run groups of processes, print medians, and write all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("sizes", "updates"), default="sizes")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=4, help="updates of each way in a round")
    parser.add_argument("--output", type=Path, default=RESULTS / "allreduce.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    result = json.loads(options.output.read_text()) if options.output.exists() else {}
    result.update(description("allreduce"))
    part = result.setdefault(options.part, {})
    part.setdefault("commands", []).append(result.pop("command"))
    for link in options.links:
        part["load average"] = os.getloadavg()[0]
        for count in (2, 4) if options.part == "sizes" else (2, 4) if link == "loopback" else (2,):
            group = part.setdefault(link, {}).setdefault(str(count), {})
            if options.part == "sizes":
                group.update(run_group(link, count, ["--seconds", str(options.seconds)]))
                print(f"{link}, {count} processes: {group}", flush=True)
                continue
            for case in CASES:
                words = ["--case", case, "--rounds", str(options.rounds), "--updates", str(options.updates)]
                group[case] = run_group(link, count, words)
                medians = {name: round(statistics.median(times), 2) for name, times in group[case]["ms"].items()}
                print(f"{link}, {count} processes, {case}: {medians}", flush=True)
        write(options.output, result)


if __name__ == "__main__":
    main()
