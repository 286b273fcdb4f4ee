"""Random play and its naive twin: what a ring of rows must give back, computed one step at a time from plain lists."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from core.env import Discrete, EnvSpec, TimeStep
from core.shared import ArraySpec
from core.trajectory import ChunkWriter, Layout, WindowSpec


class Row(NamedTuple):
    """One step of one stream as the actor saw it."""

    observation: np.ndarray
    first: bool
    last: bool
    action: int
    reward: float
    discount: float


class RandomPlay:
    """num_envs streams of random frames with ends, truncations and life losses; `rows[stream]` is the twin."""

    def __init__(self, seed: int, num_envs: int, frame_shape: tuple[int, ...] = (2, 3), frame_stack: int = 4, end: float = 0.15):
        self.generator = np.random.default_rng(seed)
        self.spec = EnvSpec("random", ArraySpec(frame_shape, "uint8"), frame_stack, Discrete(5))
        self.num_envs, self.end = num_envs, end
        self.rows: list[list[Row]] = [[] for _ in range(num_envs)]
        self._observations = [self._reset() for _ in range(num_envs)]
        ones, zeros = np.ones(num_envs), np.zeros(num_envs)
        self.timestep = self._timestep(zeros, ones, ones, zeros)

    def play(self, writer: ChunkWriter, steps: int) -> int:
        """Append steps to the writer; returns the agent steps it published."""
        return sum(self._step(writer) for _ in range(steps))

    def restart(self) -> None:
        """A new actor takes over: all streams begin new episodes, unpublished rows are forgotten by the caller."""
        self._observations = [self._reset() for _ in range(self.num_envs)]
        ones, zeros = np.ones(self.num_envs), np.zeros(self.num_envs)
        self.timestep = self._timestep(zeros, ones, ones, zeros)

    def _step(self, writer: ChunkWriter) -> int:
        before, draw = self.timestep, self.generator
        actions = draw.integers(5, size=self.num_envs)
        rewards, discounts, firsts, lasts = np.zeros(self.num_envs), np.ones(self.num_envs), before.last.copy(), before.last & False
        for stream in range(self.num_envs):
            if before.last[stream]:
                self._observations[stream] = self._reset()
                continue
            self._observations[stream] = self._next(self._observations[stream])
            rewards[stream] = draw.normal()
            ended, terminated, life_lost = draw.random() < self.end, draw.random() < 0.5, draw.random() < 0.1
            lasts[stream] = ended
            discounts[stream] = 0.0 if (ended and terminated) or life_lost else 1.0
        self.timestep = self._timestep(rewards, discounts, firsts, lasts)
        for stream, rows in enumerate(self.rows):
            rows.append(Row(before.observation[stream].copy(), bool(before.first[stream]), bool(before.last[stream]),
                            int(actions[stream]), float(self.timestep.reward[stream]), float(self.timestep.discount[stream])))
        return writer.append(before, actions, self.timestep, {})

    def _timestep(self, rewards: np.ndarray, discounts: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> TimeStep:
        return TimeStep(np.stack(self._observations), rewards.astype(np.float32), discounts.astype(np.float32),
                        firsts.astype(bool), lasts.astype(bool), rewards.astype(np.float32))

    def _frame(self) -> np.ndarray:
        return self.generator.integers(1, 256, size=self.spec.frame.shape, dtype=np.uint8)  # never 0: padding is seen

    def _reset(self) -> np.ndarray:
        if not self.spec.frame_stack:
            return self._frame()
        padding = np.zeros((self.spec.frame_stack - 1, *self.spec.frame.shape), np.uint8)
        return np.concatenate([padding, self._frame()[None]])

    def _next(self, observation: np.ndarray) -> np.ndarray:
        if not self.spec.frame_stack:
            return self._frame()
        return np.concatenate([observation[1:], self._frame()[None]])


def observed(rows: list[Row], start: int, spec: WindowSpec) -> list[np.ndarray]:
    """The observations of the window at `start`: walk forward, stop for good where the episode ends."""
    found = []
    for position in spec.observations:
        row = start
        for _ in range(position):
            if rows[row].last and not spec.crosses_episodes:
                break
            row += 1
        found.append(rows[row].observation)
    return found


def small_layout(spec: EnvSpec, *, rows: int, chunk_length: int, num_envs: int, num_actors: int = 1,
                 with_priority: bool = False) -> Layout:
    """A layout of exactly `rows` rows a stream."""
    layout = Layout.of(spec, {}, capacity=1, num_actors=num_actors, num_envs=num_envs, chunk_length=chunk_length,
                       with_priority=with_priority)
    assert rows % chunk_length == 0
    return Layout(num_actors, num_envs, rows, chunk_length, layout.frame_stack, layout.fields, layout.extras)


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """A spawned target(*arguments, event) that has set its event; killed in the end."""
    context = multiprocessing.get_context("spawn")
    event = context.Event()
    process = context.Process(target=target, args=(*arguments, event), daemon=True)
    process.start()
    try:
        assert event.wait(150), "the process did not get ready"
        yield process
    finally:
        process.kill()
        process.join()


CODE = 1 << 32


def coded_spec(frame_shape: tuple[int, ...], frame_stack: int) -> EnvSpec:
    return EnvSpec("coded", ArraySpec(frame_shape, "int64"), frame_stack, Discrete(5))


def coded_first(serials: np.ndarray, episode: int = 7) -> np.ndarray:
    return serials % episode == 0


def coded_last(serials: np.ndarray, episode: int = 7) -> np.ndarray:
    return serials % episode == episode - 1


def write_coded_row(writer: ChunkWriter, layout: Layout, actor_ind: int, serial: int, generation: int = 0) -> None:
    """A row of each stream in which every element of every field says which row it is."""
    streams = np.arange(layout.num_envs) + actor_ind * layout.num_envs
    code = (streams + 1 + generation * 1000) * CODE + serial
    shape = layout.fields["frame"].shape
    stack = max(layout.frame_stack, 1)
    frames = np.broadcast_to(code.reshape(-1, *[1] * (len(shape) + 1)), (layout.num_envs, stack, *shape))
    frames = frames if layout.frame_stack else frames[:, 0]
    flags = np.full(layout.num_envs, serial)
    before = TimeStep(frames, code, code, coded_first(flags), coded_last(flags), code)
    after = TimeStep(frames, (code % (1 << 20)).astype(np.float32), streams.astype(np.float32), flags, flags, code)
    writer.append(before, code, after, {})


def check_coded_window(layout: Layout, spec: WindowSpec, streams: np.ndarray, serials: np.ndarray, window) -> None:
    """Every element of the window is what write_coded_row wrote for these streams and serials."""
    rows = serials + np.arange(spec.length + 1)[:, None]
    codes = (streams + 1) * CODE + rows
    assert not coded_last(serials).any()
    assert (window.actions.numpy() == codes).all()
    assert (window.rewards.numpy() == codes % (1 << 20)).all()
    assert (window.discounts.numpy() == streams).all()
    assert (window.firsts.numpy() == coded_first(rows)).all() and (window.lasts.numpy() == coded_last(rows)).all()
    for place, position in enumerate(spec.observations):
        to_end = 6 - serials % 7
        row = serials + np.minimum(position, to_end)
        for back in range(layout.frame_stack):
            frames = window.observations[place, :, layout.frame_stack - 1 - back].numpy().reshape(len(serials), -1)
            expected = np.where(row % 7 >= back, (streams + 1) * CODE + row - back, 0)  # zeros before the episode's start
            assert (frames == expected[:, None]).all()
