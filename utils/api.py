"""Train, load and play from Python, in a script or a notebook.

- `train` runs `main.py` as a process of its own, so that no script needs `if __name__ == "__main__"` and a notebook can be interrupted.
- `load` reads a model file into a policy in this process; it starts no process.
- What is wrong raises `ConfigurationError` (options, files) or `TrainingError`, with the sentences that the command line shows.
"""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.acting.validated_env import ValidatedEnv
from core.agent import Agent, Exploration
from core.checkpoint import model_file
from core.common.settings import dotted
from core.evaluation.episodes import EpisodeResults, play_episodes
from core.model import restart
from core.specs import EnvSpec
from core.types import TimeStep
from utils import run_registry
from utils.config import command_line, device_validation, validation
from utils.config.dotted_settings import changed, declared
from utils.config.rows import CHOICES, from_row
from utils.errors import BAD_CHECKPOINT, BAD_CONFIGURATION, ConfigurationError
from utils.options import PROJECT, Options
from utils.plot import curves
from utils.plot.curves import Curve
from utils.sweep.subprocess_run import MAIN, end_with

NOT_HERE = ("config", "mode", "check")  # options that `train` gives itself
INTERRUPTED = 130                       # exit code of a run that was interrupted and saved
LAST_LINES = 20                         # of a failed run's output, in its error


class TrainingError(Exception):
    """A training that ended with another exit code than 0: the code, and the last lines of its output."""

    def __init__(self, signature: str, code: int, lines: list[str]):
        super().__init__(f"run {signature} ended with exit code {code}:\n" + "\n".join(lines))
        self.signature, self.code, self.lines = signature, code, lines


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run on the disk."""

    signature: str
    root: Path

    @property
    def log_folder(self) -> Path:
        return self.root / "logs" / self.signature

    @property
    def model_path(self) -> Path:
        """The model of the best evaluation."""
        return self.root / "models" / f"{self.signature}.pth"

    @property
    def checkpoint_folder(self) -> Path:
        return self.root / "models" / f"{self.signature}_checkpoints"

    @property
    def scores(self) -> Curve:
        """Mean returns of the evaluations (`values`) with the agent `steps` and `seconds` at which they were made, each [N]."""
        return curves.read_curve(self.log_folder / "metrics.jsonl")

    def load(self, device: str = "cpu") -> "Policy":
        """Return the policy of the best evaluation."""
        return load(self.model_path, device)


# training -------------------------------------------------------------------------------------------------------------
def train(config: str, settings: Mapping[str, Any] | None = None, *, progress: bool = True, **lines: Any) -> TrainedRun:
    """Train a row of CONFIGS to its end and return the run.

    An interrupt (Ctrl-C, or a notebook's stop button) has the run save its state and then raises KeyboardInterrupt; a second one ends the
    run at once. `resume="newest"` continues it.

    Args:
        settings: options with a dot in their name, as {"agent.lr": 1e-4}.
        progress: whether the run's output is printed.
        lines: options without a dot, as steps=20_000, seed=1, root="runs".

    Raises:
        Refused: options that the command line refuses too.
        TrainingError: the training failed.
    """
    given = {**(settings or {}), **lines}
    if own := [f"{name} is not to be given to train" for name in NOT_HERE if name in given]:
        raise ConfigurationError(own)
    words = ["--config", config, *(word for name, value in given.items() for word in _words(name, value))]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # the run says it again
        options = command_line.read(words)
    run = TrainedRun(options.signature, Path(options.root))
    identity = ["--resume", run.signature] if options.resume is not None else ["--timestamp", str(options.timestamp)]
    code, output, interrupted = _watched([*words, *identity], progress)
    if code == 0:
        return run
    if interrupted and code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt(f'run {run.signature} was interrupted: train("{config}", resume="{run.signature}") continues it')
    problems = [line.removeprefix("error: ") for line in output if line.startswith("error: ")]
    if code in (BAD_CONFIGURATION, BAD_CHECKPOINT) and problems:
        raise ConfigurationError(problems, code)
    raise TrainingError(run.signature, code, output)


def _words(name: str, value: Any) -> list[str]:
    """Return an option as words of the command line: None is none, a list of numbers several words, any other list JSON."""
    if isinstance(value, list | tuple) and not all(isinstance(item, int | float) for item in value):
        return [f"--{name}={json.dumps(value)}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def _watched(words: list[str], progress: bool) -> tuple[int, list[str], bool]:
    """Run main.py to its end. Returns its exit code, the last lines of its output, and whether it was interrupted from here.

    What can be imported here can be imported there. The process ends, its state saved, when this one dies.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}
    process = subprocess.Popen([sys.executable, str(MAIN), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, start_new_session=True,
                               preexec_fn=partial(end_with, os.getpid()))
    output: deque[str] = deque(maxlen=LAST_LINES)
    interrupted = False
    assert process.stdout is not None
    try:
        while True:
            try:
                line = process.stdout.readline()
                if not line:
                    return process.wait(), list(output), interrupted
                output.append(line.rstrip())
                if progress:
                    print(output[-1], flush=True)
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:  # this process fails: it cannot print, say
            process.terminate()
            process.wait()
        process.stdout.close()


# playing --------------------------------------------------------------------------------------------------------------
def load(path: str | os.PathLike[str], device: str = "cpu") -> "Policy":
    """Return the policy of a model file, models/<signature>.pth.

    What the model is stands in the file, or for files of earlier versions in logs/<signature>/run.json beside its folder.

    Raises:
        CheckpointError: the file is no model, or of another architecture than its settings say.
        Refused: what the model is cannot be found, or its environment cannot be made here.
    """
    file = Path(path).expanduser()
    if not file.exists() and (Path(PROJECT) / "models" / file).exists():
        file = Path(PROJECT) / "models" / file
    weights, metadata = model_file.load_weights(file)
    options = _options_of(file, metadata)
    try:
        spec = validation.environment_spec(options)
    except Exception as error:  # the code of an environment can fail in any way
        raise ConfigurationError(
            [f"game={options.game} (env_type={options.env_type}) of model file {file} cannot be made: {error}"]) from error
    agent = options.make_agent(spec, device_validation.resolved_device(device))
    model_file.load_into(agent.model, weights, file)
    return Policy(options, spec, agent, {name: value for name, value in metadata.items() if name != "options"})


def _options_of(file: Path, metadata: Mapping[str, Any]) -> Options:
    """Return the settings that the model was trained with."""
    signature = str(metadata.get("signature") or file.stem)
    saved = dotted(metadata["options"]) if isinstance(metadata.get("options"), dict) else None
    for root in (file.absolute().parent.parent, Path(PROJECT)):
        if saved is None and (run := run_registry.read(root / "logs" / signature)) is not None:
            saved = run.options
    if saved is None:
        raise ConfigurationError(
            [f"model file {file} does not say what it is, and there is no {file.absolute().parent.parent / 'logs' / signature}/"
                       f"{run_registry.RUN_FILE}: put the run's log folder there"], BAD_CHECKPOINT)
    row = {"name": str(saved.get("config")), **{name: str(saved.get(name)) for name in CHOICES}}
    options, problems = from_row(row)
    if problems:
        raise ConfigurationError([f"model file {file}: {problem}" for problem in problems], BAD_CHECKPOINT)
    known, other = declared(options), (*CHOICES, *command_line.OF_THIS_START)
    options, _ = changed(options, {name: value for name, value in saved.items() if name in known and name not in other})
    return dataclasses.replace(options, mode=2)


class Policy:
    """A trained network that acts as evaluations do: greedily, or by samples where `agent.evaluation` says so."""

    def __init__(self, options: Options, spec: EnvSpec, agent: Agent, metadata: Mapping[str, Any], seed: int = 1):
        self.options, self.spec, self.agent, self.metadata = options, spec, agent, dict(metadata)
        self._generator = np.random.default_rng(seed)
        self._exploration: dict[int, Exploration | None] = {}

    def act(self, observation: Any, state: tuple[np.ndarray, ...] | None = None, reward: Any = 0.0,
            first: Any = False) -> tuple[Any, tuple[np.ndarray, ...]]:
        """Return the action for one observation, or the actions for N, and the recurrent state to give with the next observation.

        Args:
            observation: [*spec.observation_shape], or [N, ...] of as many games, as the environment class of the row gives it.
            state: what the last call returned; None where an episode starts. It is () for networks without memory.
            reward: what the last action earned, one number or [N]; networks of R2D2 see it.
            first: [N] bool, the games in which an episode starts; their state is the initial one whatever `state` says.

        Raises:
            ValueError: the observation is not of the environment's shape and type.
        """
        observations, single = self._observations(observation)
        number = len(observations)
        rewards = np.broadcast_to(np.asarray(reward, np.float32), (number,)).copy()
        first = np.broadcast_to(np.asarray(first, bool) | (state is None), (number,)).copy()
        timestep = TimeStep(observations, rewards, np.ones(number, np.float32), first, np.zeros(number, bool), rewards)
        before = initial = self.agent.initial_state(number)
        if state is not None:
            if len(state) != len(initial):
                raise ValueError(f"state has {len(state)} parts, expected {len(initial)}: give what the last call returned")
            given = (torch.as_tensor(part[None] if single else part, device=start.device) for part, start in zip(state, initial))
            before = restart(tuple(given), first, initial)
        if number not in self._exploration:
            self._exploration[number] = self.agent.evaluation_exploration(number, self._generator)
        with torch.inference_mode():
            output = self.agent.act(timestep, before, self._exploration[number])
        after = tuple(part.cpu().numpy() for part in output.state)
        return (output.action[0], tuple(np.asarray(part[0]) for part in after)) if single else (output.action, after)

    def evaluate(self, episodes: int = 10, seed: int = 1) -> EpisodeResults:
        """Play whole episodes in this process, as mode 2 does; returns raw `returns`, `lengths` and `truncated`, each [episodes]."""
        options, number = self.options, min(episodes, self.options.evaluator.num_envs)
        exploration = self.agent.evaluation_exploration(number, np.random.default_rng(seed))
        env = ValidatedEnv(options.env_class(options.env, options.game, number, training=False), number)
        with contextlib.closing(env):
            playing = play_episodes(self.agent, env, episodes, options.evaluator.max_steps, exploration, seed)
            while True:
                try:
                    next(playing)
                except StopIteration as end:
                    return end.value

    def _observations(self, observation: Any) -> tuple[np.ndarray, bool]:
        """Return observations [N, ...] in their stored type, and whether one without N was given."""
        given, shape, dtype = np.asarray(observation), self.spec.observation_shape, np.dtype(self.spec.frame.dtype)
        single = given.shape == shape
        if (not single and given.shape[1:] != shape) or not given.size:
            raise ValueError(f"observation is {list(given.shape)}, expected {list(shape)} or several, [N, {', '.join(map(str, shape))}]")
        if given.dtype.kind not in "fiub" or (dtype == np.uint8 and given.dtype != np.uint8):
            raise ValueError(f"observation is {given.dtype}, expected {dtype}")
        return np.ascontiguousarray(given[None] if single else given, dtype), single
