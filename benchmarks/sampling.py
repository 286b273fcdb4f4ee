"""Compare the replay memories' batches per second with stable-baselines3 and torchrl: python -m benchmarks.sampling.

All sides hold the same data: random play of Pong, 8 environments, stacks of 4 images of 84x84, n = 3. A batch is the
input of a DQN update: two stacks of bytes per window, actions, n-step returns, discounts. Sides take turns (A B A B),
and medians over the rounds are reported.

- ours: One image per step; stacks and n-step returns are built for each batch. Threads are replay.gather_threads. In
  a run
  a prefetching thread samples, so that an update waits only if sampling is slower.
- ours, 8 a draw: With learner.batches_per_sample 8, eight batches are sampled at once and then split.
- sb3 replay: ReplayBuffer of stable-baselines3, two stacks per step. It has single steps and no n-step returns.
- sb3 replay, optimised: The same with optimize_memory_usage, one stack per step.
- sb3 n-step: NStepReplayBuffer, two stacks per step, n-step returns computed for each batch.
- torchrl uniform: TensorDictReplayBuffer on a LazyTensorStorage, two stacks per step, n-step returns computed on
  insertion.
- torchrl prioritised: TensorDictPrioritizedReplayBuffer on the same storage.

The wheels of torchrl contain a library that loads only with the torch of its build. If it does not load, its sources
in the wheel are compiled once, which takes a minute and a C++ compiler. 50,000 steps need 10 GB of memory, and other
numbers in proportion.
"""

import argparse
import copy
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer

from benchmarks.sides import calls_per_second, description, write
from benchmarks.speed import updating
from benchmarks.training import RESULTS
from core.common.system import available_bytes
from core.envs.atari import AtariEnv, AtariParams
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memories.uniform import UniformMemory, UniformParams
from core.memory import Memory
from core.ops.returns import n_step_return
from core.specs import EnvSpec, WindowSpec
from core.trajectory.frame_compression import RAW, StorageParams
from core.trajectory.ring_buffer import Layout
from core.types import Batch, TimeStep, slice_batch
from utils.plot.curves import markdown

NUM_ENVS, NSTEP, GAMMA, CHUNK = 8, 3, 0.99, 8
PACKAGES = ("stable-baselines3", "torchrl", "tensordict", "lz4")
BATCHES = (32, 256)
BYTES_PER_STEP = 200_000  # Memory of all sides together.
WINDOW = WindowSpec(NSTEP, (0, NSTEP))
MEMORIES: dict[str, tuple[Any, Any]] = {
    "shared": (UniformMemory, UniformParams),
    "prioritized": (PrioritizedMemory, PrioritizedParams),
}
NUM_PRIORITY_BATCHES = 50  # Batches whose priorities are updated in turn.
BATCHES_PER_DRAW = 8
OURS = "ours "

Sample = Callable[[int], Any]  # Batch size -> batch.
Prepare = Callable[[int], list[Callable[[], None]]]  # Batch size -> calls that update the priorities of one batch each.


class Sides:
    """All memories, filled with the same random play."""

    def __init__(self, steps: int, threads: tuple[int, ...]):
        env = AtariEnv(AtariParams(), "pong", NUM_ENVS)
        self.memories = {
            f"{OURS}{name}, {codec}, {count} thread{'s' * (count > 1)}": our_memory(env.spec, name, codec, count, steps)
            for name in MEMORIES
            for codec in (RAW, "lz4")
            for count in threads
        }
        self.sb3 = sb3_buffers(steps, env.spec)
        self._play(env, steps)
        self.torchrl = torchrl_buffers(next(iter(self.memories.values())))
        self.sb3["sb3 replay"] = single_steps(self.sb3["sb3 n-step"])
        for call in itertools.chain(*(prepare(max(BATCHES)) for prepare in self.updates().values())):
            call()  # Otherwise all leaves of a sum tree would be equal.

    def _play(self, env: AtariEnv, steps: int) -> None:
        """Play at random and add the steps to our memories and to those of stable-baselines3."""
        generator, timestep = np.random.default_rng(0), env.reset(0)
        writers = [memory.writer(0) for memory in self.memories.values()]
        for _ in range(-(-steps // NUM_ENVS)):
            action = generator.integers(env.spec.action.num_actions, size=NUM_ENVS)
            next_timestep = env.step(action)
            for writer in writers:
                writer.append(timestep, action, next_timestep, {})
            for buffer in self.sb3.values():
                add_to_sb3(buffer, timestep, action, next_timestep)
            timestep = next_timestep
        env.close()

    def samples(self) -> dict[str, Sample]:
        """Return the sampling function of each side."""
        ours = {name: partial(our_batch, memory) for name, memory in self.memories.items()}
        split = {f"{name}, {BATCHES_PER_DRAW} a draw": SplitDraws(memory) for name, memory in self.memories.items()}
        return {**ours, **split, **{name: buffer.sample for name, buffer in (self.sb3 | self.torchrl).items()}}

    def updates(self) -> dict[str, Prepare]:
        """Return the priority updates of each side; codec and threads make no difference to ours."""
        name, memory = next(
            (name, memory) for name, memory in self.memories.items() if isinstance(memory, PrioritizedMemory)
        )
        return {
            name: partial(our_updates, memory),
            "torchrl prioritised": partial(torchrl_updates, self.torchrl["torchrl prioritised"]),
        }

    def bytes_per_step(self) -> dict[str, float]:
        """Return the allocated bytes per step of each side, without sum trees.

        Entries with "used" in their name exclude the empty part of the frame arena.
        """
        sizes = {}
        for name, memory in self.memories.items():
            layout, size = memory.layout, memory.size()
            sizes[name] = sizes[f"{name}, {BATCHES_PER_DRAW} a draw"] = layout.nbytes / size
            if layout.packed:
                used = memory.trajectories.statistics()["replay_mb"] * 1e6
                size_used = (layout.nbytes - layout.arena_bytes + used) / size
                sizes[f"{name}, used"] = sizes[f"{name}, {BATCHES_PER_DRAW} a draw, used"] = size_used
        for name, buffer in self.sb3.items():
            arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
            sizes[name] = sum(array.nbytes for array in arrays) / (buffer.buffer_size * NUM_ENVS)
        for name, buffer in self.torchrl.items():
            rows = buffer[:]
            sizes[name] = sum(tensor.nbytes for tensor in rows.values(True, True)) / len(rows)
        return sizes


# ours -----------------------------------------------------------------------------------------------------------------
def our_memory(spec: EnvSpec, name: str, codec: str, threads: int, steps: int) -> Memory:
    """Return an empty memory of ours."""
    memory_type, params_type = MEMORIES[name]
    layout = Layout.of(
        spec,
        {},
        capacity=steps,
        num_actors=1,
        num_envs=NUM_ENVS,
        chunk_length=CHUNK,
        kept_steps_per_env=NSTEP,
        storage=StorageParams(codec, gather_threads=threads),
        with_priority=memory_type.with_priority,
    )
    return memory_type(params_type(capacity=steps), layout, WINDOW, seed=0)


def our_batch(memory: Memory, batch_size: int) -> Any:
    """Return windows and their n-step returns."""
    batch = memory.sample(batch_size)
    assert batch is not None
    return with_returns(batch)


def with_returns(batch: Batch) -> Any:
    """Return a batch and its n-step returns."""
    return batch, n_step_return(batch.window.rewards, batch.window.discounts, batch.window.lasts, GAMMA)


class SplitDraws:
    """Sample BATCHES_PER_DRAW batches at once and return them one by one."""

    def __init__(self, memory: Memory):
        self._memory, self._batch_size, self._pending = memory, 0, list[Batch]()

    def __call__(self, batch_size: int) -> Any:
        if not self._pending or batch_size != self._batch_size:
            batch = self._memory.sample(BATCHES_PER_DRAW * batch_size)
            assert batch is not None
            parts = (slice(part, None, BATCHES_PER_DRAW) for part in range(BATCHES_PER_DRAW))
            self._batch_size, self._pending = batch_size, [slice_batch(batch, part) for part in parts]
        return with_returns(self._pending.pop())


def our_updates(memory: Memory, batch_size: int) -> list[Callable[[], None]]:
    """Return calls that each update the priorities of one batch of ours."""
    generator, calls = np.random.default_rng(0), list[Callable[[], None]]()
    for _ in range(NUM_PRIORITY_BATCHES):
        batch = memory.sample(batch_size)
        assert batch is not None
        calls.append(partial(memory.update_priorities, batch.keys, generator.random(batch_size)))
    return calls


# stable-baselines3's --------------------------------------------------------------------------------------------------
def sb3_buffers(steps: int, spec: EnvSpec) -> dict[str, ReplayBuffer]:
    """Return empty buffers of stable-baselines3."""
    observation = gymnasium.spaces.Box(0, 255, spec.observation_shape, np.uint8)
    sizes = (steps, observation, gymnasium.spaces.Discrete(spec.action.num_actions), "cpu", NUM_ENVS)
    return {
        "sb3 n-step": NStepReplayBuffer(*sizes, n_steps=NSTEP, gamma=GAMMA),
        "sb3 replay, optimised": ReplayBuffer(*sizes, optimize_memory_usage=True, handle_timeout_termination=False),
    }


def add_to_sb3(buffer: ReplayBuffer, timestep: TimeStep, action: np.ndarray, next_timestep: TimeStep) -> None:
    """Add one step of all environments.

    Environments of stable-baselines3 reset within a step, ours in a separate step, which is marked as done here.
    """
    done = timestep.last | next_timestep.last
    buffer.add(timestep.observation, next_timestep.observation, action, next_timestep.reward, done, [{}] * NUM_ENVS)


def single_steps(buffer: ReplayBuffer) -> ReplayBuffer:
    """Return a plain buffer on the storage of an n-step one, which holds the same data."""
    plain = copy.copy(buffer)
    plain.__class__ = ReplayBuffer
    return plain


# torchrl's ------------------------------------------------------------------------------------------------------------
def torchrl_buffers(memory: Memory) -> dict[str, Any]:
    """Return buffers of torchrl with every window of a memory of ours."""
    load_torchrl()
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    trajectories = memory.trajectories
    low, high = (int(bound[0]) for bound in trajectories.starts(NSTEP))
    storage = LazyTensorStorage((high - low) * NUM_ENVS)
    prioritised = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
    for serial in range(low, high):
        window = trajectories.gather(np.arange(NUM_ENVS), np.full(NUM_ENVS, serial), WINDOW)
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, GAMMA)
        starts = ~window.lasts[0]
        following = {
            "observation": window.observations[1][starts],
            "reward": returns[starts, None],
            "factor": factors[starts, None],
        }
        rows = {"observation": window.observations[0][starts], "action": window.actions[0][starts], "next": following}
        prioritised.extend(TensorDict(rows, [int(starts.sum())]))
    return {"torchrl uniform": TensorDictReplayBuffer(storage=storage), "torchrl prioritised": prioritised}


def load_torchrl() -> None:
    """Make torchrl's library importable, compiled for this torch; call it before importing torchrl.

    Raises:
        ModuleNotFoundError: torchrl is not installed.
    """
    package = find_spec("torchrl")
    if package is None:
        raise ModuleNotFoundError("torchrl is not installed. Run: pip install -e '.[bench]'")
    folder = Path(package.submodule_search_locations[0])
    try:
        module_from_spec(spec_from_file_location("_torchrl", next(folder.glob("_torchrl*.so"))))
    except ImportError:
        from torch.utils.cpp_extension import load

        print("compiling torchrl's library for this torch", flush=True)
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja may be there.
        sys.modules["torchrl._torchrl"] = load(
            "_torchrl", sorted(map(str, folder.glob("csrc/*.cpp"))), extra_cflags=["-O3", "-std=c++20"]
        )


def torchrl_updates(buffer: Any, batch_size: int) -> list[Callable[[], None]]:
    """Return calls that each update the priorities of one batch of torchrl."""
    generator = torch.Generator().manual_seed(0)
    return [
        partial(buffer.update_priority, buffer.sample(batch_size)["index"], torch.rand(batch_size, generator=generator))
        for _ in range(NUM_PRIORITY_BATCHES)
    ]


# measuring ------------------------------------------------------------------------------------------------------------
def one_round(sides: Sides, seconds: float) -> dict[str, dict[str, float]]:
    """Return the batches per second, and priority updates per second, of one turn of every side."""
    figures: dict[str, dict[str, float]] = {}
    for batch_size in BATCHES:
        figures[f"batch {batch_size}"] = {
            name: calls_per_second(partial(sample, batch_size), seconds) for name, sample in sides.samples().items()
        }
        turns = {name: itertools.cycle(prepare(batch_size)) for name, prepare in sides.updates().items()}
        figures[f"priorities of {batch_size}"] = {
            name: calls_per_second(lambda calls=calls: next(calls)(), seconds) for name, calls in turns.items()
        }
    return figures


def compared(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return rates and median of each measurement and side, and ratios to the fastest other side of the round."""
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for measurement in rounds[0]:
        fastest = [
            max(value for name, value in turn[measurement].items() if not name.startswith(OURS)) for turn in rounds
        ]
        for name in rounds[0][measurement]:
            rates = [turn[measurement][name] for turn in rounds]
            ratios = [mine / other for mine, other in zip(rates, fastest)]
            figures.setdefault(measurement, {})[name] = {
                "per_second": rates,
                "median": statistics.median(rates),
                "of the fastest other": statistics.median(ratios),
                "ratios": ratios,
            }
    return figures


def table(figures: dict[str, dict[str, dict[str, Any]]], bytes_per_step: dict[str, float]) -> str:
    """Return a Markdown table with a line for each side."""
    columns, lines = ["side", "bytes a step"], []
    for measurement in figures:
        columns += [f"{measurement}: a second", "us", "of the fastest other"]
    for name in figures[f"batch {BATCHES[0]}"]:
        cells = [name, f"{bytes_per_step.get(f'{name}, used', bytes_per_step[name]):,.0f}"]
        for sides in figures.values():
            values = sides.get(name)
            cells += (
                [f"{values['median']:,.0f}", f"{1e6 / values['median']:,.0f}", f"{values['of the fastest other']:.2f}"]
                if values
                else [""] * 3
            )
        lines.append(cells)
    return markdown(columns, lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, including the time of an update for comparison."""
    sides, cores = Sides(options.steps, tuple(options.threads)), len(os.sched_getaffinity(0))
    rounds, update_ms = [], []
    for number in range(options.rounds):
        torch.set_num_threads(options.torch_threads or cores)
        rounds.append(one_round(sides, options.seconds))
        update_ms.append(1_000 * BATCHES[0] / updating(BATCHES[0], options.torch_threads or cores, 5 * options.seconds))
        print(
            f"round {number + 1} of {options.rounds}: an update of {BATCHES[0]} takes {update_ms[-1]:.1f} ms",
            flush=True,
        )
    figures = compared(rounds)
    shares = {
        name: statistics.median(1_000 / rate / update for rate, update in zip(values["per_second"], update_ms))
        for name, values in figures[f"batch {BATCHES[0]}"].items()
        if name.startswith(OURS)
    }
    return {
        "steps": options.steps,
        "update_ms": update_ms,
        f"batch {BATCHES[0]} as a share of an update": shares,
        "bytes_a_step": sides.bytes_per_step(),
        "measured": figures,
    }


def main() -> None:
    """Measure, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="agent steps in each memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each side's turn")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="values of replay.gather_threads for our side"
    )
    parser.add_argument(
        "--torch_threads", type=int, default=0, help="threads of torch for sampling and updates; 0: all cores"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "sampling.json")
    options = parser.parse_args()
    if options.steps * BYTES_PER_STEP > available_bytes():
        sys.exit(
            f"{options.steps:,} steps need {options.steps * BYTES_PER_STEP:,} bytes, and {available_bytes():,} are free"
        )
    figures = {**description("sampling"), **measure(options)}
    figures["versions"] |= {package: version(package) for package in PACKAGES}
    write(options.output, figures)
    print(table(figures["measured"], figures["bytes_a_step"]), end="")
    print(
        f"a batch of {BATCHES[0]} as a share of an update: "
        + ", ".join(
            f"{name} {share:.2f}" for name, share in figures[f"batch {BATCHES[0]} as a share of an update"].items()
        )
    )


if __name__ == "__main__":
    main()
