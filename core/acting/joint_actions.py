"""Let agents that take one discrete action at a time act where an environment wants several choices at once."""

from dataclasses import replace

import numpy as np

from core.acting.validated_env import ValidatedEnv
from core.agent import Agent
from core.env import Env
from core.specs import ActionSpec, Discrete, MultiDiscrete
from core.types import TimeStep


class JointActionsEnv(ValidatedEnv):
    """Wrap an Env of MultiDiscrete actions so that every combination of choices is one Discrete action."""

    def __init__(self, env: Env, num_envs: int):
        super().__init__(env, num_envs)
        assert isinstance(env.spec.action, MultiDiscrete)
        nvec = env.spec.action.nvec
        self.spec = replace(env.spec, action=Discrete(env.spec.action.num_joint_actions, nvec))
        combinations = split_joint_actions(self.spec.action, np.arange(env.spec.action.num_joint_actions))
        self._places = combinations + np.cumsum(nvec) - nvec  # [A, choices] of each combination in a mask of choices

    def step(self, action: np.ndarray) -> TimeStep:
        return super().step(split_joint_actions(self.spec.action, action))

    def send(self, action: np.ndarray) -> None:
        super().send(split_joint_actions(self.spec.action, action))

    def _validate(self, timestep: TimeStep) -> TimeStep:
        timestep = super()._validate(timestep)
        if timestep.action_mask is None:
            return timestep
        return timestep._replace(action_mask=np.asarray(timestep.action_mask[:, self._places].all(2)))


def takes_joint_actions(agent_class: type[Agent], params: object, action: MultiDiscrete) -> bool:
    """Return True if the agent acts in this space by the combinations of its choices."""
    if issubclass(MultiDiscrete, agent_class.actions):
        return False
    return action.num_joint_actions <= agent_class.max_joint_actions(params)


def split_joint_actions(action: ActionSpec, chosen: np.ndarray) -> np.ndarray:
    """Return the choices [E, choices] of combinations [E]; actions of any other space as they are."""
    if not (isinstance(action, Discrete) and action.nvec):
        return chosen
    return np.stack(np.unravel_index(chosen, action.nvec), 1)
