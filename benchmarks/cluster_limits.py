"""Compute what limits a cluster of learners, in closed form: actors, ingest, network, learners or their all-reduce.

- Each learner's node has its own ingest and actors. Actors on other nodes send chunks to their learner's node. Each of
  their nodes fetches each published version once from there.
- A ring all-reduce of n learners sends and receives 2 (n - 1) / n times the gradient at each of them.
- Learners update together, so one update learns from the batches of all.
- Home exchanges counters and log records with each learner's node.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.training import RESULTS
from core.runtime.options import LearnerParams, RayParams

USABLE = 0.7  # Share of a network's nominal rate.
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8}  # Bytes per second.


@dataclass(frozen=True)
class Cluster:
    """Learners, actors and the rates of their parts. Times are in seconds, sizes in bytes, rates per second."""

    learners: int
    actors: int
    network: float  # usable bytes per second of each node, in each direction
    update_seconds: float  # one learner's update, without the all-reduce
    actor_rate: float  # agent steps
    step_bytes: float  # of an agent step in a chunk
    ingest_rate: float  # agent steps
    parameter_bytes: float
    gradient_bytes: float
    batch: int = 512
    samples_per_insert: float = 0.8
    chunk_steps: int = 64
    actors_per_node: int = 16
    publish_period: int = LearnerParams().publish_period  # updates
    parameters_period: float = RayParams().parameters_period
    chunks_in_flight: int = RayParams().chunks_in_flight
    latency: float = 1e-4  # one way between two nodes; assumed
    exchange_period: float = 0.05  # between two exchanges with home, as in core/engines/ray/learner_host.py
    home_rate: float = 610.0  # calls that home answers; one ingest stores as many of the smallest chunks measured

    @property
    def steps_per_update(self) -> float:
        """Return the agent steps that must arrive for one update of all learners."""
        return self.learners * self.batch / self.samples_per_insert

    @property
    def nodes(self) -> int:
        """Return the number of nodes with actors of one learner, rounded up."""
        return -(-self.actors // (self.learners * self.actors_per_node))

    @property
    def all_reduce_bytes(self) -> float:
        """Return the bytes that each learner sends, and receives, in one all-reduce."""
        return 2 * (self.learners - 1) / self.learners * self.gradient_bytes

    @property
    def all_reduce_seconds(self) -> float:
        """Return the time of an all-reduce on idle links: 2 (n - 1) messages one after another."""
        return self.all_reduce_bytes / self.network + 2 * (self.learners - 1) * self.latency


def measured(learners: int, actors: int, network: str, update_seconds: float, **others: Any) -> Cluster:
    """Return a cluster that plays Pong with the Nature network and lz4, with the rates of docs/results/ray.json."""
    result = json.loads((RESULTS / "ray.json").read_text())
    way, parameters = result["way"]["Pong 84x84, lz4"], result["publication"]["dqn-pong"]["bytes"]
    return Cluster(
        learners,
        actors,
        USABLE * NETWORKS[network],
        update_seconds,
        actor_rate=way["actor, agent steps per second"],
        step_bytes=way["bytes per agent step"],
        ingest_rate=way["ingest, agent steps per second"],
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        home_rate=max(each["ingest, chunks per second"] for each in result["way"].values()),
        **others,
    )


def limits(cluster: Cluster) -> dict[str, float]:
    """Return the agent steps per second, of the whole cluster, that each of its parts supports."""
    exchange = cluster.all_reduce_bytes / cluster.steps_per_update
    update = cluster.update_seconds + cluster.all_reduce_seconds
    slower = "learners" if cluster.update_seconds >= cluster.all_reduce_seconds else "all-reduce"
    return {
        "actors": cluster.actors * cluster.actor_rate,
        "ingest": cluster.learners * cluster.ingest_rate,
        "network in": cluster.network / (cluster.step_bytes / cluster.learners + exchange),
        slower: cluster.steps_per_update / update,
    }


def version_seconds(cluster: Cluster) -> float:
    """Return the seconds from one version of the parameters to the next that every node of a learner's actors gets.

    A version goes to each node over the learner's outgoing link, which gradients leave a part of.
    """
    updates = bottleneck(cluster)[1] / cluster.steps_per_update
    left = cluster.network - updates * cluster.all_reduce_bytes
    transfers = cluster.nodes * cluster.parameter_bytes / left
    return max(cluster.publish_period / updates, cluster.parameters_period, transfers)


def bottleneck(cluster: Cluster) -> tuple[str, float]:
    """Return the part with the lowest limit, and this limit in agent steps per second."""
    return min(limits(cluster).items(), key=lambda pair: pair[1])


def supported_actors(cluster: Cluster) -> int:
    """Return the largest number of actors whose rate no other part limits."""
    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bottleneck(replace(cluster, actors=middle))[0] == "actors" else (low, middle)
    return low


def home_period(cluster: Cluster) -> float:
    """Return the seconds between two exchanges of a learner's node with home, which answers one call at a time."""
    return max(cluster.exchange_period, cluster.learners / cluster.home_rate)
