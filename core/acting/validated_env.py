"""Check every time step that an environment returns against its EnvSpec."""

import reprlib

import numpy as np

from core.acting.env_conformance import can_act, is_terminated
from core.common.foreign_code import foreign_code
from core.env import Env
from core.types import TimeStep

EXPECTED_DTYPES = {"f": "float32", "b": "bool", "u": "uint8", "i": "int64"}


class ValidatedEnv(Env):
    """Wrap an Env so that every step it returns is a TimeStep of its spec with finite numbers.

    A check costs a few microseconds a step of all environments. A mask that is returned always has a legal action.

    Raises:
        ValueError: a field has another type, shape or kind of dtype, or is not finite. The message names field, value,
            stream and step.
        ForeignCodeError: the environment's own code raised something that would end or mislead the process.
    """

    def __init__(self, env: Env, num_envs: int):
        self._env, self._num_envs, self.spec = env, num_envs, env.spec
        self._steps = self._first_stream = 0
        self._foreign_code = foreign_code(f"environment {env.spec.name}")
        shapes = {"observation": (num_envs, *env.spec.observation_shape)}
        kinds = {"observation": np.dtype(env.spec.frame.dtype).kind, "first": "b", "last": "b"}
        self._expected = [(name, shapes.get(name, (num_envs,)), kinds.get(name, "f")) for name in TimeStep._fields[:-1]]
        self._is_masked = env.spec.action_mask is not None
        if env.spec.action_mask:
            self._expected.append(("action_mask", (num_envs, *env.spec.action_mask.shape), "b"))

    def reset(self, seed: int) -> TimeStep:
        with self._foreign_code:
            timestep = self._env.reset(seed)
        return self._validate(timestep)

    def step(self, action: np.ndarray) -> TimeStep:
        self._steps += 1
        with self._foreign_code:
            timestep = self._env.step(action)
        return self._validate(timestep)

    def send(self, action: np.ndarray) -> None:
        with self._foreign_code:
            self._env.send(action)

    def recv(self) -> TimeStep:
        self._steps += 1
        with self._foreign_code:
            timestep = self._env.recv()
        return self._validate(timestep)

    def success(self, stream: int) -> bool | None:
        return self._env.success(stream)

    def render(self) -> np.ndarray:
        with self._foreign_code:
            return self._env.render()

    def set_activity_marker(self, cell: np.ndarray, first: int = 0) -> None:
        self._first_stream = first
        self._env.set_activity_marker(cell, first)

    def close(self) -> None:
        with self._foreign_code:
            self._env.close()

    def _validate(self, timestep: TimeStep) -> TimeStep:
        if not isinstance(timestep, TimeStep):
            raise ValueError(
                f"{self.spec.name} returned {reprlib.repr(timestep)} at step {self._steps}, expected a TimeStep"
            )
        for (name, shape, kind), value in zip(self._expected, timestep):
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind != kind:
                actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else reprlib.repr(value)
                raise ValueError(
                    f"{name} of {self.spec.name} at step {self._steps} is {actual}, "
                    f"expected {EXPECTED_DTYPES[kind]} {list(shape)}"
                )
            if kind == "f" and not np.isfinite(value).all():
                stream, *element = (int(index) for index in np.argwhere(~np.isfinite(value))[0])
                where = f" (element {element})" if element else ""
                number = value[stream, *element]
                stream += self._first_stream
                raise ValueError(
                    f"{name} of stream {stream} of {self.spec.name} at step {self._steps} "
                    f"is {number}{where}, expected finite values"
                )
        return self._with_legal_actions(timestep) if self._is_masked else timestep

    def _with_legal_actions(self, timestep: TimeStep) -> TimeStep:
        """Allow all actions where the episode has terminated and the environment allows none."""
        able = can_act(self._env.spec, timestep)
        if able.all():
            return timestep
        if (stuck := ~able & ~is_terminated(timestep)).any():
            raise ValueError(
                f"action_mask of stream {int(stuck.argmax()) + self._first_stream} of {self.spec.name} at step "
                f"{self._steps} has no legal action, expected at least one"
            )
        return timestep._replace(action_mask=timestep.action_mask | ~able[:, None])
