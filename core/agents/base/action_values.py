"""The part that agents of action values share: acting, exploration and the schedule of epsilon.

Each agent's own file says how its model's output becomes action values, and how it learns.
"""

from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, Agent, AgentParams
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.learning.optimizer import OptimizerParams
from core.model import draw_noise_per_row
from core.ops.actions import epsilon_greedy, ladder, linear, mask_actions, mask_actions_of_arrays
from core.specs import Discrete
from core.types import State, TimeStep


@frozen_dataclass
class ActionValueParams(OptimizerParams, AgentParams):
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    exploration: Literal["linear", "ladder", "linear-ladder"] = "linear"
    """Schedule by which epsilon falls, or differs between environments."""
    exploration_epsilon_start: float = Field(default=1.0, ge=0, le=1)
    """Share of random actions at first."""
    exploration_epsilon_end: float = Field(default=0.01, ge=0, le=1)
    """Share of random actions at the end of exploration "linear"."""
    exploration_epsilon_steps: int = Field(default=250_000, ge=1, le=10**12)
    """Agent steps of the run, after rate_limiter.min_replay_size, until epsilon is at its end (or at the ladder)."""
    apex_epsilon_base: float = Field(default=0.4, gt=0, le=1)
    """Base of the ladder, base ^ (1 + alpha i / (N - 1)) over all N environments (Ape-X: 0.4)."""
    apex_epsilon_alpha: float = Field(default=7.0, ge=0, le=1_000)
    """Exponent alpha of the ladder (Ape-X: 7)."""
    evaluation_epsilon: float = Field(default=0.0, ge=0, le=1)
    """Share of random actions in evaluations (Nature DQN: 0.05, Rainbow: 0.001)."""
    max_joint_actions: int = Field(default=1_000, ge=0, le=32_767)
    """Most combinations of a MultiDiscrete space's choices that become one Discrete action each; more are refused."""


class EpsilonGreedy:
    """Epsilon-greedy exploration of E environments.

    Epsilon falls linearly from the first update on, as in Nature DQN's code, differs between environments by a fixed
    ladder, or falls linearly to the ladder.
    """

    def __init__(
        self,
        params: ActionValueParams,
        final_epsilon: np.ndarray,
        generator: np.random.Generator,
        training: bool = True,
    ):
        self._params, self._final_epsilon, self.generator, self.training = params, final_epsilon, generator, training
        self.epsilon = final_epsilon  # [E]

    def update(self, agent_steps: int, learning_steps: int) -> None:
        params = self._params
        if params.exploration != "ladder":
            progress = linear(learning_steps, 0.0, 1.0, params.exploration_epsilon_steps)
            self.epsilon = (
                params.exploration_epsilon_start + (self._final_epsilon - params.exploration_epsilon_start) * progress
            )

    def statistics(self) -> dict[str, float]:
        return {"epsilon": float(self.epsilon.mean())}


class ActionValueAgent(Agent):
    """Base of agents that act by the values of discrete actions."""

    actions = Discrete
    uses_action_masks = True

    @classmethod
    def max_joint_actions(cls, params: ActionValueParams) -> int:
        return params.max_joint_actions

    # acting -----------------------------------------------------------------------------------------------------------
    _noise_per_row = False  # of the model's noisy layers

    def set_training(self, training: bool, acting: bool = False) -> None:
        """Switch the noise of noisy layers on (acting in training, learning) or off (evaluations)."""
        if self.model.training != training:
            self.model.train(training)
        if self._noise_per_row != acting:
            draw_noise_per_row(self.model, acting)
            self._noise_per_row = acting

    def values(self, timestep: TimeStep, state: State) -> tuple[Tensor, State]:
        """Return the action values [E, A] of E environments, and the next recurrent state."""
        values, state = self.model(on_device(timestep.observation, self.device), state)
        return values, state

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        self.set_training(exploration is not None and exploration.training, acting=True)
        output, state = self.values(timestep, state)
        values = mask_actions_of_arrays(output.cpu().numpy(), legal := timestep.action_mask)  # [E, A]
        action = values.argmax(1)
        if exploration is not None:
            action = epsilon_greedy(action, values.shape[1], exploration.epsilon, exploration.generator, legal)
        q_taken = np.take_along_axis(values, action[:, None], 1)[:, 0]
        return ActorOutput(action, {"q_taken": q_taken, "q_max": values.max(1)}, state)

    def greedy(self, output: Tensor, legal: Tensor | None = None) -> dict[str, Tensor]:
        return {"action": mask_actions(output, legal).argmax(1), "values": output}

    def policy_diagnostics(self, output: ActorOutput) -> dict[str, np.ndarray]:
        return {"value, best and taken": np.stack([output.extras["q_max"], output.extras["q_taken"]], 1)}

    def exploration(
        self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator
    ) -> EpsilonGreedy:
        params = self.params
        if params.exploration == "linear":
            return EpsilonGreedy(params, np.full(num_envs, params.exploration_epsilon_end), generator)
        rungs = ladder(num_actors * num_envs, params.apex_epsilon_base, params.apex_epsilon_alpha)
        return EpsilonGreedy(params, rungs[actor_ind::num_actors], generator)

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> EpsilonGreedy | None:
        epsilon = self.params.evaluation_epsilon
        return EpsilonGreedy(self.params, np.full(num_envs, epsilon), generator, training=False) if epsilon else None
