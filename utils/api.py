"""Train, load and play from Python, in a script or a notebook.

- `train` runs `main.py` in a subprocess. Therefore no script needs `if __name__ == "__main__"`, and a notebook can be
  interrupted.
- `load` reads a model file into a policy in this process and starts no process.
- Errors raise `ConfigurationError` (options, files) or `TrainingError`, with the messages of the command line.
"""

import contextlib
import dataclasses
import io
import json
import os
import reprlib
import signal
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.acting.validated_env import split_joint_actions
from core.agent import Agent, Exploration
from core.checkpoint import model_file
from core.checkpoint.run_checkpoint import checkpoints
from core.common.exit_codes import BAD_CHECKPOINT, BAD_OPTIONS
from core.common.settings import dotted
from core.evaluation.episodes import EpisodeResults, play_episodes
from core.runtime.options import make_env
from core.types import TimeStep, restart
from utils import run_registry
from utils.config import command_line, validation
from utils.config.rows import CHOICES, changed, declared, find_row, from_row, kinds
from utils.errors import ConfigurationError
from utils.options import PROJECT, Options
from utils.plot import curves
from utils.plot.curves import Curve
from utils.sweep.subprocess_run import start_main

RESERVED = ("config", "mode", "check", "help")  # Options that `train` sets itself.
INTERRUPTED = 130  # Exit code of a run that was interrupted and saved.
LAST_LINES = 20  # Lines of a failed run's output that its error contains.
printing = threading.Lock()  # Held while the process prints, or redirects what all of its threads print.


class TrainingError(Exception):
    """A training ended with an exit code other than 0; the error holds the code and the last lines of output."""

    def __init__(self, signature: str, code: int, lines: list[str]):
        super().__init__(f"run {signature} ended with exit code {code}:\n" + "\n".join(lines))
        self.signature, self.code, self.lines = signature, code, lines


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run and its files."""

    signature: str
    log_folder: Path  # of metrics and options
    model_path: Path  # of the best evaluation
    checkpoint_folder: Path  # of the newest checkpoints

    @property
    def scores(self) -> Curve:
        """Return the mean returns of the evaluations (`values`) with their agent `steps` and `seconds`, each [N]."""
        return curves.read_curve(self.log_folder / "metrics.jsonl")

    def load(self, device: str = "cpu") -> "Policy":
        """Return the policy of the best evaluation."""
        return load(self.model_path, device)


# training -------------------------------------------------------------------------------------------------------------
def train(config: str, settings: Mapping[str, Any] | None = None, *, progress: bool = True, **lines: Any) -> TrainedRun:
    """Train a row of CONFIGS to its end and return the run.

    An interrupt (Ctrl-C, or a notebook's stop button) makes the run save its state and then raises KeyboardInterrupt. A
    second one ends the run at once. `resume="newest"` continues the run.

    Args:
        config: Name of the row.
        settings: Options with a dot in their name, such as {"agent.learning_rate": 1e-4}. Lists and dictionaries are
            written as in a row.
        progress: Print the run's output.
        lines: Options without a dot, such as steps=20_000, seed=1, root="runs".

    Raises:
        ConfigurationError: the command line would refuse these options too.
        TrainingError: the training failed.
    """
    if not isinstance(config, str):
        raise ConfigurationError(f"config={config!r} must be a string, the name of a row of CONFIGS")
    values = {**(settings or {}), **lines}
    if reserved := [f"{name} is not to be given to train" for name in RESERVED if name in values]:
        raise ConfigurationError(reserved)
    words = _words(config, values)
    with printing, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options = command_line.read(words)  # The run prints the same messages again.
    if options.timestamp in run_registry.automatic:  # A run that starts in the same second may have chosen it too.
        options = dataclasses.replace(options, timestamp=f"{options.timestamp}-{uuid.uuid4().hex[:8]}")
    run = TrainedRun(options.signature, options.log_folder, options.model_path, options.checkpoint_folder)
    identity = ["--resume", run.signature] if options.resume is not None else ["--timestamp", str(options.timestamp)]
    code, output, interrupted = _run_main([*words, *identity], progress)
    if code == 0:
        return run
    if interrupted and code in (INTERRUPTED, -signal.SIGINT):
        hint = "it has no checkpoint"
        if checkpoints(run.checkpoint_folder):
            root = "" if options.root == PROJECT else f', root="{options.root}"'
            hint = f'train("{config}", resume="{run.signature}"{root}) continues it'
        raise KeyboardInterrupt(f"run {run.signature} was interrupted: {hint}")
    problems = [line.removeprefix("error: ") for line in output if line.startswith("error: ")]
    if code in (BAD_OPTIONS, BAD_CHECKPOINT) and problems:
        raise ConfigurationError(problems, code)
    raise TrainingError(run.signature, code, output)


def _words(config: str, values: Mapping[str, Any]) -> list[str]:
    """Return a row and these options as words of the command line.

    Lists are separate words for an option that is a tuple. For any other option, lists and dictionaries are JSON.
    """
    choices = {name: str(values[name]) for name in CHOICES if name in values}
    known = declared(from_row(find_row(config), choices)[0])
    words = ["--config", config, "--mode", "1", "--check", "false"]
    for name, value in values.items():
        if isinstance(value, list | tuple) and name in known and tuple in kinds(known[name].annotation):
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict | list | tuple):
            try:
                words.append(f"--{name}={json.dumps(value)}")
            except (TypeError, ValueError) as error:
                raise ConfigurationError(f"{name}={reprlib.repr(value)} must be valid as JSON: {error}") from None
        else:
            words.append(f"--{name}={value}")
    return words


def _run_main(words: list[str], progress: bool) -> tuple[int, list[str], bool]:
    """Run main.py to its end, with the import path of this process. If this process dies, the run saves and ends.

    Returns:
        The exit code, the last lines of the output, and True if this process interrupted the run.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))}
    process = start_main(words, subprocess.PIPE, text=True, errors="replace", env=environment)
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
                    with printing:
                        print(output[-1], flush=True)
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:  # This process failed, for example to print.
            process.terminate()
            process.wait()
        process.stdout.close()


# playing --------------------------------------------------------------------------------------------------------------
def load(path: str | os.PathLike[str], device: str = "cpu") -> "Policy":
    """Return the policy of a model file or a checkpoint, or of the run of this name in the project's `models`.

    Raises:
        CheckpointError: the file is no model, or the model's architecture differs from its options.
        ConfigurationError: the file lacks the model's options, or its environment or the device is not available here.
    """
    file = run_registry.find_model(path, PROJECT)
    weights, metadata = model_file.load_weights(file)
    options, refused = changed(_options_of(file, metadata), {"device": device})
    if problems := [*refused.values(), *validation.device_problems(options)]:
        raise ConfigurationError(problems)
    try:
        spec = validation.environment_spec(options)
    except Exception as error:  # User classes may raise anything.
        game = f"game={options.game} (env_type={options.env_type}) of model file {file}"
        raise ConfigurationError(f"{game} cannot be made: {error}") from error
    agent = options.make_agent(spec, validation.resolved_device(device))
    model_file.load_into(agent.model, weights, file)
    return Policy(options, agent, {name: value for name, value in metadata.items() if name != "options"})


def _options_of(file: Path, metadata: Mapping[str, Any]) -> Options:
    """Return the options with which the model was trained."""
    if not isinstance(metadata.get("options"), dict):
        raise ConfigurationError(f"model file {file} does not say with which options it was trained", BAD_CHECKPOINT)
    saved = dotted(metadata["options"])
    row = {"name": str(saved.get("config")), **{name: str(saved.get(name)) for name in CHOICES}}
    options, problems = from_row(row)
    known, excluded = declared(options), (*CHOICES, *command_line.OF_THIS_START)
    settings = {name: value for name, value in saved.items() if name in known and name not in excluded}
    options, refused = changed(options, settings)
    if told := problems or refused.values():
        raise ConfigurationError([f"model file {file}: {sentence}" for sentence in told], BAD_CHECKPOINT)
    return dataclasses.replace(options, mode=2)


class Policy:
    """A trained network that acts as in evaluations: greedily, or by sampling if `agent.evaluation` says so."""

    def __init__(self, options: Options, agent: Agent, metadata: Mapping[str, Any], seed: int = 1):
        self.options, self.spec, self.agent, self.metadata = options, agent.spec, agent, dict(metadata)
        self._generator = np.random.default_rng(seed)
        self._exploration: dict[int, Exploration | None] = {}

    def act(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        reward: Any = 0.0,
        first: Any = False,
        action_mask: Any = None,
    ) -> tuple[Any, tuple[np.ndarray, ...]]:
        """Return the action for one observation, or the actions for N, and the next recurrent state.

        Args:
            observation: [*spec.observation_shape] or [N, ...], as the environment class of the row returns it.
            state: State that the last call returned, () for networks without memory. If None, episodes start.
            reward: Reward of the last action, a number or [N]; input of R2D2's networks, 0 where an episode starts.
            first: [N] bool, True where an episode starts; the initial state then replaces `state`.
            action_mask: [A] or [N, A], the legal actions; needed if `spec.has_action_mask`, else not allowed.

        Raises:
            ValueError: shape or dtype of an argument differ from the environment's, or a number is not finite.
        """
        observations, single = self._observations(observation)
        count = len(observations)
        rewards = _one_for_each("reward", reward, np.float32, count)
        first = _one_for_each("first", first, bool, count) | (state is None)
        rewards = np.where(first, np.float32(0), rewards)  # as in training, where no action led to a first observation
        ones, legal = np.ones(count, np.float32), self._legal(action_mask, count)
        timestep = TimeStep(observations, rewards, ones, first, np.zeros(count, bool), rewards, legal)
        recurrent = initial = self.agent.initial_state(count)
        if state is not None:
            parts = [torch.as_tensor(part[None] if single else part) for part in state]
            given, expected = ([list(part.shape) for part in each] for each in (parts, initial))
            if given != expected:
                raise ValueError(f"state has shapes {given}, expected {expected}: give what the last call returned")
            recurrent = restart(tuple(part.to(at.device) for part, at in zip(parts, initial)), first, initial)
        if count not in self._exploration:
            self._exploration[count] = self.agent.evaluation_exploration(count, self._generator)
        with torch.inference_mode():
            output = self.agent.act(timestep, recurrent, self._exploration[count])
        next_state = tuple(part.cpu().numpy() for part in output.state)
        action = split_joint_actions(self.spec.action, output.action)
        return (action[0], tuple(np.asarray(part[0]) for part in next_state)) if single else (action, next_state)

    def from_gym(self, observation: Any) -> np.ndarray:
        """Return one observation of gymnasium, such as a Dict, as `act` takes it; `env.frame_stack` is not applied.

        Raises:
            TypeError: env_type is not gym.
            ValueError: The observation is not of the environment's space.
        """
        return self._converter.from_gym(observation)  # type: ignore[no-any-return]

    def to_gym(self, action: Any) -> Any:
        """Return the action of one observation as gymnasium's `step` takes it, such as a Dict.

        Raises:
            TypeError: env_type is not gym.
        """
        return self._converter.to_gym(action)

    @cached_property
    def _converter(self) -> Any:
        options = self.options
        if not hasattr(options.env_class, "from_gym"):
            raise TypeError(f"env_type={options.env_type} is no environment of gymnasium: act takes what it returns")
        env = options.env_class(options.env, options.game, 1, training=False)
        env.close()  # only its spaces are used
        return env

    def _legal(self, action_mask: Any, count: int) -> np.ndarray | None:
        """Return the legal actions [N, A] as the environment would; None if it has no masks."""
        if self.spec.action_mask is None:
            if action_mask is not None:
                raise ValueError(f"action_mask is given, expected none: {self.spec.name} allows every action")
            return None
        mask, size = np.asarray(action_mask), self.spec.action_mask.shape[0]
        if mask.shape not in [(count, size), *[(size,)] * (count == 1)] or mask.dtype.kind not in "biu":
            raise ValueError(f"action_mask is {reprlib.repr(action_mask)}, expected the legal ones of {size} actions")
        return mask.reshape(count, size).astype(bool)

    def evaluate(self, episodes: int = 10, seed: int = 1) -> EpisodeResults:
        """Play whole episodes in this process; return raw `returns`, `lengths` and `truncated`, each [episodes]."""
        if episodes < 1:
            raise ValueError(f"episodes is {episodes}, expected at least 1")
        options, num_envs = self.options, min(episodes, self.options.evaluator.num_envs)
        exploration = self.agent.evaluation_exploration(num_envs, np.random.default_rng(seed))
        env = make_env(options, num_envs, training=False)
        with contextlib.closing(env):
            playing = play_episodes(self.agent, env, episodes, options.evaluator.max_steps, exploration, seed)
            while True:
                try:
                    next(playing)
                except StopIteration as end:
                    results: EpisodeResults = end.value
                    return results

    def _observations(self, observation: Any) -> tuple[np.ndarray, bool]:
        """Return observations [N, ...] in their stored dtype, and True if the input was a single one without N."""
        if isinstance(observation, dict | tuple):
            kind = type(observation).__name__
            raise ValueError(f"observation is a {kind}, expected an array: act(from_gym(observation))")
        array, shape, dtype = np.asarray(observation), self.spec.observation_shape, np.dtype(self.spec.frame.dtype)
        single = array.shape == shape
        if (not single and array.shape[1:] != shape) or not array.size:
            several = f"[N, {', '.join(map(str, shape))}]"
            raise ValueError(f"observation is {list(array.shape)}, expected {list(shape)} or several, {several}")
        if array.dtype.kind not in "fiub" or (dtype == np.uint8 and array.dtype != np.uint8):
            raise ValueError(f"observation is {array.dtype}, expected {dtype}")
        with np.errstate(over="ignore"):  # A number that the stored dtype cannot hold becomes infinite.
            stored = array.astype(dtype)
        if not np.isfinite(stored).all():
            raise ValueError(f"observation holds {array[~np.isfinite(stored)][0]}, expected finite values")
        return np.ascontiguousarray(stored[None] if single else stored), single


def _one_for_each(name: str, value: Any, dtype: type, count: int) -> np.ndarray:
    """Return an argument of `act` as [N], from one value for all observations or from N."""
    array: np.ndarray = np.asarray(value, dtype)
    if array.shape not in ((), (count,)) or not np.isfinite(array).all():
        values = f"one finite value or {count}, one for each observation"
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected {values}")
    return np.broadcast_to(array, (count,)).copy()
