"""What limits a run on a GPU machine: python -m benchmarks.gpu (`make gpu`)

Each part of the row dqn-pong-gpu is measured alone, then the run as a whole. Rates are agent steps a second; an update of 256 samples
stands for the 32 agent steps that pay for it.

emulator   both groups of environments stepped by random actions, the network left out
inference  the actor's network answering groups that never change, the emulators left out: eager, captured
updates    sample, learn and write priorities back from a full memory, nobody writing: eager, captured, and in each precision that is here
run        `python main.py`, after it has started to learn

The slowest of the first three is the ceiling. With --toy everything runs on the CPU at a size that shows that it works and nothing else.
"""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed import processor
from benchmarks.training import ROOT, rate, train
from core.agent import Agent
from core.device import use_tf32
from core.env import EnvSpec, TimeStep
from core.inference import for_acting
from core.machine import versions
from core.memory import Memory
from core.model import State
from core.resident import Refreshed, ResidentUpdates
from utils import validation
from utils.command_line import read_options
from utils.options import Options

ROW = ("--config", "dqn-pong-gpu")
TOY = ("--env.size", "42", "--model_type", "dqn-small", "--num_envs_per_actor", "4", "--agent.batch_size", "8", "--memory.capacity", "1000",
       "--clock.learn_start", "200", "--clock.tolerance", "100", "--learner.updates_per_replay", "2", "--actor.env_threads", "1")
START_SECONDS, AIM_STEPS = 90.0, 50_000_000  # of a run until it learns; 200 M frames


def per_second(work: Callable[[], int], seconds: float, device: torch.device) -> float:
    """Units that work() says it did, a second; once before, unmeasured. What the device still does counts as time."""
    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(5):  # a recording is made at the fourth call
        work()
    started, done = finish(), 0
    while time.perf_counter() - started < seconds:
        done += work()
    return done / (finish() - started)


# parts ----------------------------------------------------------------------------------------------------------------
def emulator(options: Options, seconds: float) -> float:
    streams = options.num_envs_per_actor // options.actor.groups
    envs = [options.env_class(options.env, options.game, streams, num_threads=options.actor.env_threads)
            for _ in range(options.actor.groups)]
    generator = np.random.default_rng(0)
    actions = generator.integers(envs[0].spec.action.num_actions, size=(64, streams))
    for number, env in enumerate(envs):
        env.reset(number)
        env.send(actions[number])

    def step() -> int:
        for env in envs:
            env.recv()
            env.send(actions[generator.integers(64)])
        return streams * len(envs)

    found = per_second(step, seconds, torch.device("cpu"))
    for env in envs:
        env.recv()
        env.close()
    return found


def inference(options: Options, spec: EnvSpec, seconds: float) -> Iterator[tuple[str, float]]:
    streams, device = options.num_envs_per_actor // options.actor.groups, torch.device(options.actor.device)
    zeros = np.zeros(streams, np.float32)
    observation = np.random.default_rng(0).integers(0, 256, (streams, *spec.observation_shape), np.uint8)
    timestep = TimeStep(observation, zeros, zeros, zeros > 0, zeros > 0, zeros)
    for captured in (False, True) if device.type == "cuda" else (False,):
        agent = for_acting(options.make_agent(spec, options.actor.device), captured)
        state = agent.initial_state(streams)

        def act(agent: Agent = agent, state: State = state) -> int:
            agent.act(timestep, state, None)
            return streams

        yield f"inference, {'captured' if captured else 'eager'}", per_second(act, seconds, device)


def full_memory(options: Options, spec: EnvSpec, agent: Agent) -> Memory:
    """Random pictures in episodes of some 500 steps; as much as the memory holds."""
    memory: Memory = options.memory_class(options.memory, validation.layout(options, spec, agent), agent.window, options.seed)
    generator, arrays, layout = np.random.default_rng(0), memory.trajectories.arrays, memory.layout
    block = generator.integers(0, 256, (layout.chunk_length, *arrays["frame"].shape[2:]), np.uint8)
    for row in range(0, layout.rows, layout.chunk_length):
        arrays["frame"][:, row:row + layout.chunk_length] = block
    lasts = generator.random(arrays["last"].shape) < 1 / 500
    arrays["last"][:] = lasts
    arrays["first"][:] = np.roll(lasts, 1, 1)
    arrays["discount"][:], arrays["reward"][:] = ~lasts, generator.integers(-1, 2, lasts.shape)
    arrays["action"][:] = generator.integers(spec.action.num_actions, size=lasts.shape)  # type: ignore[union-attr]
    arrays["priority"][:] = generator.random(lasts.shape)
    arrays["written"][:, 0] = layout.rows
    return memory


def updates(options: Options, spec: EnvSpec, seconds: float) -> Iterator[tuple[str, float]]:
    """Agent steps a second that the updates alone could keep up with, by kind."""
    assert options.clock.samples_per_insert is not None
    on_gpu = options.device.startswith("cuda")
    memory = full_memory(options, spec, options.make_agent(spec))
    for precision in ("float32", "tf32", "bf16") if on_gpu else ("float32", "bf16"):
        for capture in (False, True) if on_gpu else (False,):
            made = updates_per_second(options, spec, memory, precision, capture, seconds)
            yield f"updates, {precision}, {'captured' if capture else 'eager'}", \
                made * options.agent.batch_size / options.clock.samples_per_insert
            give_back()


def updates_per_second(options: Options, spec: EnvSpec, memory: Memory, precision: str, capture: bool, seconds: float) -> float:
    use_tf32(precision != "float32")
    device = torch.device(options.device)
    agent, resident = options.make_agent(spec, options.device, precision), memory.Resident(memory, device)  # type: ignore[misc]
    source = Refreshed(resident)
    learn = ResidentUpdates(agent, resident, options.agent.batch_size, options.learner.updates_per_replay, device, capture=capture)

    def update() -> int:
        learn(source.get(0.0))  # type: ignore[arg-type]
        return learn.count

    return per_second(update, seconds, device)


def give_back() -> None:
    """To the device what nothing uses any more: copies of the rows that were just measured, a run's own need the room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(options: Options, words: tuple[str, ...], seconds: float, start: float) -> float:
    rows = train(start + seconds, *words)
    ratio = 0.85 * (options.clock.samples_per_insert or 0.0)
    return rate([row for row in rows if row["values"].get("global/samples_per_insert", 0) > ratio])


# all ------------------------------------------------------------------------------------------------------------------
def measure(options: Options, seconds: float, rounds: int, say: Callable[[str], None] = print) -> dict[str, list[float]]:
    """Each part alone, in turns."""
    spec, rates = validation.environment_spec(options), {}
    for _ in range(rounds):
        for name, found in (("emulator", emulator(options, seconds)), *inference(options, spec, seconds),
                            *updates(options, spec, seconds)):
            rates.setdefault(name, []).append(found)
            say(f"{name}: {found:,.0f} agent steps/s, 200 M frames in {AIM_STEPS / found / 60:,.1f} minutes")
    return rates


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--run_seconds", type=float, default=180.0, help="of the run as a whole, after its start; 0: leave it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "gpu.json")
    parser.add_argument("words", nargs="*", help="settings after --, as main.py takes them")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device here; it is made for CUDA {torch.version.cuda}, which an older "
                     "driver does not have. --toy tries the program on the CPU")
    words = (*ROW, *((*TOY, "--device", "cpu", "--actor.device", "cpu") if arguments.toy else ()), *arguments.words)
    options = read_options(words)
    result: dict[str, Any] = {"command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]), "device": device_name(options.device),
                              "processor": processor(), "cpus": len(os.sched_getaffinity(0)), "versions": versions(),
                              "settings": dataclasses.asdict(options.learner) | {"num_envs": options.num_envs_per_actor,
                                                                                "batch_size": options.agent.batch_size}}
    result["agent steps a second"] = rates = measure(options, arguments.seconds, arguments.rounds)
    write(result, arguments.output)
    give_back()
    if arguments.run_seconds:
        rates["run"] = [run(options, words, arguments.run_seconds, 10.0 if arguments.toy else START_SECONDS)]
        write(result, arguments.output)
    print({name: f"{statistics.median(each):,.0f}" for name, each in rates.items()})


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
