"""From Options to the Context that every process of the run is given."""

import os
import weakref
from pathlib import Path

import numpy as np

from core.agent import Agent
from core.checkpoint import model_file, run_checkpoint
from core.checkpoint.run_checkpoint import CheckpointError
from core.common.console import log_to_stderr
from core.common.processes import open_file_shortage
from core.memory import Memory
from core.model import Model
from core.runtime.context import Context
from core.runtime.log_buffers import LogRings
from core.runtime.parameter_store import ParameterStore
from core.runtime.rate_limiter import RateLimiter
from core.runtime.run_counters import RunCounters
from core.runtime.run_state import RunState
from core.specs import EnvSpec
from utils import run_registry
from utils.config import memory_budget, validation
from utils.config.dotted_settings import flatten
from utils.config.rows import find_row, from_row
from utils.errors import BAD_CHECKPOINT, ConfigurationError, describe_exception
from utils.options import Options
from utils.preflight import throughput

PARTS = ("agent", "clock", "learner")  # of every checkpoint
REPORT_BYTES, EPISODE_BYTES = 1 << 16, 100  # of what mode 2 writes, at most: its settings and versions, and each episode
SAVED_COPIES = 5  # of the weights that a run leaves at least: network, target and two moments in a checkpoint, and the best model


def prepare(options: Options) -> tuple[Context, Agent]:
    """Allocate what the run's processes share, then claim its folder. Raises Refused where that is impossible."""
    if options.mode == 1:
        options = throughput.resolve_num_envs(options)
    spec = validation.environment_spec(options)
    if spec.warning:
        log_to_stderr(f"warning: game={options.game}: {spec.warning}")
    agent = options.make_agent(spec)
    roles = _roles(agent, options)
    try:
        memories = _memories(options, spec, agent)
        counters, run_state = RunCounters(options.num_actors, options.num_learners), RunState(len(roles))
        rate_limiter = RateLimiter(options.clock, counters)
        parameters, logs = ParameterStore(ParameterStore.size_of(agent.model)), LogRings(len(roles))
        initial_weights, resume_from = _initial_weights(options, agent.model, spec), None
        if options.mode == 2:
            _try_test_files(options, Path(options.model_file or options.model_path))
        if options.engine == "local" and (problem := open_file_shortage(len(roles))):
            raise ConfigurationError([problem])
        if options.mode == 1:
            options = run_registry.claim(options, SAVED_COPIES * sum(tensor.nbytes for tensor in agent.model.state_dict().values()))
            try:
                resume_from = _continue(options, counters, rate_limiter) if options.resume is not None else None
                run_registry.save(options, run_registry.plain(flatten(from_row(find_row(options.config))[0])), spec.name)
            except BaseException:
                run_registry.abandon(options)
                raise
    except MemoryError as error:
        raise ConfigurationError([str(error)]) from None
    except CheckpointError as error:
        raise ConfigurationError([f"{error}; {_instead(options)}"], BAD_CHECKPOINT) from None
    context = Context(options, spec, roles, memories, parameters, counters, rate_limiter, run_state, logs, resume_from, initial_weights)
    if options.mode == 1:
        weakref.finalize(context, os.close, run_registry.locks.pop(options.log_folder))  # so long the folder is locked
    return context, agent


def _roles(agent: Agent, options: Options) -> tuple[tuple[str, int], ...]:
    """Every process of the table that the agent would launch."""
    table = RoleTable()
    agent.launch(table, options.mode, options.num_actors, options.num_learners)
    return tuple((role, index) for role, count in table.roles for index in range(count))


class RoleTable:
    """An engine that only notes what it is asked to run."""

    roles: list[tuple[str, int]]

    def run(self, roles: list[tuple[str, int]]) -> int:
        self.roles = roles
        return 0


def _memories(options: Options, spec: EnvSpec, agent: Agent) -> tuple[Memory, ...]:
    """One for each learner, with randomness of its own."""
    if options.mode == 2:
        return ()
    seeds = [options.seed, *np.random.SeedSequence(options.seed).generate_state(options.num_learners - 1).tolist()]
    return tuple(options.memory_class(options.memory, memory_budget.layout(options, spec, agent, learner), agent.window, seed)
                 for learner, seed in enumerate(seeds))


def _continue(options: Options, counters: RunCounters, rate_limiter: RateLimiter) -> Path:
    """Restore the counters of the newest undamaged checkpoint, and return that checkpoint."""
    state, found = run_checkpoint.load(options.checkpoint_folder)
    if missing := [name for name in PARTS if name not in state]:
        raise CheckpointError(f"checkpoint {found} has no {' and no '.join(missing)}: it is not of a run")
    try:
        counters.load_state_dict(state["clock"], with_replay="memory" in state)
        rate_limiter.load_state_dict(state["clock"])
    except Exception as error:  # it is intact, but not what a run wrote
        raise CheckpointError(f"the counters of checkpoint {found} are not of a run ({describe_exception(error)})") from None
    return found


def _instead(options: Options) -> str:
    """What to do when a checkpoint or model file cannot be used."""
    if options.resume is None:
        return "name another model of this row with --model_file, or in mode 2 a run of it with --timestamp"
    return f"start a new run, from this one's best model if you like: --model_file {options.model_path}"


def _try_test_files(options: Options, model: Path) -> None:
    """Raise Refused where mode 2 could not write what it finds, before it plays for hours."""
    for ending in ("json", *([options.video.format] if options.record else [])):
        path = model_file.test_file(model, ending)
        try:
            model_file.try_test_file(path, REPORT_BYTES + options.episodes * EPISODE_BYTES)
        except OSError as error:
            raise ConfigurationError([f"mode 2 cannot write {path} ({error.strerror}): make that possible, or name a copy of the model in "
                           "another folder with --model_file"]) from None


def _initial_weights(options: Options, model: Model, spec: EnvSpec) -> Path | None:
    """Return the model file or checkpoint to start from or to test, which fits the model; None without one.

    A file that the command line names is described in a printed line.
    """
    path = options.model_path if options.mode == 2 else None
    path = Path(options.model_file) if options.model_file is not None else path
    if path is not None:
        weights, metadata = model_file.load_weights(path)
        if metadata.get("environment", spec.name) != spec.name:
            raise CheckpointError(f"model file {path} is of game={metadata.get('game')} (env_type={metadata.get('env_type')}) "
                                  f"and game={options.game} is asked for: give --game {metadata.get('game')}")
        model_file.load_into(model, weights, path)
        if options.model_file is not None:
            print(f"{'starting from' if options.mode == 1 else 'testing'} model file {path}: "
                  + ", ".join(f"{name}={metadata.get(name, 'unknown')}" for name in ("config", "game", "agent_steps", "score")))
        if path.is_dir() and path.name != metadata["checkpoint"]:  # the folder of all checkpoints: one of them was verified
            path /= metadata["checkpoint"]
    return path
