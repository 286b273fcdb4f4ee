"""The part that agents share which learn from each rollout in several epochs of minibatches (PPO, PQN)."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from core.agent import Agent, AgentParams
from core.common.settings import frozen_dataclass
from core.distributed.learner_group import all_reduce_and, all_reduce_sum, num_learners, send_heartbeat
from core.learning.gradients import Loss
from core.learning.optimizer import Optimizer
from core.types import tree_leaves, tree_map


@frozen_dataclass
class RolloutAgentParams(AgentParams):
    batch_size: int = Field(default=0, ge=0, le=10**8)
    """Unrolls of a rollout; 0 is one of each environment of the learner, as memory_type rollouts needs it."""
    unroll_length: int = Field(default=128, ge=1, le=10_000)
    """Steps of an unroll."""
    epochs: int = Field(default=4, ge=1, le=1_000)
    """Times that a rollout is learnt from."""
    minibatches: int = Field(default=4, ge=1, le=65_536)
    """Parts of a rollout in an epoch: of its steps, or with a recurrent network of its unrolls."""
    lr_schedule_updates: int | None = Field(default=None, ge=1, le=10**12)
    """Rollouts that a schedule of the learning rate takes; for "step" those between two steps. None lets it
    follow the whole run, by the share of steps or updates that is over."""


Compile = Callable[[Callable[[], None], int], Callable[[], None]]  # as GraphedUpdate takes it
LossOf = Callable[[Any], Callable[[slice | None], Loss]]


class RolloutEpochs:
    """Take the optimiser steps of one update: `epochs` times `minibatches` of a rollout, with one learning rate.

    Args:
        parameters: those that the optimiser changes.
        params: options of the agent: RolloutAgentParams and OptimizerParams.
        num_samples: samples of a rollout, of which a minibatch has at least one.
        run_progress: as Optimizer takes it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], params: Any, num_samples: int, run_progress: Callable[[], float]
    ):
        self._epochs, self._minibatches = params.epochs, min(params.minibatches, num_samples)
        self.steps = self._epochs * self._minibatches
        self.optimizer = Optimizer(
            parameters, params, sums=True, steps_per_update=self.steps, run_progress=run_progress
        )
        # Compiles each step, because a whole update would be hundreds of the same operators. If None, steps are eager.
        self.compile: Compile | None = None
        self._compiled: dict[int, CompiledStep] = {}  # by the size of the minibatch
        self._names: tuple[str, ...]  # of the statistics of a step

    def plan(self, count: int) -> None:
        """Plan the steps of `count` updates. Compiled steps are planned one by one, because they read one address."""
        if self.compile is None:
            self.optimizer.plan(count * self.steps)

    def learn(
        self,
        samples: Any,
        num_samples: int,
        loss_of: LossOf,
        apply_if: Tensor,
        continue_if: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Any]:
        """Learn from a rollout.

        Args:
            samples: the rollout's, which each epoch shuffles. `select` returns some of them: copies by a tensor, views
                by a slice.
            num_samples: their number.
            loss_of: returns the loss, as `Optimizer.minimise` wants it, of a minibatch of the samples.
            apply_if: scalar; no learner takes a step if that of any learner is false.
            continue_if: returns whether another epoch follows, given the statistics of the last minibatch of an epoch.

        Returns:
            Mean statistics of the steps, and whether all steps were taken; a tensor once updates are planned.
        """
        optimizer, continues = self.optimizer, all_reduce_and(apply_if)
        all_applied = continues
        reports, weights = list[Tensor](), list[Tensor]()  # of each step
        for epoch in range(self._epochs):
            # Samples are copied once an epoch, and minibatches are views.
            shuffled = samples.select(torch.rand(num_samples, device=apply_if.device).argsort())
            weight = continues.to(torch.float32)  # 0 in planned epochs after the last one, which change nothing
            for indices in np.array_split(np.arange(num_samples), self._minibatches):
                part = slice(int(indices[0]), int(indices[-1]) + 1)
                send_heartbeat()
                report, applied = self._step(loss_of, shuffled.select(part), len(indices), continues)
                all_applied = all_applied & (~continues | applied)
                reports.append(report)
                weights.append(weight)
            if continue_if is None or epoch + 1 == self._epochs:
                continue
            continues = continues & continue_if(dict(zip(self._names, report)))
            if not optimizer.is_planned and not continues:
                optimizer.skip(self._minibatches * (self._epochs - epoch - 1))
                break
        step_weights = torch.stack(weights)
        num_steps = step_weights.sum()
        means = torch.stack(reports).mul(step_weights[:, None]).sum(0) / num_steps
        statistics = dict(zip(self._names, means))
        statistics |= {"epochs": num_steps / self._minibatches, "lr": optimizer.last_lr}
        return statistics, all_applied if optimizer.is_planned else bool(all_applied)

    def _step(self, loss_of: LossOf, minibatch: Any, size: int, continues: Tensor) -> tuple[Tensor, Any]:
        """Take the step of a minibatch if `continues`. Return its statistics [n], and whether it was taken."""
        if self.compile is None:
            return self._eager_step(loss_of, minibatch, size, continues)
        if size not in self._compiled:
            step = partial(self._eager_step, loss_of, size=size)
            self._compiled[size] = CompiledStep(step, minibatch, continues, self.compile)
        self.optimizer.plan(1)
        return self._compiled[size](minibatch, continues)

    def _eager_step(self, loss_of: LossOf, minibatch: Any, size: int, continues: Tensor) -> tuple[Tensor, Any]:
        total, grad_norm, applied = self.optimizer.minimise(size, loss_of(minibatch), apply_if=continues)
        shares = {"loss": total.loss, **total.statistics}  # of sums over the minibatches of all learners
        report = {**{name: share * num_learners() for name, share in shares.items()}, "grad_norm": grad_norm}
        self._names = tuple(report)
        return torch.stack(list(report.values())), applied


class CompiledStep:
    """A step that reads a minibatch and writes its results in place, so that it can be recorded and compiled.

    Args:
        step: takes a planned step; its arguments are `minibatch` and `continues`.
        minibatch: any of the size.
        continues: scalar.
        compiled: makes the compiled callable.
    """

    def __init__(
        self, step: Callable[..., tuple[Tensor, Tensor]], minibatch: Any, continues: Tensor, compiled: Compile
    ):
        self._step, self._inputs = step, tree_map(torch.clone, (minibatch, continues))
        self._results: tuple[Tensor, Tensor] | None = None
        self._call = compiled(self._work, 1)

    def __call__(self, minibatch: Any, continues: Tensor) -> tuple[Tensor, Tensor]:
        torch._foreach_copy_(tree_leaves(self._inputs), tree_leaves((minibatch, continues)))
        self._call()
        assert self._results is not None
        report, stepped = self._results
        return report.clone(), stepped.clone()

    def _work(self) -> None:
        minibatch, continues = self._inputs
        results = self._step(minibatch=minibatch, continues=continues)
        if self._results is None:
            self._results = results
        for static, tensor in zip(self._results, results):
            static.copy_(tensor)


class RolloutAgent(Agent):
    """Base of agents that learn from each rollout by `_epochs`."""

    params: Any

    def init_learner(self) -> None:
        # Minibatches consist of steps, or with a recurrent network of whole unrolls.
        self._is_recurrent = bool(self.model.initial_state(1))
        samples = self.params.batch_size * (1 if self._is_recurrent else self.params.unroll_length)
        self._epochs = RolloutEpochs(self.model.parameters(), self.params, samples, lambda: self.run_progress)

    @classmethod
    def compiled_calls(cls, params: Any) -> int:
        return int(params.epochs * params.minibatches)

    def compile_parts(self, compiled: Compile) -> bool:
        self._epochs.compile = compiled
        return True

    def prepare_updates(self, count: int) -> None:
        self._epochs.plan(count)

    def checkpoint_parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self._epochs.optimizer}


def normalized_weights(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide weights by their sum over the minibatches of all learners.

    Returns:
        The weights, of which all learners' sum is 1, and the scalar sum by which they were divided, at least 1.
    """
    total = weights.sum()
    all_reduce_sum(total)
    total = total.clamp(min=1)
    return weights / total, total
