"""The parts that agents of action values share: acting and exploration; and for those with a target, updates.

Each agent's own file says how its model's output becomes action values, and how it learns.
"""

from abc import abstractmethod
from threading import Lock
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, Agent, AgentParams, LearnerOutput, make_learner_output
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer, OptimizerParams, TargetUpdater
from core.model import Model, draw_noise_per_row, train_regularization
from core.ops.actions import epsilon_greedy, ladder, linear, mask_actions
from core.ops.returns import munchausen_bonus, soft_bootstrap
from core.specs import Discrete, WindowKind, WindowSpec
from core.types import Batch, State, TimeStep, TransitionBatch, Window, check_shapes, slice_batch

# Updates between two moves of the target from which its outputs are worth computing before an update.
MIN_PRECOMPUTING_PERIOD = 100


@frozen_dataclass
class ActionValueParams(OptimizerParams, AgentParams):
    optimizer_eps: float = Field(default=1.5e-4, gt=0, le=1)
    """Added to the root of Adam's second moment (Rainbow: 1.5e-4); for RMSProp see rmsprop_eps_in_root."""
    clip_norm: float = Field(default=10.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; 0 is off."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    exploration: Literal["linear", "ladder", "linear-ladder"] = "linear"
    """Epsilon falls (linear), differs between environments (ladder), or falls to those values (linear-ladder)."""
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

    By "linear" epsilon falls from the first update on, as in Nature DQN's code. By "ladder" it differs between
    environments and is fixed, and by "linear-ladder" it falls to that ladder.
    """

    def __init__(
        self, params: ActionValueParams, final_epsilon: np.ndarray, generator: np.random.Generator, training: bool
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
    _is_acting = False  # the mode of noisy layers, dropout and batch statistics

    def set_training(self, training: bool, acting: bool = False) -> None:
        """Switch noisy layers on (acting in training, learning) or off, dropout and batch statistics on in learning."""
        switched = self.model.training != training
        super().set_training(training)
        if switched or self._is_acting != acting:
            draw_noise_per_row(self.model, acting)
            train_regularization(self.model, training and not acting)
            self._is_acting = acting

    def values(self, timestep: TimeStep, state: State) -> tuple[Tensor, State]:
        """Return the action values [E, A] of E environments, and the next recurrent state."""
        output, state = self.model(on_device(timestep.observation, self.device), state)
        return self.expected(output), state

    def expected(self, output: Tensor) -> Tensor:
        """Return the action values [E, A] of a model's output, which an agent of distributions takes the mean of."""
        return output

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        self.set_training(exploration is not None and exploration.training, acting=True)
        output, state = self.values(timestep, state)
        num_actions: int = self.spec.action.num_actions  # type: ignore[union-attr]
        if output.shape[1] != num_actions:
            raise ValueError(f"the model gives values of {output.shape[1]} actions, and there are {num_actions}")
        legal = timestep.action_mask
        values = mask_actions(output, None if legal is None else on_device(legal, self.device)).cpu().numpy()  # [E, A]
        action = values.argmax(1)
        if exploration is not None:
            action = epsilon_greedy(action, num_actions, exploration.epsilon, exploration.generator, legal)
        q_taken = np.take_along_axis(values, action[:, None], 1)[:, 0]
        return ActorOutput(action, {"q_taken": q_taken, "q_max": values.max(1)}, state)

    def greedy(self, output: Tensor, legal: Tensor | None = None) -> dict[str, Tensor]:
        values = self.expected(output)
        return {"action": mask_actions(values, legal).argmax(1), "values": values}

    def policy_diagnostics(self, output: ActorOutput) -> dict[str, np.ndarray]:
        return {"value, best and taken": np.stack([output.extras["q_max"], output.extras["q_taken"]], 1)}

    def exploration(
        self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator
    ) -> EpsilonGreedy:
        params = self.params
        if params.exploration == "linear":
            return EpsilonGreedy(params, np.full(num_envs, params.exploration_epsilon_end), generator, training=True)
        rungs = ladder(num_actors * num_envs, params.apex_epsilon_base, params.apex_epsilon_alpha)
        return EpsilonGreedy(params, rungs[actor_ind::num_actors], generator, training=True)

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> EpsilonGreedy | None:
        epsilon = self.params.evaluation_epsilon
        return EpsilonGreedy(self.params, np.full(num_envs, epsilon), generator, training=False) if epsilon else None


@frozen_dataclass
class QLearningParams(ActionValueParams):
    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Windows in a batch (Nature DQN: 32, Ape-X: 512)."""
    n_step: int = Field(default=3, ge=1, le=100)
    """Steps of the return before it bootstraps (Rainbow, Ape-X: 3)."""
    double_q: bool = True
    """Choose the bootstrap action with the online network and evaluate it with the target."""
    target_update_period: int = Field(default=2_500, ge=1, le=10**9)
    """Updates between updates of the target (Nature DQN, which copies every 10 k agent steps, and Ape-X: 2,500)."""
    target_update_tau: float = Field(default=1.0, gt=0, le=1)
    """Weight of the online network in an update of the target; 1 copies it."""


@frozen_dataclass
class MunchausenParams(QLearningParams):
    """Options of agents whose targets may be Munchausen's (2007.14430).

    Of an n-step return only the first reward has the bonus, as in BTR (2411.03820).
    """

    munchausen_alpha: float = Field(default=0.0, ge=0, le=1)
    """Weight of the scaled log-policy that is added to rewards (Munchausen: 0.9); 0 is off, also for what follows."""
    munchausen_temperature: float = Field(default=0.03, gt=0, le=1e6)
    """Temperature of the soft policy softmax(q / temperature) of the target (Munchausen: 0.03)."""
    munchausen_clip: float = Field(default=-1.0, ge=-1e9, le=0)
    """Smallest scaled log-policy; smaller ones are clipped (Munchausen: -1)."""


class Precomputed(NamedTuple):
    """Inputs of an update, and outputs of the target network, which do not depend on the online network."""

    inputs: Any  # QLearning.learning_inputs
    target_outputs: tuple[Tensor, ...]  # QLearning.target_outputs
    target_version: int  # moves of the target before these outputs


class QLearning(ActionValueAgent):
    """Base of agents with a target network, whose windows are n-step transitions unless a subclass says otherwise."""

    window_kinds: ClassVar[tuple[WindowKind, ...]] = ("transitions",)

    @classmethod
    def problems(cls, params: Any) -> list[str]:
        alpha = getattr(params, "munchausen_alpha", 0.0)
        if not alpha or not params.double_q:
            return []
        return [
            f"agent.munchausen_alpha={alpha} needs agent.double_q=False: its target averages over a soft policy and "
            "chooses no action"
        ]

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec.transition(self.params.n_step)

    # learning ---------------------------------------------------------------------------------------------------------
    def init_learner(self) -> None:
        self.target = self._make_target()
        self._optimizer = Optimizer(self.model.parameters(), self.params, run_progress=lambda: self.run_progress)
        self._update_target = TargetUpdater(self.params.target_update_period, self.params.target_update_tau)
        # The lock is held while the target computes, moves or is saved, because `precompute` runs in another thread.
        self._target_lock, self._target_version = Lock(), 0

    @classmethod
    def can_precompute(cls, params: QLearningParams) -> bool:
        """Return True if the target stays for many updates, and moves in the `learn` of this class alone.

        A subclass whose own `learn` changes the target, as resets do, neither takes the lock nor counts the change.
        """
        return cls.learn is QLearning.learn and params.target_update_period >= MIN_PRECOMPUTING_PERIOD

    def precompute(self, batch: Batch) -> Precomputed:
        inputs = self.learning_inputs(batch.window)
        with self._target_lock, torch.no_grad():
            return Precomputed(inputs, self.target_outputs(inputs), self._target_version)

    def inputs_and_target_outputs(self, batch: Batch) -> Precomputed:
        """Return `Batch.precomputed`, or compute it now if it is missing or the target has moved since."""
        ready: Precomputed | None = batch.precomputed
        return self.precompute(batch) if ready is None or ready.target_version != self._target_version else ready

    def target_outputs(self, inputs: Any) -> tuple[Tensor, ...]:
        """Compute what the target network makes of the next observations and, for Munchausen, of the observations.

        Args:
            inputs: `learning_inputs` of B windows.

        Returns:
            One or two outputs, each [B, ...].
        """
        observations = [inputs.next_observation]
        if getattr(self.params, "munchausen_alpha", 0.0):
            observations.append(inputs.observation)
        return tuple(self.output_of(self.target, observation) for observation in observations)

    def output_of(self, model: Model, observation: Tensor) -> Tensor:
        """Compute a network's output [B, A, ...]."""
        output: Tensor = model(observation, ())[0]
        return output

    def bootstrap(
        self, transitions: TransitionBatch, next_output: Tensor, output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute what the returns bootstrap from, and the returns.

        Args:
            transitions: B transitions.
            next_output: [B, A, ...] of the target network, for the next observations.
            output: [B, A, ...] of the target network, for the observations; given for Munchausen's bonus.

        Returns:
            The target network's output [B, ...] of the best next action, or Munchausen's mixture; and R [B], to which
            Munchausen's bonus is added.
        """
        params, legal, returns = self.params, transitions.next_legal, transitions.returns
        if output is not None:
            alpha, temperature, clip = params.munchausen_alpha, params.munchausen_temperature, params.munchausen_clip
            next_values = mask_actions(self.expected(next_output), legal)
            values = mask_actions(self.expected(output), transitions.legal)
            returns = returns + munchausen_bonus(values, transitions.action, alpha, temperature, clip)
            return soft_bootstrap(next_values, next_output, temperature), returns
        chooser = self.output_of(self.model, transitions.next_observation) if params.double_q else next_output
        best = mask_actions(self.expected(chooser), legal).argmax(1)
        return select_actions(next_output, best), returns

    def learning_inputs(self, window: Window) -> Any:
        """Return what windows hold for an update, on the agent's device: n-step transitions, preprocessed."""
        return self.n_step_transitions(window, self.params.gamma, self.params.n_step)

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """Compute the mean loss of the windows, their priorities, and statistics that are means too."""

    def weighted_mean(self, losses: Tensor, batch: Batch) -> Tensor:
        """Return the mean of the windows' losses [B], each times its importance weight."""
        check_shapes("B", losses, batch.weights)
        return (batch.weights.to(self.device) * losses).mean()

    def learn(self, batch: Batch) -> LearnerOutput:
        def loss(part: slice | None) -> Loss:  # of inputs that every reader in `loss` shares, however they are drawn
            windows = slice_batch(batch, part)
            return self.loss(windows._replace(precomputed=self.inputs_and_target_outputs(windows)))

        self.set_training(True)
        total, grad_norm, applied = self._optimizer.minimise(len(batch.weights), loss)
        update = self._optimizer.steps_begun
        if self._update_target.may_move(update, applied):
            with self._target_lock:  # which may wait for a whole `precompute`
                if self._update_target(self.target, self.model, update, applied) is True:
                    self._target_version += 1
        self.model.update_normalization(batch.window.observations[:-1].flatten(0, 1))
        statistics = {"loss": total.loss, "grad_norm": grad_norm, "lr": self._optimizer.last_lr, **total.statistics}
        return make_learner_output(statistics, total.priorities, applied)

    def prepare_updates(self, count: int) -> None:
        self._optimizer.plan(count)
        self._update_target.plan(self._optimizer.steps_begun + 1, count, self.device)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> dict[str, Any]:
        return {"model": self.model, "target": self.target, "optimizer": self._optimizer}

    def state_dict(self) -> dict[str, Any]:
        # While `precompute` runs the target in bfloat16, its layers hold rounded copies of their weights.
        with self._target_lock:
            return super().state_dict()


def select_actions(output: Tensor, actions: Tensor) -> Tensor:
    """Return the outputs [B, ...] of actions [B] among outputs [B, A, ...]."""
    index = actions.view(-1, *[1] * (output.dim() - 1)).expand(-1, 1, *output.shape[2:])
    return output.gather(1, index)[:, 0]
