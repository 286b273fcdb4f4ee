"""What the agents of action values share: acting, exploring, the target network, checkpoints. Their own files say how they learn."""

from abc import abstractmethod
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, Agent, AgentParams, LearnerOutput, output_of
from core.common.settings import frozen_dataclass
from core.learning.device_schedule import UpdateCounter
from core.learning.microbatches import Loss
from core.learning.optimizer import Optimizer, OptimizerParams
from core.learning.target_network import TargetUpdater
from core.model import Model, disable_host_sync
from core.ops.exploration import epsilon_greedy, ladder, linear
from core.specs import Discrete
from core.types import Batch, State, TimeStep, batch_size, piece


@frozen_dataclass
class QLearningParams(OptimizerParams, AgentParams):
    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Windows in a batch (Nature DQN: 32, Ape-X: 512)."""
    nstep: int = Field(default=3, ge=1, le=100)
    """Steps of the return before it bootstraps (Rainbow, Ape-X: 3)."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    double: bool = True
    """Choose the bootstrap action with the online network and evaluate it with the target."""
    target_update: float = Field(default=2_500.0, gt=0, le=1e9)
    """Updates between copies to the target; below 1 the factor of a soft update each time."""
    exploration: Literal["linear", "ladder", "linear-ladder"] = "linear"
    """Schedule by which epsilon falls, or differs between environments."""
    epsilon_start: float = Field(default=1.0, ge=0, le=1)
    """Share of random actions at first."""
    epsilon_end: float = Field(default=0.01, ge=0, le=1)
    """Share of random actions at the end of exploration "linear"."""
    epsilon_steps: int = Field(default=250_000, ge=1, le=10**12)
    """Agent steps of the whole run from epsilon_start to epsilon_end (or to the ladder)."""
    ladder_base: float = Field(default=0.4, gt=0, le=1)
    """Base of the ladder, base ^ (1 + alpha i / (N - 1)) over all N environments (Ape-X: 0.4)."""
    ladder_alpha: float = Field(default=7.0, ge=0, le=1_000)
    """Exponent alpha of the ladder (Ape-X: 7)."""
    evaluation_epsilon: float = Field(default=0.0, ge=0, le=1)
    """Share of random actions in evaluations (Nature DQN: 0.05)."""


class EpsilonGreedy:
    """Exploration of E streams: a linear decay, a fixed ladder, or a decay that ends at the ladder."""

    def __init__(self, params: QLearningParams, targets: np.ndarray, generator: np.random.Generator, training: bool = True):
        self._params, self._targets, self.generator, self.training = params, targets, generator, training
        self.epsilon = targets  # [E]

    def update(self, agent_steps: int) -> None:
        params = self._params
        if params.exploration != "ladder":
            progress = linear(agent_steps, 0.0, 1.0, params.epsilon_steps)
            self.epsilon = params.epsilon_start + (self._targets - params.epsilon_start) * progress

    def statistics(self) -> dict[str, float]:
        return {"epsilon": float(self.epsilon.mean())}


class QLearning(Agent):
    """Subclasses say what `head` their model has, how its output becomes action values, and what its loss is."""

    actions = Discrete
    memories = ("shared", "prioritized")
    _model: Model | None = None
    _target: Model | None = None

    # the actor's side -------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self._make_model()
        return self._model

    @cached_property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def set_training(self, training: bool) -> None:
        """Networks with noise have it while acting in training and while learning, not in evaluation."""
        if self.model.training != training:
            self.model.train(training)

    @abstractmethod
    def values(self, timestep: TimeStep, state: State) -> tuple[Tensor, State]:
        """Action values [E, A] of what E streams see, and the next recurrent state."""

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        self.set_training(exploration is not None and exploration.training)
        output, state = self.values(timestep, state)
        values = output.cpu().numpy()  # [E, A]
        action = values.argmax(1)
        if exploration is not None:
            action = epsilon_greedy(action, values.shape[1], exploration.epsilon, exploration.generator)
        taken = np.take_along_axis(values, action[:, None], 1)[:, 0]
        return ActorOutput(action, {"q_taken": taken, "q_max": values.max(1)}, state)

    def greedy(self, output: Tensor) -> dict[str, Tensor]:
        return {"action": output.argmax(1), "values": output}

    def outlook(self, output: ActorOutput) -> dict[str, np.ndarray]:
        return {"value, best and taken": np.stack([output.extras["q_max"], output.extras["q_taken"]], 1)}

    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> EpsilonGreedy:
        params = self.params
        rungs = ladder(num_actors * num_envs, params.ladder_base, params.ladder_alpha)
        flat = np.full(num_envs, params.epsilon_end)
        targets = flat if params.exploration == "linear" else rungs[actor_ind::num_actors]
        return EpsilonGreedy(params, targets, generator)

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> EpsilonGreedy | None:
        epsilon = self.params.evaluation_epsilon
        return EpsilonGreedy(self.params, np.full(num_envs, epsilon), generator, training=False) if epsilon else None

    # the learner's side -----------------------------------------------------------------------------------------------
    @property
    def target(self) -> Model:
        """The network that values what comes after a step; made, with the optimiser, when learning begins."""
        if self._target is None:
            self._target = self._make_model().requires_grad_(False)
            self._target.load_state_dict(self.model.state_dict())
            self._optimizer = Optimizer(self.model.parameters(), self.params)
            self._updates, self._follow = UpdateCounter(), TargetUpdater(self.params.target_update)
        return self._target

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """The mean loss of these windows, with priorities and what is reported: means too."""

    def learn(self, batch: Batch) -> LearnerOutput:
        self.set_training(True)
        self.target  # noqa: B018  made, with the optimiser, if nothing was learnt yet
        found, grad_norm, stepped = self._optimizer.minimise(batch_size(batch), lambda part: self.loss(piece(batch, part)))
        self._follow(list(self.target.state_dict().values()), list(self.model.state_dict().values()), self._updates.next(), stepped)
        statistics = {"loss": found.loss, "grad_norm": grad_norm, "lr": self._optimizer.rate, **found.statistics}
        return output_of(statistics, found.priorities, stepped)

    def plan(self, count: int) -> None:
        for network in (self.target, self.model):
            disable_host_sync(network)
        self._follow.plan(self._updates.made + 1, count, self.device)
        self._optimizer.plan(count)
        self._updates.plan(count)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "target": self.target.state_dict(),
                "optimizer": self._optimizer.state_dict(), "updates": self._updates.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target.load_state_dict(state["target"])
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates.restore(state["updates"])
