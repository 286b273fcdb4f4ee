"""Sizes of the shared ring buffers (core/trajectory/ring_buffer.py), known before anything is allocated."""

from dataclasses import dataclass, field

from core.common.shared_arrays import total_bytes
from core.specs import ArraySpec, EnvSpec
from core.trajectory.frame_arena import PackedLayout, arena_bytes
from core.trajectory.frame_compression import RAW, StorageParams
from core.types import ACTION_MASK

STORAGE = StorageParams()


@dataclass(frozen=True)
class Layout:
    """Sizes of the ring buffers of all actors."""

    num_actors: int
    num_envs: int  # environments of an actor
    ring_length: int  # steps that the ring of an environment holds, a multiple of chunk_length
    chunk_length: int  # steps published together
    frame_stack: int
    fields: dict[str, ArraySpec]  # of one step of one environment
    extras: tuple[str, ...] = field(default=())  # fields that Window.extras carries
    states: tuple[ArraySpec, ...] = ()  # recurrent state of one environment, stored once a chunk
    storage: StorageParams = STORAGE  # of the frames
    arena_bytes: int = 0  # of an actor's compressed frames; 0 stores raw frames

    @staticmethod
    def of(
        spec: EnvSpec,
        extras: dict[str, ArraySpec],
        *,
        capacity: int,
        num_actors: int,
        num_envs: int,
        chunk_length: int,
        with_priority: bool,
        states: tuple[ArraySpec, ...] = (),
        storage: StorageParams = STORAGE,
        kept_steps_per_env: int = 1,
    ) -> "Layout":
        """Return the layout that holds `capacity` agent steps, rounded up to whole chunks, plus the overwrite margin.

        Args:
            spec: The environment.
            extras: Fields that the agent adds to a step. Masks of legal actions join them if the environment has any.
            capacity: Agent steps of all actors. With raw frames, `replay.max_frame_bytes` may lower the number.
            num_actors: Number of actors.
            num_envs: Environments of each actor.
            chunk_length: Steps that are published together.
            with_priority: True if actors write initial priorities.
            states: Recurrent state of one environment.
            storage: Compression of frames.
            kept_steps_per_env: Steps of each environment whose compressed frames always fit.
        """
        if storage.frame_compression == RAW and storage.max_frame_bytes is not None:
            capacity = max(min(capacity, storage.max_frame_bytes // spec.frame.nbytes), 1)
        flag, number = ArraySpec((), "bool"), ArraySpec((), "float32")
        if spec.action_mask:
            extras = {**extras, ACTION_MASK: spec.action_mask}
        fields = {
            "frame": spec.frame,
            "first": flag,
            "last": flag,
            "action": spec.action.array,
            "reward": number,
            "discount": number,
            **extras,
        }
        if with_priority:
            fields["priority"] = number
        chunks = -(-capacity // (num_actors * num_envs * chunk_length)) + 2 + -(-spec.frame_stack // chunk_length)
        ring_length, arena = chunks * chunk_length, 0
        if storage.frame_compression != RAW:
            min_steps = 2 * chunk_length + spec.frame_stack + kept_steps_per_env
            arena = arena_bytes(storage, spec.frame, num_actors, num_envs, ring_length, chunk_length, min_steps)
        return Layout(
            num_actors,
            num_envs,
            ring_length,
            chunk_length,
            spec.frame_stack,
            fields,
            tuple(extras),
            states,
            storage,
            arena,
        )

    @property
    def total_envs(self) -> int:
        """Return the number of environments of all actors."""
        return self.num_actors * self.num_envs

    @property
    def num_slots(self) -> int:
        """Return the number of steps that all rings hold."""
        return self.total_envs * self.ring_length

    @property
    def overwrite_margin(self) -> int:
        """Return how many of the oldest steps readers leave alone.

        The writer is overwriting the first chunk of them. The second keeps a slow reader from being overtaken often.
        """
        return 2 * self.chunk_length

    @property
    def state_fields(self) -> dict[str, ArraySpec]:
        """Return the recurrent states by the names of their arrays."""
        return {f"state {number}": spec for number, spec in enumerate(self.states)}

    @property
    def packed(self) -> PackedLayout | None:
        """Return the layout of compressed frames; if frames are raw, return None."""
        if not self.arena_bytes:
            return None
        return PackedLayout(
            self.num_actors, self.num_envs, self.ring_length, self.chunk_length, self.fields["frame"], self.arena_bytes
        )

    def arrays(self) -> dict[str, ArraySpec]:
        """Return every array that is allocated, by name."""
        steps = (self.num_actors, self.ring_length, self.num_envs)
        chunks = (self.num_actors, self.ring_length // self.chunk_length, self.num_envs)
        specs = {name: ArraySpec((*steps, *spec.shape), spec.dtype) for name, spec in self.fields.items()}
        specs |= {name: ArraySpec((*chunks, *spec.shape), spec.dtype) for name, spec in self.state_fields.items()}
        if packed := self.packed:
            specs |= packed.arrays()
        counters = ArraySpec((self.num_actors, 8), "int64")  # a cache line for each actor; column 0 counts
        return {**specs, "tickets": ArraySpec(chunks[:2], "int64"), "written": counters, "oldest": counters}

    @property
    def nbytes(self) -> int:
        """Return the bytes that Trajectories(self) allocates."""
        return total_bytes(self.arrays())
