"""The model contract: observations in, output of the kind that the agent requires, recurrent state passed through."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from core.common.settings import combined, frozen_dataclass
from core.specs import EnvSpec
from core.types import State, tree_map


@frozen_dataclass
class ModelParams:
    """Options of every model. `Model.Params` of each model is a subclass."""


class Model(nn.Module, ABC):
    """A network for one EnvSpec.

    `output_kind` names what `forward` returns, so that a mismatch with the agent is found before a start:

    - "q": action values [B, A]
    - "recurrent-q": action values [B, A] of OARInputs
    - "distribution": parameters of a distribution of returns for each action [B, A, atoms]
    - "implicit-quantiles": quantiles of returns for each action [B, A, N], at the N fractions of QuantileInputs; of a
      plain observation, at fractions that the model chooses to act by
    - "actor-critic": ActorCriticOutput
    - the kinds of PolicyAndCritic
    - any other text that an agent of your own has as its `required_output`
    """

    Params: ClassVar[type[ModelParams]] = ModelParams
    output_kind: ClassVar[str]
    observations: ClassVar[Literal["image", "vector"]]
    reads_vectors: ClassVar[bool] = False  # "image" models: also the vectors that stand beside pictures
    # core/learning/precision.py sets the precision of the networks and the dtype to which images are scaled.
    precision = "float32"
    image_dtype = torch.float32

    def __init_subclass__(cls, *, torso: Any = None, **defaults: Any):
        """Let `class Mine(Family, torso=Kind)` have the options of Family.Params and of a kind of torso.

        Args:
            torso: A class of core/models/layers/torsos.py, or a tuple of classes with more options and that one last;
                None if the class has Params of its own.
            defaults: Defaults of options that are not those of family or torso.
        """
        if torso is None:
            super().__init_subclass__(**defaults)  # which takes no keyword
            return
        # The name is one by which pickle finds the class.
        name = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Params"}
        torsos = torso if isinstance(torso, tuple) else (torso,)
        cls.Params = combined((*torsos, cls.Params), defaults, name)
        cls.observations = cls.__dict__.get("observations", torsos[-1].observations)

    def __init__(self, params: Any, spec: EnvSpec):
        super().__init__()
        self.params, self.spec = params, spec

    def initial_state(self, batch_size: int) -> State:
        """Return the recurrent state at an episode's first observation."""
        return ()

    def networks(self) -> list[nn.Module]:
        """Return the modules that agents call. Each has a `forward`, and may have an `unroll`."""
        return [self]

    def preprocess(self, observation: Tensor) -> Tensor:
        """Compute what `forward` makes of stored observations [B, *observation_shape] before its layers.

        `forward` takes the result in their place. The default leaves observations as they are.
        """
        return observation

    @abstractmethod
    def forward(self, observation: Any, state: State) -> tuple[Any, State]:
        """Compute one step of B environments.

        Args:
            observation: [B, *observation_shape] in the stored dtype, which the model scales, or OARInputs.
            state: Recurrent state before the step, each tensor [B, ...].

        Returns:
            The output and the recurrent state after the step.
        """

    def update_normalization(self, observation: Tensor) -> None:
        """Update the statistics by which a model normalises; the default has none. The project's agents call this.

        The statistics are buffers of the model, which the learner puts back if the update is skipped.

        Args:
            observation: [B, *observation_shape] stored observations that were learnt from.
        """

    def unroll(self, observations: Any, firsts: Tensor, state: State) -> tuple[Any, State]:
        """Compute T steps, [T, B, ...] to [T, B, ...].

        Feed-forward models fold time into the batch. Recurrent models override this, and reset the state where firsts
        [T, B] is True.
        """
        length, batch_size = observations.shape[:2]
        output, state = self(observations.flatten(0, 1), state)
        return tree_map(lambda tensor: torch.unflatten(tensor, 0, (length, batch_size)), output), state


class Critics(nn.ModuleList):
    """Critics of the same inputs, each with its own parameters and outputs [B, N]; together [C, B, N]."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return torch.stack([critic(observation, action) for critic in self])


class PolicyAndCritic(Model):
    """Networks without a common parameter, for actions of A numbers in -1 .. 1. Other parameters are not trained.

    `critic` returns [C, B, N]: N numbers from each of C critics. The output kind names the outputs of both:

    - "policy-value": policy to actions [B, A], one critic of one value
    - "policy-distribution": the same policy, one critic of N atoms' logits
    - "policy-twin-value": the same policy, two critics of one value
    - "gaussian-twin-value": two critics of one value, and policy to means and logarithms of deviations [B, 2 A], before
      tanh
    """

    policy: nn.Module  # input: preprocessed observations
    critic: Critics  # inputs: preprocessed observations, and actions [B, A] in -1 .. 1

    def networks(self) -> list[nn.Module]:
        return [self.policy, *self.critic]

    @abstractmethod
    def preprocess(self, observation: Tensor) -> Tensor:
        """Return stored observations [B, *observation_shape] as floats [B, ...], the input of networks and targets."""

    def forward(self, observation: Tensor, state: State = ()) -> tuple[Tensor, State]:
        """Compute the policy's output."""
        return self.policy(self.preprocess(observation)), state


def keep_float32(layer: nn.Module) -> nn.Module:
    """Mark a layer that computes in float32 when its network computes in bfloat16, and return the layer.

    Output layers are marked, because bfloat16 has 8 bits: values between 8 and 16 would be multiples of 1/16, and many
    actions would have the same value. Recurrent cores are marked, because rounding would add up over the steps.
    """
    layer.keeps_float32 = True  # type: ignore[assignment]
    return layer


def disable_host_sync(model: nn.Module) -> None:
    """Make every part of the model depend on shapes alone, and never read a tensor's value in Python.

    CUDA graph capture requires this. Modules with a data-dependent fast path take it while `allow_host_sync` is True.
    """
    for module in model.modules():
        if getattr(module, "allow_host_sync", False):
            module.allow_host_sync = False  # type: ignore[assignment]


def draw_noise_per_row(model: nn.Module, per_row: bool) -> None:
    """Let noisy modules draw for each row (environments that act) or once for a batch (a learner)."""
    for module in model.modules():
        if hasattr(module, "noise_per_row"):
            module.noise_per_row = per_row and module.noise_per_env  # type: ignore[assignment]


def train_regularization(model: nn.Module, training: bool) -> None:
    """Switch dropout and batch statistics of torch's layers, whatever the mode of the model's other modules is."""
    for module in model.modules():
        if isinstance(module, _BatchNorm | _InstanceNorm | _DropoutNd):
            module.train(training)
