"""The rows of all actors once more, as tensors on the learner's device.

Every published row is copied once, after that windows are gathered there by index. Nobody else writes this copy, so what can be read
stays as it is until the next `refresh`; whether a row was overwritten while it was being copied is seen by looking at the writers' counters
again afterwards, as every reader does. Frames lie here as they are, also those that are packed in the shared rows.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from core.device.transfers import Transfers
from core.specs import ArraySpec, WindowSpec
from core.trajectory.layout import Layout
from core.trajectory.ring_buffer import Trajectories
from core.types import Window

COPY_BYTES = 64 << 20  # of frames that are copied in one go


def torch_dtype(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class DeviceRingBuffer:
    """Trajectories on `device`. A stream's rows lie as in the shared rows: [actor, row, stream]."""

    def __init__(self, trajectories: Trajectories, device: torch.device):
        self.layout, self._trajectories = trajectories.layout, trajectories
        self._arrays = {name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
                        for name, spec in self.arrays(self.layout).items()}
        self.copied = np.zeros(self.layout.num_actors, np.int64)  # rows of each actor's streams
        self._transfers = Transfers(trajectories.arrays, device)
        self._known: dict[WindowSpec, Tensor] = {}
        self._stack = torch.arange(max(self.layout.frame_stack, 1) - 1, -1, -1, device=device)  # [S] rows back, oldest first

    @staticmethod
    def arrays(layout: Layout) -> dict[str, ArraySpec]:
        """What is copied: all but the actors' first priorities, which are written after the rows."""
        lead = (layout.num_actors, layout.rows, layout.num_envs)
        fields = {name: ArraySpec((*lead, *spec.shape), spec.dtype) for name, spec in layout.fields.items() if name != "priority"}
        return fields | {name: spec for name, spec in layout.arrays().items() if name in layout.state_fields}

    def __getitem__(self, name: str) -> Tensor:
        """A field of all rows, [num_actors, rows, num_envs, ...]."""
        return self._arrays[name]

    # copying ----------------------------------------------------------------------------------------------------------
    def refresh(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy what has been published since the last call.

        Returns the serial numbers [low, high) of each actor's rows from which a whole window of this length can be read here, both
        [num_actors]; `low` as it was after the copying, so that no row that was overwritten meanwhile is among them.
        """
        written = self._trajectories.written()
        stacked = self._trajectories.starts(0)[0] - max(self.layout.frame_stack - 1, 0)  # oldest rows that windows may touch
        begin = np.maximum(self.copied - 1, stacked).clip(0)  # a writer that took over has marked the newest row
        overtaken = written - self.copied > self.layout.overwrite_margin  # these copies overwrite rows that updates in hand may be reading
        with self._transfers.together(after_work=bool(overtaken.any())) as copy:
            for actor in np.flatnonzero(written > self.copied).tolist():
                for first, last in self._pieces(int(begin[actor]), int(written[actor])):
                    self._copy(copy, actor, first, last)
        self.copied = written
        low = self._trajectories.starts(length)[0]
        return low, np.maximum(written - length, low)

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """[first, last) in parts that lie in one piece in the ring and are not too large."""
        layout = self.layout
        chunk_bytes = layout.chunk_length * layout.num_envs * layout.fields["frame"].nbytes
        most = max(COPY_BYTES // chunk_bytes, 1) * layout.chunk_length
        while first < last:
            end = min(last, first + most, (first // layout.rows + 1) * layout.rows)
            yield first, end
            first = end

    def _copy(self, copy: Callable[[np.ndarray, Tensor], None], actor: int, first: int, last: int) -> None:
        shared, length = self._trajectories.arrays, self.layout.chunk_length
        rows = slice(first % self.layout.rows, (last - 1) % self.layout.rows + 1)
        chunks = slice(rows.start // length, (rows.stop - 1) // length + 1)
        for name, tensor in self._arrays.items():
            if name in self.layout.state_fields:
                copy(shared[name][actor, chunks], tensor[actor, chunks])
            elif name == "frame" and self.layout.packed:
                copy(self._unpacked(actor, first, last), tensor[actor, rows])
            else:
                copy(shared[name][actor, rows], tensor[actor, rows])

    def _unpacked(self, actor: int, first: int, last: int) -> np.ndarray:
        streams = actor * self.layout.num_envs + np.arange(self.layout.num_envs)
        return self._trajectories.frames.take(streams, np.arange(first, last)[:, None])

    # windows ----------------------------------------------------------------------------------------------------------
    def gather(self, streams: Tensor, serials: Tensor, spec: WindowSpec) -> Window:
        """As Trajectories.gather, of rows (streams [B], serials [B]) int64 on the device; python looks at no value."""
        steps = torch.arange(spec.length + 1, device=serials.device)[:, None]
        slots = self._slots(streams, serials + steps)  # [T + 1, B]
        lasts = self._take("last", slots)
        positions = self._positions(spec)
        if not spec.crosses_episodes:
            end = torch.where(lasts, steps, spec.length).amin(0)  # [B] position of the episode's last row
            positions = torch.minimum(positions, end)
        return Window(self._observations(streams, serials + positions), self._take("first", slots), lasts, self._take("action", slots),
                      self._take("reward", slots), self._take("discount", slots),
                      {name: self._take(name, slots) for name in self.layout.extras}, self._states(streams, serials))

    def _positions(self, spec: WindowSpec) -> Tensor:
        """Those of its observations, [P, 1]; put on the device once."""
        if spec not in self._known:
            self._known[spec] = torch.tensor(spec.observations, dtype=torch.int64, device=self._stack.device)[:, None]
        return self._known[spec]

    def _slots(self, streams: Tensor, serials: Tensor) -> Tensor:
        """Flat row indices, broadcast together."""
        num_envs, rows = self.layout.num_envs, self.layout.rows
        return (streams // num_envs * rows + serials % rows) * num_envs + streams % num_envs

    def _take(self, name: str, slots: Tensor) -> Tensor:
        return self._arrays[name].flatten(0, 2)[slots]

    def _states(self, streams: Tensor, serials: Tensor) -> tuple[Tensor, ...]:
        actors, envs = streams // self.layout.num_envs, streams % self.layout.num_envs
        chunks = serials // self.layout.chunk_length % (self.layout.rows // self.layout.chunk_length)
        return tuple(self._arrays[name][actors, chunks, envs] for name in self.layout.state_fields)

    def _observations(self, streams: Tensor, rows: Tensor) -> Tensor:
        """Stacked observations of rows [P, B], zeros before an episode's start."""
        if not self.layout.frame_stack:
            return self._take("frame", self._slots(streams, rows))
        slots = self._slots(streams[:, None], rows[..., None] - self._stack)  # [P, B, S], oldest first
        firsts = self._take("first", slots).to(torch.uint8)
        started = firsts.flip(-1).cumsum(-1).flip(-1) - firsts  # [P, B, S]: episodes that start at a later frame of the stack
        stacked = self._take("frame", slots)
        return stacked.masked_fill_((started > 0).view(*started.shape, *[1] * (stacked.dim() - 3)), 0)
