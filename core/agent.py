"""The agent contract: stored fields and sampled windows, acting, learning.

An agent sees a model, a batch and ops; never a process, a clock, a file or an environment class. Constructing an agent
is cheap, because its network is built on first access and everything that only a learner needs by `init_learner`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from types import UnionType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.common.settings import frozen_dataclass
from core.model import Model
from core.ops.returns import bootstrap_position, n_step_return
from core.specs import ArraySpec, EnvSpec, WindowKind, WindowSpec
from core.types import ACTION_MASK, Batch, State, TimeStep, TransitionBatch, Window, check_scalar


@frozen_dataclass
class AgentParams:
    """Options of every agent. `Agent.Params` of each agent is a subclass."""

    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Windows in a batch."""


class ActorOutput(NamedTuple):
    """Actions of E environments, fields to store with them, and the next recurrent state."""

    action: np.ndarray  # [E, ...] as the action space wants it
    extras: dict[str, np.ndarray]  # each [E, ...]: the fields of `Agent.extras`, and features if the agent has them
    state: State


class LearnerOutput(NamedTuple):
    """Metrics and priorities of one update."""

    statistics: dict[str, Tensor]  # scalars, left on their device; updates may report different names
    priorities: Tensor | None  # [B], non-negative
    # A loss or gradient was not finite, so that an optimiser step was left out; a tensor after `prepare_updates`.
    skipped: bool | Tensor = False


def make_learner_output(
    statistics: dict[str, Tensor], priorities: Tensor | None, applied: bool | Tensor
) -> LearnerOutput:
    """Build the output of one update.

    Args:
        statistics: Scalar tensors by name; they are detached.
        priorities: [B] new priorities of the windows, if the agent computes any.
        applied: True if the optimiser took its step. After `prepare_updates` it is a tensor, and the priorities of a
            skipped update become NaN.

    Raises:
        ValueError: a statistic is no scalar tensor.
    """
    for name, value in statistics.items():
        check_scalar(f"statistic {name!r} of an update", value)
    statistics = {name: value.detach() for name, value in statistics.items()}
    if isinstance(applied, Tensor):
        priorities = None if priorities is None else torch.where(applied, priorities, torch.nan)
        return LearnerOutput(statistics, priorities, ~applied)
    return LearnerOutput(statistics, priorities if applied else None, not applied)


class Exploration(Protocol):
    """One actor's departure from the greedy policy.

    The agent makes it and the actor keeps it. `update` adapts it to the agent steps of the run, and to
    `learning_steps`: those after rate_limiter.min_replay_size, when learning starts.
    """

    def update(self, agent_steps: int, learning_steps: int) -> None: ...

    def statistics(self) -> dict[str, float]: ...


@runtime_checkable
class Engine(Protocol):
    """The contract of an engine."""

    def run(self) -> int:
        """Run the single-processes of its context and return the exit code when they have ended."""


class Agent(ABC):
    """One algorithm.

    Class attributes say what an agent can be combined with, so that impossible configs are refused before a start.
    """

    Params: ClassVar[type[AgentParams]] = AgentParams
    # `prepare_updates` is implemented, and updates may be captured and compiled. A subclass does not inherit it: what
    # Python computes in the methods that it overrides would stay as it was in the recorded update.
    supports_cuda_graphs: ClassVar[bool] = False
    required_output: ClassVar[str]  # the Model.output_kind that it needs
    # Of core/specs.py: Discrete, MultiDiscrete, Continuous, Mixed, or several.
    actions: ClassVar[type | UnionType | tuple[type, ...]]
    uses_action_masks: ClassVar[bool] = False  # it takes legal actions of TimeStep.action_mask only, and learns so
    window_kinds: ClassVar[tuple[WindowKind, ...]]  # kinds of windows that it can learn from
    # Option whose value training adapts from its start -> option that switches this on: SAC's temperature ->
    # learn_temperature. Checkpoints keep what was learnt, and a resumed run goes on with it.
    trained_options: ClassVar[Mapping[str, str]] = {}
    burn_in_steps: int = 0  # steps of one window before those that are learnt from
    run_progress: float = 0.0  # share of the run that is over, 0 to 1; the learner sets it before each update

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.supports_cuda_graphs = vars(cls).get("supports_cuda_graphs", False)

    def __init__(self, params: Any, spec: EnvSpec, make_model: Callable[[], Model]):
        self.params, self.spec, self._make_model = params, spec, make_model

    @classmethod
    def update_cycle(cls, params: Any) -> int:
        """Return the number of updates after which Python's decisions in `learn` repeat.

        A CUDA graph holds a multiple of it.
        """
        return 1

    @classmethod
    def compiled_calls(cls, params: Any) -> int:
        """Return how often an update calls compiled work: once, or once for each call of a part (`compile_parts`)."""
        return 1

    @classmethod
    def can_precompute(cls, params: Any) -> bool:
        """Return True if a large part of an update can be computed before it, by `precompute`."""
        return False

    @classmethod
    def max_joint_actions(cls, params: Any) -> int:
        """Return the largest number of joint actions of a MultiDiscrete space that the agent takes as Discrete ones."""
        return 0

    @classmethod
    def problems(cls, params: Any) -> list[str]:
        """Return errors of settings that are each within their bounds, one sentence each."""
        return []

    @classmethod
    def replay_options(cls, params: Any) -> list[str]:
        """Return the options that are set and act on replayed steps alone. Without replay they are refused."""
        return []

    @classmethod
    def refuses_clipped_rewards(cls, params: Any) -> bool:
        """Return True if the agent is not to be trained on clipped rewards."""
        return False

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    @abstractmethod
    def window(self) -> WindowSpec:
        """Return the shape of the windows that it learns from."""

    @cached_property
    def samples_per_window(self) -> int:
        """The steps of one window that are learnt from, by which the pace and the progress of a run are counted.

        These are all steps of windows with a stride, and one of other windows. An agent that learns from fewer sets it.
        """
        return self.window.length if self.window.stride else 1

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """Return the fields of its own that `act` stores with each step."""
        return {}

    @property
    def feature_field(self) -> ArraySpec:
        """Return the spec of the stored field "features", for memories that compare states by them."""
        raise NotImplementedError(f"{type(self).__name__} gives no features")

    def features(self, window: Window) -> Tensor:
        """Compute the network's current features [T, B, F] of windows, for which `act` stored earlier ones."""
        raise NotImplementedError(f"{type(self).__name__} gives no features")

    def count_samples(self, batch: Batch) -> int:
        """Count the agent steps learnt from in a batch on the CPU. Steps that end an episode have no action."""
        lasts = batch.window.lasts[self.burn_in_steps : self.burn_in_steps + self.samples_per_window]
        return len(batch.weights) * self.samples_per_window - int(lasts.count_nonzero())

    def initial_priorities(self, window: Window) -> np.ndarray | None:
        """Compute priorities [B] of new windows without observations, from the actor's stored fields.

        If None, new windows get the largest priority seen so far.
        """
        return None

    # acting -----------------------------------------------------------------------------------------------------------
    @cached_property
    def model(self) -> Model:
        """The network that acts and whose parameters are shared; built on first access."""
        with torch.inference_mode(False):  # the first access may be that of `act`
            return self._make_model()

    @cached_property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.model.parameters()).device

    def initial_state(self, batch_size: int) -> State:
        """Return the state for `act` at the start of every episode, each tensor [B, ...]. Actors call it once."""
        return self.model.initial_state(batch_size)

    @abstractmethod
    def act(self, timestep: TimeStep, state: State, exploration: Exploration | None) -> ActorOutput:
        """Choose actions for E environments, under inference mode. If `exploration` is None, they are greedy."""

    def greedy(self, output: Any, legal: Tensor | None = None) -> dict[str, Tensor]:
        """Return the named outputs of an exported network.

        Args:
            output: The model's output for B observations.
            legal: [B, A] bool, the legal actions; given if the environment has masks.

        Returns:
            "action" [B, ...] is the greedy action as the action space wants it. The values it was chosen by have
            further names, each [B, ...].
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} does not say how actions follow from its network: it needs `greedy`")

    def policy_diagnostics(self, output: ActorOutput) -> dict[str, np.ndarray]:
        """Return curves for recordings: quantities by which these actions were chosen, each [E] or [E, N]."""
        return {}

    @abstractmethod
    def exploration(
        self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator
    ) -> Exploration:
        """Make the exploration of one actor in training, which `act` gets.

        With `actor.num_env_splits`, each split of an actor's environments has its own. `actor_ind` and `num_actors`
        then count the splits of all actors.
        """

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> Exploration | None:
        """Make the exploration of evaluations. If None, evaluations are greedy."""
        return None

    # learning ---------------------------------------------------------------------------------------------------------
    def set_training(self, training: bool) -> None:
        """Switch dropout and batch statistics of the model on (learning) or off (acting)."""
        if self.model.training != training:
            self.model.train(training)

    def _make_target(self) -> Model:
        """Return a frozen copy of the model."""
        target = copy.deepcopy(self.model).requires_grad_(False)
        for module in target.modules():
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # of which cuDNN wants one block, and a copy has many
        return target

    def n_step_transitions(self, window: Window, gamma: float, n_step: int | None = None) -> TransitionBatch:
        """Return preprocessed n-step transitions of B windows, on the agent's device.

        Args:
            window: Windows of `Agent.window`. They may be longer than n steps, and have further observations.
            gamma: Discount of a step.
            n_step: Steps n of the return. If None, those of the window.

        Raises:
            ValueError: the windows lack the observation of step 0 or of step n, or `Agent.window` has changed since the
                start.
        """
        spec = self.window
        if not spec.fits(window):
            raise ValueError(
                f"{type(self).__name__}.window is {spec}, and the windows have {len(window.lasts) - 1} steps and "
                f"{len(window.observations)} observations, as it asked for at the start: if n changes, let it ask for "
                "the observations of every n, and pass n_step"
            )
        n_step = spec.length if n_step is None else n_step
        if missing := {0, n_step} - {*spec.observations}:
            raise ValueError(
                f"{type(self).__name__}.window has no observation {max(missing)}, which {n_step}-step returns need"
            )
        rewards, discounts, lasts = (field[: n_step + 1] for field in (window.rewards, window.discounts, window.lasts))
        returns, bootstrap_discounts = n_step_return(rewards, discounts, lasts, gamma)
        stored = window.observations
        if spec.observations != (0, n_step):
            stored = torch.stack([stored[spec.observations.index(step)] for step in (0, n_step)])
        stored = stored.to(self.device, non_blocking=True)  # [2, B, ...]
        observations = self.model.preprocess(stored.flatten(0, 1)).unflatten(0, stored.shape[:2])
        fields = [window.actions[0], returns, bootstrap_discounts]
        if (masks := window.extras.get(ACTION_MASK)) is not None:  # [T + 1, B, A]
            position = bootstrap_position(lasts)[None, :, None].expand(1, -1, masks.shape[2])
            fields += [masks[0], masks.gather(0, position)[0]]
        action, returns, bootstrap_discounts, *legal_masks = (field.to(self.device) for field in fields)
        legal, next_legal = legal_masks or (None, None)
        return TransitionBatch(
            observations[0], action, returns, bootstrap_discounts, observations[1], legal, next_legal
        )

    @abstractmethod
    def init_learner(self) -> None:
        """Build everything that only a learner needs: optimisers, target network, counters.

        A learner calls this once, when the network has its first weights, and before every method below. Actors never
        call it.
        """

    @abstractmethod
    def learn(self, batch: Batch) -> LearnerOutput:
        """Make one update."""

    def precompute(self, batch: Batch) -> Any:
        """Compute `Batch.precomputed` for a later `learn` while another thread makes earlier updates.

        Only agents that `can_precompute` implement this. What earlier updates made invalid, `learn` computes again.
        """
        raise NotImplementedError(f"{type(self).__name__} computes nothing before its updates")

    def prepare_updates(self, count: int) -> None:
        """Put the scheduled values of the next `count` updates, a multiple of `update_cycle`, on the device.

        From then on `learn` never reads a tensor in Python, so that updates can run as a CUDA graph: a skipped update
        reports so by a tensor and by NaN priorities. Only agents with `supports_cuda_graphs` implement this.
        """
        raise NotImplementedError(f"updates of {type(self).__name__} cannot be captured")

    def compile_parts(self, compiled: Callable[[Callable[[], None], int], Callable[[], None]]) -> bool:
        """Let parts of an update be compiled in place of the whole update; return True if this agent has such parts.

        Args:
            compiled: Makes a compiled callable of a part and of the number of its calls after which it repeats.
        """
        return False

    @abstractmethod
    def checkpoint_parts(self) -> dict[str, Any]:
        """Return by name what continues learning exactly: networks, optimisers, counters.

        Each has `state_dict` and `load_state_dict`, whose states are tensors and plain values.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the checkpoint's parts, and plain values or tensors that a subclass adds."""
        return {name: part.state_dict() for name, part in self.checkpoint_parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. The order of its keys means nothing.

        Raises:
            ValueError: the state lacks a part, such as one that the agent's class did not have when it was stored.
        """
        parts = self.checkpoint_parts()
        if missing := parts.keys() - state.keys():
            name = type(self).__name__
            raise ValueError(f"it lacks {', '.join(sorted(missing))}, which {name}.checkpoint_parts now names")
        for name, part in parts.items():
            part.load_state_dict(state[name])

    # processes --------------------------------------------------------------------------------------------------------
    def single_processes(self, mode: int, num_actors: int, num_learners: int) -> tuple[tuple[str, int], ...]:
        """Return the single-processes of a run as (role, index), in the order in which they start."""
        counts = {"logger": 1, "actor": num_actors, "learner": num_learners, "evaluator": 1}
        if mode == 2:
            counts = {"tester": 1}
        return tuple((role, index) for role, count in counts.items() for index in range(count))

    def launch(self, engine: Engine) -> int:
        """Let the engine run this agent's single-processes to their end and return its exit code."""
        return engine.run()
