"""The agent contract: what it stores, how it acts, how it learns.

An agent sees a model, a batch and ops; never a process, a clock, a file or an environment class. Constructing one is cheap: networks,
optimiser and target are made on first use, in the process that needs them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.model import Model
from core.specs import ArraySpec, EnvSpec, WindowSpec
from core.types import Batch, State, TimeStep, Window, batch_size


@frozen_dataclass
class AgentParams:
    """Options of every agent. `Agent.Params` of each agent is a subclass."""

    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Windows in a batch."""


class ActorOutput(NamedTuple):
    action: np.ndarray             # [E, ...] as the action space wants it
    extras: dict[str, np.ndarray]  # each [E, ...]: the row fields that `Agent.extras` declares, and features if it has them
    state: State


class LearnerOutput(NamedTuple):
    statistics: dict[str, Tensor]  # scalars, left on their device; an update need not have all that another has
    priorities: Tensor | None      # [B], non-negative
    skipped: bool | Tensor = False  # the loss or its gradient was not finite, nothing changed; a tensor once updates are planned


def output_of(statistics: dict[str, Tensor], priorities: Tensor | None, stepped: bool | Tensor) -> LearnerOutput:
    """Of an update whose step was taken or not, as the optimiser said: a tensor once updates are planned, and then priorities of a skipped
    one are NaN."""
    if isinstance(stepped, Tensor):
        return LearnerOutput(statistics, None if priorities is None else torch.where(stepped, priorities, torch.nan), ~stepped)
    return LearnerOutput(statistics, priorities if stepped else None, not stepped)


def samples_of(agent: "Agent", batch: Batch) -> int:
    """Return the agent steps learnt from in a batch on the CPU."""
    return batch_size(batch) * agent.samples_per_window - int(agent.idle(batch.window))


class Exploration(Protocol):
    """How one actor departs from the greedy policy; made by the agent, kept by the actor, changing with the run's agent steps."""

    def update(self, agent_steps: int) -> None: ...

    def statistics(self) -> dict[str, float]: ...


class Engine(Protocol):
    def run(self, roles: list[tuple[str, int]]) -> int: ...


class Agent(ABC):
    """One algorithm. Class attributes say what it can be combined with, so that impossible rows are found before a start."""

    Params: ClassVar[type[AgentParams]] = AgentParams
    captures: ClassVar[bool] = False     # its updates can be planned, so that they can be captured
    samples_per_window: int = 1          # rows learnt from in one window
    first_sample: int = 0                # the first of them
    head: ClassVar[str]                  # the Model.head it needs
    actions: ClassVar[type]              # Discrete or Continuous
    memories: ClassVar[tuple[str, ...]]  # memory types it can learn from

    def __init__(self, params: Any, spec: EnvSpec, make_model: Callable[[], Model]):
        self.params, self.spec, self._make_model = params, spec, make_model

    @classmethod
    def period(cls, params: Any) -> int:
        """Updates after which what python decides in `learn` by counting them repeats: so many, or a multiple, can be planned at once."""
        return 1

    @classmethod
    def problems(cls, params: Any) -> list[str]:
        """What is wrong with settings that are each within their bounds, one sentence each."""
        return []

    # what it stores and samples ---------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def window(self) -> WindowSpec: ...

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """Row fields of its own, written by `act`."""
        return {}

    @property
    def feature_field(self) -> ArraySpec:
        """Of the row field "features", for memories that compare what networks make of a state."""
        raise NotImplementedError(f"{type(self).__name__} gives no features")

    def features(self, window: Window) -> Tensor:
        """What the network makes of these windows' observations today, [T, B, F]; as `act` stored it under "features"."""
        raise NotImplementedError(f"{type(self).__name__} gives no features")

    def idle(self, window: Window) -> Tensor:
        """Return how many of the rows learnt from end an episode, a scalar: no action was taken there, so they are no samples."""
        return window.lasts[self.first_sample:self.first_sample + self.samples_per_window].count_nonzero()

    def initial_priorities(self, window: Window) -> np.ndarray | None:
        """Priorities [B] of fresh windows without observations, from what the actor stored; None: the largest seen so far."""
        return None

    # the actor's side -------------------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def model(self) -> Model:
        """The network that acts and whose parameters are shared."""

    def initial_state(self, batch_size: int) -> State:
        """What `act` is given for streams whose episode starts, each tensor [B, ...]."""
        return self.model.initial_state(batch_size)

    @abstractmethod
    def act(self, timestep: TimeStep, state: State, exploration: Exploration | None) -> ActorOutput:
        """Actions of E streams; exploration None: greedy. Runs under inference mode."""

    def greedy(self, output: Any) -> dict[str, Tensor]:
        """Return what the model's output for B observations stands for, as an exported network gives it.

        "action" [B, ...] is the greedy one, as the action space wants it; what it was chosen from has names of its own, each [B, ...].
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how actions follow from its network: it needs `greedy`")

    def outlook(self, output: ActorOutput) -> dict[str, np.ndarray]:
        """What a recording draws beside the game: what was made of the streams when these actions were chosen, each [E] or [E, N]."""
        return {}

    @abstractmethod
    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> Exploration: ...

    @abstractmethod
    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> Exploration | None: ...

    # the learner's side -----------------------------------------------------------------------------------------------
    @abstractmethod
    def learn(self, batch: Batch) -> LearnerOutput:
        """One update."""

    def plan(self, count: int) -> None:
        """The next `count` updates, a multiple of `period`, may be recorded and replayed: what is known ahead and changes from one to the
        next goes to the device.

        From then on python reads no tensor in `learn`: an update that is skipped says so by a tensor and by priorities that are NaN. Only
        agents with `captures` have it.
        """
        raise NotImplementedError(f"updates of {type(self).__name__} cannot be captured")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that continue learning exactly: weights, target, optimiser, schedules, counters."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    # its processes ----------------------------------------------------------------------------------------------------
    def launch(self, engine: Engine, mode: int, num_actors: int = 1, num_learners: int = 1) -> int:
        """Hand the table of single-processes to the engine; returns the exit code."""
        if mode == 2:
            return engine.run([("tester", 1)])
        return engine.run([("logger", 1), ("actor", num_actors), ("learner", num_learners), ("evaluator", 1)])
