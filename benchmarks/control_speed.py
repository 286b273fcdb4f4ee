"""Compare the speed of continuous control with stable-baselines3's DDPG or SAC: python -m benchmarks.control_speed.

Both sides do the same work on all cores: one environment (HalfCheetah-v5 by default), two hidden layers of 256 units,
uniform memory and the same noise. Each makes one update of 256 samples per agent step. The sides take turns (A B A B)
in processes of their own. Reported are the median and the ratio of each pair. Start-up, random first actions and
imports are not counted.

Then two parts take turns likewise:

- The update alone on batches in memory: eager, compiled, and stable-baselines3's train(), which samples its batch
  itself.
- E environments stepped in the actor's process, like `env_type gym`, and in one process each (AsyncVectorEnv).
"""

import argparse
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.sides import calls_per_second, description, last_line, ratios, take_turns, write
from benchmarks.training import RESULTS, rate, stable_baselines3_rate, train

BATCH_SIZE, HIDDEN, LEARN_START, NUM_ENVS = 256, 256, 1_000, 8
UNCOUNTED = 20  # First calls of a part.
START_SECONDS = 60  # Start-up of our side: processes, filling the memory, compiling.


def ours(agent: str, game: str, seconds: float, *words: str) -> float:
    """Return the agent steps per second of `python main.py`, with one update per step, compiled as the row says."""
    lines = train(
        START_SECONDS + seconds,
        f"--config {agent}-halfcheetah --game {game} --agent.batch_size {BATCH_SIZE} --model.hidden {HIDDEN} {HIDDEN}",
        f"--rate_limiter.min_replay_size {LEARN_START} --agent.random_exploration_steps {LEARN_START}",
        f"--rate_limiter.samples_per_insert {BATCH_SIZE} --logger.period 1",
        *words,
    )
    full = [line for line in lines if line["values"].get("global/samples_per_insert", 0) > 0.9 * BATCH_SIZE]
    return rate([line for line in full if line["time"] > full[-1]["time"] - seconds])


def ours_eager(agent: str, game: str, seconds: float) -> float:
    """Return the same without compiled updates."""
    return ours(agent, game, seconds, "--learner.compile no")


def stable_baselines3(agent: str, game: str, seconds: float) -> float:
    """Return the agent steps per second of stable-baselines3 in this process, with one update per step."""
    return stable_baselines3_rate(_sb3_agent(agent, game), LEARN_START + 200, seconds)


def compiled(agent: str, game: str, seconds: float) -> float:
    """Return the compiled updates per second on a batch in memory, on all cores."""
    return _updates(agent, game, seconds, compiled=True)


def eager(agent: str, game: str, seconds: float) -> float:
    """Return the updates per second on a batch in memory, not compiled, on all cores."""
    return _updates(agent, game, seconds, compiled=False)


def stable_baselines3_update(agent: str, game: str, seconds: float) -> float:
    """Return the updates per second of stable-baselines3's train() on all cores."""
    learning = _sb3_agent(agent, game)
    learning.learn(LEARN_START + 200)
    return calls_per_second(lambda: learning.train(1, BATCH_SIZE), seconds, UNCOUNTED)


def in_one_process(agent: str, game: str, seconds: float) -> float:
    """Return the agent steps per second of NUM_ENVS environments in the process of an actor."""
    import numpy as np

    from core.envs.gym import GymEnv, GymParams

    env = GymEnv(GymParams(), game, NUM_ENVS)
    env.reset(0)
    generator, space = np.random.default_rng(0), env.spec.action
    low, high = space.low, space.high  # type: ignore[union-attr]
    shape = (NUM_ENVS, *low.shape)

    def step() -> None:
        env.step(generator.uniform(low, high, shape).astype(np.float32))

    return NUM_ENVS * calls_per_second(step, seconds, UNCOUNTED)


def a_process_each(agent: str, game: str, seconds: float) -> float:
    """Return the agent steps per second of gymnasium's AsyncVectorEnv, without our checks."""
    import gymnasium
    import numpy as np
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([lambda: gymnasium.make(game)] * NUM_ENVS)
    env.reset(seed=0)
    generator, space = np.random.default_rng(0), env.action_space
    low, high = space.low, space.high  # type: ignore[attr-defined]

    def step() -> None:
        env.step(generator.uniform(low, high).astype(np.float32))

    steps_per_second = NUM_ENVS * calls_per_second(step, seconds, UNCOUNTED)
    env.close()
    return steps_per_second


def _updates(agent: str, game: str, seconds: float, compiled: bool) -> float:
    from benchmarks import arithmetic
    from core.device.torch_runtime import use_threads
    from core.envs.gym import GymEnv, GymParams

    use_threads(len(os.sched_getaffinity(0)))
    kind, network, _, settings = arithmetic.CONTROL[agent.upper()]
    case = kind, network, GymEnv(GymParams(), game, 1).spec, {**settings, "batch_size": BATCH_SIZE}
    return calls_per_second(arithmetic.make_update(case, compiled=compiled), seconds, UNCOUNTED)


def _sb3_agent(agent: str, game: str) -> Any:
    import gymnasium
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.noise import NormalActionNoise

    env = gymnasium.make(game)
    size = env.action_space.shape[0]  # type: ignore[index]
    noise = {"action_noise": NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))} if agent == "ddpg" else {}
    return getattr(stable_baselines3, agent.upper())(
        "MlpPolicy",
        env,
        learning_rate=1e-3 if agent == "ddpg" else 3e-4,
        buffer_size=1_000_000,
        learning_starts=LEARN_START,
        batch_size=BATCH_SIZE,
        tau=0.005,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [HIDDEN, HIDDEN]},
        seed=0,
        device="cpu",
        **noise,
    )


Side = Callable[[str, str, float], float]
GROUPS: dict[str, tuple[str, dict[str, Side]]] = {  # Unit and sides; the first side is compared with each other side.
    "program": ("agent steps/s", {"ours": ours, "ours, eager": ours_eager, "stable-baselines3": stable_baselines3}),
    "update": (
        "updates/s",
        {"compiled": compiled, "eager": eager, "stable-baselines3 update": stable_baselines3_update},
    ),
    "environments": ("agent steps/s", {"in one process": in_one_process, "a process each": a_process_each}),
}
SIDES = {name: side for _, sides in GROUPS.values() for name, side in sides.items()}


def main() -> None:
    """Run the comparison, print it and write it as JSON; with --side, print the rate of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--agent", choices=["ddpg", "sac"], default="ddpg")
    parser.add_argument("--game", default="HalfCheetah-v5")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of each measurement of a program; parts take a sixth"
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "control-speed.json")
    options = parser.parse_args()
    if options.side:
        print(SIDES[options.side](options.agent, options.game, options.seconds))
        return
    result: dict[str, Any] = {
        **description("control_speed"),
        "agent": options.agent,
        "game": options.game,
        "seconds": options.seconds,
    }
    result["versions"] |= {name: version(name) for name in ("stable-baselines3", "mujoco")}
    for group in options.groups:
        unit, sides = GROUPS[group]
        settings = {
            "agent": options.agent,
            "game": options.game,
            "seconds": options.seconds if group == "program" else options.seconds / 6,
        }
        rates = take_turns(
            sides,
            options.pairs,
            lambda side, settings=settings: float(last_line("control_speed", side=side, **settings)),
            f"{group}: ",
            unit,
        )
        first, *others = sides
        result[group] = {"unit": unit, **rates} | {
            f"{first} / {other}": ratios(f"{group}: {first} / {other}", rates[first], rates[other]) for other in others
        }
    write(options.output, result)


if __name__ == "__main__":
    main()
