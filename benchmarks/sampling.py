"""Batches a second of the replay memories against those of stable-baselines3 and torchrl: python -m benchmarks.sampling

Content is the same everywhere: random play of Pong, 8 environments, stacks of 4 pictures of 84x84, n = 3. A batch is what a DQN update
reads: two stacks of bytes a window, actions, n-step returns, discounts. Sides take turns (A B A B); medians over the rounds are quoted.

ours                   one picture a step; windows are put together and n-step returns computed for each batch. The threads are
                       storage.threads. Sampling is what the prefetching thread does, so an update waits for it only when it is slower.
ours, 8 a draw         with learner.batches_per_draw 8: eight batches of one draw, each taken from it as that thread does
sb3 replay             stable-baselines3's ReplayBuffer: two stacks a step; of single steps, it knows no n-step returns
sb3 replay, optimised  with optimize_memory_usage: one stack a step; single steps
sb3 n-step             NStepReplayBuffer: two stacks a step, n-step returns computed for each batch
torchrl uniform        TensorDictReplayBuffer, LazyTensorStorage: two stacks a step, n-step returns computed when it was filled
torchrl prioritised    TensorDictPrioritizedReplayBuffer on the same storage

torchrl's wheels hold a library that only the torch they were built with can load; where this one cannot, the sources in the same wheel are
compiled, once, which takes a minute and a C++ compiler. Needs 10 GB of memory for 50,000 steps, in proportion for others.
"""

import argparse
import copy
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer

from benchmarks.speed import processor, updating
from benchmarks.training import ROOT
from core.common.system import available_bytes, versions
from core.envs.atari import AtariEnv, AtariParams
from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memories.uniform import UniformMemory, UniformParams
from core.memory import Memory
from core.ops.returns import n_step_return
from core.specs import EnvSpec, WindowSpec
from core.trajectory.frame_compression import RAW, StorageParams
from core.trajectory.layout import Layout
from core.types import Batch, TimeStep, slice_batch

NUM_ENVS, NSTEP, GAMMA, CHUNK = 8, 3, 0.99, 8
PACKAGES = ("stable-baselines3", "torchrl", "tensordict", "lz4")
BATCHES = (32, 256)
BYTES_A_STEP = 200_000  # that all sides hold together
WINDOW = WindowSpec(NSTEP, (0, NSTEP))
RULES: dict[str, tuple[Any, Any]] = {"shared": (UniformMemory, UniformParams), "prioritized": (PrioritizedMemory, PrioritizedParams)}
UPDATED = 50  # batches that take turns in being given new priorities
TOGETHER = 8  # batches of a draw
OURS = "ours "

Sample = Callable[[int], Any]                    # a batch of so many windows
Prepare = Callable[[int], list[Callable[[], None]]]  # batch size -> calls, each of which gives the windows of one batch new priorities


class Sides:
    """Every memory, full of the same play."""

    def __init__(self, steps: int, threads: tuple[int, ...]):
        env = AtariEnv(AtariParams(), "pong", NUM_ENVS)
        self.memories = {f"{OURS}{rule}, {codec}, {count} thread{'s' * (count > 1)}": our_memory(env.spec, rule, codec, count, steps)
                         for rule in RULES for codec in (RAW, "lz4") for count in threads}
        self.sb3 = sb3_buffers(steps, env.spec)
        self._play(env, steps)
        self.torchrl = torchrl_buffers(next(iter(self.memories.values())))
        self.sb3["sb3 replay"] = single_steps(self.sb3["sb3 n-step"])
        for call in itertools.chain(*(prepare(max(BATCHES)) for prepare in self.updates().values())):
            call()  # so that no tree holds the same number everywhere

    def _play(self, env: AtariEnv, steps: int) -> None:
        """Random play, given to our memories and to stable-baselines3's."""
        generator, before = np.random.default_rng(0), env.reset(0)
        writers = [memory.writer(0) for memory in self.memories.values()]
        for _ in range(-(-steps // NUM_ENVS)):
            action = generator.integers(env.spec.action.num_actions, size=NUM_ENVS)
            after = env.step(action)
            for writer in writers:
                writer.append(before, action, after, {})
            for buffer in self.sb3.values():
                add_to_sb3(buffer, before, action, after)
            before = after
        env.close()

    def samples(self) -> dict[str, Sample]:
        ours = {name: partial(our_batch, memory) for name, memory in self.memories.items()}
        together = {f"{name}, {TOGETHER} a draw": Together(memory) for name, memory in self.memories.items()}
        return {**ours, **together, **{name: buffer.sample for name, buffer in (self.sb3 | self.torchrl).items()}}

    def updates(self) -> dict[str, Prepare]:
        """Codec and threads make no difference to ours."""
        name, memory = next((name, memory) for name, memory in self.memories.items() if isinstance(memory, PrioritizedMemory))
        return {name: partial(our_updates, memory), "torchrl prioritised": partial(torchrl_updates, self.torchrl["torchrl prioritised"])}

    def bytes_a_step(self) -> dict[str, float]:
        """Of what they have allocated for the rows; trees of priorities excluded. `used`: of lz4, without the empty part of its arena."""
        found = {}
        for name, memory in self.memories.items():
            layout, size = memory.layout, memory.size()
            found[name] = found[f"{name}, {TOGETHER} a draw"] = layout.nbytes / size
            if layout.packed:
                used = memory.trajectories.statistics()["memory_mb"] * 1e6
                found[f"{name}, used"] = found[f"{name}, {TOGETHER} a draw, used"] = (layout.nbytes - layout.arena_bytes + used) / size
        for name, buffer in self.sb3.items():
            arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
            found[name] = sum(array.nbytes for array in arrays) / (buffer.buffer_size * NUM_ENVS)
        for name, buffer in self.torchrl.items():
            rows = buffer[:]
            found[name] = sum(tensor.nbytes for tensor in rows.values(True, True)) / len(rows)
        return found


# ours ---------------------------------------------------------------------------------------------------------------------
def our_memory(spec: EnvSpec, rule: str, codec: str, threads: int, steps: int) -> Memory:
    memory_type, params_type = RULES[rule]
    layout = Layout.of(spec, {}, capacity=steps, num_actors=1, num_envs=NUM_ENVS, chunk_length=CHUNK, kept_steps_per_env=NSTEP,
                       storage=StorageParams(codec, threads=threads), with_priority=memory_type.with_priority)
    return memory_type(params_type(capacity=steps), layout, WINDOW, seed=0)


def our_batch(memory: Memory, batch_size: int) -> Any:
    """Windows and their n-step returns."""
    batch = memory.sample(batch_size)
    assert batch is not None
    return with_returns(batch)


def with_returns(batch: Batch) -> Any:
    return batch, n_step_return(batch.window.rewards, batch.window.discounts, batch.window.lasts, GAMMA)


class Together:
    """Batches of draws of TOGETHER batches."""

    def __init__(self, memory: Memory):
        self._memory, self._batch_size, self._left = memory, 0, list[Batch]()

    def __call__(self, batch_size: int) -> Any:
        if not self._left or batch_size != self._batch_size:
            drawn = self._memory.sample(TOGETHER * batch_size)
            assert drawn is not None
            self._batch_size, self._left = batch_size, [slice_batch(drawn, slice(part, None, TOGETHER)) for part in range(TOGETHER)]
        return with_returns(self._left.pop())


def our_updates(memory: Memory, batch_size: int) -> list[Callable[[], None]]:
    generator, calls = np.random.default_rng(0), []
    for _ in range(UPDATED):
        batch = memory.sample(batch_size)
        assert batch is not None
        calls.append(partial(memory.update_priorities, batch.keys, generator.random(batch_size)))
    return calls


# stable-baselines3's ------------------------------------------------------------------------------------------------------
def sb3_buffers(steps: int, spec: EnvSpec) -> dict[str, ReplayBuffer]:
    observation = gymnasium.spaces.Box(0, 255, spec.observation_shape, np.uint8)
    sizes = (steps, observation, gymnasium.spaces.Discrete(spec.action.num_actions), "cpu", NUM_ENVS)
    return {"sb3 n-step": NStepReplayBuffer(*sizes, n_steps=NSTEP, gamma=GAMMA),
            "sb3 replay, optimised": ReplayBuffer(*sizes, optimize_memory_usage=True, handle_timeout_termination=False)}


def add_to_sb3(buffer: ReplayBuffer, before: TimeStep, action: np.ndarray, after: TimeStep) -> None:
    """Its environments restart within a step and ours in one of its own, which counts as a step of an ended episode here."""
    buffer.add(before.observation, after.observation, action, after.reward, before.last | after.last, [{}] * NUM_ENVS)


def single_steps(buffer: ReplayBuffer) -> ReplayBuffer:
    """The plain buffer on the rows of an n-step one, which are the same."""
    plain = copy.copy(buffer)
    plain.__class__ = ReplayBuffer
    return plain


# torchrl's ----------------------------------------------------------------------------------------------------------------
def torchrl_buffers(memory: Memory) -> dict[str, Any]:
    """Buffers of every window of a memory of ours."""
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
        following = {"observation": window.observations[1][starts], "reward": returns[starts, None], "factor": factors[starts, None]}
        rows = {"observation": window.observations[0][starts], "action": window.actions[0][starts], "next": following}
        prioritised.extend(TensorDict(rows, [int(starts.sum())]))
    return {"torchrl uniform": TensorDictReplayBuffer(storage=storage), "torchrl prioritised": prioritised}


def load_torchrl() -> None:
    """Make torchrl's library, compiled for this torch, importable. To be called before torchrl is imported.

    Raises ModuleNotFoundError without torchrl.
    """
    package = find_spec("torchrl")
    if package is None:
        raise ModuleNotFoundError("torchrl is missing: pip install -r requirements-bench.txt")
    folder = Path(package.submodule_search_locations[0])
    try:
        module_from_spec(spec_from_file_location("_torchrl", next(folder.glob("_torchrl*.so"))))
    except ImportError:
        from torch.utils.cpp_extension import load

        print("compiling torchrl's library for this torch", flush=True)
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where ninja may be
        sys.modules["torchrl._torchrl"] = load("_torchrl", sorted(map(str, folder.glob("csrc/*.cpp"))), extra_cflags=["-O3", "-std=c++20"])


def torchrl_updates(buffer: Any, batch_size: int) -> list[Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    return [partial(buffer.update_priority, buffer.sample(batch_size)["index"], torch.rand(batch_size, generator=generator))
            for _ in range(UPDATED)]


# measuring ----------------------------------------------------------------------------------------------------------------
def rate(call: Callable[[], Any], seconds: float) -> float:
    """Calls a second."""
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        call()
        count += 1
    return count / elapsed


def one_round(sides: Sides, seconds: float) -> dict[str, dict[str, float]]:
    """A turn of every side: batches a second, and priorities of a batch a second."""
    found: dict[str, dict[str, float]] = {}
    for batch_size in BATCHES:
        found[f"batch {batch_size}"] = {name: rate(partial(sample, batch_size), seconds) for name, sample in sides.samples().items()}
        turns = {name: itertools.cycle(prepare(batch_size)) for name, prepare in sides.updates().items()}
        found[f"priorities of {batch_size}"] = {name: rate(lambda calls=calls: next(calls)(), seconds) for name, calls in turns.items()}
    return found


def compared(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of every measurement and side the rates, their median, and the median of the ratios to the fastest other in the same round."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for measurement in rounds[0]:
        fastest = [max(value for name, value in turn[measurement].items() if not name.startswith(OURS)) for turn in rounds]
        for name in rounds[0][measurement]:
            rates = [turn[measurement][name] for turn in rounds]
            ratios = [mine / other for mine, other in zip(rates, fastest)]
            found.setdefault(measurement, {})[name] = {"per_second": rates, "median": statistics.median(rates),
                                                       "of the fastest other": statistics.median(ratios), "ratios": ratios}
    return found


def table(found: dict[str, dict[str, dict[str, Any]]], bytes_a_step: dict[str, float]) -> Iterable[str]:
    yield "| side | bytes a step |" + "".join(f" {measurement}: a second | us | of the fastest other |" for measurement in found)
    yield "|---|---|" + "---|---|---|" * len(found)
    for name in found[f"batch {BATCHES[0]}"]:
        cells = [f"{values['median']:,.0f} | {1e6 / values['median']:,.0f} | {values['of the fastest other']:.2f}"
                 if (values := sides.get(name)) else " | | " for sides in found.values()]
        yield f"| {name} | {bytes_a_step.get(f'{name}, used', bytes_a_step[name]):,.0f} | " + " | ".join(cells) + " |"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sides, cores = Sides(options.steps, tuple(options.threads)), len(os.sched_getaffinity(0))
    rounds, update_ms = [], []
    for number in range(options.rounds):
        torch.set_num_threads(options.torch_threads or cores)
        rounds.append(one_round(sides, options.seconds))
        update_ms.append(1_000 * BATCHES[0] / updating(BATCHES[0], options.torch_threads or cores, 5 * options.seconds))
        print(f"round {number + 1} of {options.rounds}: an update of {BATCHES[0]} takes {update_ms[-1]:.1f} ms", flush=True)
    found = compared(rounds)
    shares = {name: statistics.median(1_000 / rate / update for rate, update in zip(values["per_second"], update_ms))
              for name, values in found[f"batch {BATCHES[0]}"].items() if name.startswith(OURS)}
    return {"steps": options.steps, "update_ms": update_ms, f"batch {BATCHES[0]} as a share of an update": shares,
            "bytes_a_step": sides.bytes_a_step(), "measured": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="agent steps that every side holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side's turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="storage.threads of ours")
    parser.add_argument("--torch_threads", type=int, default=0, help="of torch, for the sides that use it and the update; 0: all cores")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "sampling.json")
    options = parser.parse_args()
    if options.steps * BYTES_A_STEP > available_bytes():
        sys.exit(f"{options.steps * BYTES_A_STEP:,} bytes are needed for {options.steps:,} steps and {available_bytes():,} are free")
    found = {"command": " ".join(("python -m benchmarks.sampling", *sys.argv[1:])), "processor": processor(),
             "cpus": len(os.sched_getaffinity(0)), "versions": {**versions(), **{package: version(package) for package in PACKAGES}},
             **measure(options)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found["measured"], found["bytes_a_step"])))
    print(f"a batch of {BATCHES[0]} as a share of an update: "
          + ", ".join(f"{name} {share:.2f}" for name, share in found[f"batch {BATCHES[0]} as a share of an update"].items()))


if __name__ == "__main__":
    main()
