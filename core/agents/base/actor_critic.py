"""What the actor-critics with unrolls share: acting by sampling the policy, and what they store. Their own files say how they learn."""

from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, Agent, AgentParams
from core.common.settings import frozen_dataclass
from core.device.transfers import on_device
from core.learning.optimizer import Optimizer, OptimizerParams
from core.model import Model, disable_host_sync
from core.specs import ArraySpec, Discrete, WindowSpec
from core.types import ActorCriticOutput, State, TimeStep, Window


@frozen_dataclass
class ActorCriticParams(OptimizerParams, AgentParams):
    """Defaults of the optimiser: IMPALA's on Atari (1802.01561, table G.1)."""

    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Unrolls in a batch (IMPALA: 32)."""
    unroll_length: int = Field(default=20, ge=1, le=10_000)
    """Steps of an unroll (IMPALA: 20)."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a step."""
    evaluation: Literal["sample", "greedy"] = "sample"
    """Actions in evaluations: sampled as in training, or the likeliest one (greedy)."""
    baseline_cost: float = Field(default=0.5, ge=0, le=1e6)
    """Weight of the value loss (IMPALA: 0.5)."""
    entropy_cost: float = Field(default=0.01, ge=0, le=1e6)
    """Weight of the negative entropy (IMPALA: 0.01)."""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """Optimiser of the network."""
    lr: float = Field(default=6e-4, gt=0, le=100)
    """Learning rate at the start."""
    eps: float = Field(default=0.01, gt=0, le=1)
    """Added to the root of the optimiser's second moment."""
    rmsprop_decay: float = Field(default=0.99, ge=0, le=1)
    """Decay of RMSProp's moments (IMPALA: 0.99)."""
    rmsprop_centered: bool = False
    """Divide RMSProp's steps by the standard deviation (IMPALA: no)."""
    clip_norm: float = Field(default=40.0, ge=0, le=1e9)
    """Largest norm of the whole gradient; losses are sums over [T, B]; 0 is off."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    return torch.from_numpy(logits).softmax(-1).numpy()


class Sampling:
    """The policy itself explores."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def update(self, agent_steps: int) -> None:
        """Nothing decays."""

    def statistics(self) -> dict[str, float]:
        return {}


class ActorCriticAgent(Agent):
    head = "actor-critic"
    actions = Discrete
    _model: Model | None = None

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.samples_per_window = self.params.unroll_length

    # what it stores and samples ---------------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        length = self.params.unroll_length
        return WindowSpec(length, tuple(range(length + 1)), crosses_episodes=True, stride=length)

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """Behaviour logits and value."""
        assert isinstance(self.spec.action, Discrete)
        return {"logits": ArraySpec((self.spec.action.num_actions,), "float32"), "value": ArraySpec((), "float32")}

    @property
    def feature_field(self) -> ArraySpec:
        return ArraySpec((self.model.feature_size,), "float32")  # type: ignore[arg-type]

    @torch.inference_mode()
    def features(self, window: Window) -> Tensor:
        return self.unroll(window.to(self.device))[0].features[:-1]

    # the actor's side -------------------------------------------------------------------------------------------------
    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self._make_model()
        return self._model

    @cached_property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        output, state = self.model(on_device(timestep.observation, self.device), state)
        logits, value, features = (tensor.cpu().numpy() for tensor in output)
        noise = 0.0 if exploration is None else exploration.generator.gumbel(size=logits.shape)  # argmax of both is a sample
        return ActorOutput((logits + noise).argmax(1), {"logits": logits, "value": value, "features": features}, state)

    def greedy(self, output: ActorCriticOutput) -> dict[str, Tensor]:
        return {"action": output.logits.argmax(1), "logits": output.logits, "value": output.value}

    def outlook(self, output: ActorOutput) -> dict[str, np.ndarray]:
        return {"value": output.extras["value"], "action probabilities": softmax(output.extras["logits"])}

    def exploration(self, actor_ind: int, num_actors: int, num_envs: int, generator: np.random.Generator) -> Sampling:
        return Sampling(generator)

    def evaluation_exploration(self, num_envs: int, generator: np.random.Generator) -> Sampling | None:
        return Sampling(generator) if self.params.evaluation == "sample" else None

    # the learner's side -----------------------------------------------------------------------------------------------
    def unroll(self, window: Window, model: Model | None = None) -> tuple[ActorCriticOutput, State]:
        """The network (or another of its kind) on all rows of windows on its device, [T + 1, B, ...]."""
        return (model or self.model).unroll(window.observations, window.firsts, window.states)

    def _prepare(self) -> None:
        """What only the learner has is made when it first learns."""
        if not hasattr(self, "_optimizer"):
            self._optimizer = Optimizer(self.model.parameters(), self.params, sums=True)

    def plan(self, count: int) -> None:
        self._prepare()
        disable_host_sync(self.model)
        self._optimizer.plan(count)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        self._prepare()
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prepare()
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
