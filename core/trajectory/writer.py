"""Write an actor's steps: fill a chunk, then publish it, or send it to the ring of its steps on another machine."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from core.specs import WindowSpec
from core.trajectory.frame_compression import CompressedFrameWriter, StorageParams, arena_bytes, compress, decompressed
from core.trajectory.ring_buffer import Layout, Trajectories
from core.types import ACTION_MASK, TimeStep, Window

BOOTSTRAP_FIELDS = ("frame", "first", "last", ACTION_MASK)  # fields that the bootstrap step after a chunk has too


class DamagedChunk(ValueError):
    """An error that is raised for a chunk that is not what was sent."""


class Chunk(NamedTuple):
    """L steps of E environments and the bootstrap step, in arrays of its own."""

    # Each [L, E, ...], those in BOOTSTRAP_FIELDS [L + 1, E, ...]; `priority` is that of the steps that became starts.
    fields: dict[str, np.ndarray]
    states: list[np.ndarray]  # recurrent states, each [E, ...]
    # Compressed frames and their checksum: a block of each environment's L steps, then one of all environments'
    # bootstrap step. Empty if the fields have the frames.
    blocks: list[tuple[np.ndarray, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [*self.fields.values(), *self.states, *(block for block, _ in self.blocks)]
        return sum(array.nbytes for array in arrays)


class ChunkWriter:
    """The only writer of an actor's rings. A writer that replaces another marks its open episodes as truncated."""

    def __init__(
        self,
        trajectories: Trajectories,
        actor_ind: int,
        window: WindowSpec,
        priorities: Callable[[Window], np.ndarray | None] | None = None,
        may_begin_chunk: Callable[[], bool] | None = None,
    ):
        """Continue the rings of an actor.

        Args:
            trajectories: The rings of all actors.
            actor_ind: The actor whose rings are written.
            window: The windows that the learner samples.
            priorities: Returns initial priorities [B] of windows [T + 1, B] without observations. It is called just
                before their starts can be sampled. If it or its result is None, the memory uses the largest priority
                that it has seen.
            may_begin_chunk: Returns True if a new chunk may be begun. If None, it always may.
        """
        self._trajectories, self._actor_ind, self._priorities = trajectories, actor_ind, priorities
        self._layout, arrays = trajectories.layout, trajectories.arrays
        self._window = dataclasses.replace(window, observations=())
        self._fields = {name: arrays[name][actor_ind] for name in (*self._layout.fields, *self._layout.state_fields)}
        self._agent_extras = [name for name in self._layout.extras if name != ACTION_MASK]
        self._written, self._tickets = arrays["written"], arrays["tickets"]
        self._counter = self._written[actor_ind]
        self._filled, self._may_begin_chunk = 0, may_begin_chunk
        packed, level = self._layout.packed, self._layout.storage.compression_level
        self._compressor = CompressedFrameWriter(packed, arrays, actor_ind, level) if packed else None
        if self._counter[0]:
            newest = (self._counter[0] - 1) % self._layout.ring_length
            # A step with discount 0 needs nothing that follows, and as a `last` step would lose its terminal reward.
            self._fields["last"][newest] |= self._fields["discount"][newest] != 0

    def has_room(self) -> bool:
        """Return True if a step may be appended; a chunk that was begun may always be finished."""
        return not self.begins_chunk or self._may_begin_chunk is None or self._may_begin_chunk()

    @property
    def begins_chunk(self) -> bool:
        """Return True if the next step is the first of a chunk."""
        return not self._filled

    @property
    def lacks_windows(self) -> bool:
        """Return True until at least two full windows have been published."""
        return bool(self._counter[0] < self._window.length + 2)

    def append(
        self,
        before: TimeStep,
        action: np.ndarray,
        after: TimeStep,
        extras: Mapping[str, np.ndarray],
        state: Sequence[Tensor] = (),
    ) -> int:
        """Write one step of each environment.

        Args:
            before: What the action was chosen from.
            action: The actions, [E, ...].
            after: What the environments returned to them.
            extras: At least the fields that the layout declares as extras, except masks of legal actions.
            state: The recurrent state that the actions were chosen with.

        Returns:
            The agent steps that this call published: 0 until a chunk is full. Steps that end an episode do not count.
        """
        slot, fields = self._write_observation(before), self._fields
        fields["action"][slot] = action
        fields["reward"][slot], fields["discount"][slot] = after.reward, after.discount
        for name in self._agent_extras:
            if extras.get(name) is None:
                raise ValueError(f"Agent.extras declares {name!r}, which act has not returned")
            value = np.asarray(extras[name])
            if value.shape != fields[name].shape[1:]:
                shapes = f"{[*value.shape]}, not {[*fields[name].shape[1:]]}"
                raise ValueError(f"act has returned {name!r} of the shape {shapes} as Agent.extras declares it")
            if (dtype := fields[name].dtype).kind != "f" and value.dtype.kind == "f":
                raise ValueError(f"act has returned {name!r} as {value.dtype}, and Agent.extras declares {dtype}")
            fields[name][slot] = value
            if dtype.kind in "iu" and not np.can_cast(value.dtype, dtype) and (fields[name][slot] != value).any():
                raise ValueError(f"act has returned {name!r} beyond {dtype}, which Agent.extras declares")
        if not self._filled:
            for name, tensor in zip(self._layout.state_fields, state, strict=True):
                fields[name][slot // self._layout.chunk_length] = tensor.cpu().numpy()
        self._filled += 1
        if self._filled < self._layout.chunk_length:
            return 0
        self._write_observation(after)  # that of the bootstrap step, because the chunk is full
        start, end = int(self._counter[0]), int(self._counter[0]) + self._filled
        if "priority" in fields:
            self._write_priorities(max(start - self._window.length, 0), end - self._window.length)
        if self._compressor:
            self._compressor.pack(start // self._layout.chunk_length)
        return self._publish(self._filled)

    def store(self, chunk: Chunk) -> int:
        """Store a whole chunk that a writer on another machine has filled; return the agent steps published.

        Raises DamagedChunk, and stores nothing, if compressed frames are not what was sent.
        """
        chunk = with_frames(chunk, self._layout)
        length, fields = self._layout.chunk_length, self._fields
        start = int(self._counter[0])
        for name in self._layout.fields.keys() - {"priority"}:
            field, values = fields[name], chunk.fields[name]
            begin = start % len(field)
            field[begin : begin + length] = values[:length]
            if name in BOOTSTRAP_FIELDS:
                field[(start + length) % len(field)] = values[length]
        for name, values in zip(self._layout.state_fields, chunk.states, strict=True):
            fields[name][start % self._layout.ring_length // length] = values
        if "priority" in fields:
            starts = np.arange(start, start + length) - self._window.length
            slots = starts[starts >= 0] % self._layout.ring_length
            fields["priority"][slots] = chunk.fields["priority"][starts >= 0]
        if self._compressor:
            self._compressor.store(start // length, chunk.blocks[:-1])
        return self._publish(length)

    def _write_observation(self, timestep: TimeStep) -> int:
        """Write what is observed at the first step that is not filled yet; return the step's slot."""
        step_id = int(self._counter[0]) + self._filled
        slot, frames = step_id % self._layout.ring_length, self._fields["frame"]
        newest = timestep.observation[:, -1] if self._layout.frame_stack else timestep.observation
        frames[step_id % len(frames)] = newest
        self._fields["first"][slot], self._fields["last"][slot] = timestep.first, timestep.last
        if ACTION_MASK in self._fields:
            self._fields[ACTION_MASK][slot] = timestep.action_mask
        return slot

    def _publish(self, length: int) -> int:
        """Publish the next `length` steps to the readers, with the next ticket; return how many are agent steps."""
        start = int(self._counter[0])
        num_chunks = self._tickets.shape[1]
        # one more than the newest ticket of any actor's published chunks
        newest = self._written[:, 0] // self._layout.chunk_length - 1
        ticket = int(self._tickets[np.arange(len(newest)), newest % num_chunks].max()) + 1
        self._tickets[self._actor_ind, start // self._layout.chunk_length % num_chunks] = ticket
        self._counter[0], self._filled = start + length, 0
        return int((~self._fields["last"][np.arange(start, start + length) % self._layout.ring_length]).sum())

    def _write_priorities(self, low: int, high: int) -> None:
        """Write the initial priorities of starts [low, high), which this chunk completes.

        NaN means that the actor supplied none. A step that ends an episode is no start of a window without stride.
        """
        starts = np.arange(low, high)
        starts = starts[starts % (self._window.stride or 1) == 0]
        slots, num_envs = starts % self._layout.ring_length, self._layout.num_envs
        self._fields["priority"][slots] = np.nan
        if self._priorities is None or not len(slots):
            return
        env_ids = np.tile(np.arange(num_envs), len(starts)) + self._actor_ind * num_envs
        window = self._trajectories.gather(env_ids, np.repeat(starts, num_envs), self._window)
        supplied = self._priorities(window)
        if supplied is None:
            return
        priorities = supplied if self._window.stride else np.where(window.lasts[0].numpy(), 0.0, supplied)
        if not (np.isfinite(priorities) & (priorities >= 0)).all():
            raise ValueError(
                f"initial priorities must be finite and not negative; actor {self._actor_ind} computed {priorities}"
            )
        self._fields["priority"][slots] = priorities.reshape(-1, num_envs)


# on another machine ---------------------------------------------------------------------------------------------------
def newest_chunk(trajectories: Trajectories, window_length: int) -> Chunk:
    """Return the newest chunk of trajectories that have one actor and no other writer."""
    layout = trajectories.layout
    arrays = {name: trajectories.arrays[name][0] for name in layout.arrays()}
    end = int(arrays["written"][0])
    begin = end - layout.chunk_length
    step_ids, slot = np.arange(begin, end + 1), begin % layout.ring_length // layout.chunk_length
    fields = {}
    for name in layout.fields:
        if name == "priority":
            starts = step_ids[:-1] - window_length
            stored = arrays[name].take(starts % layout.ring_length, axis=0)
            fields[name] = np.where(starts[:, None] >= 0, stored, np.nan).astype(stored.dtype)
        elif name != "frame" or not layout.packed:
            ids = step_ids if name in BOOTSTRAP_FIELDS else step_ids[:-1]
            fields[name] = arrays[name].take(ids % len(arrays[name]), axis=0)
    blocks = list[tuple[np.ndarray, int]]()
    if packed := layout.packed:
        begins, sizes, checks = (arrays[name][slot].tolist() for name in ("block_start", "block_bytes", "block_check"))
        for start, size, check in zip(begins, sizes, checks):
            start %= packed.arena_bytes
            blocks.append((arrays["arena"][start : start + size].copy(), check))
        bootstrap, check = compress(arrays["frame"][end % len(arrays["frame"])], layout.storage.compression_level)
        blocks.append((np.frombuffer(bootstrap, np.uint8), check))
    return Chunk(fields, [arrays[name][slot].copy() for name in layout.state_fields], blocks)


def with_frames(chunk: Chunk, layout: Layout) -> Chunk:
    """Return the chunk with its frames decompressed, beside the blocks.

    Raises DamagedChunk if a checksum is wrong.
    """
    if not chunk.blocks:
        return chunk
    frame = layout.fields["frame"]

    def frames(block: tuple[Any, int], count: int) -> np.ndarray:
        """Return the frames of a block, [count, *frame]."""
        contents = decompressed(*block, count * frame.nbytes)
        if contents is None:
            raise DamagedChunk("compressed frames are not what was sent")
        return contents.view(frame.dtype).reshape(count, *frame.shape)

    *blocks, bootstrap = chunk.blocks
    steps = np.stack([frames(block, layout.chunk_length) for block in blocks], axis=1)
    both = np.concatenate([steps, frames(bootstrap, layout.num_envs)[None]])
    return chunk._replace(fields={**chunk.fields, "frame": both})


def single_actor_layout(layout: Layout, window_length: int) -> Layout:
    """Return the layout of one actor's own rings, as short as a writer that sends each chunk away at once needs."""
    ring_length, arena = (-(-(window_length + 1) // layout.chunk_length) + 2) * layout.chunk_length, 0
    if packed := layout.packed:
        smallest = StorageParams(max_frame_bytes=1)
        arena = arena_bytes(smallest, packed._replace(num_actors=1, ring_length=ring_length), 2 * layout.chunk_length)
    return dataclasses.replace(layout, num_actors=1, ring_length=ring_length, arena_bytes=arena)
