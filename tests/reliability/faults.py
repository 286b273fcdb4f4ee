"""Environments and agents with injected faults, for tests that start the real program.

A run uses them by, for example, `--env_type gym --game tests.reliability.faults:Faulty-v0`. The environment variable
FAULTS selects the faults: a JSON list of {"kind", "where", "env_ind", "at", "once"}. A fault occurs

- in processes whose name begins with `where`, such as "actor 1"; main's name is its command;
- in environment `env_ind` of that process; in all of them if absent;
- from step `at` of that environment on;
- only the first time if `once` names a file, which is created then.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from gymnasium import spaces

from core.agents.dqn import DQN
from core.agents.sac import SAC
from core.distributed.learner_group import _GROUP
from core.distributed.torch_group import TorchGroup
from core.envs.catch import CatchEnv
from core.types import TimeStep

PATTERN = 97  # the second element of an observation is PATTERN * episode + step


def due(kind: str, env_ind: int, step: int) -> bool:
    """Return True if a fault of this kind is due now."""
    name = Path("/proc/self/comm").read_text()
    for fault in json.loads(os.environ.get("FAULTS", "[]")):
        once = Path(fault["once"]) if "once" in fault else None
        if (
            fault["kind"] == kind
            and name.startswith(fault.get("where", ""))
            and fault.get("env_ind", env_ind) == env_ind
            and step >= fault.get("at", 0)
            and not (once and once.exists())
        ):
            if once:
                once.touch()
            return True
    return False


class Faulty(gym.Env):
    """Play episodes of 20 steps with observations (step, 97 * episode + step), so that each step is unique."""

    action_space = spaces.Discrete(2)
    made = 0  # environments made in this process: numbers those of the one vector environment that an actor makes

    def __init__(self, bound: float = np.inf) -> None:
        self.observation_space = spaces.Box(-bound, bound, (2,), np.float32)
        self._env_ind, self._total, self._episode = Faulty.made, 0, 0
        Faulty.made += 1
        if due("init", self._env_ind, 0):
            raise RuntimeError("the simulator has no licence")
        if due("exit when made", self._env_ind, 0):
            sys.exit(0)
        if due("chdir", self._env_ind, 0):
            os.chdir("/")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        if due("reset", self._env_ind, self._total):
            raise RuntimeError("the simulator lost its level")
        self._step, self._episode = 0, self._episode + 1
        return self._observation(), {}

    def step(self, action: int) -> Any:
        self._total += 1
        self._step += 1
        for kind, act in FAULTS.items():
            if due(kind, self._env_ind, self._total):
                return act(self)
        return self._observation(), 1.0, self._step == 20, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._step, PATTERN * self._episode + self._step], np.float32)


def _raise(env: Faulty) -> Any:
    raise RuntimeError("the simulator crashed") from RuntimeError("word " * 40_000)  # longer than a pipe's buffer


def _hang(env: Faulty) -> Any:
    while True:
        time.sleep(60)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _unreadable(env: Faulty) -> Any:
    raise Unreadable


def _import(env: Faulty) -> Any:
    raise ImportError("no module of levels")


def _slow(env: Faulty) -> Any:
    time.sleep(0.02)
    return env._observation(), 1.0, env._step == 20, False, {}


def _print(env: Faulty) -> Any:
    print("a line of this environment " * 30)
    os.write(2, b"a line of a library\n")
    return env._observation(), 1.0, env._step == 20, False, {}


def _start(env: Faulty) -> Any:
    """Start child processes once per process and record their pids in the file `strays_<pid>`.

    The children are two programs, a fork and a multiprocessing worker. A second worker must end on SIGTERM.
    """
    path = Path(f"strays_{os.getpid()}")
    if not path.exists():
        terminated, left = (multiprocessing.Process(target=time.sleep, args=(1_000,)) for _ in range(2))
        terminated.start(), left.start()
        terminated.terminate(), terminated.join(10)
        assert terminated.exitcode == -signal.SIGTERM
        programs = [subprocess.Popen(["sleep", "1000"], start_new_session=apart).pid for apart in (False, True)]
        if not (fork := os.fork()):
            time.sleep(1_000)
            os._exit(0)
        path.write_text(json.dumps([left.pid, *programs, fork]))
    return env._observation(), 1.0, env._step == 20, False, {}


FAULTS = {
    "start": _start,
    "leave": lambda env: os._exit(0),
    "print": _print,
    "raise": _raise,
    "hang": _hang,
    "slow": _slow,
    "exit": lambda env: sys.exit(0),
    "unreadable": _unreadable,
    "import": _import,
    "huge reward": lambda env: (env._observation(), 3e38, env._step == 20, False, {}),
    "nan": lambda env: (np.array([np.nan, 0], np.float32), 1.0, False, False, {}),
    "far": lambda env: (np.array([1e30, 0], np.float32), 1.0, env._step == 20, False, {}),
    "infinite reward": lambda env: (env._observation(), float("inf"), False, False, {}),
    "wrong dtype": lambda env: (np.array(["a", "b"]), 1.0, False, False, {}),
    "wrong shape": lambda env: (np.zeros(3, np.float32), 1.0, False, False, {}),
    "nothing": lambda env: None,
    "four values": lambda env: (env._observation(), 1.0, False, {}),
}

gym.register("Faulty-v0", entry_point=Faulty)


class Scalar(gym.Env):
    """Play episodes of ten steps with scalar observations and actions; the reward is -|action - observation|."""

    observation_space = spaces.Box(-1.0, 1.0, (), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._state = 0, np.float32(self.np_random.uniform(-1, 1))
        return np.asarray(self._state), {}

    def step(self, action: np.ndarray) -> Any:
        assert self.action_space.contains(np.asarray(action)), action
        self._step += 1
        return np.asarray(self._state), -float(abs(action - self._state)), self._step == 10, False, {}


gym.register("Scalar-v0", entry_point=Scalar)


class Endless(CatchEnv):
    """Play Catch without episode ends: every tenth step throws a new ball and gives the reward of the last one."""

    def step(self, action: np.ndarray) -> TimeStep:
        timestep = super().step(action)
        self._start(self._ended)
        self._ended = np.zeros(len(timestep.last), bool)
        return timestep._replace(last=self._ended, first=self._ended, discount=np.ones_like(timestep.reward))


class Careless(CatchEnv):
    """A user's Env class whose time steps lack a field."""

    def step(self, action: np.ndarray) -> TimeStep:
        timestep = super().step(action)
        return timestep._replace(first=None) if due("nothing", 0, 0) else timestep  # type: ignore[arg-type]


class BadPriorities(DQN):
    """Return priorities with the value that FAULTS names, or none."""

    def learn(self, batch):  # type: ignore[no-untyped-def]
        output = super().learn(batch)
        if due("no priorities", 0, 0):
            return output._replace(priorities=None)
        values = {"nan": float("nan"), "zero": 0.0}
        wanted = [value for kind, value in values.items() if due(f"{kind} priorities", 0, 0)]
        assert output.priorities is not None and wanted
        return output._replace(priorities=torch.full_like(output.priorities, wanted[0]))


class Watchful(DQN):
    """Fail on a window whose steps were not played one after another."""

    def learn(self, batch):  # type: ignore[no-untyped-def]
        window = batch.window
        start, end = window.observations[0], window.observations[-1]  # [B, 2]
        within = ~window.lasts.any(0)
        moved = (end - start)[within]
        assert (moved == len(window.lasts) - 1).all(), f"a torn window: {start[within]} to {end[within]}"
        assert ((start[:, 1] - start[:, 0]) % PATTERN == 0).all(), f"a torn row: {start}"
        return super().learn(batch)


class NeverSaved(DQN):
    """Block for ever while the state dict is collected."""

    def state_dict(self):  # type: ignore[no-untyped-def]
        if due("save", 0, 0):
            time.sleep(1_000)
        return super().state_dict()


class FailsAlone(DQN):
    """Raise an error in learner 1 only.

    As with NCCL, the process group cannot be left in an orderly way without the other learner.
    """

    updates = 0

    def learn(self, batch):  # type: ignore[no-untyped-def]
        group = _GROUP.get()
        assert isinstance(group, TorchGroup)
        group._on_gpu, dist.destroy_process_group = True, lambda: time.sleep(1_000)
        self.updates += 1
        if group.index == 1 and self.updates > 100:
            raise ValueError("a fault of this learner alone")
        return super().learn(batch)


class SlowLearner(DQN):
    """Learn a hundred times more slowly than the actors play."""

    def learn(self, batch):  # type: ignore[no-untyped-def]
        time.sleep(0.2)
        return super().learn(batch)


class Stops(DQN):
    """Stop the learner by SIGSTOP in an update, while the other learners wait for its gradients."""

    updates = 0

    def learn(self, batch):  # type: ignore[no-untyped-def]
        self.updates += 1
        if due("stop", 0, self.updates):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().learn(batch)


class Drifts(DQN):
    """Learner 1 changes a weight after its third update."""

    updates = 0

    def learn(self, batch):  # type: ignore[no-untyped-def]
        output, group = super().learn(batch), _GROUP.get()
        self.updates += 1
        if group is not None and group.index == 1 and self.updates == 3:
            next(self.model.parameters()).data.view(-1)[0] += 1e-3
        return output


class HalfAnUpdate(SAC):
    """Kill the learner between the step of its critics and the step of its policy."""

    def update_policy(self, transitions, apply_if):  # type: ignore[no-untyped-def]
        if due("kill", 0, self.critic_optimizer.steps_begun):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update_policy(transitions, apply_if)
