"""PPO (1707.06347): several epochs of minibatches over a rollout, with a clipped surrogate objective.

- The details are those that Huang et al. list ("The 37 implementation details of PPO", ICLR blog track 2022) and that
  CleanRL implements. Weights are orthogonal at first, Adam has epsilon 1e-5, and the learning rate is annealed.
  Advantages are GAE, normalised in each minibatch; the value loss is clipped; the loss has an entropy bonus. Gradients
  are clipped at 0.5, and the KL may have a limit.
- The memory `rollouts` collects synchronously: every rollout is by the newest parameters, and its advantages are GAE.
  The memory `queue` collects asynchronously, as Sample Factory's APPO (2006.11751): actors go on while the learner
  computes. Advantages and targets are corrected by V-trace, which equals GAE where policies are alike. V-trace is
  computed once a rollout. Sample Factory computes it for each minibatch, without lambda and with min(1, pi / mu) in
  the advantage.
- A2C is PPO with one epoch of one minibatch (2205.09123).
- Deviations: a truncated episode bootstraps from its final observation; the step after an episode's end, where no
  action was taken, is left out of the loss and its means. So minibatches differ a little in size. Statistics of
  observations are updated after a rollout was learnt from, so that ratios begin at 1.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from core.agent import ActorOutput, LearnerOutput, make_learner_output
from core.agents.base.actor_critic import ActorCriticAgent, ActorCriticAgentParams
from core.agents.base.rollout_epochs import RolloutAgent, RolloutAgentParams, normalized_weights
from core.common.settings import frozen_dataclass
from core.device.torch_runtime import on_device
from core.distributed.learner_group import all_reduce_mean, all_reduce_sum
from core.learning.gradients import Loss
from core.learning.optimizer import OptimizerName
from core.model import Model
from core.models.layers.running_normalization import RunningNormalization
from core.ops.actions import mask_actions
from core.ops.policy_losses import MAX_LOG_RATIO, clipped_policy_loss, clipped_value_loss
from core.ops.returns import generalised_advantages
from core.ops.vtrace import lambda_advantages, vtrace
from core.specs import ArraySpec
from core.types import ACTION_MASK, ActorCriticOutput, Batch, State, TimeStep, Window, tree_map

MAX_REWARD = 10.0  # bound of normalised rewards, as in CleanRL


@frozen_dataclass
class PPOParams(RolloutAgentParams, ActorCriticAgentParams):
    """Defaults: CleanRL's ppo.py and ppo_atari.py."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Factor of the trace of advantages and value targets."""
    clip_epsilon: float = Field(default=0.2, gt=0, le=1)
    """Half width of the clip of pi / mu around 1 (Atari: 0.1)."""
    value_clipping: bool = True
    """Clip the change of a value in an update by clip_epsilon."""
    normalize_advantages: bool = True
    """Normalise advantages by mean and standard deviation of each minibatch."""
    normalize_rewards: bool = False
    """Divide rewards by the standard deviation of discounted returns so far, and clip them to +- 10. The 0 of an
    episode's first observation counts as a return. Returns begin at 0 also after a truncation, where gymnasium's
    wrapper goes on."""
    target_kl: float = Field(default=0.0, ge=0, le=1e6)
    """Nats of KL(mu || pi) in the last minibatch of an epoch after which the update ends; 0 is off."""
    rho_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in V-trace's temporal differences, for memory_type queue."""
    c_bar: float = Field(default=1.0, gt=0, le=1e30)
    """Clip of pi / mu in V-trace's trace, for memory_type queue."""
    optimizer: OptimizerName = "adam"
    """Optimiser of the network."""
    learning_rate: float = Field(default=2.5e-4, gt=0, le=100)
    """Learning rate at the start."""
    optimizer_eps: float = Field(default=1e-5, gt=0, le=1)
    """Added to the root of Adam's second moment; for RMSProp see rmsprop_eps_in_root."""
    clip_norm: float = Field(default=0.5, ge=0, le=1e9)
    """Largest norm of the whole gradient; 0 is off."""


class Samples(NamedTuple):
    """Samples of a rollout, [T, N, ...], which minibatches select: N unrolls, or with T = 1 single steps."""

    observations: Tensor
    firsts: Tensor
    actions: Tensor
    log_probs: Tensor  # of the behaviour policy
    values: Tensor  # before the update
    advantages: Tensor
    targets: Tensor
    weights: Tensor  # 1 where an action was taken, else 0
    legal: Tensor | None  # the actions' masks; None if the environment has none
    states: State  # before step 0, each [1, N, ...]
    extras: dict[str, Tensor]  # fields of a subclass

    def select(self, index: Tensor | slice) -> "Samples":
        """Return some of the N samples."""

        def part(field: Tensor) -> Tensor:
            return field[:, index] if isinstance(index, slice) else field.index_select(1, index)

        samples: Samples = tree_map(part, self)
        return samples


class PPO(RolloutAgent, ActorCriticAgent):
    """Proximal policy optimisation."""

    Params = PPOParams
    supports_cuda_graphs = True
    window_kinds = ("rollouts", "unrolls")

    # acting -----------------------------------------------------------------------------------------------------------
    @property
    def extras(self) -> dict[str, ArraySpec]:
        returns = {"discounted_return": ArraySpec((), "float32")} if self.params.normalize_rewards else {}
        return {**super().extras, **returns}

    def initial_state(self, batch_size: int) -> State:
        state = super().initial_state(batch_size)
        return (*state, torch.zeros(batch_size, device=self.device)) if self.params.normalize_rewards else state

    def act(self, timestep: TimeStep, state: State, exploration: Any) -> ActorOutput:
        """Choose actions. With normalised rewards the state carries the discounted return up to here."""
        if not self.params.normalize_rewards:
            return super().act(timestep, state, exploration)
        output = super().act(timestep, state[:-1], exploration)
        returns = self.params.gamma * state[-1].cpu().numpy() + timestep.reward
        extras = {**output.extras, "discounted_return": returns}
        return ActorOutput(output.action, extras, (*output.state, on_device(returns, self.device)))

    # learning ---------------------------------------------------------------------------------------------------------
    def init_learner(self) -> None:
        super().init_learner()
        self._returns = (
            RunningNormalization(1, clips_outliers=False).to(self.device) if self.params.normalize_rewards else None
        )

    def unroll(self, window: Window, model: Model | None = None) -> tuple[ActorCriticOutput, State]:
        if self.params.normalize_rewards:
            window = window._replace(states=window.states[:-1])
        return super().unroll(window, model)

    def learn(self, batch: Batch) -> LearnerOutput:
        self.set_training(True)
        window = batch.window.to(self.device)
        with torch.no_grad():
            samples, statistics = self.samples(window, batch.on_policy)
        if not self._is_recurrent:
            samples = tree_map(lambda field: field.flatten(0, 1)[None], samples)
        learnt, applied = self._epochs.learn(
            samples,
            samples.weights.shape[1],
            lambda minibatch: partial(self._loss, self._weighted(minibatch)),
            apply_if=torch.isfinite(samples.targets.sum() + samples.advantages.sum()),  # sums spread NaN
            continue_if=self._is_near if self.params.target_kl else None,
        )
        self.model.update_normalization(window.observations[:-1].flatten(0, 1))
        return make_learner_output({**statistics, **learnt}, None, applied)

    def _is_near(self, statistics: Mapping[str, Tensor]) -> Tensor:
        is_near: Tensor = all_reduce_mean(statistics["approximate_kl"]) <= self.params.target_kl
        return is_near

    def samples(self, window: Window, on_policy: bool) -> tuple[Samples, dict[str, Tensor]]:
        """Return the samples [T, B, ...] of a rollout, and statistics of them; no gradients are recorded.

        Advantages and value targets are by the parameters before the update. A subclass may change them, and add
        fields that its `loss` reads to `extras`.
        """
        params, valid = self.params, ~window.lasts[:-1]  # [T, B]: steps where an action was taken
        rewards, discounts = self._rewards(window), params.gamma * window.discounts[:-1]
        actions, values = self.taken_actions(window), window.extras["value"][:-1]
        log_probs = self.policy.log_probs(window.extras["logits"][:-1], actions)
        if on_policy:
            values = torch.cat([values, self._bootstrap(window)])  # [T + 1, B]
            advantages, targets = generalised_advantages(rewards, discounts, values, valid, params.gae_lambda)
        else:
            output, _ = self.unroll(window)
            values, log_ratios = output.value, self.policy.log_probs(output.logits[:-1], actions) - log_probs
            clips = {"rho_bar": params.rho_bar, "c_bar": params.c_bar}
            returns = vtrace(log_ratios, rewards, discounts, values, valid, **clips, trace_lambda=params.gae_lambda)
            targets = returns.targets
            advantages = lambda_advantages(returns, rewards, discounts, values, valid, params.gae_lambda)
        samples = Samples(
            window.observations[:-1],
            window.firsts[:-1],
            actions,
            log_probs,
            values[:-1],
            advantages,
            targets,
            valid.to(values.dtype),
            window.extras[ACTION_MASK][:-1] if self.spec.has_action_mask else None,
            tuple(state[None] for state in window.states[: len(window.states) - params.normalize_rewards]),
            {},
        )
        residuals = (samples.targets - samples.values) * samples.weights
        statistics = {"value_mean": values.mean(), "explained_variance": _explained_variance(samples, residuals)}
        return samples, statistics

    def _bootstrap(self, window: Window) -> Tensor:
        """Compute the values [1, B] of the observations to which the last actions led."""
        if self._is_recurrent:
            return self.unroll(window)[0].value[-1:]
        output, _ = self.model(window.observations[-1], ())
        value: Tensor = output.value
        return value[None]

    def _rewards(self, window: Window) -> Tensor:
        """Return the rewards [T, B], normalised if asked; those of steps without an action mean nothing."""
        rewards = window.rewards[:-1]
        if self._returns is None:
            return rewards
        self._returns.update(window.extras["discounted_return"][:-1].reshape(-1, 1))
        return (rewards * (self._returns.variance + 1e-8).rsqrt()).clamp(-MAX_REWARD, MAX_REWARD)

    def _weighted(self, minibatch: Samples) -> Samples:
        """Normalise the advantages, and divide the weights by the number of actions in all learners' minibatches."""
        advantages = minibatch.advantages
        weights, count = normalized_weights(minibatch.weights)
        if self.params.normalize_advantages:
            mean = (weights * advantages).sum()
            all_reduce_sum(mean)
            advantages = advantages - mean
            variance = (weights * advantages.square()).sum() * count / (count - 1).clamp(min=1)
            all_reduce_sum(variance)
            advantages = advantages / (variance.sqrt() + 1e-8)
        return minibatch._replace(weights=weights, advantages=advantages)

    def _loss(self, minibatch: Samples, part: slice | None) -> Loss:
        """Compute the loss of a minibatch, or its share of the loss if it is a part."""
        samples = minibatch if part is None else minibatch.select(part)
        states = tuple(state[0] for state in samples.states)
        output, _ = self.model.unroll(samples.observations, samples.firsts, states)
        return self.loss(samples, output._replace(logits=mask_actions(output.logits, samples.legal)))

    def loss(self, samples: Samples, output: ActorCriticOutput) -> Loss:
        """Compute the loss of a minibatch or a part of it, and its statistics.

        All of them are sums over the steps, weighted by `samples.weights`.

        Args:
            samples: Those of the minibatch, with normalised advantages.
            output: The network's for these samples. Logits of illegal actions are the lowest float.
        """
        params, logits = self.params, output.logits
        log_ratios = self.policy.log_probs(logits, samples.actions) - samples.log_probs
        log_ratios = log_ratios.clamp(max=MAX_LOG_RATIO)
        policy = clipped_policy_loss(log_ratios, samples.advantages, params.clip_epsilon)
        epsilon = params.clip_epsilon if params.value_clipping else torch.inf
        value = clipped_value_loss(output.value, samples.values, samples.targets, epsilon)
        with torch.set_grad_enabled(params.entropy_cost > 0):
            entropy = self.policy.entropies(logits)
        losses = torch.add(policy, value, alpha=params.baseline_cost)
        losses = torch.sub(losses, entropy, alpha=params.entropy_cost) if params.entropy_cost else losses
        with torch.no_grad():
            ratios = log_ratios.exp()
            kl = ratios - 1 - log_ratios  # http://joschu.net/blog/kl-approx.html
            clipped = (ratios - 1).abs() > params.clip_epsilon
            reports = torch.stack([policy, value, entropy, kl, clipped]).mul_(samples.weights).sum((1, 2)).unbind()
        names = "policy_loss", "baseline_loss", "entropy", "approximate_kl", "clip_fraction"
        return Loss((samples.weights * losses).sum(), dict(zip(names, reports)))

    # checkpoint -------------------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> dict[str, Any]:
        return super().checkpoint_parts() | ({"returns": self._returns} if self._returns else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A continued run that did not normalise rewards so far has no statistics of returns.
        super().load_state_dict(({"returns": self._returns.state_dict()} if self._returns else {}) | state)


def _explained_variance(samples: Samples, residuals: Tensor) -> Tensor:
    """Return 1 - Var(target - V) / Var(target) over the steps where an action was taken; 0 if targets are alike."""
    weights = samples.weights / samples.weights.sum().clamp(min=1)

    def variance(terms: Tensor) -> Tensor:
        return (weights * (terms - (weights * terms).sum()).square()).sum()

    total = variance(samples.targets)
    return torch.where(total > 0, 1 - variance(residuals) / total, 0.0)
