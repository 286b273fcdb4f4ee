"""Create the Context that all processes of a run share, and the options of an elastic run's next part."""

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from core.agent import Agent
from core.checkpoint import model_file, run_checkpoint
from core.checkpoint.run_checkpoint import CheckpointError
from core.common.console import log_to_stderr
from core.common.exit_codes import BAD_CHECKPOINT, BAD_OPTIONS, DONE, TRAINING_FAILED
from core.common.files import TEMPORARY
from core.common.processes import open_file_shortage
from core.common.settings import dotted
from core.engines.run_end import resume_command_hint
from core.memory import Memory
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RateLimiter, RunCounters, RunState
from utils import run_registry
from utils.config import memory_budget, throughput, validation
from utils.config.command_line import FIXED
from utils.config.rows import find_row, settings_on_file
from utils.errors import ConfigurationError, describe_exception
from utils.options import Options

PARTS = ("agent", "clock", "learner")  # of every checkpoint
REPORT_BYTES, EPISODE_BYTES = 1 << 16, 100  # upper bounds of what mode 2 writes: options and versions, and each episode
SAVED_COPIES = 5  # of the weights that a run leaves: network, target, two moments, and the best model


def create_context(options: Options) -> tuple[Context, Agent]:
    """Allocate what the processes of a run share, then claim the run's folder.

    Raises:
        ConfigurationError: memory, weights, a checkpoint or files are missing or unusable. Nothing is left on the disk.
    """
    if options.mode == 1 and options.num_envs_per_actor == 0:
        options = throughput.resolve_num_envs(options)
    spec = validation.environment_spec(options)
    if spec.warning:
        log_to_stderr(f"warning: game={options.game}: {spec.warning}")
    agent = options.make_agent(spec)
    try:
        return _allocate(options, agent), agent
    except MemoryError as error:
        raise ConfigurationError(str(error)) from None
    except CheckpointError as error:
        best = f", from this one's best model if you like: --model_file {options.model_path}"
        instead = f"start a new run{best if options.model_path.exists() else ''}"
        if options.resume is None:
            instead = "name another model of this row with --model_file, or in mode 2 a run of it with --timestamp"
        raise ConfigurationError(f"{error}; {instead}", BAD_CHECKPOINT) from None


def _allocate(options: Options, agent: Agent) -> Context:
    """Allocate a run's shared memory, claim its folder, and restore its counters if it continues another.

    Raises:
        MemoryError: the machine lacks the memory.
        CheckpointError: weights or a checkpoint cannot be used.
        ConfigurationError: files cannot be written or opened, or the run is still running.
    """
    roles = agent.single_processes(options.mode, options.num_actors, options.num_learners)
    makers = _memory_makers(options, agent)
    try:
        memories = {learner: makers[learner]() for learner in options.learners_at_home if makers}
    except MemoryError:
        raise
    except Exception as error:  # the code of a memory can fail in any way
        made = f"memory_type={options.memory_type} cannot be made"
        raise ConfigurationError(f"{made}: {describe_exception(error)}") from error
    counters, state = RunCounters(options.num_actors, options.num_learners), RunState(len(roles))
    parameters, logs = ParameterStore(ParameterStore.size_of(agent.model)), LogRings(len(roles))
    initial_weights = resume_from = None
    if options.mode == 2 or options.model_file is not None:
        initial_weights = _initial_weights(options, agent)
    if options.mode == 2:
        _try_test_files(options, Path(options.model_file or options.model_path))
    if options.engine == "local" and (problem := open_file_shortage(len(roles))):
        raise ConfigurationError(problem)
    if options.mode == 1:
        size = SAVED_COPIES * sum(tensor.nbytes for tensor in agent.model.state_dict().values())
        if options.learner.checkpoint_replay:
            size += memory_budget.replay_bytes(options, memory_budget.layouts(options, agent), agent.window)
        options = run_registry.claim(options, size)
        try:
            if options.resume is not None:
                resume_from = _continue(options, counters)
            run_registry.save(options, settings_on_file(find_row(options.config)), agent.spec.name)
        except BaseException:
            run_registry.abandon(options)
            raise
        if options.resume is None:
            print(f"training run {options.signature}: {options.config}, game={options.game}, in {options.log_folder}")
    context = Context(
        options, agent.spec, roles, memories, parameters, counters, state, logs, resume_from, initial_weights, makers
    )
    if resume_from and (reached := context.reached_limits()):
        print(f"run {options.signature} has {' and '.join(reached)} already: set a higher limit to train it further")
    if options.mode == 1:  # the folder is locked as long as the context lives
        weakref.finalize(context, os.close, run_registry.locks.pop(options.log_folder))
    return context


def _memory_makers(options: Options, agent: Agent) -> tuple[Callable[[], Memory], ...]:
    """Return what makes the memory of each learner, each with a seed of its own."""
    if options.mode == 2:
        return ()
    seeds = [options.seed, *np.random.SeedSequence(options.seed).generate_state(options.num_learners - 1).tolist()]
    make, layouts = partial(options.memory_class, options.memory), memory_budget.layouts(options, agent)
    return tuple(partial(make, ring, agent.window, seed) for ring, seed in zip(layouts, seeds))


def _initial_weights(options: Options, agent: Agent) -> Path:
    """Return the model file or checkpoint to start from or to test, and print what it is if the command line names it.

    Raises:
        CheckpointError: the file is damaged, or its weights are of another game or architecture.
    """
    path = options.model_path if options.model_file is None else Path(options.model_file)
    weights, metadata = model_file.load_weights(path)
    if metadata.get("environment", agent.spec.name) != agent.spec.name:
        raise CheckpointError(
            f"model file {path} is of game={metadata.get('game')} (env_type={metadata.get('env_type')}) "
            f"and game={options.game} is asked for: give --game {metadata.get('game')}"
        )
    model_file.load_into(agent.model, weights, path)
    if options.model_file is not None:
        told = [f"{name}={metadata.get(name, 'unknown')}" for name in ("config", "game", "agent_steps", "score")]
        print(f"{'starting from' if options.mode == 1 else 'testing'} model file {path}: {', '.join(told)}")
        for line in _differences(options, path, metadata):
            print(line)
    if path.is_dir() and path.name != metadata["checkpoint"]:  # the folder of all checkpoints: one of them was verified
        path /= metadata["checkpoint"]
    return path


def _differences(options: Options, path: Path, metadata: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that decides what weights mean and that was another one in their training."""
    saved, used = metadata.get("options"), dotted(options.to_dict())
    trained = dotted(saved) if isinstance(saved, dict) else {}
    different = [name for name, value in used.items() if "." in name and trained.get(name, value) != value]
    return [
        f"{path.name} is used with {name}={used[name]!r} (was {trained[name]!r})"
        for name in different
        if name in FIXED or name.partition(".")[0] in FIXED
    ]


def _try_test_files(options: Options, model: Path) -> None:
    """Raise ConfigurationError if mode 2 could not write its results, before it plays for hours."""
    for suffix in ("json", *([options.video.format] if options.record else [])):
        path = model_file.file_beside(model, f"_test.{suffix}")
        trial = path.with_name(f"{TEMPORARY}{os.getpid()}_{path.name}")  # two processes may test the same model
        try:
            if path.exists():  # a video is written in place
                path.open("ab").close()
            trial.write_bytes(bytes(REPORT_BYTES + options.episodes * EPISODE_BYTES))
        except OSError as error:
            raise ConfigurationError(
                f"mode 2 cannot write {path} ({error.strerror}): make that possible, or name a copy of the model "
                "in another folder with --model_file"
            ) from None
        finally:
            with suppress(OSError):  # there is none
                trial.unlink()


def _continue(options: Options, counters: RunCounters) -> Path:
    """Restore the counters of the newest undamaged checkpoint, and return that checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or none of a run.
    """
    state, newest = run_checkpoint.load(options.checkpoint_folder, PARTS)
    if missing := [name for name in PARTS if name not in state]:
        raise CheckpointError(f"checkpoint {newest} has no {' and no '.join(missing)}: it is not of a run")
    try:
        counters.load_state_dict(state["clock"], with_replay=(newest / "memory.pt").exists())
        RateLimiter(options.rate_limiter, counters).load_state_dict(state["clock"])
    except Exception as error:  # the file is intact, but its content is not what a run wrote
        raise CheckpointError(
            f"the counters of checkpoint {newest} are not of a run ({describe_exception(error)})"
        ) from None
    return newest


class ElasticRun:
    """The parts of an elastic run (supervisor.elastic).

    Each continues the one before with as many learners as nodes have room for.
    """

    def __init__(self, options: Options):
        self._begin, self._seconds = time.monotonic(), options.seconds
        self._lost_at: list[float] = []  # monotonic seconds in the last supervisor.restart_window, of lost learners
        self._learners = 0  # of the last part that started

    def next_options(self, options: Options, exit_code: int, learners: int | None) -> Options | None:
        """Return the options of the next part, or None if the run has ended.

        Options and exit code are those of the part that ended. `learners` is the number with which the engine says that
        the run can go on.
        """
        if learners is None:
            if self.exit_code(exit_code) != exit_code:
                log_to_stderr(f"supervisor: {resume_command_hint(options)}")
            return None
        params, now = options.supervisor, time.monotonic()
        if exit_code != DONE:
            self._lost_at = [lost for lost in self._lost_at if now - lost < params.restart_window] + [now]
        if too_often := len(self._lost_at) > params.max_restarts:
            log_to_stderr(
                f"supervisor: learners were lost {len(self._lost_at)} times within {params.restart_window:g} s "
                "(supervisor.restart_window), more than supervisor.max_restarts; the run ends"
            )
        if too_often or not run_checkpoint.checkpoints(options.checkpoint_folder):
            log_to_stderr(f"supervisor: {resume_command_hint(options)}")
            return None
        if exit_code != BAD_OPTIONS:
            self._learners = options.num_learners
        elif options.num_learners > self._learners > 0:
            log_to_stderr("supervisor: the run takes in no more learners (supervisor.elastic)")
            params = dataclasses.replace(params, elastic=self._learners)
        actors = options.num_actors // options.num_learners * learners
        log_to_stderr(f"supervisor: the run goes on with learners={learners} and actors={actors} from its checkpoint")
        return dataclasses.replace(
            options,
            resume=options.signature,
            model_file=None,
            num_learners=learners,
            num_actors=actors,
            supervisor=params,
            seconds=None if self._seconds is None else max(self._seconds - (now - self._begin), 0.001),
        )

    def exit_code(self, exit_code: int) -> int:
        """Return the exit code of the run, whose last part had this one. Options with which a part trained are good."""
        return TRAINING_FAILED if exit_code == BAD_OPTIONS and self._learners else exit_code
