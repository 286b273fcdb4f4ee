"""Deep Q-learning, from Nature DQN to Ape-X by settings alone.

Nature DQN (Mnih et al. 2015), double (1509.06461), dueling (1511.06581, an option of the models), n-step, prioritised replay (1511.05952:
take the memory `prioritized`) and the epsilon ladder of Ape-X (1803.00933). Deviations: a truncated episode bootstraps from its final
observation; importance weights scale the loss of each window before the mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.agent import ActorOutput, Agent, LearnerOutput
from core.env import Discrete, TimeStep
from core.memory import Batch
from core.model import Model, State
from core.ops.exploration import epsilon_greedy, ladder, linear
from core.ops.returns import bootstrap_position, n_step_return
from core.optimizer import Optimizer, OptimizerParams
from core.settings import setting
from core.shared import ArraySpec
from core.trajectory import Window, WindowSpec

LOSSES: dict[str, Any] = {"huber": F.huber_loss, "squared": F.mse_loss}


@dataclass(frozen=True)
class DQNParams(OptimizerParams):
    batch_size: int = setting(32, low=1)                      # windows an update (Nature; Ape-X: 512)
    nstep: int = setting(3, low=1, high=100)                  # steps of the return before it bootstraps (Rainbow, Ape-X)
    gamma: float = setting(0.99, low=0, high=1)               # discount of a step
    double: bool = setting(True)                              # choose with the online network, evaluate with the target
    loss: str = setting("huber", choices=tuple(LOSSES))       # of the td error
    target_update: float = setting(2_500.0, above=0)          # below 1: soft update each time; else hard copy every that many updates
    exploration: str = setting("linear", choices=("linear", "ladder", "linear-ladder"))  # how epsilon falls
    epsilon_start: float = setting(1.0, low=0, high=1)                                   # share of random actions at first
    epsilon_end: float = setting(0.01, low=0, high=1)         # of "linear"
    epsilon_steps: int = setting(250_000, low=1)              # agent steps of the whole run from start to end (or to the ladder)
    ladder_base: float = setting(0.4, above=0, high=1)        # Ape-X: base ^ (1 + alpha i / (N - 1)) over all environments
    ladder_alpha: float = setting(7.0, low=0)                 # Ape-X: 7
    evaluation_epsilon: float = setting(0.0, low=0, high=1)   # Nature: 0.05


class EpsilonGreedy:
    """Exploration of E streams: a linear decay, a fixed ladder, or a decay that ends at the ladder."""

    def __init__(self, params: DQNParams, targets: np.ndarray, generator: np.random.Generator):
        self._params, self._targets, self.generator = params, targets, generator
        self.epsilon = targets  # [E]

    def update(self, agent_steps: int) -> None:
        params = self._params
        if params.exploration != "ladder":
            progress = linear(agent_steps, 0.0, 1.0, params.epsilon_steps)
            self.epsilon = params.epsilon_start + (self._targets - params.epsilon_start) * progress

    def statistics(self) -> dict[str, float]:
        return {"epsilon": float(self.epsilon.mean())}


class DQN(Agent):
    Params = DQNParams
    head = "q"
    actions = Discrete
    memories = ("shared", "prioritized")
    _model: Model | None = None
    _target: Model | None = None

    # what it stores and samples ---------------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec(self.params.nstep, (0, self.params.nstep))

    @property
    def extras(self) -> dict[str, ArraySpec]:
        return {"q_taken": ArraySpec((), "float32"), "q_max": ArraySpec((), "float32")}

    def initial_priorities(self, window: Window) -> np.ndarray:
        """|td| of the actor's own values: its network stands for the target (Ape-X, section 3)."""
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, self.params.gamma)
        bootstrap = window.extras["q_max"].gather(0, bootstrap_position(window.lasts)[None])[0]  # [B]
        return (returns + factors * bootstrap - window.extras["q_taken"][0]).abs().numpy()

    # the actor's side -------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self._make_model()
        return self._model

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        observation = torch.from_numpy(timestep.observation).to(self._device)
        values, state = self.model(observation, state)
        values = values.cpu().numpy()  # [E, A]
        action = values.argmax(1)
        if exploration is not None:
            action = epsilon_greedy(action, values.shape[1], exploration.epsilon, exploration.generator)
        taken = np.take_along_axis(values, action[:, None], 1)[:, 0]
        return ActorOutput(action, {"q_taken": taken, "q_max": values.max(1)}, state)

    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> EpsilonGreedy:
        params = self.params
        rungs = ladder(num_actors * num_envs, params.ladder_base, params.ladder_alpha)
        flat = np.full(num_envs, params.epsilon_end)
        targets = flat if params.exploration == "linear" else rungs[actor_ind::num_actors]
        return EpsilonGreedy(params, targets, generator)

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> EpsilonGreedy | None:
        epsilon = self.params.evaluation_epsilon
        return EpsilonGreedy(self.params, np.full(num_envs, epsilon), generator) if epsilon else None

    # the learner's side -----------------------------------------------------------------------------------------------
    def learn(self, batch: Batch) -> LearnerOutput:
        self._prepare()
        params = self.params
        window = batch.window
        returns, factors = n_step_return(window.rewards, window.discounts, window.lasts, params.gamma)
        observations = window.observations.to(self._device, non_blocking=True)  # [2, B, ...]
        target = returns.to(self._device) + factors.to(self._device) * self._bootstrap(observations[1])  # [B]
        values = self.model(observations[0], ())[0]  # [B, A]
        taken = values.gather(1, window.actions[0, :, None].to(self._device))[:, 0]  # [B]
        loss = (batch.weights.to(self._device) * LOSSES[params.loss](taken, target, reduction="none")).mean()
        grad_norm, stepped = self._optimizer.step(loss)
        self._updates += 1
        self._update_target()
        errors = (target - taken.detach()).abs()
        statistics = {"loss": loss.detach(), "grad_norm": grad_norm, "q_mean": values.detach().mean(),
                      "td_error": errors.mean(), "lr": torch.tensor(self._optimizer.lr)}
        return LearnerOutput(statistics, errors if stepped else None, skipped=not stepped)

    @torch.no_grad()
    def _bootstrap(self, observation: Tensor) -> Tensor:
        """Value of each window's final observation [B]."""
        assert self._target is not None
        values = self._target(observation, ())[0]  # [B, A]
        if not self.params.double:
            return values.amax(1)
        return values.gather(1, self.model(observation, ())[0].argmax(1, keepdim=True))[:, 0]

    @torch.no_grad()
    def _update_target(self) -> None:
        assert self._target is not None
        period = self.params.target_update
        online, target = list(self.model.state_dict().values()), list(self._target.state_dict().values())
        if period < 1:
            torch._foreach_lerp_(target, online, period)
        elif self._updates % int(period) == 0:
            torch._foreach_copy_(target, online)

    def _prepare(self) -> None:
        if self._target is None:
            self._target = self._make_model().requires_grad_(False)
            self._target.load_state_dict(self.model.state_dict())
            self._optimizer = Optimizer(self.model.parameters(), self.params)
            self._updates = 0

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        self._prepare()
        assert self._target is not None
        return {"model": self.model.state_dict(), "target": self._target.state_dict(),
                "optimizer": self._optimizer.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prepare()
        assert self._target is not None
        self.model.load_state_dict(state["model"])
        self._target.load_state_dict(state["target"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
