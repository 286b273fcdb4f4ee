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
            "`python -m benchmarks.scaling` computes this page from three files of `docs/results`. An actor is one",
            "process of environments. On another machine, measure again: `make bench-ray`.\n",
            markdown(("file", "written by", "holds"), _sources(result, allreduce, cluster)),
            "## Measured\n",
            *_measured(result),
            "## Limits of Pong, Nature network, in agent steps per second\n",
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
            markdown(("limit", "raised by"), ADVICE),
            POLICY_LAG,
        ]
    )


ADVICE = (
    (
        "network",
        "`replay.frame_compression lz4`, which compresses images in the actors; for parameters, larger "
        "`ray.parameters_period` and `actor.parameter_pull_period`; many actors on few nodes",
    ),
    (
        "ingest, which is one process",
        "longer chunks (`actor.chunk_length`, `num_envs_per_actor`), for fewer messages and the same copies; actors on "
        "the learner's node, which do not use it",
    ),
    (
        "learner; beyond it the rate limiter makes actors wait",
        "a GPU; fewer samples per step (`rate_limiter.samples_per_insert` 0.8 in place of 8, like Ape-X); larger "
        "batches; several learners with a GPU each (`num_learners`)",
    ),
    ("all-reduce", "larger batches (`agent.batch_size`), `learner.gradient_dtype bfloat16`, a faster network"),
    (
        "replay: many actors overwrite a million steps within minutes",
        "`memory.capacity`, with `replay.frame_compression lz4`",
    ),
)
POLICY_LAG = """\
Policy lag is the sum of `learner.publish_period` updates, `ray.parameters_period`, the latency above,
`actor.parameter_pull_period` steps, and up to `ray.chunks_in_flight` chunks. Chunks that wait for room add to it.
"""


def _sources(*results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return a row for each file from which the page is computed."""
    ray, allreduce, cluster = results
    machine = f"{ray['cpus']} cores of {ray['processor']}, load average {ray['load average']:.0f}: {_condition(ray)}"
    return [
        (
            "`ray.json`",
            f"`python -m benchmarks.ray_engine`, last `{ray['command']}`",
            f"rates and latencies, measured on {machine}",
        ),
        (
            "`allreduce.json`",
            f"`{allreduce['sizes']['commands'][0]}`",
            f"times of the all-reduce, measured on {allreduce['processor']}",
        ),
        ("`cluster.json`", f"`{cluster['command']}`", "the simulation below"),
    ]


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
        "*Ingest* is the rate at which one sender stores chunks in the ring through Ray, with `ray.chunks_in_flight`",
        "chunks in transit. All processes ran on the same cores.\n",
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
            "Each learner has a node with its own ingest and actors, which fetch parameters there. All learners make "
            f"each update together, with batches of {one.batch} and {one.samples_per_insert} samples per agent "
            "step. The CPU update was measured. **The GPU update is an assumption.**"
        ),
        "",
        _paragraph(
            f"An all-reduce is assumed to get {USABLE:.0%} of the network and to need {one.latency * 1e3:.1f} ms a "
            f"message. For {size / 1e6:.1f} MB between two nodes at 1 Gbit/s that is {predicted * 1e3:.0f} ms; "
            f"[measured](results/speed.md#several-learners): {took[str(size)]:.0f} ms. That the backward pass hides a "
            "part is not counted."
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
            f"- **Age of parameters.** With 10,000 actors, {largest.actors_per_node} on a node, one learner can "
            f"give every node a new version each {fresh[0]:.1f} s; {largest.learners} learners one each "
            f"{fresh[1]:.1f} s. This limits no agent steps."
        ),
        _paragraph(
            "- **Home** carries counters and log records of other learners, beside all that its own one needs. "
            f"{largest.learners} nodes that call it every {largest.exchange_period * 1e3:.0f} ms make {calls:,.0f} "
            f"calls per second. One process answered {largest.home_rate:,.0f} calls with a small chunk per second, "
            f"so that a node would hear from home every {period * 1e3:,.0f} ms. That delays the rate limiter's counts, "
            "and limits no agent steps."
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
    lost_learner = "a learner's node fails"
    rows = [
        ("agent steps per second", f"{rate:,.0f}, {rate / limit:.0%} of the {limit:,.0f} above"),
        (
            f"policy of a chunk that is stored, at {first['updates per second']:.0f} updates per second",
            f"{median:.0f} updates old (median; 95% are below {high:.0f})",
        ),
        (
            f"a tenth of the actors' nodes fails and is back after {RESTART_SECONDS:.0f} s",
            f"updates at full rate after {resumed['actors']:.0f} s: there are more actors than learners keep up with",
        ),
        (
            f"{lost_learner}, the run is resumed {RESUME_SECONDS:.0f} s later",
            f"{lost:,} updates since the checkpoint are lost; full rate after {resumed['learner']:.0f} s",
        ),
        (
            f"{lost_learner}, an elastic run (`supervisor.elastic`) regroups within {REGROUP_SECONDS:.0f} s",
            f"no update is lost; full rate after {elastic['learner']:.0f} s; another pause when a node takes the place",
        ),
    ]
    return [
        _paragraph(
            f"`{result['command']}` simulates 64 learners and 10,000 actors at 10 Gbit/s event by event, with the GPU "
            f"update assumed above and durations that vary by {VARIATION:.0%}. The seconds for restart, resume and "
            "regrouping are assumptions. A run takes at most 4,096 actors today (`num_actors`)."
        ),
        "",
        markdown(("simulated", "result"), rows),
        "Throughput is below the limit because the slowest learner ends an update, and chunks and parameters share the",
        "links.\n",
        "![Throughput (means of 5 s) and lag of the simulated cluster](results/cluster.png)\n",
    ]


if __name__ == "__main__":
    print(page(), end="")
