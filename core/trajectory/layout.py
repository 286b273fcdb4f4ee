"""Sizes of the shared rows (core/trajectory/ring_buffer.py): what is allocated, known before it is."""

from dataclasses import dataclass, field

from core.common.shared_arrays import total_bytes
from core.specs import ArraySpec, EnvSpec
from core.trajectory.frame_arena import PackedLayout, arena_bytes
from core.trajectory.frame_compression import RAW, StorageParams

STORAGE = StorageParams()


@dataclass(frozen=True)
class Layout:
    """Sizes of the shared rows of all actors."""

    num_actors: int
    num_envs: int                     # streams an actor
    rows: int                         # rows a stream, a multiple of chunk_length
    chunk_length: int                 # rows published together
    frame_stack: int
    fields: dict[str, ArraySpec]      # one row of one stream
    extras: tuple[str, ...] = field(default=())  # the fields that Window.extras carries
    states: tuple[ArraySpec, ...] = ()           # recurrent state of one stream, stored once a chunk
    storage: StorageParams = STORAGE             # of the frames
    arena_bytes: int = 0                         # of an actor's packed frames; 0: they are not packed

    @staticmethod
    def of(spec: EnvSpec, extras: dict[str, ArraySpec], *, capacity: int, num_actors: int, num_envs: int, chunk_length: int,
           with_priority: bool, states: tuple[ArraySpec, ...] = (), storage: StorageParams = STORAGE, kept_rows: int = 1) -> "Layout":
        """The layout of `capacity` agent steps of this environment, or of the fewer whose raw frames take `storage.bytes`; rounded
        up to whole chunks, guard rows added. Packed frames of `kept_rows` rows of a stream always fit."""
        if storage.codec == RAW and storage.bytes is not None:
            capacity = max(min(capacity, storage.bytes // spec.frame.nbytes), 1)
        fields = {"frame": spec.frame, "first": ArraySpec((), "bool"), "last": ArraySpec((), "bool"),
                  "action": spec.action.array, "reward": ArraySpec((), "float32"),
                  "discount": ArraySpec((), "float32"), **extras}
        if with_priority:
            fields["priority"] = ArraySpec((), "float32")
        chunks = -(-capacity // (num_actors * num_envs * chunk_length)) + 2 + -(-spec.frame_stack // chunk_length)
        rows = chunks * chunk_length
        arena = 0 if storage.codec == RAW else arena_bytes(storage, spec.frame, num_actors, num_envs, rows, chunk_length,
                                                           2 * chunk_length + spec.frame_stack + kept_rows)
        return Layout(num_actors, num_envs, rows, chunk_length, spec.frame_stack, fields, tuple(extras), states, storage, arena)

    @property
    def num_streams(self) -> int:
        return self.num_actors * self.num_envs

    @property
    def num_slots(self) -> int:
        return self.num_streams * self.rows

    @property
    def overwrite_margin(self) -> int:
        """Oldest rows that readers leave alone: the chunk being written, and one more so that a reader is rarely lapped."""
        return 2 * self.chunk_length

    @property
    def state_fields(self) -> dict[str, ArraySpec]:
        return {f"state {number}": spec for number, spec in enumerate(self.states)}

    @property
    def packed(self) -> PackedLayout | None:
        """Of the frames if they are packed."""
        if not self.arena_bytes:
            return None
        return PackedLayout(self.num_actors, self.num_envs, self.rows, self.chunk_length, self.fields["frame"], self.arena_bytes)

    def arrays(self) -> dict[str, ArraySpec]:
        lead = (self.num_actors, self.rows, self.num_envs)
        specs = {name: ArraySpec((*lead, *spec.shape), spec.dtype) for name, spec in self.fields.items()}
        lead = (self.num_actors, self.rows // self.chunk_length, self.num_envs)
        specs |= {name: ArraySpec((*lead, *spec.shape), spec.dtype) for name, spec in self.state_fields.items()}
        counters = ArraySpec((self.num_actors, 8), "int64")  # a cache line each; column 0 counts
        packed, tickets = self.packed, ArraySpec((self.num_actors, self.rows // self.chunk_length), "int64")
        return {**specs, **(packed.arrays() if packed else {}), "tickets": tickets, "written": counters, "oldest": counters}

    @property
    def nbytes(self) -> int:
        """Bytes that Trajectories(self) allocates."""
        return total_bytes(self.arrays())
