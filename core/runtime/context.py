"""Hand each single-process the options of the run and the shared memory that connects it with the others."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.agent import Agent
from core.common.terminal import Terminal
from core.distributed.learner_group import Rendezvous, SingleLearner
from core.env import Env
from core.memory import Memory
from core.runtime.log_buffers import LogRings
from core.runtime.options import RunOptions, make_env
from core.runtime.parameter_store import ParameterStore
from core.runtime.run_state import RateLimiter, RunCounters, RunState
from core.specs import EnvSpec

ROLES = {"logger": 0, "actor": 1, "learner": 2, "evaluator": 3, "tester": 4}


@dataclass
class Context:
    """The options and shared memory of a run, which main makes and each spawned process inherits.

    - `roles` lists every process of the run as (role, index). Its position there is its number for heartbeats and logs.
    - `memories` has the memory of each learner on this node, by learner. Actor i writes to that of learner i modulo
      their number.
    """

    options: RunOptions
    spec: EnvSpec
    roles: tuple[tuple[str, int], ...]
    # Empty in mode 2.
    memories: Mapping[int, Memory]
    parameters: ParameterStore
    counters: RunCounters
    run_state: RunState
    logs: LogRings
    # The verified checkpoint that this run continues from.
    resume_from: Path | None = None
    initial_weights: Path | None = None
    # Makes the memory of each learner, by learner: on this node, or on the node of a learner elsewhere.
    memory_makers: tuple[Callable[[], Memory], ...] = ()
    # Brings a file or folder of the checkpoint folder to that of main. Set if this node has another.
    send_home: Callable[[Path], None] | None = None
    # Set by the engine if there are several learners.
    rendezvous: Rendezvous = field(default_factory=SingleLearner)
    # Where the output of main is relayed to.
    terminal: Terminal = Terminal(None)

    @cached_property
    def rate_limiter(self) -> RateLimiter:
        """The pace of the run, which these counters tell."""
        return RateLimiter(self.options.rate_limiter, self.counters)

    def make_agent(self, device: str = "cpu", precision: str = "float32") -> Agent:
        return self.options.make_agent(self.spec, device, precision)

    def make_env(self, num_envs: int, *, training: bool, num_threads: int = 1, render_mode: str | None = None) -> Env:
        return make_env(self.options, num_envs, training=training, num_threads=num_threads, render_mode=render_mode)

    def memory_of(self, actor: int) -> tuple[Memory, int]:
        """Return the memory that an actor writes to, and the actor's number among those who do."""
        number, learner = divmod(actor, self.options.num_learners)
        return self.memories[learner], number

    def publishes(self, learner: int) -> bool:
        """Return True if this learner publishes the parameters on its node: all learners have the same."""
        return learner == min(self.memories)

    def device_of(self, learner: int) -> str:
        """Return the device of a learner. On CUDA, several learners have a GPU each."""
        device = self.options.device
        return f"cuda:{learner}" if device == "cuda" and self.options.num_learners > 1 else device

    def device_of_actor(self, actor: int) -> str:
        """Return the device of an actor: the GPU of the learner that it writes to, if both compute on GPUs."""
        device = self.options.actor.device
        learner = actor % self.options.num_learners
        return self.device_of(learner) if device == self.options.device == "cuda" else device

    def reached_limits(self) -> list[str]:
        """Return which of its steps, updates and target score the run has reached; its seconds the engine counts."""
        options, counters, scores = self.options, self.counters, self.counters.scores
        limits = [
            ("steps", options.steps, counters.agent_steps),
            ("updates", options.updates, counters.updates),
            ("target_score", options.target_score, scores[0] if scores else -math.inf),
        ]
        return [f"{name}={limit}" for name, limit, value in limits if limit is not None and value >= limit]

    def model_metadata(self, agent_steps: int, score: float | None = None) -> dict[str, Any]:
        """Return what model files and checkpoints say of the model that they hold."""
        options = self.options
        return {
            "signature": options.signature,
            "config": options.config,
            "env_type": options.env_type,
            "game": options.game,
            "environment": self.spec.name,
            "agent_steps": agent_steps,
            "score": score,
            "options": options.to_dict(),
        }

    def process_ind(self, role: str, index: int) -> int:
        return self.roles.index((role, index))

    def report(self, role: str, index: int, values: dict[str, float]) -> None:
        """Send values to the logger as "role/name", at the current agent steps of the run."""
        self.logs.write(
            self.process_ind(role, index),
            {f"{role}/{name}": value for name, value in values.items()},
            self.counters.agent_steps,
        )

    def seed(self, role: str, index: int, salt: int = 0) -> int:
        """Return a seed that differs between processes and, by `salt`, between successive starts of one process."""
        sequence = np.random.SeedSequence([self.options.seed, ROLES[role], index, salt])
        return int(sequence.generate_state(1)[0] >> 1)

    def seed_everything(self, role: str, index: int, salt: int = 0) -> np.random.Generator:
        """Seed the global generators of this process, and return a numpy generator of its own.

        Only environments of other authors use those of Python and numpy.
        """
        seed = self.seed(role, index, salt)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        return np.random.default_rng(seed)


Process = Callable[[Context, int], Iterator[bool]]
