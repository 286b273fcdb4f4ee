"""Provide one Atari game that can be rendered, with the preprocessing of AtariVectorEnv in numpy."""

from typing import Any

import ale_py
import numpy as np
from ale_py import roms
from gymnasium.spaces import Discrete

from core.envs.atari_protocols import AtariParams
from core.envs.preprocessing import resized


class RenderableAtari:
    """A single stream with next-step autoreset, and the methods of AtariVectorEnv that AtariEnv calls.

    Its observations equal those of AtariVectorEnv in every byte.
    """

    def __init__(self, params: AtariParams, name: str, render_mode: str):
        rom = roms.get_rom_path(name)
        assert rom is not None, name
        self._params, self._rules, self._rom = params, params.rules(), rom
        self._ale = ale_py.ALEInterface()
        self._ale.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale.setFloat("repeat_action_probability", self._rules.repeat_action_probability)
        self._ale.setBool("display_screen", render_mode == "human")
        self._ale.loadROM(self._rom)
        full = self._rules.full_action_space
        self._actions = self._ale.getLegalActionSet() if full else self._ale.getMinimalActionSet()
        self._fire = self._rules.use_fire_reset and ale_py.Action.FIRE in self._actions
        self.single_action_space = Discrete(len(self._actions))
        self._ended = False

    def reset(
        self, *, seed: np.ndarray | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(int(seed[0]))
            self._ale.setInt("random_seed", int(seed[0]))
            self._ale.loadROM(self._rom)
        self._restart()
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        reward = 0
        if self._ended:
            self._restart()
        else:
            reward = self._advance(self._actions[int(action[0])])
        return self._observation(), np.array([reward]), np.array([self._ended]), np.array([False]), self._info()

    def send(self, action: np.ndarray) -> None:
        self._sent = action

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        return self.step(self._sent)

    @property
    def ale(self) -> "RenderableAtari":
        """Return the object that knows the actions, which AtariVectorEnv keeps under this name."""
        return self

    def get_action_set(self) -> list[ale_py.Action]:
        return list(self._actions)

    def render(self) -> np.ndarray:
        return self._ale.getScreenRGB()

    def close(self) -> None:
        del self._ale

    def _restart(self) -> None:
        self._ale.reset_game()
        if self._fire:
            self._ale.act(ale_py.Action.FIRE)
        for _ in range(int(self._random.integers(self._rules.noop_max + 1)) - self._fire):
            self._ale.act(ale_py.Action.NOOP)
            if self._ale.game_over():
                self._ale.reset_game()
        self._ended = False
        newest = self._screen()
        self._screens = [newest, np.zeros_like(newest)]
        frame = self._frame()
        self._stack = np.zeros((max(self._params.frame_stack, 1), *frame.shape), np.uint8)
        self._stack[-1] = frame

    def _advance(self, action: ale_py.Action) -> int:
        reward = 0
        for frames_left in range(self._params.frameskip, 0, -1):
            reward += self._ale.act(action)
            self._ended = self._ale.game_over()
            if self._ended:  # the picture stays that of the frames before, as in AtariVectorEnv
                break
            if frames_left <= 2:
                self._screens[frames_left - 1] = self._screen()
        self._stack = np.concatenate([self._stack[1:], self._frame()[None]])
        return reward

    def _screen(self) -> np.ndarray:
        return self._ale.getScreenGrayscale() if self._params.grayscale else self._ale.getScreenRGB()

    def _frame(self) -> np.ndarray:
        if self._params.maxpool:
            self._screens[0] = np.maximum(*self._screens)
        return resized(self._screens[0], self._params.resolution)

    def _observation(self) -> np.ndarray:
        return self._stack[None]  # [1, S, H, W] or [1, S, H, W, 3]

    def _info(self) -> dict[str, Any]:
        return {"lives": np.array([self._ale.lives()])}
