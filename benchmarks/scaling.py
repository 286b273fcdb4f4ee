"""Compute how many actors and learners a cluster supports, from docs/results: ray, allreduce and cluster .json.

python -m benchmarks.scaling > docs/scaling.md
"""

import json
import statistics
import textwrap
from typing import Any

from benchmarks.cluster_limits import (
    NETWORKS,
    USABLE,
    bottleneck,
    home_period,
    measured,
    supported_actors,
    version_seconds,
)
from benchmarks.cluster_simulation import GPU_UPDATE, REGROUP_SECONDS, RESTART_SECONDS, RESUME_SECONDS, VARIATION
from benchmarks.training import RESULTS
from core.runtime.options import LearnerParams, RayParams
from utils.plot.curves import markdown

ACTORS = (10, 100, 1_000)
LEARNERS = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (
    "bytes per agent step",
    "agent steps per chunk",
    "actor, agent steps per second",
    "ingest, chunks per second",
    "ingest, agent steps per second",
)
SAMPLES_PER_STEP = {"Ape-X's 0.8": 0.8, "Nature DQN's 8": 8.0}
RAW, LZ4 = "Pong 84x84, raw", "Pong 84x84, lz4"


def page() -> str:
    """Return the page as Markdown."""
    result, allreduce, cluster = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("ray", "allreduce", "cluster")
    )
    way = result["way"]
    samples = {int(size): rate for size, rate in result["learner, samples per second"].items()}
    batch, learner = max(samples.items(), key=lambda pair: pair[1])
    return "\n".join(
        [
            "# How many actors and learners a cluster supports\n",
            "`python -m benchmarks.scaling` computes this page from `docs/results/ray.json`. That file was measured by",
            f"`python -m benchmarks.ray_engine` on {result['cpus']} cores of {result['processor']} with a load average",
            f"of {result['load average']:.0f}: {_condition(result)} (last: `{result['command']}`).",
            "An actor is one process of environments. On another machine, measure again: `make bench-ray`.\n",
            "## Measured\n",
            *_measured(result),
            "## The four limits of Pong, Nature network, in agent steps per second\n",
            *_limits(way, learner, batch),
            "## Actors\n",
            *_actors(way, learner),
            "## Parameters, from learner to actors\n",
            *_parameters(result["publication"]["dqn-pong"]["bytes"], learner / batch),
            "## Several learners\n",
            *_learners(batch / learner, allreduce),
            "## A cluster simulated\n",
            *_simulated(cluster),
            "## How to raise each limit\n",
            ADVICE,
        ]
    )


ADVICE = """\
- **Network.** `replay.frame_compression lz4` compresses images in the actors. For parameters, raise
  `ray.parameters_period` and
  `actor.parameter_pull_period`. Many actors per node cost less than many nodes.
- **Ingest.** The ingest is one process. Longer chunks (`actor.chunk_length`, `num_envs_per_actor`) need fewer messages
  and the same copies. Actors on the learner's node do not use it.
- **Learner.** Use a GPU, or fewer samples per step (`rate_limiter.samples_per_insert` 0.8 in place of 8, like Ape-X).
  Larger batches and several learners with a GPU each (`num_learners`) also help. Otherwise the rate limiter makes
  actors wait, and more actors stay idle.
- **All-reduce.** Larger batches (`agent.batch_size`), `learner.gradient_dtype bfloat16`, or a faster network.
- **Replay.** Many actors overwrite a million steps within minutes: raise `memory.capacity` with
  `replay.frame_compression lz4`.
- **Policy lag.** The lag adds up: `learner.publish_period` updates, `ray.parameters_period`, the latency above,
  `actor.parameter_pull_period` steps, and up to `ray.chunks_in_flight` chunks. Chunks that wait for room add to it.
"""


def _condition(result: dict[str, Any]) -> str:
    if result["load average"] <= 3 * result["cpus"]:
        return "the benchmark alone causes two to four"
    return (
        "other programs used the same cores, so that rates are far too low, ratios of one pair mean little, and only "
        "the bytes are exact"
    )


def _measured(result: dict[str, Any]) -> list[str]:
    lines = []
    if "speed" in result:
        columns = ("the same run on one machine", "local, agent steps/s", "ray, agent steps/s", "ray / local, median")
        rows = [
            (f"`{name}`", _rates(each["local"]), _rates(each["ray"]), f"{statistics.median(each['ray / local']):.2f}")
            for name, each in result["speed"].items()
        ]
        lines.append(markdown(columns, rows))
    rates = [[name, *(f"{each[column]:,.0f}" for column in COLUMNS)] for name, each in result["way"].items()]
    versions = [
        (f"`{row}`", f"{each['bytes']:,}", f"{each['median ms']:.1f} ms", f"{each['95th percentile ms']:.1f} ms")
        for row, each in result["publication"].items()
    ]
    publication = ("parameters of", "bytes", "publication to the acting network, median", "95th percentile")
    return [
        *lines,
        markdown(["from node to node", *COLUMNS], rates),
        "*Ingest* is the rate at which one sender stores chunks in the ring through Ray, `ray.chunks_in_flight` at",
        "a time. All processes ran on the same cores.\n",
        markdown(publication, versions),
        "The times hold without `ray.parameters_period` and for an actor that asks at once. A playing actor learns",
        "of a version from the answer to its next chunk.\n",
    ]


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)


def network_limit(step_bytes: float, network: float) -> float:
    """Return how many items of `step_bytes`, such as agent steps, a network carries per second."""
    return USABLE * network / step_bytes


def _limits(way: dict[str, Any], learner: float, batch: int) -> list[str]:
    lines = []
    for name, network in NETWORKS.items():
        rates = [network_limit(way[kind]["bytes per agent step"], network) for kind in (RAW, LZ4)]
        lines.append((f"network of {name}, {USABLE:.0%} of it", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}"))
    stored = [way[kind]["ingest, agent steps per second"] for kind in (RAW, LZ4)]
    lines.append(("one ingest", f"{stored[0]:,.0f}", f"{stored[1]:,.0f}"))
    for name, ratio in SAMPLES_PER_STEP.items():
        samples = f"this learner, batch {batch}: {learner:,.0f} samples/s"
        lines.append((f"{samples}, {name} a step", f"{learner / ratio:,.0f}", "the same"))
    return [markdown(("limit", "raw", "lz4"), lines)]


def _actors(way: dict[str, Any], learner: float) -> list[str]:
    """Return the number of actors that each limit supports, and the limits that each number of actors exceeds."""
    one = way[LZ4]["actor, agent steps per second"]
    limits = {
        "the network (1 Gbit/s)": network_limit(way[LZ4]["bytes per agent step"], NETWORKS["1 Gbit/s"]),
        "the ingest": way[LZ4]["ingest, agent steps per second"],
        **{f"the learner, {name}": learner / ratio for name, ratio in SAMPLES_PER_STEP.items()},
    }
    raw = {
        "the network (1 Gbit/s), raw": network_limit(way[RAW]["bytes per agent step"], NETWORKS["1 Gbit/s"]),
        "the ingest, raw": way[RAW]["ingest, agent steps per second"],
    }
    actors = {name: limit / one for name, limit in limits.items()}
    actors |= {name: limit / way[RAW]["actor, agent steps per second"] for name, limit in raw.items()}
    lines = []
    for count in ACTORS:
        rate, megabytes = count * one, count * one * way[LZ4]["bytes per agent step"] / 1e6
        exceeded = [name for name, limit in limits.items() if rate > limit]
        lines.append((f"{count:,}", f"{rate:,.0f}", f"{megabytes:,.1f} MB", "; ".join(exceeded) or "none"))
    return [
        f"One actor makes {one:,.0f} agent steps per second, compression included.",
        "Each part of one learner's node supports:\n",
        markdown(("part", "actors"), [(name, f"{limit:,.1f}") for name, limit in actors.items()]),
        markdown(("actors", "their rate, steps/s", "bytes/s, lz4", "limits exceeded (lz4)"), lines),
    ]


def _parameters(size: int, updates: float) -> list[str]:
    """Return the number of nodes that the networks supply with versions of `size` bytes, at this rate of updates."""
    every, period = LearnerParams().publish_period, RayParams().parameters_period
    columns = ("versions a second", "bytes/s to each node", *(f"nodes, {name}" for name in NETWORKS))
    lines = []
    for name, rate in (
        (f"{{:.2g}}: this learner, one every {every} updates", updates / every),
        (f"{{:.2g}}: the maximum with `ray.parameters_period` {period:g}", 1 / period),
    ):
        nodes = [f"{network_limit(size * rate, network):,.1f}" for network in NETWORKS.values()]
        lines.append([name.format(rate), f"{size * rate / 1e6:,.1f} MB", *nodes])
    return [
        "A node with actors fetches each version once.",
        f"{USABLE:.0%} of a network supply this many nodes with the Nature network:\n",
        markdown(columns, lines),
    ]


def _learners(update: float, allreduce: dict[str, Any]) -> list[str]:
    """Return the actors that learners support, for two update times on two networks."""
    sides = [
        (f"{name} of {seconds * 1e3:,.0f} ms, {network}", seconds, network)
        for name, seconds in (("CPU update", update), ("GPU update", GPU_UPDATE))
        for network in NETWORKS
    ]
    one = measured(2, 100, "1 Gbit/s", update)
    took = allreduce["sizes"]["1 Gbit/s"]["2"]
    size = max((int(each) for each in took if int(each) < one.gradient_bytes), default=0)
    predicted = size / (NETWORKS["1 Gbit/s"] * USABLE) + 2 * one.latency
    lines = [
        _paragraph(
            "Each learner has a node with its own ingest and actors. All learners make each update together, with "
            f"batches of {one.batch} and {one.samples_per_insert} samples per agent step. Parameters are alike "
            "everywhere, so an actor fetches them from its own learner's node. The CPU update was measured. **The "
            f"GPU update is an assumption.** An all-reduce is assumed to get {USABLE:.0%} of the network and to need "
            f"{one.latency * 1e3:.1f} ms a message: for {size / 1e6:.1f} MB between two nodes at 1 Gbit/s that is "
            f"{predicted * 1e3:.0f} ms. [Measured](results/speed.md#several-learners): {took[str(size)]:.0f} ms. That "
            "the backward pass hides a part is not counted."
        ),
        "",
        "Each cell is the number of actors that the learners keep up with, and the part that limits more of them:\n",
    ]
    supported, rates = [], []
    for learners in LEARNERS:
        cells = [f"{learners}"]
        for _, seconds, network in sides:
            cluster = measured(learners, learners, network, seconds)
            count = supported_actors(cluster)
            limit = bottleneck(measured(learners, count + 1, network, seconds))[0]
            cells.append(f"{count:,}, {limit}")
        supported.append(cells)
        cells = [f"{learners}"]
        for actors in (*ACTORS, 10_000):
            limit, rate = bottleneck(measured(learners, actors, "10 Gbit/s", GPU_UPDATE))
            cells.append(f"{rate:,.0f}, {limit}" if actors >= learners else "")
        rates.append(cells)
    lines += [
        markdown(["learners", *(name for name, *_ in sides)], supported),
        "With the GPU update at 10 Gbit/s, in agent steps per second:\n",
        markdown(["learners", *(f"{actors:,} actors" for actors in (*ACTORS, 10_000))], rates),
    ]
    largest = measured(LEARNERS[-1], 10_000, "10 Gbit/s", GPU_UPDATE)
    fresh = [version_seconds(measured(n, 10_000, "10 Gbit/s", GPU_UPDATE)) for n in (1, LEARNERS[-1])]
    calls = largest.learners / largest.exchange_period
    period = home_period(largest)
    return [
        *lines,
        _paragraph(
            f"Parameters limit no agent steps, only their age. With 10,000 actors, {largest.actors_per_node} on a "
            f"node, one learner can give every node a new version each {fresh[0]:.1f} s. {largest.learners} learners "
            f"can give every node one each {fresh[1]:.1f} s."
        ),
        "",
        _paragraph(
            "For other learners, home carries counters and log records, no chunks and no parameters. Its own learner's "
            "chunks, parameters and gradients come on top, as on every learner's node. If every "
            f"learner's node calls it every {largest.exchange_period * 1e3:.0f} ms, {largest.learners} nodes make "
            f"{calls:,.0f} calls per second. One process answered {largest.home_rate:,.0f} calls with a small chunk "
            f"per second here, so that a node would hear from home every {period * 1e3:,.0f} ms. That delays the rate "
            "limiter's counts, and limits no agent steps."
        ),
        "",
    ]


def _paragraph(text: str) -> str:
    """Return a paragraph or an item of a list in lines of 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent="  " * text.startswith("- "), break_on_hyphens=False)


def _simulated(result: dict[str, Any]) -> list[str]:
    """Return throughput, lag and recovery of the simulated cluster."""
    scenarios = result["scenarios"]
    first = scenarios["no fault"]
    resumed, elastic = (scenarios[name]["recovery, seconds"] for name in ("resumed from a checkpoint", "elastic"))
    rate, limit = first["agent steps per second"], first["limit, agent steps per second"]
    median, high = first["lag, median and 95th percentile"]
    lost = scenarios["resumed from a checkpoint"]["lost updates"]
    return [
        _paragraph(
            f"`{result['command']}` simulates 64 learners and 10,000 actors at 10 Gbit/s event by event, with the GPU "
            f"update assumed above and durations that vary by {VARIATION:.0%}. The seconds for restart, resume and "
            "regrouping are assumptions. A run takes at most 4,096 actors today (`num_actors`). Data: "
            "`docs/results/cluster.json`."
        ),
        "",
        _paragraph(
            f"- **Throughput:** {rate:,.0f} agent steps per second, {rate / limit:.0%} of the {limit:,.0f} above. The "
            "rest is lost because the slowest learner ends an update, and chunks and parameters share the links."
        ),
        _paragraph(
            f"- **Lag:** a chunk that is stored was played with a policy {median:.0f} updates old (median; 95% are "
            f"below {high:.0f}), at {first['updates per second']:.0f} updates per second."
        ),
        _paragraph(
            f"- **A tenth of the actors' nodes fails** and is back after {RESTART_SECONDS:.0f} s. Updates are at full "
            f"rate again after {resumed['actors']:.0f} s, because there are more actors than the learners keep up "
            "with."
        ),
        _paragraph(
            f"- **A learner's node fails.** A run that is resumed {RESUME_SECONDS:.0f} s later loses {lost:,} updates "
            f"since its checkpoint. The resumed run is at full rate after {resumed['learner']:.0f} s. An elastic run "
            "(`supervisor.elastic`) goes on with the learners left. If it regroups within "
            f"{REGROUP_SECONDS:.0f} s, it loses no update and is at full rate after {elastic['learner']:.0f} s. It "
            "pauses again when another node takes the place."
        ),
        "",
        "![Throughput (means of 5 s) and lag of the simulated cluster](results/cluster.png)\n",
    ]


if __name__ == "__main__":
    print(page(), end="")
