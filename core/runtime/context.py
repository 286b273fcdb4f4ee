"""What every single-process is given: the options, and the shared memory that connects it with the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from core.agent import Agent
from core.common.terminal import Terminal
from core.distributed.learner_group import Rendezvous, SingleLearner
from core.env import Env
from core.memory import Memory
from core.runtime.clock import Clock
from core.runtime.log_buffers import LogRings
from core.runtime.options import RunOptions, make_env
from core.runtime.parameter_store import ParameterStore
from core.specs import EnvSpec

ROLES = {"logger": 0, "actor": 1, "learner": 2, "evaluator": 3, "tester": 4}


@dataclass
class Context:
    """Made by main, inherited by each spawned process.

    `roles` lists every process of the run in order, so that (role, index) has one number for heartbeats and logs.
    Each learner has a memory of its own: actor i writes to that of learner i modulo their number.
    """

    options: RunOptions
    spec: EnvSpec
    roles: tuple[tuple[str, int], ...]
    memories: tuple[Memory, ...]  # of the learners; none in mode 2
    parameters: ParameterStore
    clock: Clock
    logs: LogRings
    resume_from: Path | None = None   # a verified full checkpoint
    initial_weights: Path | None = None
    meeting: Rendezvous = field(default_factory=SingleLearner)  # of several learners: set by the engine
    terminal: Terminal | None = None  # where main's output is relayed to; None: it is not relayed

    def make_agent(self, device: str = "cpu", precision: str = "float32") -> Agent:
        return self.options.make_agent(self.spec, device, precision)

    def make_env(self, num_envs: int, *, training: bool, num_threads: int = 1, render_mode: str | None = None) -> Env:
        return make_env(self.options, num_envs, training=training, num_threads=num_threads, render_mode=render_mode)

    def memory_of(self, actor: int) -> tuple[Memory, int]:
        """The memory that an actor writes to, and its number among those who do."""
        number, learner = divmod(actor, len(self.memories))
        return self.memories[learner], number

    def device_of(self, learner: int) -> str:
        """One GPU each."""
        device = self.options.device
        return f"cuda:{learner}" if device == "cuda" and len(self.memories) > 1 else device

    def device_of_actor(self, actor: int) -> str:
        """That of the learner which has its experience, where both are GPUs."""
        device = self.options.actor.device
        return self.device_of(actor % len(self.memories)) if device == self.options.device == "cuda" else device

    def process_ind(self, role: str, index: int) -> int:
        return self.roles.index((role, index))

    def report(self, role: str, index: int, values: dict[str, float]) -> None:
        """Send values to the logger under "role/name", at the run's current agent steps."""
        self.logs.write(self.process_ind(role, index), {f"{role}/{name}": value for name, value in values.items()},
                        self.clock.agent_steps)

    def seed(self, role: str, index: int, salt: int = 0) -> int:
        """A seed of its own for each process of a run; `salt` separates successive lives of one process."""
        sequence = np.random.SeedSequence([self.options.seed, ROLES[role], index, salt])
        return int(sequence.generate_state(1)[0] >> 1)

    def seed_everything(self, role: str, index: int, salt: int = 0) -> np.random.Generator:
        """Seed torch's global generator for this process and return a numpy generator for the rest."""
        seed = self.seed(role, index, salt)
        torch.manual_seed(seed)
        return np.random.default_rng(seed)


Process = Callable[[Context, int], Iterator[bool]]
