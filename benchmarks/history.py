"""Measure the memory that a million steps of Atari take, compressed and raw.

    python -m benchmarks.history --games pong breakout seaquest asterix wizard_of_wor --steps 1000000
    python -m benchmarks.history --codec raw --jobs 1

The program plays agent steps at random (every action equally likely) as an actor of the row dqn-breakout does: its
environments, its stored fields, its memory `prioritized` with a ring buffer of so many steps.
`replay.frame_compression` is lz4 or raw, which takes 7 GB per million steps. Each game has a process of its own,
`--jobs` of them at once. A game that the results already contain with as many steps is not played again, so that a long
measurement can be stopped and continued. `--steps 20000` is a quick try, in which the two megabytes of uncompressed
frames, which do not grow, weigh more.

Bytes of lz4 are reported in three ways:

- used: the compressed frames that readers may read, and everything else
- allocated: with the whole frame arena and the sum tree, which is what a run asks the machine for
- resident: the growth of this process, which counts the pages touched so far

Raw bytes are computed from the same layout with codec raw, and measured as resident bytes with --codec raw.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.sides import description, last_line, write
from benchmarks.training import RESULTS
from core.common.shared_arrays import total_bytes
from core.env import Env
from core.memories.prioritized import PrioritizedMemory
from core.trajectory.frame_compression import RAW, StorageParams
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from utils.config import memory_budget
from utils.config.command_line import read_options
from utils.options import Options
from utils.plot.curves import markdown

GAMES = ("pong", "breakout", "seaquest", "asterix", "wizard_of_wor")
TIMED_BLOCKS = 2_000  # Blocks whose decompression is timed.
WARM_UP = 2_000  # Agent steps before the first reading of the resident set.
COLUMNS = {
    "steps held": ("steps_held", 1, 0),
    "ratio": ("compression", 1, 1),
    "frames B/step": ("frame_bytes_per_step", 1, 1),
    "other B/step": ("other_bytes_per_step", 1, 1),
    "used MB/M": ("used_bytes_per_million", 1e-6, 0),
    "allocated MB/M": ("allocated_bytes_per_million", 1e-6, 0),
    "resident MB/M": ("resident_bytes_per_million", 1e-6, 0),
    "raw MB/M": ("raw_bytes_per_million", 1e-6, 0),
    "pack us/frame": ("pack_us_per_frame", 1, 1),
    "unpack us/frame": ("unpack_us_per_frame", 1, 1),
    "steps/s": ("steps_per_second", 1, 0),
}


class Timed:
    """A function that adds up the time of its calls."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = self._function(*arguments)
        self.seconds, self.calls = self.seconds + time.perf_counter() - started, self.calls + 1
        return result


# one game -------------------------------------------------------------------------------------------------------------
def measure(game: str, steps: int, env_threads: int, codec: str) -> dict[str, Any]:
    """Play one game and return its figures."""
    words = f"--config dqn-breakout --game {game} --memory.capacity {steps} --replay.frame_compression {codec}"
    options = read_options(f"{words} --actor.env_threads {env_threads} --device cpu".split())
    env = options.env_class(options.env, game, options.num_envs_per_actor, training=True, num_threads=env_threads)
    fill(options, env, min(steps, WARM_UP))
    resident_before = psutil.Process().memory_info().rss
    memory, pack, rate = fill(options, env, steps)
    resident = psutil.Process().memory_info().rss
    env.close()
    layout, grown = memory.layout, resident - resident_before
    figures = {
        "chunk_length": layout.chunk_length,
        "steps_held": memory.size(),
        "resident_bytes_before": resident_before,
        "resident_bytes_after": resident,
        "resident_bytes_per_million": grown / memory.size() * 1e6,
        "steps_per_second": rate,
        "env_threads": env_threads,
    }
    if pack is None:
        return {**figures, "allocated_bytes": layout.nbytes}
    return {
        **figures,
        **sizes_of(memory),
        "unpack_us_per_frame": unpacking(memory.trajectories),
        "pack_us_per_frame": pack.seconds / pack.calls / (layout.chunk_length * layout.num_envs) * 1e6,
    }


def fill(options: Options, env: Env, steps: int) -> tuple[PrioritizedMemory, Timed | None, float]:
    """Fill a memory of `steps` steps.

    Returns:
        The memory, its writer's compression function or None for raw frames, and the agent steps per second.
    """
    options = dataclasses.replace(options, memory=dataclasses.replace(options.memory, capacity=steps))
    agent = options.make_agent(env.spec)
    memory = PrioritizedMemory(options.memory, memory_budget.layout(options, agent), agent.window, options.seed)
    writer, pack = memory.writer(0), None
    if memory.layout.packed:
        assert writer._compressor is not None
        pack = writer._compressor.pack = Timed(writer._compressor.pack)
    rate = play(env, writer, memory.layout, steps)
    memory.sample(options.agent.batch_size)  # Creates and fills the sum tree.
    return memory, pack, rate


def play(env: Env, writer: ChunkWriter, layout: Layout, steps: int) -> float:
    """Play at random until `steps` agent steps are published; return the agent steps per second."""
    generator, timestep = np.random.default_rng(0), env.reset(0)
    extras = {
        name: np.zeros((layout.num_envs, *layout.fields[name].shape), layout.fields[name].dtype)
        for name in layout.extras
    }
    started, published = time.perf_counter(), 0
    while published < steps:
        action = generator.integers(env.spec.action.num_actions, size=layout.num_envs)
        next_timestep = env.step(action)
        published += writer.append(timestep, action, next_timestep, extras)
        timestep = next_timestep
    return published / (time.perf_counter() - started)


def sizes_of(memory: PrioritizedMemory) -> dict[str, Any]:
    """Return the bytes of the memory and of the same one with raw frames; `other` is all but compressed frames."""
    layout, held = memory.layout, memory.size()
    arrays, statistics = layout.arrays(), memory.trajectories.statistics()
    frames = statistics["replay_mb"] * 1e6
    tree = sum(level.nbytes for level in memory.tree._levels)
    other = total_bytes({name: spec for name, spec in arrays.items() if name != "arena"}) + tree
    raw = dataclasses.replace(layout, storage=StorageParams(RAW), arena_bytes=0).nbytes + tree
    totals = {"used": frames + other, "allocated": layout.nbytes + tree, "raw": raw}
    parts = {
        "fields": {name: arrays[name].nbytes for name in layout.fields if name != "frame"},
        "index": {name: arrays[name].nbytes for name in ("block_start", "block_bytes", "block_check")},
        "unpacked ring": arrays["frame"].nbytes,
        "arena": arrays["arena"].nbytes,
        "sum tree": tree,
    }
    return {
        "compression": statistics["compression"],
        "frame_bytes": frames,
        "frame_bytes_per_step": frames / held,
        "other_bytes_per_step": other / held,
        **{f"{name}_bytes": size for name, size in totals.items()},
        **{f"{name}_bytes_per_million": size / held * 1e6 for name, size in totals.items()},
        "parts": parts,
    }


def unpacking(trajectories: Trajectories) -> float:
    """Return the microseconds per frame to find, verify, decompress and copy random blocks, 32 blocks a call."""
    generator, layout = np.random.default_rng(0), trajectories.layout
    length, seconds = layout.chunk_length, 0.0
    low, high = (int(bound[0]) for bound in trajectories.starts(0))
    chunks = generator.integers(-(-low // length), high // length, size=(TIMED_BLOCKS // 32, 32))
    for batch in chunks:
        env_ids, started = generator.integers(layout.total_envs, size=(32, 1)), time.perf_counter()
        trajectories.frames.take(env_ids, batch[:, None] * length + np.arange(length))
        seconds += time.perf_counter() - started
    return seconds / (chunks.size * length) * 1e6


# all games ------------------------------------------------------------------------------------------------------------
def in_own_process(game: str, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Measure a game in a process of its own; return the game and its figures."""
    settings = {"only": game, "steps": options.steps, "env_threads": options.env_threads, "codec": options.codec}
    return game, json.loads(last_line("history", {"OMP_NUM_THREADS": "1"}, **settings))


def table(games: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with the columns that were measured."""
    columns = {
        name: column for name, column in COLUMNS.items() if all(column[0] in figures for figures in games.values())
    }
    lines = (
        [game, *(f"{figures[key] * scale:,.{digits}f}" for key, scale, digits in columns.values())]
        for game, figures in games.items()
    )
    return markdown(["game", *columns], lines)


def main() -> None:
    """Measure the games, write JSON after each one and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=GAMES)
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help="agent steps to play, and capacity of the ring buffer"
    )
    parser.add_argument("--env_threads", type=int, default=1, help="emulator threads per game")
    parser.add_argument("--codec", choices=("lz4", RAW), default="lz4")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="number of games played at once")
    parser.add_argument("--again", action="store_true", help="also play games that the results already contain")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS / "history.json")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.steps, options.env_threads, options.codec)))
        return
    result = json.loads(options.output.read_text()) if options.output.exists() else {}
    games = result.setdefault(f"{options.steps} steps{', raw' * (options.codec == RAW)}", {})
    missing = [game for game in options.games if options.again or game not in games]

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(in_own_process, game, options) for game in missing]):
            game, figures = done.result()
            megabytes = figures["resident_bytes_per_million"] / 1e6
            print(
                f"{game}: {figures['steps_per_second']:.0f} steps/s, {megabytes:,.0f} MB a million resident", flush=True
            )
            games[game] = {**description("history"), **figures, "jobs": options.jobs}
            write(options.output, result)
    print(table({game: games[game] for game in options.games}), end="")


if __name__ == "__main__":
    main()
