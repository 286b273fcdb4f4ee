"""Random play and a reference ring: what a ring must return, computed one step at a time from plain lists."""

import dataclasses
import multiprocessing
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.memory import Memory
from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from core.trajectory.frame_compression import StorageParams
from core.trajectory.ring_buffer import STORAGE, Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import TimeStep, Window


class Row(NamedTuple):
    """One step of one environment as the actor saw it."""

    observation: np.ndarray
    first: bool
    last: bool
    action: int
    reward: float
    discount: float
    features: np.ndarray  # added by the agent
    state: np.ndarray  # in which the action was chosen


class RandomPlay:
    """Play random frames with terminations, truncations and lost lives; `rows[stream]` is the reference ring."""

    extras = {"features": ArraySpec((3,), "float32")}
    states = (ArraySpec((2,), "float32"),)

    def __init__(
        self,
        seed: int,
        num_envs: int,
        frame_shape: tuple[int, ...] = (2, 3),
        frame_stack: int = 4,
        end: float = 0.15,
        frame_dtype: str = "uint8",
    ):
        self.generator = np.random.default_rng(seed)
        self.spec = EnvSpec("random", ArraySpec(frame_shape, frame_dtype), frame_stack, Discrete(5))
        self.num_envs, self.end, self.with_states = num_envs, end, False
        self._thoughts = np.random.default_rng([seed, 1])
        self.rows: list[list[Row]] = [[] for _ in range(num_envs)]
        self._observations = [self._reset() for _ in range(num_envs)]
        ones, zeros = np.ones(num_envs), np.zeros(num_envs)
        self.timestep = self._timestep(zeros, ones, ones, zeros)

    def play(self, writer: ChunkWriter, steps: int) -> int:
        """Append steps to the writer and return the number of agent steps it published."""
        return sum(self._step(writer) for _ in range(steps))

    def restart(self) -> None:
        """Begin new episodes everywhere, as a new actor does; the caller forgets unpublished steps."""
        self._observations = [self._reset() for _ in range(self.num_envs)]
        ones, zeros = np.ones(self.num_envs), np.zeros(self.num_envs)
        self.timestep = self._timestep(zeros, ones, ones, zeros)

    def seen(self, stream: int, serial: int) -> tuple[np.ndarray, bool, bool]:
        """Return observation, first and last of a step, or of the next one, which has no action yet."""
        rows = self.rows[stream]
        if serial < len(rows):
            return rows[serial].observation, rows[serial].first, rows[serial].last
        assert serial == len(rows)
        return self.timestep.observation[stream], bool(self.timestep.first[stream]), bool(self.timestep.last[stream])

    def _step(self, writer: ChunkWriter) -> int:
        before, draw = self.timestep, self.generator
        actions = draw.integers(5, size=self.num_envs)
        rewards, discounts, firsts, lasts = (
            np.zeros(self.num_envs),
            np.ones(self.num_envs),
            before.last.copy(),
            before.last & False,
        )
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
        features, state = self._thoughts.normal(size=(self.num_envs, 3)), self._thoughts.normal(size=(self.num_envs, 2))
        for stream, rows in enumerate(self.rows):
            rows.append(
                Row(
                    before.observation[stream].copy(),
                    bool(before.first[stream]),
                    bool(before.last[stream]),
                    int(actions[stream]),
                    float(self.timestep.reward[stream]),
                    float(self.timestep.discount[stream]),
                    features[stream].astype(np.float32),
                    state[stream].astype(np.float32),
                )
            )
        return writer.append(
            before,
            actions,
            self.timestep,
            {"features": features},
            (torch.from_numpy(state),) if self.with_states else (),
        )

    def _timestep(self, rewards: np.ndarray, discounts: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> TimeStep:
        return TimeStep(
            np.stack(self._observations),
            rewards.astype(np.float32),
            discounts.astype(np.float32),
            firsts.astype(bool),
            lasts.astype(bool),
            rewards.astype(np.float32),
        )

    def _frame(self) -> np.ndarray:
        # never 0, so that padding is recognised
        return self.generator.integers(1, 256, size=self.spec.frame.shape, dtype=np.uint8)

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
    """Return the observations of the window at `start`, stopping where the episode ends."""
    found = []
    for position in spec.observations:
        row = start
        for _ in range(position):
            if rows[row].last and not spec.stride:
                break
            row += 1
        found.append(rows[row].observation)
    return found


def small_layout(
    spec: EnvSpec,
    *,
    rows: int,
    chunk_length: int,
    num_envs: int,
    num_actors: int = 1,
    with_priority: bool = False,
    extras: dict[str, ArraySpec] | None = None,
    states: tuple[ArraySpec, ...] = (),
    storage: StorageParams = STORAGE,
    kept_steps_per_env: int = 1,
    arena_bytes: int | None = None,
) -> Layout:
    """Return a layout of exactly `rows` steps per environment, and of `arena_bytes` per arena unless None."""
    layout = Layout.of(
        spec,
        extras or {},
        capacity=1,
        num_actors=num_actors,
        num_envs=num_envs,
        chunk_length=chunk_length,
        with_priority=with_priority,
        states=states,
        storage=storage,
        kept_steps_per_env=kept_steps_per_env,
    )
    assert rows % chunk_length == 0
    return dataclasses.replace(
        layout, ring_length=rows, arena_bytes=layout.arena_bytes if arena_bytes is None else arena_bytes
    )


def quick_processes() -> Any:
    """Return multiprocessing's fork server, which imports torch once for all processes of a test worker."""
    multiprocessing.set_forkserver_preload(["torch"])
    return multiprocessing.get_context("forkserver")


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """Run target(*arguments, event) in a process, wait until it has set its event, and kill it at the end.

    A spawned process would import torch first, which takes seconds. A fork of this process would have the locks of its
    threads, which torch.distributed and OpenMP start.
    """
    context = quick_processes()
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
    """Write a step of each environment in which every element of every field identifies the step."""
    streams = np.arange(layout.num_envs) + actor_ind * layout.num_envs
    code = (streams + 1 + generation * 1000) * CODE + serial

    def everywhere(name: str) -> np.ndarray:
        shape = layout.fields[name].shape
        return np.broadcast_to(code.reshape(-1, *[1] * len(shape)), (layout.num_envs, *shape))

    def timestep(ahead: int) -> TimeStep:
        flags, frames = np.full(layout.num_envs, serial + ahead), everywhere("frame") + ahead
        frames = np.repeat(frames[:, None], layout.frame_stack, 1) if layout.frame_stack else frames
        return TimeStep(
            frames,
            ((code + ahead - 1) % (1 << 20)).astype(np.float32),
            streams.astype(np.float32),
            coded_first(flags),
            coded_last(flags),
            code,
        )

    states = [
        torch.from_numpy(np.broadcast_to(code[:, None], (layout.num_envs, *spec.shape)).copy())
        for spec in layout.states
    ]
    writer.append(timestep(0), code, timestep(1), {name: everywhere(name) for name in layout.extras}, states)


def check_coded_window(layout: Layout, spec: WindowSpec, streams: np.ndarray, serials: np.ndarray, window) -> None:
    """Assert that every element of the window is what write_coded_row wrote for these environments and steps."""
    rows = serials + np.arange(spec.length + 1)[:, None]
    codes = (streams + 1) * CODE + rows
    assert not coded_last(serials).any()
    assert (window.actions.numpy() == codes).all()
    assert (window.rewards.numpy() == codes % (1 << 20)).all()
    assert (window.discounts.numpy() == streams).all()
    assert (window.firsts.numpy() == coded_first(rows)).all() and (window.lasts.numpy() == coded_last(rows)).all()
    for place, position in enumerate(spec.observations):
        to_end = 6 - serials % 7
        check_coded_frames(layout, streams, serials + np.minimum(position, to_end), window.observations[place].numpy())


def check_coded_frames(layout: Layout, streams: np.ndarray, rows: np.ndarray, observations: np.ndarray) -> None:
    """Assert that observations [N, *observation shape] belong to the steps `rows` [N]."""
    size = np.prod(layout.fields["frame"].shape, dtype=int)
    for back in range(max(layout.frame_stack, 1)):
        frames = observations[:, layout.frame_stack - 1 - back] if layout.frame_stack else observations
        expected = np.where(rows % 7 >= back, (streams + 1) * CODE + rows - back, 0)  # zeros before the episode's start
        assert (frames.reshape(len(rows), size) == expected[:, None]).all()


# compressed frames ------------------------------------------------------------------------------------------------
def check_blocks(trajectories: Trajectories) -> list[int]:
    """Assert that the blocks of all readable chunks are whole, in order, within the arena and unchanged.

    Returns:
        The number of readable chunks per actor.
    """
    layout, counts = trajectories.layout, []
    names = ("arena", "written", "oldest", "packed", "block_start", "block_bytes", "block_check")
    length, chunks = layout.chunk_length, layout.ring_length // layout.chunk_length
    for arena, (written, *_), (oldest, *_), (packed, *_), starts, sizes, checks in zip(
        *map(trajectories.arrays.__getitem__, names)
    ):
        end = first = None
        live = range(max(-(-oldest // length), written // length - chunks + 1), written // length)
        for chunk in live:
            for start, size, check in zip(*(column[chunk % chunks].tolist() for column in (starts, sizes, checks))):
                place, first = start % layout.arena_bytes, start if first is None else first
                assert size > 0 and place + size <= len(arena) == layout.arena_bytes, (
                    "a block runs over the edge of the arena"
                )
                assert end is None or start >= end, "a block begins within the one before it"
                assert zlib.crc32(arena[place : place + size]) == check, f"chunk {chunk} is not what was written"
                end = start + size
        assert end is None or end <= packed, "blocks beyond the end"
        assert first is None or packed - first <= layout.arena_bytes, "the arena holds less than is offered"
        counts.append(len(live))
    return counts


# random unrolls ---------------------------------------------------------------------------------------------------
def assert_unroll_equals_twin(window: Window, column: int, play: RandomPlay, stream: int, serial: int) -> None:
    """Assert that an unroll equals the reference; of the bootstrap step only published fields count."""
    length, observations = len(window.lasts) - 1, window.observations.numpy()
    for position in range(length + 1):
        observation, first, last = play.seen(stream, serial + position)
        np.testing.assert_array_equal(observations[position, column], observation)
        assert (bool(window.firsts[position, column]), bool(window.lasts[position, column])) == (first, last)
    rows = play.rows[stream][serial : serial + length]
    assert window.actions[:-1, column].tolist() == [row.action for row in rows]
    assert window.rewards[:-1, column].tolist() == [row.reward for row in rows]
    assert window.discounts[:-1, column].tolist() == [row.discount for row in rows]
    if "features" in window.extras:
        np.testing.assert_array_equal(
            window.extras["features"][:-1, column].numpy(), np.stack([row.features for row in rows])
        )
    for state in window.states:
        np.testing.assert_array_equal(state[column].numpy(), rows[0].state)


# coded unrolls ----------------------------------------------------------------------------------------------------
Unroll = tuple[int, int]  # environment, number of its first step


def unroll_spec(length: int) -> WindowSpec:
    return WindowSpec(length, tuple(range(length + 1)), stride=length)


def unroll_memory(
    memory_type: type[Memory],
    params: Any,
    spec: EnvSpec,
    *,
    batch_size: int,
    length: int = 4,
    num_envs: int = 2,
    num_actors: int = 1,
    extras: dict[str, ArraySpec] | None = None,
    states: tuple[ArraySpec, ...] = (),
    seed: int = 0,
    storage: StorageParams = STORAGE,
    arena_bytes: int | None = None,
) -> Any:
    """Return a memory with the rings that it needs, and arenas of `arena_bytes` unless None."""
    capacity = memory_type.ring_steps(params, batch_size, length, num_actors)
    kept = -(-memory_type.kept_steps(params, batch_size, length, num_actors) // (num_actors * num_envs))
    layout = Layout.of(
        spec,
        extras or {},
        capacity=capacity,
        num_actors=num_actors,
        num_envs=num_envs,
        chunk_length=length,
        with_priority=False,
        states=states,
        storage=storage,
        kept_steps_per_env=length + kept,
    )
    layout = dataclasses.replace(layout, arena_bytes=layout.arena_bytes if arena_bytes is None else arena_bytes)
    return memory_type(params, layout, unroll_spec(length), seed)


class CodedActor:
    """Write coded steps of an actor's environments one after another."""

    def __init__(self, memory: Memory, actor_ind: int):
        self.memory, self.actor_ind, self.writer, self.serial = memory, actor_ind, memory.writer(actor_ind), 0

    def step(self) -> bool:
        """Write one step if the memory has room, and return True if it had."""
        if not self.writer.has_room():
            return False
        write_coded_row(self.writer, self.memory.layout, self.actor_ind, self.serial)
        self.serial += 1
        return True

    def write(self, chunks: int) -> None:
        """Write chunks whether or not the memory has room."""
        for _ in range(chunks * self.memory.layout.chunk_length):
            write_coded_row(self.writer, self.memory.layout, self.actor_ind, self.serial)
            self.serial += 1

    def unrolls(self) -> list[Unroll]:
        """Return all published unrolls, oldest first."""
        length, envs = self.memory.layout.chunk_length, self.memory.layout.num_envs
        return [
            (self.actor_ind * envs + env, chunk * length)
            for chunk in range(self.serial // length)
            for env in range(envs)
        ]


def check_coded_unrolls(layout: Layout, window: Window) -> list[Unroll]:
    """Assert that every element of each window belongs to one unroll, and return the unrolls by their first actions."""
    streams, serials = (array.astype(np.int64) for array in np.divmod(window.actions[0].numpy(), CODE))
    streams, length = streams - 1, layout.chunk_length
    assert ((streams >= 0) & (streams < layout.total_envs) & (serials % length == 0)).all()
    rows = serials + np.arange(length + 1)[:, None]
    codes = (streams + 1) * CODE + rows
    assert (window.actions[:-1].numpy() == codes[:-1]).all()
    assert (window.rewards[:-1].numpy() == codes[:-1] % (1 << 20)).all() and (
        window.discounts[:-1].numpy() == streams
    ).all()
    assert (window.firsts.numpy() == coded_first(rows)).all() and (window.lasts.numpy() == coded_last(rows)).all()
    for extra in window.extras.values():
        assert (extra[:-1].flatten(2).numpy() == codes[:-1, :, None]).all()
    for state in window.states:
        assert (state.flatten(1).numpy() == codes[0][:, None]).all()
    for position, row in enumerate(rows):
        check_coded_frames(layout, streams, row, window.observations[position].numpy())
    return list(zip(streams.tolist(), serials.tolist()))


CODED_FEATURES = {"features": ArraySpec((2,), "int64")}


def coded_features(window: Window) -> Tensor:
    """Return features [T, N, 2] of coded unrolls, equal to the stored ones."""
    return window.actions[:-1, :, None].expand(-1, -1, 2).float()
