"""Compute how many actors one learner's node supports, from docs/results/ray.json.

python -m benchmarks.scaling > docs/scaling.md
"""

import json
import statistics
from typing import Any

from benchmarks.training import ROOT
from core.runtime.options import LearnerParams, RayParams

ACTORS = (10, 100, 1_000)
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8}  # Bytes per second.
COLUMNS = (
    "bytes per agent step",
    "agent steps per chunk",
    "actor, agent steps per second",
    "ingest, chunks per second",
    "ingest, agent steps per second",
)
USABLE = 0.7  # Share of a network's nominal rate.
SAMPLES_PER_STEP = {"Ape-X's 0.8": 0.8, "Nature DQN's 8": 8.0}
RAW, LZ4 = "Pong 84x84, raw", "Pong 84x84, lz4"


def page(result: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    way = result["way"]
    samples = {int(size): rate for size, rate in result["learner, samples per second"].items()}
    batch, learner = max(samples.items(), key=lambda pair: pair[1])
    return "\n".join(
        [
            "# How many actors one learner's node supports\n",
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
- **Learner.** Use a GPU, fewer samples per step (`rate_limiter.samples_per_insert` 0.8 in place of 8, like Ape-X),
  larger
  batches, or several learners with a GPU each (`num_learners`). Otherwise the rate limiter makes actors wait, and more
  actors stay idle.
- **Replay.** Many actors overwrite a million steps within minutes: raise `memory.capacity` with
  `replay.frame_compression lz4`.
- **Policy lag.** The lag is at most `actor.parameter_pull_period` steps of an actor, `ray.parameters_period`, the
  latency
  above and a chunk.
"""


def _condition(result: dict[str, Any]) -> str:
    if result["load average"] <= 3 * result["cpus"]:
        return "nothing else ran there"
    return (
        "other programs used the same cores, so that rates are far too low, ratios of one pair mean little, and only "
        "the bytes are exact"
    )


def _measured(result: dict[str, Any]) -> list[str]:
    lines = []
    if "speed" in result:
        columns = ("the same run on one machine", "local, agent steps/s", "ray, agent steps/s", "ray / local, median")
        lines += [f"| {' | '.join(columns)} |", "|---|---|---|---|"]
        for name, each in result["speed"].items():
            ratio = statistics.median(each["ray / local"])
            lines.append(f"| `{name}` | {_rates(each['local'])} | {_rates(each['ray'])} | {ratio:.2f} |")
        lines.append("")
    lines += [f"| from node to node | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for name, each in result["way"].items():
        lines.append(f"| {name} | " + " | ".join(f"{each[column]:,.0f}" for column in COLUMNS) + " |")
    lines += [
        "",
        "*Ingest* is the rate at which one sender stores chunks in the ring through Ray, `ray.chunks_in_flight` at",
        "a time. All processes ran on the same cores.\n",
        "| parameters of | bytes | publication to the acting network, median | 95th percentile |",
        "|---|---|---|---|",
    ]
    for row, each in result["publication"].items():
        lines.append(
            f"| `{row}` | {each['bytes']:,} | {each['median ms']:.1f} ms | {each['95th percentile ms']:.1f} ms |"
        )
    return [
        *lines,
        "",
        "The times hold without `ray.parameters_period` and for an actor that asks at once. A playing actor learns",
        "of a version from the answer to its next chunk.\n",
    ]


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)


def network_limit(step_bytes: float, network: float) -> float:
    """Return how many items of `step_bytes`, such as agent steps, a network carries per second."""
    return USABLE * network / step_bytes


def _limits(way: dict[str, Any], learner: float, batch: int) -> list[str]:
    lines = ["| limit | raw | lz4 |", "|---|---|---|"]
    for name, network in NETWORKS.items():
        rates = [network_limit(way[kind]["bytes per agent step"], network) for kind in (RAW, LZ4)]
        lines.append(f"| network of {name}, {USABLE:.0%} of it | {rates[0]:,.0f} | {rates[1]:,.0f} |")
    stored = [way[kind]["ingest, agent steps per second"] for kind in (RAW, LZ4)]
    lines.append(f"| one ingest | {stored[0]:,.0f} | {stored[1]:,.0f} |")
    for name, ratio in SAMPLES_PER_STEP.items():
        samples = f"this learner, batch {batch}: {learner:,.0f} samples/s"
        lines.append(f"| {samples}, {name} a step | {learner / ratio:,.0f} | the same |")
    return [*lines, ""]


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
    lines = [
        f"One actor makes {one:,.0f} agent steps per second, compression included.",
        "Each part of one learner's node supports:\n",
        "| part | actors |",
        "|---|---|",
    ]
    lines += [f"| {name} | {limit / one:,.1f} |" for name, limit in {**limits, **raw}.items()]
    lines += ["", "| actors | their rate, steps/s | bytes/s, lz4 | limits exceeded (lz4) |", "|---|---|---|---|"]
    for count in ACTORS:
        rate, megabytes = count * one, count * one * way[LZ4]["bytes per agent step"] / 1e6
        exceeded = [name for name, limit in limits.items() if rate > limit]
        lines.append(f"| {count:,} | {rate:,.0f} | {megabytes:,.1f} MB | {'; '.join(exceeded) or 'none'} |")
    return [*lines, ""]


def _parameters(size: int, updates: float) -> list[str]:
    """Return the number of nodes that the networks supply with versions of `size` bytes, at this rate of updates."""
    every, period = LearnerParams().publish_period, RayParams().parameters_period
    columns = ("versions a second", "bytes/s to each node", *(f"nodes, {name}" for name in NETWORKS))
    lines = [
        "A node with actors fetches each version once.",
        f"{USABLE:.0%} of a network supply this many nodes with the Nature network:\n",
        f"| {' | '.join(columns)} |",
        "|---|" + "---|" * 3,
    ]
    for name, rate in (
        (f"{{:.2g}}: this learner, one every {every} updates", updates / every),
        (f"{{:.2g}}: the maximum with `ray.parameters_period` {period:g}", 1 / period),
    ):
        nodes = [f"{network_limit(size * rate, network):,.1f}" for network in NETWORKS.values()]
        lines.append(f"| {name.format(rate)} | {size * rate / 1e6:,.1f} MB | {' | '.join(nodes)} |")
    return [*lines, ""]


if __name__ == "__main__":
    print(page(json.loads((ROOT / "docs" / "results" / "ray.json").read_text())), end="")
