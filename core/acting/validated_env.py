"""Check what environments return against the contract of core/env.py, and adapt their actions to an agent.

- `ValidatedEnv` wraps the environments of a run. It checks each time step against the EnvSpec.
- `JointActionsEnv` lets agents that take one discrete action act where an environment wants several choices at once.
- `play_randomly` checks what is left of the contract's clauses, one time step at a time.
"""

import math
import reprlib
from dataclasses import replace

import numpy as np

from core.common.foreign_code import foreign_code
from core.env import Env
from core.ops.actions import random_legal_actions
from core.specs import ActionSpec, Continuous, Discrete, EnvSpec, Mixed, MultiDiscrete
from core.types import TimeStep

FLOATS = np.dtype("float32"), np.dtype("float64"), np.dtype("float16")
BOOLS = (np.dtype("bool"),)


class ValidatedEnv(Env):
    """Wrap an Env so that every step it returns is a TimeStep of its spec with finite numbers.

    A check costs a few microseconds a step of all environments. A mask that is returned always has a legal action.

    Raises:
        ValueError: a field has another type, shape or dtype (floats may have any precision), or is not finite in
            float32. The message names field, value, environment and step.
        ForeignCodeError: the environment's own code raised something that would end or mislead the process.
    """

    def __init__(self, env: Env, num_envs: int):
        self._env, self.spec = env, env.spec
        self._steps = self._first_env = 0
        self._foreign_code = foreign_code(f"environment {env.spec.name}")
        shapes = {"observation": (num_envs, *env.spec.observation_shape)}
        frame = np.dtype(env.spec.frame.dtype)
        dtypes = {"observation": FLOATS if frame.kind == "f" else (frame,), "first": BOOLS, "last": BOOLS}
        self._expected = [
            (name, shapes.get(name, (num_envs,)), dtypes.get(name, FLOATS)) for name in TimeStep._fields[:-1]
        ]
        self._is_masked, self._has_vectors = env.spec.action_mask is not None, bool(env.spec.vector_size)
        if env.spec.action_mask:
            self._expected.append(("action_mask", (num_envs, *env.spec.action_mask.shape), BOOLS))

    def reset(self, seed: int) -> TimeStep:
        with self._foreign_code:
            timestep = self._env.reset(seed)
        return self._validate(timestep)

    def step(self, action: np.ndarray) -> TimeStep:
        self.send(action)
        return self.recv()

    def send(self, action: np.ndarray) -> None:
        with self._foreign_code:
            self._env.send(action)

    def recv(self) -> TimeStep:
        self._steps += 1
        with self._foreign_code:
            timestep = self._env.recv()
        return self._validate(timestep)

    def success(self, env_ind: int) -> bool | None:
        with self._foreign_code:
            success = self._env.success(env_ind)
        return None if success is None else bool(success)

    def render(self) -> np.ndarray:
        with self._foreign_code:
            return self._env.render()

    def set_activity_marker(self, cell: np.ndarray, first: int = 0) -> None:
        self._first_env = first
        self._env.set_activity_marker(cell, first)

    def close(self) -> None:
        with self._foreign_code:
            self._env.close()

    def _validate(self, timestep: TimeStep) -> TimeStep:
        if not isinstance(timestep, TimeStep):
            raise ValueError(
                f"{self.spec.name} returned {reprlib.repr(timestep)} at step {self._steps}, expected a TimeStep"
            )
        for (name, shape, dtypes), value in zip(self._expected, timestep):
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype not in dtypes:
                actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else reprlib.repr(value)
                raise ValueError(
                    f"{name} of {self.spec.name} at step {self._steps} is {actual}, expected {dtypes[0]} {list(shape)}"
                )
            if dtypes is FLOATS and not np.isfinite(value.astype(np.float32, copy=False)).all():
                raise self._not_finite(name, value)
        if self._has_vectors:
            self._validate_vectors(timestep.observation)
        if self._is_masked:
            return self._with_legal_actions(timestep)
        if timestep.action_mask is not None:
            raise ValueError(
                f"{self.spec.name} returned an action_mask at step {self._steps}, and its spec says no has_action_mask"
            )
        return timestep

    def _validate_vectors(self, observation: np.ndarray) -> None:
        """Raise ValueError if a vector beside a picture holds a number that is not finite."""
        size = math.prod(self.spec.picture_of_parts)
        newest = observation[:, -1] if self.spec.frame_stack else observation
        vectors = np.ascontiguousarray(newest[:, size:]).view(np.float32)  # [E, vector_size]
        if not np.isfinite(vectors).all():
            raise self._not_finite("observation", vectors, " of the vector beside the picture")

    def _not_finite(self, name: str, values: np.ndarray, beside: str = "") -> ValueError:
        """Return the error that names the first of the values [E, ...] that is not finite."""
        env_ind, *element = np.argwhere(~np.isfinite(values.astype(np.float32)))[0].tolist()
        where = f" (element {element}{beside})" if element else ""
        return ValueError(
            f"{name} of environment {env_ind + self._first_env} of {self.spec.name} at step {self._steps} "
            f"is {values[env_ind, *element]}{where}, expected finite values"
        )

    def _with_legal_actions(self, timestep: TimeStep) -> TimeStep:
        """Allow all actions where the episode has terminated and the environment allows none."""
        space = self._env.spec.action
        assert timestep.action_mask is not None and not isinstance(space, Continuous)
        begins = np.cumsum((0, *space.choice_sizes[:-1]), dtype=np.int64)
        able = np.asarray(np.logical_or.reduceat(timestep.action_mask, begins, axis=1).all(1))  # [E], in each choice
        if able.all():
            return timestep
        if (stuck := ~able & ~(timestep.last & (timestep.discount == 0))).any():
            raise ValueError(
                f"action_mask of environment {int(stuck.argmax()) + self._first_env} of {self.spec.name} at step "
                f"{self._steps} has no legal action, expected at least one"
            )
        return timestep._replace(action_mask=timestep.action_mask | ~able[:, None])


class JointActionsEnv(ValidatedEnv):
    """Wrap an Env of MultiDiscrete actions so that every combination of choices is one Discrete action."""

    def __init__(self, env: Env, num_envs: int):
        super().__init__(env, num_envs)
        assert isinstance(env.spec.action, MultiDiscrete)
        nvec = env.spec.action.nvec
        self.spec = replace(env.spec, action=Discrete(env.spec.action.num_joint_actions, nvec))
        combinations = split_joint_actions(self.spec.action, np.arange(env.spec.action.num_joint_actions))
        self._places = combinations + np.cumsum(nvec) - nvec  # [A, choices] of each combination in a mask of choices

    def send(self, action: np.ndarray) -> None:
        super().send(split_joint_actions(self.spec.action, action))

    def _validate(self, timestep: TimeStep) -> TimeStep:
        timestep = super()._validate(timestep)
        if timestep.action_mask is None:
            return timestep
        return timestep._replace(action_mask=np.asarray(timestep.action_mask[:, self._places].all(2)))


def split_joint_actions(action: ActionSpec, chosen: np.ndarray) -> np.ndarray:
    """Return the choices [E, choices] of combinations [E]; actions of any other space as they are."""
    if not (isinstance(action, Discrete) and action.nvec):
        return chosen
    return np.stack(np.unravel_index(chosen, action.nvec), 1)


def play_randomly(env: Env, num_envs: int, steps: int, seed: int) -> tuple[list[str], int]:
    """Reset, then take `steps` steps with uniform random actions, or fewer if one violates the contract.

    Returns:
        The violations of the last step, and the number of episodes that ended.
    """
    generator = np.random.default_rng([seed, 1])  # environments may have the generator of `seed` alone
    previous, episodes = None, 0
    timestep = env.reset(seed)
    for number in range(steps + 1):
        if number:
            timestep = env.step(random_actions(env.spec.action, num_envs, generator, timestep.action_mask))
        violations = contract_violations(env.spec, timestep, previous)
        if violations:
            return [f"step {number} of random play: {violation}" for violation in violations], episodes
        episodes += int(timestep.last.sum())
        # Copies, because an environment may reuse its arrays.
        previous = TimeStep._make(None if field is None else np.array(field) for field in timestep)
    return [], episodes


def contract_violations(spec: EnvSpec, timestep: TimeStep, previous: TimeStep | None) -> list[str]:
    """Return one sentence for each clause of the contract that a step violates, which ValidatedEnv has let pass.

    The step after the end of an episode starts the next one, without a reward (next-step autoreset). `previous` is the
    step before, or None after a reset.
    """
    dtypes = {"observation": spec.frame.dtype} | dict.fromkeys(("reward", "discount", "raw_reward"), "float32")
    arrays = {name: getattr(timestep, name) for name in dtypes}
    errors = [
        f"{name} is {array.dtype} {list(array.shape)}, expected {dtypes[name]} {list(array.shape)}"
        for name, array in arrays.items()
        if array.dtype != np.dtype(dtypes[name])
    ]
    first, discount = timestep.first, timestep.discount
    starts, rule = np.ones(len(first), bool), "a reset starts an episode in every environment"
    if previous is not None:
        starts, rule = previous.last, "an episode starts exactly where one ended before"
    misplaced = np.zeros(len(first), bool)
    if spec.frame_stack:
        older = np.zeros_like(timestep.observation[:, 1:])
        if previous is not None:
            older[~first] = previous.observation[~first, 1:]
        misplaced = (timestep.observation[:, :-1] != older).reshape(len(first), -1).any(1)
    outside, rewarded = (discount < 0) | (discount > 1), (timestep.reward != 0) | (timestep.raw_reward != 0)
    violations = {
        f"discount of environments {{}} is outside 0 .. 1: {discount[outside]}": outside,
        f"first is wrong in environments {{}}: {rule}": first != starts,
        "first and last are both true in environments {}": first & timestep.last,
        "an episode's first observation earned a reward in environments {}": first & rewarded,
        "an episode's first observation has a discount other than 1 in environments {}": first & (discount != 1),
        "older frames are neither those of the step before nor, at an episode's start, 0 in environments {}": misplaced,
    }
    found = {text: ", ".join(map(str, np.flatnonzero(wrong))) for text, wrong in violations.items()}
    errors += [text.format(envs) for text, envs in found.items() if envs]
    beside = spec.picture_of_parts  # the bytes after a picture are floats
    pictures = timestep.observation[..., : math.prod(beside)] if beside else timestep.observation
    low, high = pictures.min(), pictures.max()
    if spec.is_image and (low < 0 or high > spec.max_value):
        errors.append(f"observation has values {low} .. {high}, outside 0 .. {spec.max_value:g}")
    return errors


def random_actions(
    space: ActionSpec, num_envs: int, generator: np.random.Generator, legal: np.ndarray | None = None
) -> np.ndarray:
    """Draw uniform actions [E, ...] from the action space, those of TimeStep.action_mask if it is given."""
    if isinstance(space, Mixed):
        parts = (MultiDiscrete(space.nvec), legal), (space.continuous, None)
        drawn = [random_actions(part, num_envs, generator, mask) for part, mask in parts]
        return np.concatenate(drawn, 1, dtype=np.float32)
    if legal is not None and not isinstance(space, Continuous):
        return random_legal_actions(legal, space.choice_sizes, generator).reshape(num_envs, *space.array.shape)
    if isinstance(space, Discrete):
        return generator.integers(space.num_actions, size=num_envs)
    if not isinstance(space, Continuous):
        return generator.integers(space.nvec, size=(num_envs, len(space.nvec)))
    actions = generator.uniform(space.low, space.high, (num_envs, *space.low.shape)).astype(np.float32)
    return np.clip(actions, space.low, space.high)  # because rounding to float32 can leave the space
