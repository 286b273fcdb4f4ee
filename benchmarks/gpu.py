"""Measure what limits runs on a GPU machine: python -m benchmarks.gpu (`make gpu`).

For each case the parts are measured alone, then the whole run. Rates are agent steps per second; an update counts as
the agent steps that it corresponds to.

- emulator: Both environment splits are stepped with random actions, without the network.
- inference: The actor's network acts on constant observations, without the emulators: eager and captured.
- updates: Eager and captured, in each precision of this device. With replay on the GPU: sample, learn and update
  priorities from a full memory. Otherwise: learn from a batch that is copied to the GPU each time. No actor writes.
- run: `python main.py` after learning has started: agent steps, frames and updates per second, and GPU memory in use.

The slowest part, as the run configures it, is the ceiling. With --toy everything runs on the CPU, on Catch with the
smallest networks, which only shows that the program works.
"""

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sides import description, write
from benchmarks.training import RESULTS, after_start, rate, train
from core.acting.graphed_inference import with_graphed_forward
from core.agent import Agent, Exploration
from core.learning.precision import precision_on, use_tf32
from core.learning.updates import DeviceReplayBatches, GraphedUpdate, StagedBatches
from core.memory import Memory
from core.specs import EnvSpec
from core.types import State, TimeStep
from utils.config import memory_budget, validation
from utils.config.command_line import read_options
from utils.options import Options

CASES = {
    "dqn": "--config dqn-pong-gpu",
    "dqn of 32": "--config dqn-pong-gpu --agent.batch_size 32 --learner.updates_per_graph_launch 32",
    "rainbow": "--config rainbow-pong-gpu",
    "r2d2": "--config r2d2-pong-gpu",
    "impala, deep": "--config impala-pong-gpu",
}
TOY = (
    "--env_type catch --game catch --num_envs_per_actor 4 --actor.env_threads 1 --agent.batch_size 4 "
    "--device cpu --actor.device cpu"
)
TOY_REPLAY = (
    "--memory.capacity 1000 --rate_limiter.min_replay_size 600 --rate_limiter.error_buffer 160 "
    "--learner.updates_per_graph_launch 2"
)
TOY_MODELS = {
    "dqn": "dqn-minatar",
    "dqn of 32": "dqn-minatar",
    "rainbow": "rainbow-minatar",
    "r2d2": "r2d2-minatar",
    "impala, deep": "minatar-ac",
}
START_SECONDS = 90.0  # Time until a run learns.
AIM_STEPS = 50_000_000  # 200 M frames.


def words_of(case: str, toy: bool) -> list[str]:
    """Return the words of the command line of a case."""
    if not toy:
        return f"{CASES[case]} --learner.cuda_graph on".split()  # needs a GPU
    replay = "" if case == "impala, deep" else TOY_REPLAY
    return f"{CASES[case]} {TOY} --model_type {TOY_MODELS[case]} {replay}".split()


def per_second(work: Callable[[], int], seconds: float, device: torch.device) -> float:
    """Return the units per second that work() reports, including the time until the device has finished."""

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(5):  # The fourth call captures the CUDA graph.
        work()
    started, done = finish(), 0
    while time.perf_counter() - started < seconds:
        done += work()
    return done / (finish() - started)


# parts ----------------------------------------------------------------------------------------------------------------
def emulator(options: Options, seconds: float) -> float:
    """Return the rate of the environments with random actions."""
    num_envs = options.num_envs_per_actor // options.actor.num_env_splits
    envs = [
        options.env_class(options.env, options.game, num_envs, num_threads=options.actor.env_threads)
        for _ in range(options.actor.num_env_splits)
    ]
    generator = np.random.default_rng(0)
    actions = generator.integers(envs[0].spec.action.num_actions, size=(64, num_envs))
    for number, env in enumerate(envs):
        env.reset(number)
        env.send(actions[number])

    def step() -> int:
        for env in envs:
            env.recv()
            env.send(actions[generator.integers(64)])
        return num_envs * len(envs)

    steps_per_second = per_second(step, seconds, torch.device("cpu"))
    for env in envs:
        env.recv()
        env.close()
    return steps_per_second


def inference(options: Options, spec: EnvSpec, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield name and rate of the actor's network, eager and, on a GPU, captured."""
    num_envs, device = options.num_envs_per_actor // options.actor.num_env_splits, torch.device(options.actor.device)
    zeros = np.zeros(num_envs, np.float32)
    observation = np.random.default_rng(0).integers(0, 256, (num_envs, *spec.observation_shape), np.uint8)
    timestep = TimeStep(observation, zeros, zeros, zeros > 0, zeros > 0, zeros)
    for captured in (False, True) if device.type == "cuda" else (False,):
        agent = with_graphed_forward(options.make_agent(spec, options.actor.device), "on" if captured else "off")
        state, exploration = agent.initial_state(num_envs), agent.exploration(0, 1, num_envs, np.random.default_rng(0))

        def act(agent: Agent = agent, state: State = state, exploration: Exploration = exploration) -> int:
            agent.act(timestep, state, exploration)
            return num_envs

        yield f"inference, {kind(captured)}", per_second(act, seconds, device)


def full_memory(options: Options, spec: EnvSpec, agent: Agent) -> Memory:
    """Return a memory that is full of random images, in episodes of about 500 steps."""
    memory: Memory = options.memory_class(
        options.memory, memory_budget.layout(options, agent), agent.window, options.seed
    )
    generator, arrays, layout = np.random.default_rng(0), memory.trajectories.arrays, memory.layout
    block = generator.integers(0, 256, (layout.chunk_length, *arrays["frame"].shape[2:]), np.uint8)
    for row in range(0, layout.ring_length, layout.chunk_length):
        arrays["frame"][:, row : row + layout.chunk_length] = block
    lasts = generator.random(arrays["last"].shape) < 1 / 500
    arrays["last"][:] = lasts
    arrays["first"][:] = np.roll(lasts, 1, 1)
    arrays["discount"][:], arrays["reward"][:] = ~lasts, generator.integers(-1, 2, lasts.shape)
    arrays["action"][:] = generator.integers(spec.action.num_actions, size=lasts.shape)  # type: ignore[union-attr]
    if "priority" in arrays:
        arrays["priority"][:] = generator.random(lasts.shape)
    arrays["written"][:, 0] = layout.ring_length
    return memory


def updates(options: Options, spec: EnvSpec, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield name and rate of the updates, in agent steps per second, for each precision, eager and captured."""
    on_gpu, agent = options.device.startswith("cuda"), options.make_agent(spec)
    memory = full_memory(options, spec, agent)
    steps = options.agent.batch_size * agent.samples_per_window / options.samples_per_step  # Per update.
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for precision in ("float32", "tf32", "bf16") if on_gpu else ("float32", "bf16"):
        for capture in (False, True) if on_gpu else (False,):
            use_tf32(precision != "float32")  # Like a learner; actors keep torch's default.
            work = update(options, options.make_agent(spec, options.device, precision), memory, capture)
            yield (
                f"updates, {precision}, {kind(capture)}",
                steps * per_second(work, seconds, torch.device(options.device)),
            )
            del work
            free_memory()
    for flag, allowed in zip(flags, before):
        flag.allow_tf32 = allowed


def update(options: Options, agent: Agent, memory: Memory, capture: bool) -> Callable[[], int]:
    """Return a function that makes some updates and returns their number."""
    device = torch.device(options.device)
    agent.init_learner()
    if options.learner.replay_device == "learner":
        resident = memory.device_class(memory, device)  # type: ignore[misc]
        count = options.learner.updates_per_graph_launch
        batches = DeviceReplayBatches(resident, options.agent.batch_size, count, device)
        learn = GraphedUpdate(agent, batches, capture=capture)

        def from_rows() -> int:
            resident.refresh()
            learn(resident)
            return learn.updates_per_call

        return from_rows
    batch, staged = (
        memory.sample(options.agent.batch_size),
        GraphedUpdate(agent, StagedBatches(device), capture=capture),
    )
    assert batch is not None

    def from_batch() -> int:
        staged(batch)
        return 1

    return from_batch


def kind(capture: bool) -> str:
    """Return the name of a way to execute."""
    return "captured" if capture else "eager"


def free_memory() -> None:
    """Return unused memory to the device, such as the replay just measured; a run needs it for its own replay."""
    gc.collect()
    torch.cuda.empty_cache()


# the run --------------------------------------------------------------------------------------------------------------
class MemoryInUse:
    """A context manager that samples, each second, the peak of the GPU memory in use by all processes."""

    def __init__(self, device: torch.device):
        self._device, self.peak, self._closed = device, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while self._device.type == "cuda" and not self._closed.wait(1.0):
            free, total = torch.cuda.mem_get_info(self._device)
            self.peak = max(self.peak, total - free)

    def __enter__(self) -> "MemoryInUse":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()


def run(options: Options, words: Sequence[str], seconds: float, start: float) -> dict[str, float]:
    """Return the rates of a run over the time in which the learner kept up with the actors."""
    with MemoryInUse(torch.device(options.device)) as memory:
        lines = train(start + seconds, *words, "--logger.period 1")
    min_ratio = 0.85 * (options.rate_limiter.samples_per_insert or 0.0)
    ratio = "global/samples_per_insert"
    lines = [line for line in after_start(lines, start) if line["values"].get(ratio, 0) >= min_ratio]
    if len(lines) < 4:
        raise SystemExit(
            f"{' '.join(words)}: after {start:g} s the learner had not caught up; give more with --start_seconds"
        )
    rates = {name: rate(lines, f"global/{name}") for name in ("agent_steps", "frames", "updates")}
    return {**{f"{name} a second": value for name, value in rates.items()}, "bytes of the GPU in use": memory.peak}


# all ------------------------------------------------------------------------------------------------------------------
def measure(options: Options, seconds: float, rounds: int) -> dict[str, float]:
    """Return the median rate of each part alone; the parts take turns."""
    spec, rates = validation.environment_spec(options), dict[str, list[float]]()
    for _ in range(rounds):
        for name, part_rate in (
            ("emulator", emulator(options, seconds)),
            *inference(options, spec, seconds),
            *updates(options, spec, seconds),
        ):
            rates.setdefault(name, []).append(part_rate)
            minutes = AIM_STEPS / part_rate / 60
            print(f"  {name}: {part_rate:,.0f} agent steps/s, 200 M frames in {minutes:,.1f} minutes")
    return {name: statistics.median(each) for name, each in rates.items()}


def ceiling(options: Options, rates: Mapping[str, float]) -> tuple[str, float]:
    """Return the slowest part, as the run configures it, and its rate."""
    captured, precision = (
        kind(options.device.startswith("cuda")),
        precision_on(options.device, options.learner.precision, validation.environment_spec(options)),
    )
    parts = ("emulator", f"inference, {captured}", f"updates, {precision}, {captured}")
    return min(((part, rates[part]) for part in parts), key=lambda part: part[1])


def main() -> None:
    """Measure all cases, print the rates and write JSON after each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--run_seconds", type=float, default=300.0, help="duration of a run after its start; 0: no runs"
    )
    parser.add_argument(
        "--start_seconds", type=float, default=START_SECONDS, help="time until the learner has caught up"
    )
    parser.add_argument("--toy", action="store_true", help="Catch on the CPU")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("words", nargs="*", help="options of main.py after --, for every case")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA device here; it is built for CUDA {torch.version.cuda}, which an "
            "older driver does not support. Use --toy to try the program on the CPU"
        )
    cases: dict[str, Any] = {}
    device = "no GPU" if arguments.toy else torch.cuda.get_device_name()
    result = {**description("gpu"), "device": device, "cases": cases}
    for case in arguments.cases:
        words = (*words_of(case, arguments.toy), *arguments.words)
        options = read_options(words)
        print(f"{case}: {' '.join(words)}")
        rates = measure(options, arguments.seconds, arguments.rounds)
        part, limit = ceiling(options, rates)
        cases[case] = {"words": words, "agent steps a second of each part": rates, "ceiling": part}
        write(arguments.output, result)
        free_memory()
        if arguments.run_seconds:
            run_rates = run(options, words, arguments.run_seconds, arguments.start_seconds)
            cases[case] |= {"run": run_rates, "of the ceiling": run_rates["agent_steps a second"] / limit}
            write(arguments.output, result)
            print(
                "  run:",
                ", ".join(f"{name} {value:,.0f}" for name, value in run_rates.items()),
                f"- {run_rates['agent_steps a second'] / limit:.2f} of the rate of {part} alone",
            )


if __name__ == "__main__":
    main()
