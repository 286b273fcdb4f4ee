"""Rows, chunks and windows: the one data format between actors and learners.

A *row* is one step of one environment, written once: the newest frame, first, last, action, reward, discount and what the agent
adds. Each actor owns a ring of rows of its E streams, [rows, E, ...], and is its only writer: it fills a chunk of rows, then
raises `written`. Readers trust rows in [written - rows + guard, written) and check `written` again when they have read, so
nobody locks and a killed writer leaves nothing locked. Row t of a stream holds the action taken at its observation and
the reward and discount which that action earned; a `last` row ends an episode: no action was taken there.

Of the row after the newest chunk, the *head*, observation, first and last are readable too: an unroll of a whole chunk can
bootstrap from what its last action led to without waiting for the next chunk.

Every chunk has a *ticket*, which says in what order the chunks of all actors were published: one more than the newest that its writer
saw. So no counter is shared, and only chunks published at the same moment may have the same one. A checkpoint carries them.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.common.shared_arrays import SharedArrays
from core.common.system import available_bytes
from core.specs import WindowSpec
from core.trajectory.counters import first_valid_step
from core.trajectory.frame_arena import CompressedFrameReader
from core.trajectory.frame_gather import GatherThreadPool, RawFrames
from core.trajectory.layout import Layout
from core.types import Window


class Trajectories:
    """The shared rows of all actors."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.arrays = SharedArrays(layout.arrays())
        actors, envs = np.divmod(np.arange(layout.num_streams), layout.num_envs)
        self._origins = actors * layout.rows * layout.num_envs + envs  # [num_streams] flat index of a stream's row 0

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made on first use."""
        return {name: value for name, value in self.__dict__.items() if name != "frames"}

    @cached_property
    def frames(self) -> RawFrames | CompressedFrameReader:
        """The frames of the rows, by stream and serial number."""
        packed, threads = self.layout.packed, GatherThreadPool(self.layout.storage.threads)
        return CompressedFrameReader(packed, self.arrays, threads) if packed else RawFrames(self.arrays["frame"], threads)

    def written(self) -> np.ndarray:
        """[num_actors] int64: rows a stream published by each actor so far; never falls."""
        return self.arrays["written"][:, 0].copy()

    def starts(self, window_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Serial numbers [low, high) of each actor's rows from which a whole window can be read, both [num_actors]."""
        written = self.written()
        low = np.maximum(written - self.layout.rows + self.layout.overwrite_margin, 0)
        low = np.maximum(low, self.arrays["oldest"][:, 0])
        low = np.where(low > 0, low + max(self.layout.frame_stack - 1, 0), 0)
        return low, np.maximum(written - window_length, low)

    def size(self) -> int:
        low, high = self.starts(0)
        return int((high - low).sum()) * self.layout.num_envs

    def still_valid(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """[B] bool: the rows of these windows (and of their first stack) had not been touched by their writer until now."""
        oldest_read = np.maximum(serials - max(self.layout.frame_stack - 1, 0), 0)
        return oldest_read >= first_valid_step(self.arrays, self.layout.rows, self.layout.chunk_length)[streams // self.layout.num_envs]

    def slots(self, streams: np.ndarray, serials: np.ndarray) -> np.ndarray:
        """Flat row indices of (stream, serial), broadcast together."""
        return self._origins[streams] + serials % self.layout.rows * self.layout.num_envs

    def flat(self, name: str) -> np.ndarray:
        """A field as [num_slots, ...]."""
        return self.arrays[name].reshape(self.layout.num_slots, *self.layout.fields[name].shape)

    def gather(self, streams: np.ndarray, serials: np.ndarray, spec: WindowSpec) -> Window:
        """The windows that start at rows (streams [B], serials [B])."""
        slots = self.slots(streams, serials + np.arange(spec.length + 1)[:, None])  # [T + 1, B]

        def take(name: str) -> Tensor:
            return torch.from_numpy(self.flat(name).take(slots, axis=0))

        lasts = take("last")
        positions = np.broadcast_to(np.array(spec.observations, np.int64)[:, None], (len(spec.observations), len(serials)))
        if not spec.crosses_episodes:
            ends = lasts.numpy()
            end = np.where(ends.any(0), ends.argmax(0), spec.length)  # [B] position of the episode's last row
            positions = np.minimum(positions, end)
        return Window(self._observations(streams, serials + positions), take("first"), lasts, take("action"),
                      take("reward"), take("discount"), {name: take(name) for name in self.layout.extras},
                      self.states(streams, serials))

    def states(self, streams: np.ndarray, serials: np.ndarray) -> tuple[Tensor, ...]:
        """Recurrent states [B, ...] at the chunks of these rows."""
        actors, envs = np.divmod(streams, self.layout.num_envs)
        chunks = serials // self.layout.chunk_length % (self.layout.rows // self.layout.chunk_length)
        return tuple(torch.from_numpy(self.arrays[name][actors, chunks, envs]) for name in self.layout.state_fields)

    def _observations(self, streams: np.ndarray, rows: np.ndarray) -> Tensor:
        """Stacked observations of rows [P, B], zeros before an episode's start as the environment pads."""
        stack = self.layout.frame_stack
        if not stack:
            return torch.from_numpy(self.frames.take(streams, rows))
        serials = rows[..., None] - np.arange(stack - 1, -1, -1)  # [P, B, S], oldest first
        stacked = self.frames.take(streams[:, None], serials)
        firsts = self.flat("first")[self.slots(streams[:, None], serials)]
        before = np.zeros_like(firsts)  # a later frame of the stack started the episode
        before[..., :-1] = np.logical_or.accumulate(firsts[..., :0:-1], axis=-1)[..., ::-1]
        if before.any():
            stacked[before] = 0
        return torch.from_numpy(stacked)

    def statistics(self) -> dict[str, float]:
        """memory_mb: 1e6 bytes that the frames take; compression: how many times that they would take raw."""
        packed = self.layout.packed
        low, high = self.starts(0)
        raw = float((high - low).sum()) * self.layout.num_envs * self.layout.fields["frame"].nbytes
        if packed is None or not raw:
            return {"memory_mb": raw / 1e6}
        used = CompressedFrameReader.used_bytes(packed, self.arrays)
        return {"memory_mb": used / 1e6, "compression": raw / max(used, 1)}

    def state_dict(self) -> dict[str, Any]:
        """Copies of the rows in use. Writers may go on meanwhile: what they overwrite is left out by `oldest`.

        Raises MemoryError when the machine has no room for the copies.
        """
        if self.layout.nbytes > available_bytes():
            raise MemoryError(f"{self.layout.nbytes:,} bytes are needed to copy the replay and {available_bytes():,} are free: "
                              "a smaller memory.capacity, or learner.checkpoint_replay false")
        state = self._newest()
        lengths = self._lengths(self._used(state["written"]), state.get("packed"))
        state |= {name: self.arrays[name][:, :length].copy() for name, length in lengths.items() if name not in state}
        state |= {"oldest": self.arrays["oldest"].copy()}
        state["oldest"][:, 0] = first_valid_step(self.arrays, self.layout.rows, self.layout.chunk_length)  # after the rows were copied
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def _newest(self) -> dict[str, np.ndarray]:
        """`written`, and of packed frames the short ring of unpacked ones as it was then, and their end."""
        while True:
            state = {"written": self.arrays["written"].copy()}
            if self.layout.packed is None:
                return state
            state |= {name: self.arrays[name].copy() for name in ("frame", "packed")}
            if (self.arrays["written"] - state["written"] <= self.layout.chunk_length).all():
                return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only while nobody writes. Raises ValueError naming the field whose shape or dtype differs."""
        used = self._used(state["written"].numpy()) if "written" in state else 0
        lengths = self._lengths(used, state["packed"].numpy() if "packed" in state else None)
        for name, spec in self.layout.arrays().items():
            shape = (spec.shape[0], lengths[name], *spec.shape[2:]) if name in lengths else spec.shape
            stored = state[name].numpy() if name in state else None
            if stored is None or stored.shape != shape or stored.dtype != spec.dtype:
                found = "absent" if stored is None else f"{stored.dtype} {stored.shape}"
                raise ValueError(f"stored replay does not fit: field {name} is {found}, this run needs {spec.dtype} {shape}")
        for name in self.layout.arrays():
            stored = state[name].numpy()
            self.arrays[name][:, :stored.shape[1]] = stored

    def _used(self, written: np.ndarray) -> int:
        """Rows of a stream that hold anything: the published ones and the head."""
        return min(self.layout.rows, int(written.max()) + 1)

    def _lengths(self, used: int, ends: np.ndarray | None) -> dict[str, int]:
        """Of each array's second axis, what rows 0 .. used of a stream take, and arenas up to `ends`."""
        chunks = -(-used // self.layout.chunk_length)
        lengths = {**dict.fromkeys(self.layout.fields, used), **dict.fromkeys((*self.layout.state_fields, "tickets"), chunks)}
        return lengths | self.layout.packed.lengths(chunks, ends) if self.layout.packed else lengths
