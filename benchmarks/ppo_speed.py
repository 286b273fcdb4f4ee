"""Compare the speed of PPO with stable-baselines3, CleanRL and Sample Factory: python -m benchmarks.ppo_speed.

All sides do the same work on all cores: environments, steps of a rollout, epochs, minibatches, network and optimiser
are those of CleanRL's scripts, which the rows `ppo-pong`, `ppo-halfcheetah` and `ppo-cartpole` have as well. The case
`v-trace` compares the queue of benchmarks.onpolicy with Sample Factory alone. The sides take turns (A B A B) in
processes of their own. Agent steps are counted from the end of one rollout to the end of another; the start is not
counted. They are divided by the wall clock and by the processor time of all processes of the side. Processor time
says little of what waits, and nothing of other programs on the machine. Reported are medians and the ratios to the
first side. `taskset -c 0` before the command compares on one core.

`make bench` installs stable-baselines3 into .venv. The others need packages that no environment holds with ours:

    git clone https://github.com/vwxyzjn/cleanrl CLEANRL
    pip install --no-deps --target CLEANRL/packages gymnasium==0.29.1 tyro docstring-parser typeguard shtab
    pip install --no-deps --target SF sample-factory gymnasium==0.29.1 signal-slot-mp faster-fifo threadpoolctl \\
        tensorboardx huggingface-hub==0.36.2 wandb numpy==2.2.6
    sed -i 's/var\\.mb\\.advantages/var.mb.values/' SF/sample_factory/algo/learning/learner.py
    python -m benchmarks.ppo_speed --cleanrl CLEANRL --sample_factory SF

CleanRL's scripts run unchanged, with today's PyTorch, emulator and MuJoCo. Sample Factory fails with numpy 2.4, and
with V-trace if it summarises advantages, which V-trace's batches lack; sed changes those two lines.
Programs without a folder are left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.onpolicy import BATCH, COMMON, NUM_ENVS, UNROLL
from benchmarks.sides import description, last_line, ratios, write
from benchmarks.training import RESULTS, train

START_SECONDS = 10.0  # not counted: start-up and the first rollouts
# One line of metrics a rollout, as the others print one.
OURS = "--actor.niceness 0 --logger.steps 1 --logger.period 1000"
# gymnasium 0.29 does not find the games of today's emulator by itself.
REGISTER = "from ale_py.registration import register_v0_v4_envs; register_v0_v4_envs()"
# Words of ours, game of stable-baselines3 and CleanRL, CleanRL's script, words of Sample Factory.
CASES: dict[str, dict[str, Any]] = {
    "pong": {
        "ours": "--config ppo-pong",
        "envs": 8,
        "game": "PongNoFrameskip-v4",
        "script": "ppo_atari.py",
        "sample factory": ("--env=atari_pong", "--summaries_use_frameskip=False"),
    },
    "halfcheetah": {
        "ours": "--config ppo-halfcheetah",
        "envs": 1,
        "game": "HalfCheetah-v4",
        "script": "ppo_continuous_action.py",
        "sample factory": (
            *("--env=mujoco_halfcheetah", "--num_workers=1", "--num_envs_per_worker=1", "--worker_num_splits=1"),
            *("--rollout=64", "--batch_size=64", "--num_batches_per_epoch=32", "--num_epochs=10"),
            *("--actor_critic_share_weights=False", "--learning_rate=3e-4", "--max_grad_norm=0.5"),
            *("--kl_loss_coeff=0.0", "--value_loss_coeff=0.5"),
        ),
    },
    "cartpole": {
        "ours": "--config ppo-cartpole",
        "envs": 4,
        "game": "CartPole-v1",
        "script": "ppo.py",
        "sample factory": (
            *("--env=CartPole-v1", "--num_workers=1", "--num_envs_per_worker=4", "--worker_num_splits=1"),
            *("--rollout=128", "--batch_size=128", "--num_batches_per_epoch=4", "--num_epochs=4", "--use_rnn=False"),
            *("--actor_critic_share_weights=False", "--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh"),
            *("--recurrence=1", "--learning_rate=2.5e-4", "--max_grad_norm=0.5"),
        ),
    },
    "v-trace": {
        "ours": f"{COMMON} --memory.capacity {BATCH}",
        "envs": NUM_ENVS,
        "sample factory": (
            *("--env=atari_pong", "--summaries_use_frameskip=False", "--with_vtrace=True", "--normalize_returns=False"),
            *("--num_workers=2", f"--num_envs_per_worker={NUM_ENVS // 2}", "--worker_num_splits=2"),
            *(f"--rollout={UNROLL}", f"--recurrence={UNROLL}", f"--batch_size={UNROLL * BATCH}"),
            *("--num_batches_per_epoch=1", "--num_epochs=1"),
        ),
    },
}


Points = list[tuple[float, float]]  # (time, agent steps) at ends of rollouts


class ProcessorTime:
    """Sample the processor time of this process and those below it, in a thread."""

    def __init__(self) -> None:
        self._samples, self._last = [(time.time(), 0.0)], dict[int, float]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            tree = [process := psutil.Process(), *process.children(recursive=True)]
            for each in tree:
                with suppress(psutil.Error):
                    self._last[each.pid] = sum(each.cpu_times()[:2])
            self._samples.append((time.time(), sum(self._last.values())))
            time.sleep(0.5)

    def at(self, moment: float) -> float:
        """Return the seconds of processor time used until a moment."""
        return float(np.interp(moment, *zip(*self._samples)))


def ours(case: str, seconds: float, *words: str) -> Points:
    """Run `python main.py`."""
    lines = train(START_SECONDS + seconds, CASES[case]["ours"], OURS, *words)
    # Steps are counted when a rollout is complete, so that a line with more of them stands at the end of one.
    ends = [after for before, after in pairwise(lines) if after["step"] > before["step"]]
    return [(line["time"], line["step"]) for line in ends if line["time"] >= ends[0]["time"] + START_SECONDS / 2]


def ours_float32(case: str, seconds: float) -> Points:
    """Run without bfloat16, which the row has for pictures where it is native."""
    return ours(case, seconds, "--learner.precision float32")


def ours_compiled(case: str, seconds: float) -> Points:
    """Run with compiled updates; the first run compiles, which can take longer than the start that is not counted."""
    return ours(case, seconds, "--learner.compile yes")


def ours_two_actors(case: str, seconds: float) -> Points:
    """Run with the environments in two processes, so that two cores have work while the learner waits."""
    half = CASES[case]["envs"] // 2
    return ours(case, seconds, f"--num_actors 2 --num_envs_per_actor {half}" if half else "")


def ours_asynchronous(case: str, seconds: float) -> Points:
    """Run asynchronous PPO, whose actors never wait and which is not the same."""
    return ours(case, seconds, "--memory_type queue")


def stable_baselines3(case: str, seconds: float, processes: bool = False) -> Points:
    """Run stable-baselines3's PPO."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Ends(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.began, self.points = time.time(), Points()

        def _on_rollout_end(self) -> None:
            self.points.append((time.time(), self.num_timesteps))

        def _on_step(self) -> bool:
            return time.time() - self.began < START_SECONDS + seconds

    ends = Ends()
    _sb3_agent(case, processes).learn(10_000_000, callback=ends)
    return [point for point in ends.points if point[0] >= ends.began + START_SECONDS / 2]


def stable_baselines3_processes(case: str, seconds: float) -> Points:
    """Run stable-baselines3's PPO with a process for each environment."""
    return stable_baselines3(case, seconds, processes=True)


def _sb3_agent(case: str, processes: bool) -> Any:
    import ale_py
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

    gymnasium.register_envs(ale_py)
    game, kind = CASES[case]["game"], SubprocVecEnv if processes else DummyVecEnv
    shared = {"n_steps": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01, "seed": 0, "device": "cpu"}
    if case == "pong":
        env: Any = VecFrameStack(make_atari_env(game, 8, seed=0, vec_env_cls=kind), 4)
        return PPO("CnnPolicy", env, **shared, batch_size=256, clip_range=0.1, clip_range_vf=0.1)
    if case == "cartpole":
        env = make_vec_env(game, 4, seed=0, vec_env_cls=kind)
        return PPO("MlpPolicy", env, **shared, batch_size=128, clip_range_vf=0.2)
    env = VecNormalize(make_vec_env(game.replace("v4", "v5"), 1, seed=0, vec_env_cls=kind))
    shared |= {"n_steps": 2_048, "n_epochs": 10, "learning_rate": 3e-4, "ent_coef": 0.0}
    return PPO("MlpPolicy", env, **shared, batch_size=64, clip_range_vf=0.2)


def cleanrl(case: str, seconds: float) -> Points:
    """Run CleanRL's script, which runs unchanged."""
    begin = f"{REGISTER}; import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = Path(os.environ["CLEANRL"]) / "cleanrl" / CASES[case]["script"]
    command = [sys.executable, "-u", "-c", begin, str(script), "--env-id", CASES[case]["game"]]
    began, points = time.time(), Points()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        steps = {"pong": 1_024, "halfcheetah": 2_048, "cartpole": 512}[case]
        for line in process.stdout:
            now = time.time()
            if line.startswith("SPS") and now >= began + START_SECONDS / 2:  # once a rollout
                points.append((now, steps * len(points)))
            if now > began + START_SECONDS + seconds:
                break
        process.kill()
        process.wait()
    return points


def registered_atari_env(*arguments: Any, **keywords: Any) -> Any:
    """Make an Atari environment of Sample Factory, in a process that may not know the games yet."""
    from ale_py.registration import register_v0_v4_envs
    from sf_examples.atari.atari_utils import make_atari_env

    register_v0_v4_envs()
    return make_atari_env(*arguments, **keywords)


def sample_factory(case: str, seconds: float, *words: str) -> Points:
    """Run Sample Factory's APPO."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner
    from sf_examples import train_gym_env
    from sf_examples.atari import train_atari
    from sf_examples.mujoco import train_mujoco

    register, parse = {
        "pong": (train_atari.register_atari_components, train_atari.parse_atari_args),
        "v-trace": (train_atari.register_atari_components, train_atari.parse_atari_args),
        "halfcheetah": (train_mujoco.register_mujoco_components, train_mujoco.parse_mujoco_cfg),
        "cartpole": (train_gym_env.register_custom_components, train_gym_env.parse_custom_args),
    }[case]
    began, points = time.time(), Points()

    class Ends(AlgoObserver):
        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            if (now := time.time()) >= began + START_SECONDS:
                points.append((now, runner.env_steps.get(0, 0)))
            runner.total_train_seconds = now - began  # --train_for_seconds needs it; 2.1.1 never counts.

    with tempfile.TemporaryDirectory() as folder:
        register()
        register_env("atari_pong", registered_atari_env)
        _, runner = make_runner(
            parse(
                [
                    "--algo=APPO",
                    "--device=cpu",
                    f"--train_dir={folder}",
                    "--experiment=speed",
                    f"--train_for_seconds={int(START_SECONDS + seconds)}",
                    *CASES[case]["sample factory"],
                    *words,
                ]
            )
        )
        runner.register_observer(Ends())
        runner.init()
        runner.run()
    return points


def sample_factory_serial(case: str, seconds: float) -> Points:
    """Run Sample Factory with everything in one process."""
    return sample_factory(case, seconds, "--serial_mode=True", "--async_rl=False")


def sample_factory_synchronous(case: str, seconds: float) -> Points:
    """Run Sample Factory whose workers wait for the learner."""
    return sample_factory(case, seconds, "--serial_mode=False", "--async_rl=False")


def sample_factory_asynchronous(case: str, seconds: float) -> Points:
    """Run Sample Factory whose workers never wait."""
    return sample_factory(case, seconds, "--serial_mode=False", "--async_rl=True")


Side = Callable[[str, float], Points]
SIDES: dict[str, tuple[str, Side]] = {  # The option with the folder of packages that the side needs, and the side.
    "ours": ("", ours),
    "ours, float32": ("", ours_float32),
    "ours, compiled": ("", ours_compiled),
    "ours, two actors": ("", ours_two_actors),
    "ours, asynchronous": ("", ours_asynchronous),
    "stable-baselines3": ("sb3", stable_baselines3),
    "stable-baselines3, processes": ("sb3", stable_baselines3_processes),
    "CleanRL": ("cleanrl", cleanrl),
    "Sample Factory, serial": ("sample_factory", sample_factory_serial),
    "Sample Factory, synchronous": ("sample_factory", sample_factory_synchronous),
    "Sample Factory, asynchronous": ("sample_factory", sample_factory_asynchronous),
}


def measure(side: str, case: str, seconds: float, folder: Path | None, threads: int) -> list[float]:
    """Run one side in a process of its own; return its agent steps per second, and per second of processor time.

    Args:
        side: name of the side.
        case: name of the case.
        seconds: duration of the measurement.
        folder: packages that the side needs.
        threads: torch's threads of a side that is not ours; 0 leaves them to torch.
    """
    variables = {}
    if folder is not None:
        folder = folder.resolve()
        variables = {"PYTHONPATH": f"{folder}:{folder / 'packages'}", "CLEANRL": str(folder)}
        variables |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    line = last_line("ppo_speed", variables, side=side, cases=case, seconds=seconds)
    return [float(word) for word in line.split()]


def main() -> None:
    """Run the comparison, print it and write it as JSON; with --side, print the rate of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads of the other programs; 0 is theirs")
    for name in ("sb3", "cleanrl", "sample_factory"):
        parser.add_argument(f"--{name}", type=Path, help="folder of this program's packages")
    parser.add_argument("--output", type=Path, default=RESULTS / "ppo-speed.json")
    options = parser.parse_args()
    if options.side:
        processor_time = ProcessorTime()
        (start, first), *_, (end, last) = SIDES[options.side][1](options.cases[0], options.seconds)
        seconds = end - start, processor_time.at(end) - processor_time.at(start)
        print(*((last - first) / each for each in seconds))
        return
    folders = {side: getattr(options, needs) if needs else None for side, (needs, _) in SIDES.items()}
    installed = {"", "sb3"} if find_spec("stable_baselines3") else {""}
    sides = [side for side in options.sides if SIDES[side][0] in installed or folders[side]]
    result = description("ppo_speed")
    result["versions"] |= {"ale-py": version("ale-py"), "mujoco": version("mujoco")}
    for case in options.cases:
        able = [side for side in sides if "game" in CASES[case] or side.startswith(("ours", "Sample Factory"))]
        rates: dict[str, list[list[float]]] = {side: [] for side in able}
        for _ in range(options.rounds):
            for side in able:
                rates[side].append(measure(side, case, options.seconds, folders[side], options.threads))
                wall, processor_time = rates[side][-1]
                print(f"{case}: {side} {wall:.0f} agent steps/s, {processor_time:.0f} /s of processor time", flush=True)
        found: dict[str, Any] = {}
        for number, unit in enumerate(("agent steps per second", "agent steps per second of processor time")):
            rows = {side: [round(pair[number], 1) for pair in pairs] for side, pairs in rates.items()}
            found[unit] = rows
            found[f"{unit}, {able[0]} / side"] = {
                side: ratios(f"{case}: {unit}, {able[0]} / {side}", rows[able[0]], rows[side]) for side in able[1:]
            }
        result[case] = found
    write(options.output, result)


if __name__ == "__main__":
    main()
