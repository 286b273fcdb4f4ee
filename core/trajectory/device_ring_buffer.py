"""A copy of all actors' ring buffers as tensors on the learner's device.

Every published step is copied once. Afterwards windows are gathered on the device by index.

- Nobody else writes the copy, so what can be read stays unchanged until the next `refresh`. Copies that overwrite steps
  which updates on the device may still read wait for these updates.
- A step that a writer overwrote during the copy is detected by checking the writers' counters again afterwards, as
  every reader does.
- Frames are stored uncompressed, also if those of the shared rings are compressed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from core.device.torch_runtime import Transfers, on_device
from core.specs import ArraySpec
from core.trajectory.ring_buffer import Layout, Trajectories, WindowGatherer

COPY_BYTES = 64 << 20  # of frames in one copy
# CUDA's operators index no unsigned numbers but bytes.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class DeviceRingBuffer(WindowGatherer[Tensor]):
    """A copy of `Trajectories` on `device`, with the same layout [actor, step, environment]."""

    library = torch

    def __init__(self, trajectories: Trajectories, device: torch.device):
        self.layout, self.device, self._trajectories = trajectories.layout, device, trajectories
        self.tensors = {  # by field, [num_actors, ring_length, num_envs, ...]
            name: torch.zeros(spec.shape, dtype=torch.from_numpy(np.empty(0, spec.dtype)).dtype, device=device)
            for name, spec in self.arrays(self.layout).items()
        }
        self.copied = np.zeros(self.layout.num_actors, np.int64)  # steps of each environment, by actor
        self._waited_at = self.copied  # steps after the last copy that waited for updates
        self._transfers = Transfers(trajectories.arrays, device)

    @staticmethod
    def arrays(layout: Layout) -> dict[str, ArraySpec]:
        """Return what is copied: all fields except initial priorities, which are written after their steps."""
        arrays = replace(layout, arena_bytes=0).arrays()  # with frames uncompressed, as here
        return {name: arrays[name] for name in (*layout.fields, *layout.state_fields) if name != "priority"}

    # copying ----------------------------------------------------------------------------------------------------------
    def refresh(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy what has been published since the last call.

        Returns:
            The step ids [low, high) of each actor from which a whole window of this length can be read here, both
            [num_actors]. `low` is read after the copy, which excludes every step that was overwritten meanwhile.
        """
        written = self._trajectories.written()
        # oldest steps that windows may touch
        oldest = self._trajectories.starts(0)[0] - max(self.layout.frame_stack - 1, 0)
        begin = np.maximum(self.copied - 1, oldest).clip(0)  # a restarted writer has changed the newest step's `last`
        # Beyond the margin, copies overwrite steps that running updates may still read. Python may be many updates
        # ahead of the device, so the steps of all copies since the last one that waited count.
        after_work = bool((written - self._waited_at > self.layout.overwrite_margin).any())
        if after_work:
            self._waited_at = written
        with self._transfers.together(after_work) as copy:
            for actor in np.flatnonzero(written > self.copied).tolist():
                for first, last in self._ranges(int(begin[actor]), int(written[actor])):
                    self._copy(copy, actor, first, last)
        self.copied = written
        low = self._trajectories.starts(length)[0]
        return low, np.maximum(written - length, low)

    def _ranges(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Split steps [first, last) into ranges that are contiguous in the ring and not too large."""
        layout = self.layout
        chunk_bytes = layout.chunk_length * layout.num_envs * layout.fields["frame"].nbytes
        max_steps = max(COPY_BYTES // chunk_bytes, 1) * layout.chunk_length
        while first < last:
            end = min(last, first + max_steps, (first // layout.ring_length + 1) * layout.ring_length)
            yield first, end
            first = end

    def _copy(self, copy: Callable[[np.ndarray, Tensor], None], actor: int, first: int, last: int) -> None:
        layout, shared = self.layout, self._trajectories.arrays
        steps = slice(first % layout.ring_length, (last - 1) % layout.ring_length + 1)
        chunks = slice(steps.start // layout.chunk_length, (steps.stop - 1) // layout.chunk_length + 1)
        compressed = self._trajectories.frames
        for name, tensor in self.tensors.items():
            if name == "frame" and compressed is not None:
                env_ids = actor * layout.num_envs + np.arange(layout.num_envs)
                copy(compressed.take(env_ids, np.arange(first, last)[:, None]), tensor[actor, steps])
            else:
                part = chunks if name in layout.state_fields else steps
                copy(shared[name][actor, part], tensor[actor, part])

    # reading ----------------------------------------------------------------------------------------------------------
    def take(self, name: str, env_ids: np.ndarray, step_ids: np.ndarray) -> Tensor:
        """Return a field of steps (env_ids [K], step_ids [K]), [K, ...]."""
        return self._take(name, self.slots(on_device(env_ids, self.device), on_device(step_ids, self.device)))

    def _take(self, name: str, slots: Tensor) -> Tensor:
        tensor = self.tensors[name]
        return tensor.view(SIGNED.get(tensor.dtype, tensor.dtype)).flatten(0, 2)[slots].view(tensor.dtype)

    def take_frames(self, env_ids: Tensor, step_ids: Tensor, slots: Tensor) -> Tensor:
        return self._take("frame", slots)

    def _clear(self, frames: Tensor, mask: Tensor) -> None:
        empty = mask.view(*mask.shape, *[1] * (frames.dim() - mask.dim()))
        frames.view(SIGNED.get(frames.dtype, frames.dtype)).masked_fill_(empty, 0)
