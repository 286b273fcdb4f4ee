"""The part that agents of action values with a target network share: updates, the target, checkpoints."""

from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from core.agent import LearnerOutput, make_learner_output
from core.agents.base.action_values import ActionValueAgent, ActionValueParams
from core.common.settings import frozen_dataclass
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer, TargetUpdater, UpdateCounter
from core.model import disable_host_sync
from core.ops.returns import bootstrap_position
from core.specs import WindowKind, WindowSpec
from core.types import ACTION_MASK, Batch, Window, batch_size, slice_batch


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
class MunchausenParams:
    """Options of agents whose targets may be Munchausen's (2007.14430).

    Of an n-step return only the first reward has the bonus, as in BTR (2411.03820).
    """

    munchausen_alpha: float = Field(default=0.0, ge=0, le=1)
    """Weight of the scaled log-policy that is added to rewards (Munchausen: 0.9); 0 is off, also for what follows."""
    munchausen_temperature: float = Field(default=0.03, gt=0, le=1e6)
    """Temperature of the soft policy softmax(q / temperature) of the target (Munchausen: 0.03)."""
    munchausen_clip: float = Field(default=-1.0, ge=-1e9, le=0)
    """Smallest scaled log-policy; smaller ones are clipped (Munchausen: -1)."""

    def munchausen_problems(self) -> list[str]:
        """Return why Munchausen's target does not fit the other options."""
        if not self.munchausen_alpha or not getattr(self, "double_q", False):
            return []
        return [
            f"agent.munchausen_alpha={self.munchausen_alpha} needs agent.double_q=False: its target "
            "averages over a soft policy and chooses no action"
        ]


class QLearning(ActionValueAgent):
    """Base of agents with a target network, whose windows are n-step transitions unless a subclass says otherwise."""

    window_kinds: ClassVar[tuple[WindowKind, ...]] = ("transitions",)

    # stored fields and sampled windows --------------------------------------------------------------------------------
    @property
    def window(self) -> WindowSpec:
        return WindowSpec.transition(self.params.n_step)

    # learning ---------------------------------------------------------------------------------------------------------
    def init_learner(self) -> None:
        self.target = self._make_target()
        self._optimizer = Optimizer(self.model.parameters(), self.params)
        self._updates, self._update_target = (
            UpdateCounter(),
            TargetUpdater(self.params.target_update_period, self.params.target_update_tau),
        )

    def legal_actions(self, window: Window) -> tuple[Tensor | None, Tensor | None]:
        """Return the legal actions [B, A] of the first step, and of the step that the n-step return bootstraps from.

        Both are None if the environment has no masks.
        """
        if not self.spec.has_action_mask:
            return None, None
        masks = window.extras[ACTION_MASK]  # [n + 1, B, A]
        position = bootstrap_position(window.lasts)[None, :, None].expand(1, -1, masks.shape[2])
        return masks[0].to(self.device), masks.gather(0, position)[0].to(self.device)

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """Compute the mean loss of the windows, their priorities, and statistics that are means too."""

    def learn(self, batch: Batch) -> LearnerOutput:
        self.set_training(True)
        total, grad_norm, applied = self._optimizer.minimise(
            batch_size(batch), lambda part: self.loss(slice_batch(batch, part))
        )
        target, online = (list(network.state_dict().values()) for network in (self.target, self.model))
        self._update_target(target, online, self._updates.next(), applied)
        statistics = {"loss": total.loss, "grad_norm": grad_norm, "lr": self._optimizer.rate, **total.statistics}
        return make_learner_output(statistics, total.priorities, applied)

    def prepare_updates(self, count: int) -> None:
        for network in (self.target, self.model):
            disable_host_sync(network)
        self._update_target.plan(self._updates.made + 1, count, self.device)
        self._optimizer.plan(count)
        self._updates.plan(count)

    # checkpoint -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self._updates.made,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.target.load_state_dict(state["target"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates.restore(state["updates"])
