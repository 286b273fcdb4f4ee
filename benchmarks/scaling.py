"""The page of limits: how many actors one learner's node feeds, computed from docs/results/ray.json.

    python -m benchmarks.scaling > docs/scaling.md
"""

import json
import statistics
from typing import Any

from benchmarks.training import ROOT
from core.runtime.options import LearnerParams, RayParams

ACTORS = (10, 100, 1_000)
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8}  # bytes a second
COLUMNS = ("bytes per agent step", "agent steps per chunk", "actor, agent steps per second", "ingest, chunks per second",
           "ingest, agent steps per second")
USABLE = 0.7                                             # of a network's nominal rate
SAMPLES_PER_STEP = {"Ape-X's 0.8": 0.8, "Nature DQN's 8": 8.0}
RAW, LZ4 = "Pong 84x84, raw", "Pong 84x84, lz4"


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    way = result["way"]
    samples = {int(size): rate for size, rate in result["learner, samples per second"].items()}
    batch, learner = max(samples.items(), key=lambda pair: pair[1])
    return "\n".join([
        "# How far one learner's node goes\n",
        "Computed by `python -m benchmarks.scaling` from `docs/results/ray.json`, which `python -m benchmarks.ray_engine` measured on "
        f"{result['cpus']} cores of {result['processor']} (last: `{result['command']}`), load average {result['load average']:.0f}: "
        f"{_condition(result)}. An actor is one process of environments. Where your machine is another, measure there: `make bench-ray`.\n",
        "## Measured\n", *_measured(result),
        "## The four limits of Pong, Nature network, in agent steps a second\n", *_limits(way, learner, batch),
        "## Actors\n", *_actors(way, learner),
        "## Parameters, the other way\n", *_parameters(result["publication"]["dqn-pong"]["bytes"], learner / batch),
        "## What to change then\n", *ADVICE])


ADVICE = [
    "- **Network.** `storage.codec lz4` packs pictures on the actors' side. Parameters: a larger `ray.parameters_period` and",
    "  `actor.refresh_period`; many actors a node are cheaper than many nodes.",
    "- **Ingest.** It is one process: longer chunks (`actor.chunk_length`, `num_envs_per_actor`) cost it fewer messages and the same",
    "  copies. Actors on the learner's node do not need it.",
    "- **Learner.** A GPU; fewer samples a step (`clock.samples_per_insert` 0.8 in place of 8), which is what Ape-X did; larger batches;",
    "  several learners, a GPU each (`num_learners`). Otherwise the limiter makes actors wait, and more of them are idle ones.",
    "- **History.** Many actors overwrite a million steps within minutes: raise `memory.capacity` with `storage.codec lz4`.",
    "- **Policy lag.** It is at most `actor.refresh_period` steps of an actor, `ray.parameters_period`, the latency above and a chunk.\n"]


def _condition(result: dict[str, Any]) -> str:
    if result["load average"] <= 3 * result["cpus"]:
        return "nothing else ran there"
    return "others worked on the same cores, so rates are far too low, ratios of one pair mean little, and only the bytes are exact"


def _measured(result: dict[str, Any]) -> list[str]:
    lines = []
    if "speed" in result:
        lines += ["| the same run on one machine | local, agent steps/s | ray, agent steps/s | ray / local, median |", "|---|---|---|---|"]
        for name, each in result["speed"].items():
            ratio = statistics.median(each["ray / local"])
            lines.append(f"| `{name}` | {_rates(each['local'])} | {_rates(each['ray'])} | {ratio:.2f} |")
        lines.append("")
    lines += [f"| from node to node | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for name, each in result["way"].items():
        lines.append(f"| {name} | " + " | ".join(f"{each[column]:,.0f}" for column in COLUMNS) + " |")
    lines += ["", "Ingest: what one sender gets through Ray into the ring, `ray.chunks_in_flight` at a time; all ran on the same cores.\n",
              "| parameters of | bytes | publication to the acting network, median | 95th percentile |", "|---|---|---|---|"]
    for row, each in result["publication"].items():
        lines.append(f"| `{row}` | {each['bytes']:,} | {each['median ms']:.1f} ms | {each['95th percentile ms']:.1f} ms |")
    return [*lines, "", "Without `ray.parameters_period`, and for an actor that asks at once; one that plays hears of a version with the",
            "answer to its next chunk.\n"]


def _rates(rates: list[float]) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)


def network_limit(step_bytes: float, network: float) -> float:
    """Agent steps a second that a network carries into the learner's node, or others of so many bytes."""
    return USABLE * network / step_bytes


def _limits(way: dict[str, Any], learner: float, batch: int) -> list[str]:
    lines = ["| limit | raw | lz4 |", "|---|---|---|"]
    for name, network in NETWORKS.items():
        rates = [network_limit(way[kind]["bytes per agent step"], network) for kind in (RAW, LZ4)]
        lines.append(f"| network of {name}, {USABLE:.0%} of it | {rates[0]:,.0f} | {rates[1]:,.0f} |")
    stored = [way[kind]["ingest, agent steps per second"] for kind in (RAW, LZ4)]
    lines.append(f"| one ingest | {stored[0]:,.0f} | {stored[1]:,.0f} |")
    for name, ratio in SAMPLES_PER_STEP.items():
        lines.append(f"| this learner, batch {batch}: {learner:,.0f} samples/s, {name} a step | {learner / ratio:,.0f} | the same |")
    return [*lines, ""]


def _actors(way: dict[str, Any], learner: float) -> list[str]:
    """What each number of actors makes, and which limit it meets first; and how many actors each limit feeds."""
    one = way[LZ4]["actor, agent steps per second"]
    limits = {"the network (1 Gbit/s)": network_limit(way[LZ4]["bytes per agent step"], NETWORKS["1 Gbit/s"]),
              "the ingest": way[LZ4]["ingest, agent steps per second"],
              **{f"the learner, {name}": learner / ratio for name, ratio in SAMPLES_PER_STEP.items()}}
    raw = {"the network (1 Gbit/s), raw": network_limit(way[RAW]["bytes per agent step"], NETWORKS["1 Gbit/s"]),
           "the ingest, raw": way[RAW]["ingest, agent steps per second"]}
    lines = [f"One actor makes {one:,.0f} agent steps a second, packing included. So each part of one learner's node feeds so many:\n",
             "| part | actors |", "|---|---|"]
    lines += [f"| {name} | {limit / one:,.1f} |" for name, limit in {**limits, **raw}.items()]
    lines += ["", "| actors | they could make, steps/s | bytes/s, lz4 | beyond what is measured here (lz4) |", "|---|---|---|---|"]
    for count in ACTORS:
        made, carried = count * one, count * one * way[LZ4]["bytes per agent step"] / 1e6
        beyond = [name for name, limit in limits.items() if made > limit]
        lines.append(f"| {count:,} | {made:,.0f} | {carried:,.1f} MB | {'; '.join(beyond) or 'nothing'} |")
    return [*lines, ""]


def _parameters(size: int, updates: float) -> list[str]:
    """How many nodes with actors the networks feed with versions of this size, of a learner that makes so many updates a second."""
    every, period = LearnerParams().publish_period, RayParams().parameters_period
    lines = [f"A node with actors fetches a version once. So {USABLE:.0%} of a network feed so many nodes with the Nature network's:\n",
             f"| versions a second | bytes/s to each node | {' | '.join(f'nodes, {name}' for name in NETWORKS)} |", "|---|" + "---|" * 3]
    for name, rate in ((f"{{:.2g}}: this learner, one every {every} updates", updates / every),
                       (f"{{:.2g}}: the most, by `ray.parameters_period` {period:g}, of a faster one", 1 / period)):
        nodes = [f"{network_limit(size * rate, network):,.1f}" for network in NETWORKS.values()]
        lines.append(f"| {name.format(rate)} | {size * rate / 1e6:,.1f} MB | {' | '.join(nodes)} |")
    return [*lines, ""]


if __name__ == "__main__":
    print(page(json.loads((ROOT / "docs" / "results" / "ray.json").read_text())), end="")
