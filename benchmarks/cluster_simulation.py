"""Simulate a cluster of learners event by event: throughput, lag of policies, and recovery when nodes fail.

    python -m benchmarks.cluster_simulation

The parts and their rates are those of benchmarks/cluster_limits.py. What the simulation adds to these limits:

- Links and ingests are queues. An all-reduce takes the links of all learners, behind chunks and parameters that wait.
- Actors of a node send a chunk each at the same time. They wait at `chunks_in_flight`, and for the rate limiter.
- Times of updates and of actors vary by `VARIATION`. The slowest learner ends an update.
- Nodes fail at given times. An actors' node comes back after RESTART_SECONDS. After the loss of a learner's node the
  run resumes from its last checkpoint or, if elastic, goes on with the learners left.
"""

import argparse
import heapq
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.cluster_limits import Cluster, bottleneck, measured
from benchmarks.training import RESULTS

GPU_UPDATE = 0.01  # seconds of one update of a batch of 512 on a GPU; assumed
VARIATION = 0.1  # standard deviation of a duration, relative to its mean
RESTART_SECONDS = 20.0  # until actors of a lost node play on another; assumed
RESUME_SECONDS = 60.0  # until a run that has ended learns again; assumed
REGROUP_SECONDS = 10.0  # until the learners left have formed a new group; assumed
RETURN_SECONDS = 90.0  # until another node takes the place of a lost learner's; assumed
CHECKPOINT_SECONDS = 60.0
SMOOTHED = 5  # seconds of throughput that a point of the plot is the mean of
BUFFERED_UPDATES = 4  # that actors may run ahead of the rate limiter


@dataclass(frozen=True)
class Fault:
    """Nodes that are lost at one time: `count` actors' nodes, or one learner's node."""

    time: float
    kind: Literal["actors", "learner"]
    count: int = 1


@dataclass
class Link:
    """A queue that serves one item after another: a direction of a network link, or an ingest."""

    free_at: float = 0.0

    def serve(self, now: float, duration: float) -> float:
        """Return the time at which an item that arrives now has been served."""
        self.free_at = max(self.free_at, now) + duration
        return self.free_at


@dataclass
class Learner:
    """The node of a learner."""

    outgoing: Link = field(default_factory=Link)
    incoming: Link = field(default_factory=Link)
    ingest: Link = field(default_factory=Link)
    is_alive: bool = True


@dataclass
class Node:
    """A node with actors, all of one learner."""

    learner: Learner
    actors: int
    version: int = 0  # that its actors play with
    requested: int = 0
    in_flight: int = 0
    is_idle: bool = False  # because too much is in flight
    life: int = 0  # events of an earlier life are ignored


@dataclass
class Trace:
    """Counts of each simulated second."""

    steps: list[int]  # agent steps stored
    updates: list[int]
    lags: list[list[int]]  # updates made since the version that a chunk was played with, when it is stored
    lost_updates: int = 0
    events: int = 0

    def throughput(self, start: int, stop: int) -> float:
        """Return the mean agent steps per second."""
        return statistics.fmean(self.steps[start:stop])

    def lag(self, start: int, stop: int) -> tuple[float, float]:
        """Return median and 95th percentile of the lag in updates."""
        values = [lag for second in self.lags[start:stop] for lag in second]
        return float(np.median(values)), float(np.quantile(values, 0.95))

    def recovery(self, fault: float, share: float = 0.95, window: int = 5) -> float:
        """Return the seconds from a fault until updates of `window` seconds reach a share of those before it."""
        fault = int(fault)
        before = statistics.fmean(self.updates[max(fault - 30, 0) : fault])
        for second in range(fault, len(self.updates) - window + 1):
            if statistics.fmean(self.updates[second : second + window]) >= share * before:
                return float(second - fault)
        return float("inf")


class Simulation:
    """A run of a cluster, deterministic for a seed."""

    def __init__(self, cluster: Cluster, seed: int, faults: Sequence[Fault] = (), elastic: bool = False):
        self.cluster, self._elastic = cluster, elastic
        self._rng = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self.now = count(), 0.0
        self._round = cluster.chunk_steps / cluster.actor_rate  # in which each actor of a node plays a chunk
        self._learners = [Learner() for _ in range(cluster.learners)]
        self._nodes = self._make_nodes()
        self._waiting: deque[tuple[Node, int]] = deque()  # for the rate limiter, each with its life
        self._updates = self._published = self._group = 0  # a new group ignores events of the one before
        self._published_at = 0.0
        self._inserted = self._learned = 0.0  # agent steps, samples
        self._is_updating = self._is_down = False
        self._checkpoint = (0, 0.0, 0.0)
        for node in self._nodes:
            self._after(self._rng.uniform(0, self._round), self._play, node, 0)
        for fault in faults:
            self._after(fault.time, self._fail, fault)
        self._after(CHECKPOINT_SECONDS, self._save)

    def run(self, seconds: int) -> Trace:
        """Simulate from the start to this time."""
        self._trace = Trace([0] * seconds, [0] * seconds, [[] for _ in range(seconds)])
        while self._queue and self._queue[0][0] < seconds:
            self.now, _, function, arguments = heapq.heappop(self._queue)
            self._trace.events += 1
            function(*arguments)
        return self._trace

    def _make_nodes(self) -> list[Node]:
        """Return nodes with the actors of each learner, whose numbers differ by one at most."""
        nodes, each = [], self.cluster.actors_per_node
        for index, learner in enumerate(self._learners):
            actors = len(range(index, self.cluster.actors, self.cluster.learners))
            nodes += [Node(learner, min(each, actors - start)) for start in range(0, actors, each)]
        return nodes

    def _after(self, delay: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), function, arguments))

    def _varied(self, mean: float, size: int = 1) -> float:
        """Return the largest of `size` durations around the mean, none of them below half of it."""
        return mean * max(0.5, 1 + VARIATION * float(self._rng.standard_normal(size).max()))

    # actors -----------------------------------------------------------------------------------------------------------
    def _play(self, node: Node, life: int) -> None:
        """Send the chunks that a node's actors have played, or let them wait for the rate limiter."""
        if life != node.life or self._is_down:
            return
        if not self._can_insert():
            self._waiting.append((node, life))
            return
        steps = node.actors * self.cluster.chunk_steps
        arrival = node.learner.incoming.serve(self.now, steps * self.cluster.step_bytes / self.cluster.network)
        stored = node.learner.ingest.serve(arrival + self.cluster.latency, steps / self.cluster.ingest_rate)
        self._after(stored - self.now, self._store, node, life, steps, node.version)
        node.in_flight += 1
        node.is_idle = node.in_flight >= self.cluster.chunks_in_flight
        if not node.is_idle:
            self._after(self._varied(self._round), self._play, node, life)

    def _store(self, node: Node, life: int, steps: int, version: int) -> None:
        """Count stored steps and answer the node, which then learns of new parameters."""
        if self._is_down or not node.learner.is_alive:
            return
        second = int(self.now)
        self._inserted += steps
        self._trace.steps[second] += steps
        self._trace.lags[second].append(self._updates - version)
        self._start_update()
        if life != node.life:
            return
        node.in_flight -= 1
        if self._published > node.requested == node.version:
            node.requested = self._published
            sent = node.learner.outgoing.serve(self.now, self.cluster.parameter_bytes / self.cluster.network)
            self._after(sent - self.now + self.cluster.latency, self._pull, node, life, node.requested)
        if node.is_idle:
            node.is_idle = False
            self._after(self._varied(self._round), self._play, node, life)

    def _pull(self, node: Node, life: int, version: int) -> None:
        if life == node.life:
            node.version = version

    def _can_insert(self) -> bool:
        ahead = self._inserted * self.cluster.samples_per_insert - self._learned
        return ahead < BUFFERED_UPDATES * self.cluster.batch * self.cluster.learners

    # learners ---------------------------------------------------------------------------------------------------------
    def _start_update(self) -> None:
        """Let all learners update if a batch of each is due."""
        alive = sum(learner.is_alive for learner in self._learners)
        samples = alive * self.cluster.batch
        due = self._inserted * self.cluster.samples_per_insert - self._learned >= samples
        if due and not self._is_updating and not self._is_down:
            self._is_updating = True
            self._after(self._varied(self.cluster.update_seconds, alive), self._reduce, self._group, alive)

    def _reduce(self, group: int, alive: int) -> None:
        """Exchange gradients over the links of all learners. The last one ends the update."""
        if group != self._group:
            return
        duration = 2 * (alive - 1) / alive * self.cluster.gradient_bytes / self.cluster.network
        links = [link for each in self._learners if each.is_alive for link in (each.outgoing, each.incoming)]
        end = max(link.serve(self.now, duration) for link in links) + 2 * (alive - 1) * self.cluster.latency
        self._after(end - self.now, self._finish_update, group, alive)

    def _finish_update(self, group: int, alive: int) -> None:
        """Count an update, publish if it is time, and wake actors that waited for the rate limiter."""
        if group != self._group:
            return
        self._is_updating = False
        self._updates += 1
        self._learned += alive * self.cluster.batch
        self._trace.updates[int(self.now)] += 1
        due = self._updates // self.cluster.publish_period * self.cluster.publish_period
        if due > self._published and self.now - self._published_at >= self.cluster.parameters_period:
            self._published, self._published_at = self._updates, self.now
        for _ in range(len(self._waiting)):
            self._play(*self._waiting.popleft())
        self._start_update()

    # faults -----------------------------------------------------------------------------------------------------------
    def _save(self) -> None:
        """Remember counts as a checkpoint does."""
        if not self._is_down:
            self._checkpoint = (self._updates, self._inserted, self._learned)
        self._after(CHECKPOINT_SECONDS, self._save)

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "actors":
            for index in self._rng.choice(len(self._nodes), fault.count, replace=False):
                self._stop_node(self._nodes[index])
                self._after(RESTART_SECONDS, self._start_node, self._nodes[index], self._nodes[index].life)
        elif self._elastic:
            lost = self._learners[int(self._rng.integers(len(self._learners)))]
            lost.is_alive = False
            for node in self._nodes:
                if node.learner is lost:
                    self._stop_node(node)
            self._regroup()
            self._after(RETURN_SECONDS, self._return, lost)
        else:
            self._end_run()

    def _stop_node(self, node: Node) -> None:
        node.life += 1
        node.in_flight, node.is_idle = 0, False

    def _start_node(self, node: Node, life: int) -> None:
        """Let a node's actors play again, with the newest parameters."""
        if life == node.life and node.learner.is_alive and not self._is_down:
            node.life += 1
            node.version = node.requested = self._published
            self._after(self._varied(self._round), self._play, node, node.life)

    def _regroup(self) -> None:
        """Abandon the update under way and go on with the learners that are there."""
        self._group += 1
        self._is_updating = True
        self._after(REGROUP_SECONDS, self._continue, self._group)

    def _continue(self, group: int) -> None:
        if group == self._group:
            self._is_updating = False
            self._start_update()

    def _return(self, learner: Learner) -> None:
        """Take a node into the group in place of the lost learner's."""
        learner.is_alive = True
        learner.outgoing, learner.incoming, learner.ingest = Link(), Link(), Link()
        for node in self._nodes:
            if node.learner is learner:
                self._start_node(node, node.life)
        self._regroup()

    def _end_run(self) -> None:
        """End the run and resume it from its last checkpoint."""
        self._trace.lost_updates += self._updates - self._checkpoint[0]
        self._is_down, self._is_updating = True, False
        self._group += 1
        self._updates, self._inserted, self._learned = self._checkpoint
        self._published = self._updates
        self._waiting.clear()
        for node in self._nodes:
            self._stop_node(node)
        self._after(RESUME_SECONDS, self._resume)

    def _resume(self) -> None:
        self._is_down = False
        for learner in self._learners:
            learner.outgoing, learner.incoming, learner.ingest = Link(), Link(), Link()
        for node in self._nodes:
            node.version = node.requested = self._published
            self._after(self._rng.uniform(0, self._round), self._play, node, node.life)
        self._start_update()  # actors may have to wait for it


def scenarios() -> dict[str, tuple[Cluster, tuple[Fault, ...], bool]]:
    """Return the runs that are simulated: 64 learners and 10,000 actors, with and without losses of nodes."""
    cluster = measured(64, 10_000, "10 Gbit/s", GPU_UPDATE)
    faults = (Fault(60.0, "actors", len(Simulation(cluster, 0)._nodes) // 10), Fault(140.0, "learner"))
    return {
        "no fault": (cluster, (), False),
        "resumed from a checkpoint": (cluster, faults, False),
        "elastic": (cluster, faults, True),
    }


def summary(cluster: Cluster, trace: Trace, faults: Sequence[Fault]) -> dict[str, Any]:
    """Return the figures of a run that the page states."""
    name, limit = bottleneck(cluster)
    start, stop = 20, 60  # before the first fault
    return {
        "limit": name,
        "limit, agent steps per second": limit,
        "agent steps per second": trace.throughput(start, stop),
        "updates per second": statistics.fmean(trace.updates[start:stop]),
        "lag, median and 95th percentile": trace.lag(start, stop),
        "lost updates": trace.lost_updates,
        "recovery, seconds": {fault.kind: trace.recovery(fault.time) for fault in faults},
        "steps": trace.steps,
        "updates": trace.updates,
        "lags": [float(np.median(each)) if each else None for each in trace.lags],
    }


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw throughput and lag of the scenarios against time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    for name, each in results.items():
        smooth = np.convolve(each["steps"], np.ones(SMOOTHED) / SMOOTHED, "valid")
        axes[0].plot(np.arange(len(smooth)) + (SMOOTHED - 1) / 2, smooth / 1e6, label=name)
        axes[1].plot(np.array(each["lags"], float), label=name)
    limit = next(iter(results.values()))["limit, agent steps per second"]
    axes[0].axhline(limit / 1e6, color="gray", linestyle=":", label="limit in closed form")
    axes[0].set_ylabel("million agent steps/s")
    axes[1].set_ylabel("median lag, updates")
    axes[1].set_xlabel("simulated seconds: at 60 a tenth of the actors' nodes fails, at 140 a learner's node")
    axes[0].set_ylim(0)
    axes[1].set_ylim(0)
    axes[0].legend(loc="lower left")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Simulate the scenarios, print their figures, and write them as JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=300, help="simulated time of each scenario")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "cluster.json")
    options = parser.parse_args()
    results = {}
    for name, (cluster, faults, elastic) in scenarios().items():
        started = time.perf_counter()
        trace = Simulation(cluster, options.seed, faults, elastic).run(options.seconds)
        results[name] = summary(cluster, trace, faults)
        shown = {key: value for key, value in results[name].items() if key not in ("steps", "updates", "lags")}
        print(f"{name}: {trace.events:,} events in {time.perf_counter() - started:.0f} s, {shown}", flush=True)
    command = " ".join(["python -m benchmarks.cluster_simulation", *sys.argv[1:]])
    content = {"command": command, "seed": options.seed, "numpy": np.__version__, "scenarios": results}
    options.output.write_text(json.dumps(content) + "\n")
    draw(results, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
