"""Compressed frames in one process: every window equals that of a raw ring that forgets nothing."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import lz4.block
import numpy as np
import pytest
import torch

from core.memories.uniform import UniformMemory, UniformParams
from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from core.trajectory import frame_compression as frames_module
from core.trajectory.frame_compression import CompressedFrameReader, CorruptedBlock, GatherThreadPool, StorageParams
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Window
from tests.core.tapes import RandomPlay, check_blocks, small_layout, unroll_spec

LZ4 = StorageParams(frame_compression="lz4")
SPEC = WindowSpec(3, (0, 3))
FOREVER = 8_000  # steps


class UnevenPlay(RandomPlay):
    """Play frames that are flat, noisy, or in between, for some steps each."""

    noise = 0.0

    def _frame(self) -> np.ndarray:
        if self.generator.random() < 0.1:
            self.noise = self.generator.choice([0.0, 0.0, 0.3, 1.0])
        frame = np.full(self.spec.frame.shape, self.generator.integers(1, 256), np.uint8)
        count = int(self.noise * frame.size)
        frame.reshape(-1)[:count] = self.generator.integers(1, 256, count)
        return frame


class Writers:
    """Append each step to several writers."""

    def __init__(self, *writers: ChunkWriter):
        self.writers = writers

    def append(self, *row: Any) -> int:
        return [writer.append(*row) for writer in self.writers][-1]


def oracle_of(layout: Layout) -> Trajectories:
    return Trajectories(
        dataclasses.replace(
            layout,
            ring_length=FOREVER // layout.chunk_length * layout.chunk_length,
            arena_bytes=0,
            storage=StorageParams(),
        )
    )


def make(
    play: RandomPlay,
    rows: int,
    chunk_length: int,
    spec: WindowSpec = SPEC,
    num_actors: int = 1,
    storage: StorageParams = LZ4,
    arena_bytes: int | None = None,
) -> tuple[Trajectories, Trajectories, Any]:
    """Return a compressed ring, the raw reference ring, and a writer of actor 0 of both."""
    layout = small_layout(
        play.spec,
        rows=rows,
        chunk_length=chunk_length,
        num_envs=play.num_envs,
        num_actors=num_actors,
        extras=play.extras,
        states=play.states,
        storage=storage,
        kept_steps_per_env=spec.length,
        arena_bytes=arena_bytes,
    )
    play.with_states = True
    packed, oracle = Trajectories(layout), oracle_of(layout)
    return packed, oracle, Writers(ChunkWriter(packed, 0, spec), ChunkWriter(oracle, 0, spec))


def starts_of(trajectories: Trajectories, spec: WindowSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the environments and steps of all readable windows."""
    layout, (low, high) = trajectories.layout, trajectories.starts(spec.length - bool(spec.stride))
    keys = [
        (stream, serial)
        for stream in range(layout.total_envs)
        for serial in range(low[stream // layout.num_envs], high[stream // layout.num_envs])
        if serial % (spec.stride or 1) == 0
    ]
    streams, serials = np.array(keys, np.int64).reshape(-1, 2).T
    return streams, serials


def assert_same(window: Window, expected: Window, which: slice | np.ndarray = slice(None), head: bool = False) -> None:
    """Assert that windows are equal; of the bootstrap step only published fields count."""
    rows = slice(None, -1 if head else None)
    assert window.observations[:, which].equal(expected.observations[:, which])
    assert window.firsts[:, which].equal(expected.firsts[:, which]) and window.lasts[:, which].equal(
        expected.lasts[:, which]
    )
    for read, stored in zip((*window[3:6], *window.extras.values()), (*expected[3:6], *expected.extras.values())):
        assert read[rows, which].equal(stored[rows, which])
    for read, stored in zip(window.states, expected.states):
        assert read[which].equal(stored[which])


def check_all(packed: Trajectories, oracle: Trajectories, spec: WindowSpec = SPEC) -> int:
    """Check that every offered window is valid and equals the reference, and return their number."""
    keys = starts_of(packed, spec)
    assert packed.still_valid(*keys).all()
    assert_same(packed.gather(*keys, spec), oracle.gather(*keys, spec), head=spec.stride > 0)
    return len(keys[0])


def ring_bytes(layout: Layout) -> int:
    """Return the bytes of all blocks of an actor's ring and one more, if no frame compresses."""
    block = layout.chunk_length * layout.fields["frame"].nbytes
    return (layout.ring_length // layout.chunk_length + 2) * layout.num_envs * (block + block // 255 + 16)


# equality with raw frames -----------------------------------------------------------------------------------------
WINDOWS = {
    "one step": (WindowSpec(1, (0, 1)), 4),
    "chunks of one row": (WindowSpec(3, (0, 3)), 1),
    "within a chunk": (WindowSpec(3, (0, 2, 3)), 8),
    "longer than two chunks": (WindowSpec(9, (0, 4, 9), stride=4), 4),
    "sequences that overlap": (WindowSpec(9, tuple(range(10)), stride=4), 4),
    "unroll": (unroll_spec(4), 4),
    "unroll of one row": (unroll_spec(1), 1),
}


@pytest.mark.parametrize(
    ("window", "frame_stack", "frame_shape"),
    [
        *((window, 4, (12, 12)) for window in WINDOWS),
        *((window, *kind) for window in ("within a chunk", "unroll") for kind in ((0, (7,)), (1, (3, 5, 2)))),
    ],
)
@pytest.mark.parametrize("evicts", [False, True])
def test_compressed_steps_give_the_windows_of_raw_ones(window, frame_stack, frame_shape, evicts):
    (spec, chunk_length), play = WINDOWS[window], UnevenPlay(3, 2, frame_shape, frame_stack)
    rows = 80 if evicts else 40
    packed, oracle, writer = make(play, rows, chunk_length, spec)
    if not evicts:
        packed, oracle, writer = make(play, rows, chunk_length, spec, arena_bytes=ring_bytes(packed.layout))
    same_ring = ChunkWriter(
        Trajectories(dataclasses.replace(packed.layout, arena_bytes=0, storage=StorageParams())), 0, spec
    )
    writer.writers = (same_ring, *writer.writers)
    counts = []
    for part in range(90):
        play.play(writer, 1 + part % 6)
        counts.append(check_all(packed, oracle, spec))
        (low,), (high,) = packed.starts(spec.length)
        (raw_low,), (raw_high,) = same_ring._trajectories.starts(spec.length)
        assert (
            (raw_low < low < high == raw_high)
            if packed.arrays["oldest"][0, 0] > raw_low
            else (low, high) == (raw_low, raw_high)
        )
    check_blocks(packed)
    assert (
        int(packed.written()[0]) > 3 * rows
        and int(packed.arrays["packed"][0, 0]) > (2 if evicts else 1) * packed.layout.arena_bytes
    )
    assert bool(packed.arrays["oldest"][0, 0]) == evicts and min(counts[12:]) > 0


def test_environments_of_several_actors_do_not_mix():
    plays = [UnevenPlay(seed, 3, (6, 6)) for seed in range(3)]
    packed, oracle, writer = make(plays[0], 48, 4, num_actors=3)
    writers = [Writers(ChunkWriter(packed, actor, SPEC), ChunkWriter(oracle, actor, SPEC)) for actor in range(3)]
    for part in range(60):
        for actor, play in enumerate(plays):
            play.with_states = True
            play.play(writers[actor], (2, 7, 1)[actor])
        assert check_all(packed, oracle) > 0 or part < 5
    assert len(set(packed.arrays["oldest"][:, 0].tolist())) == 3 and min(packed.arrays["packed"][:, 0]) > 0
    assert min(check_blocks(packed)) > 2


@pytest.mark.parametrize("level", [0, 3, 9, 12])
def test_every_compression_level_is_lossless(level):
    play = RandomPlay(1, 2, (20, 20))
    play._frame = lambda: play.generator.integers(1, 3, (20, 20), np.uint8)  # each level makes other blocks of these
    packed, oracle, writer = make(play, 64, 8, storage=StorageParams("lz4", compression_level=level))
    for _ in range(10):
        play.play(writer, 20)
        check_all(packed, oracle)
    starts, sizes = packed.arrays["block_start"][0, :, 0], packed.arrays["block_bytes"][0, :, 0]
    chunk = int(packed.written()[0]) // 8 - 2
    frames = np.stack([row.observation[-1] for row in play.rows[0][chunk * 8 : chunk * 8 + 8]]).tobytes()
    mode = {"mode": "high_compression", "compression": level} if level else {}
    block = lz4.block.compress(frames, store_size=False, **mode)
    place = int(starts[chunk % 8]) % packed.layout.arena_bytes
    assert packed.arrays["arena"][0, place : place + sizes[chunk % 8]].tobytes() == block


@pytest.mark.parametrize("codec", ["raw", "lz4"])
@pytest.mark.parametrize("size", [1, 2, 5, 300])
def test_the_number_of_threads_changes_no_result(codec, size):
    play = UnevenPlay(2, 2, (10, 10))
    packed, oracle, writer = make(play, 80, 4, storage=StorageParams(codec, gather_threads=1))
    play.play(writer, 150)
    streams, serials = starts_of(packed, SPEC)
    chosen = np.random.default_rng(size).integers(len(streams), size=size)
    key = streams[chosen], serials[chosen]
    for threads in (1, 2, 3):
        packed._threads = GatherThreadPool(threads)
        packed.__dict__.pop("frames", None)
        for _ in range(3):
            assert_same(packed.gather(*key, SPEC), oracle.gather(*key, SPEC))
        assert (packed._threads._pool is None) == (threads == 1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 3, 6, 50])
def test_threads_process_every_part_once_and_pass_on_errors(count, length):
    seen, parts, threads = [], [], GatherThreadPool(count)
    threads.run(lambda part: (parts.append(part), seen.extend(range(length)[part])), length)
    assert sorted(seen) == list(range(length)) and len(parts) == (count if length >= 2 * count else 1)

    def fails(part: slice) -> None:
        if part.stop == length:
            raise KeyError("last part")

    with pytest.raises(KeyError):
        threads.run(fails, length)


# the arena --------------------------------------------------------------------------------------------------------
class NaiveArena:
    """Record each byte's chunk; `oldest` is the first chunk such that it and all later ones are whole."""

    def __init__(self, size: int):
        self.owners, self.place, self.oldest = np.full(size, -1), 0, 0

    def add(self, chunk: int, size: int) -> int:
        if self.place + size > len(self.owners):
            self.place = 0
        start, self.place = self.place, self.place + size
        self.oldest = max(self.oldest, int(self.owners[start : self.place].max()) + 1)
        self.owners[start : self.place] = chunk
        return start


@pytest.mark.parametrize(("num_envs", "rows", "share"), [(1, 200, 0.0), (2, 200, 0.4), (3, 24, 1.0)])
def test_the_arena_evicts_the_oldest_chunks_as_needed(num_envs, rows, share):
    play, length = UnevenPlay(num_envs, num_envs, (24,), 1), 4
    layout = make(play, rows, length)[0].layout
    arena = layout.arena_bytes + int(share * (ring_bytes(layout) - layout.arena_bytes)) + 1
    packed, _, _ = make(play, rows, length, num_actors=3, arena_bytes=arena)
    writer, naive, evictions, edges = ChunkWriter(packed, 1, SPEC), NaiveArena(arena), [0], 0
    for chunk in range(1000):
        play.play(writer, length)
        written, chunks = (chunk + 1) * length, rows // length
        for env in range(num_envs):
            frames = np.stack([row.observation[-1] for row in play.rows[env][chunk * length : written]])
            block = lz4.block.compress(frames.tobytes(), store_size=False)
            place = naive.add(chunk, len(block))
            slot, edges = (1, chunk % chunks, env), edges + (place == 0)
            assert packed.arrays["block_start"][slot] % arena == place and packed.arrays["block_bytes"][slot] == len(
                block
            )
            assert packed.arrays["block_check"][slot] == zlib.crc32(block)
            assert packed.arrays["arena"][1, place : place + len(block)].tobytes() == block
        assert check_blocks(packed) == [0, min(chunk + 1 - naive.oldest, chunks - 1), 0]
        assert packed.starts(0)[0][1] == max(naive.oldest * length, written - rows + 2 * length, 0)
        evictions.append(naive.oldest)
    assert edges > 10
    if share < 1:
        assert len(set(np.diff(evictions))) > 2  # none, one, several at once
    else:
        assert packed.arrays["oldest"][1, 0] == 0  # the ring is shorter than the arena
    for name in packed.layout.arrays():
        assert not packed.arrays[name][0].any() and not packed.arrays[name][2].any()


@pytest.mark.parametrize(
    ("num_envs", "chunk_length", "frame_stack", "length"), [(1, 1, 4, 1), (2, 4, 4, 5), (3, 8, 0, 20), (1, 5, 1, 5)]
)
def test_incompressible_frames_always_leave_a_window(num_envs, chunk_length, frame_stack, length):
    play, spec = RandomPlay(0, num_envs, (16, 16), frame_stack, end=0.05), WindowSpec(length, (0, length))
    layout = Layout.of(
        play.spec,
        play.extras,
        capacity=2000,
        num_actors=1,
        num_envs=num_envs,
        chunk_length=chunk_length,
        with_priority=False,
        storage=StorageParams("lz4", max_frame_bytes=1),
        kept_steps_per_env=length,
    )
    memory, written = UniformMemory(UniformParams(), layout, spec, 0), 0
    writer = memory.writer(0)
    while written < 60 * chunk_length:
        play.play(writer, 1)
        written = int(memory.trajectories.written()[0])
        low, high = memory.trajectories.starts(length)
        assert high[0] > low[0] or written <= length
        assert memory.sample(2) is not None or written <= 2 * length
    assert memory.trajectories.arrays["oldest"][0, 0] > 0


def test_an_arena_takes_its_share_of_storage_bytes():
    spec = EnvSpec("pong", ArraySpec((84, 84), "uint8"), 4, Discrete(6))

    def layout(**settings: Any) -> Layout:
        return Layout.of(
            spec,
            {},
            capacity=160_000,
            num_actors=2,
            num_envs=4,
            chunk_length=8,
            with_priority=False,
            kept_steps_per_env=3,
            storage=StorageParams(**settings),
        )

    raw, usual = layout(), layout(frame_compression="lz4")
    assert usual.ring_length == raw.ring_length and usual.arena_bytes == raw.num_slots * 84 * 84 // 16 // 2
    assert layout(frame_compression="lz4", max_frame_bytes=200_000_001).arena_bytes == 100_000_000
    least = (-(-(16 + 4 + 3) // 8) + 2) * 4 * (8 * 84 * 84 + 8 * 84 * 84 // 255 + 16)
    assert layout(frame_compression="lz4", max_frame_bytes=1).arena_bytes == least
    fewer = layout(max_frame_bytes=70_560_000)  # 10,000 frames
    assert 10_000 - 2 * 4 * 8 < fewer.num_slots <= 10_000 and fewer.arena_bytes == 0
    assert layout(max_frame_bytes=10**12) == dataclasses.replace(raw, storage=StorageParams(max_frame_bytes=10**12))
    # chunks: two of the overwrite margin, one of the frame stack, one in which a window of 3 steps starts
    assert layout(max_frame_bytes=1).ring_length == (2 + 1 + 1) * 8


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_the_computed_bytes_of_a_layout_are_those_allocated(codec):
    play = UnevenPlay(0, 2, (5, 5))
    layout = make(play, 48, 4, num_actors=3, storage=StorageParams(codec))[0].layout
    packed = Trajectories(layout)
    sizes = [packed.arrays[name].nbytes for name in layout.arrays()]
    assert layout.nbytes == sum(-(-size // 64) * 64 for size in sizes)
    if codec == "lz4":
        assert (
            packed.arrays["arena"].nbytes == 3 * layout.arena_bytes and packed.arrays["frame"].nbytes == 3 * 16 * 2 * 25
        )
        assert isinstance(packed.frames, CompressedFrameReader)
    else:
        assert packed.frames is None and "arena" not in packed.arrays


def test_statistics_equal_a_count_of_the_blocks():
    play = UnevenPlay(5, 2, (9, 9))
    for evicts in (True, False):
        arena = None if evicts else 40_000
        packed, oracle, writer = make(play, 96, 4, num_actors=2, arena_bytes=arena)
        assert packed.statistics() == {"replay_mb": 0.0} and oracle.statistics() == {"replay_mb": 0.0}
        end, ends = 0, [0]
        for chunk in range(70):
            before = len(play.rows[0])
            play.play(writer, 4)
            for rows in play.rows:
                frames = np.stack([row.observation[-1] for row in rows[before : before + 4]])
                size = len(lz4.block.compress(frames.tobytes(), store_size=False))
                if end % packed.layout.arena_bytes + size > packed.layout.arena_bytes:
                    end = -(-end // packed.layout.arena_bytes) * packed.layout.arena_bytes
                end += size
            ends.append(end)
            low, high = int(packed.starts(0)[0][0]), 4 * chunk + 4
            first = (low - 3) // 4 if low else 0  # chunk
            start = ends[first]  # of its first block, unless that crossed the end
            found, raw = packed.statistics(), (high - low) * 2 * 81
            gap = packed.arrays["block_start"][0, first % 24, 0] - start
            assert 0 <= gap < 400 and (gap == 0 or (start + gap) % packed.layout.arena_bytes == 0)
            assert found == {"replay_mb": (end - start - gap) / 1e6, "compression": raw / (end - start - gap)}
            assert oracle.statistics() == {"replay_mb": high * 2 * 81 / 1e6}
        assert bool(packed.arrays["oldest"][0, 0]) == evicts
        assert found["replay_mb"] * 1e6 <= packed.layout.arena_bytes


# damage -----------------------------------------------------------------------------------------------------------
def read_packed(packed: Trajectories) -> tuple[np.ndarray, np.ndarray]:
    """Return the environments and steps of all readable steps with compressed frames."""
    low, (written,) = packed.starts(0)[0], packed.written()
    serials = np.arange(low[0], written - packed.layout.chunk_length)
    return np.arange(packed.layout.num_envs)[:, None], serials[None]


def test_any_flipped_bit_of_a_block_or_its_index_is_an_error():
    play = UnevenPlay(7, 2, (6,), 1)
    packed, oracle, writer = make(play, 40, 2, arena_bytes=331)
    play.play(writer, 600)
    rows = read_packed(packed)
    expected, length, count = packed.frames.take(*rows).copy(), 2, 0
    (low,), (written,) = packed.starts(0)[0], packed.written()
    assert (
        expected == np.stack([[play.rows[env][serial].observation[-1] for serial in rows[1][0]] for env in range(2)])
    ).all()
    for chunk, env in itertools.product(range(low // length, written // length - 1), range(2)):
        slot = (0, chunk % 20, env)
        start, size = int(packed.arrays["block_start"][slot]) % 331, int(packed.arrays["block_bytes"][slot])
        places = [packed.arrays["arena"][0, start : start + size]]
        for name in ("block_start", "block_bytes", "block_check"):
            places.append(packed.arrays[name].reshape(-1).view(np.uint8).reshape(*packed.arrays[name].shape, -1)[slot])
        for place in places:
            for byte, bit in itertools.product(range(len(place)), range(8)):
                place[byte] ^= 1 << bit
                with pytest.raises(CorruptedBlock, match=f"chunk {chunk}, environment {env} of actor 0"):
                    packed.frames.take(*rows)
                place[byte] ^= 1 << bit
                count += 1
    assert (packed.frames.take(*rows) == expected).all() and count > 3000


def put_block(packed: Trajectories, slot: tuple[int, ...], block: bytes) -> None:
    """Replace a block, with a correct checksum."""
    place = int(packed.arrays["block_start"][slot]) % packed.layout.arena_bytes
    packed.arrays["arena"][slot[0], place : place + len(block)] = np.frombuffer(block, np.uint8)
    packed.arrays["block_bytes"][slot], packed.arrays["block_check"][slot] = len(block), zlib.crc32(block)


@pytest.mark.parametrize(
    "block", [lz4.block.compress(bytes(7), store_size=False), b"", b"\x0f", bytes(3), b"\xff\xff\xff"]
)
def test_a_block_of_a_wrong_size_is_an_error(block):
    play = RandomPlay(7, 2, (6,), 1)
    packed, _, writer = make(play, 40, 4)
    play.play(writer, 16)
    put_block(packed, (0, 2, 1), block)
    packed.frames.take(np.array([1, 1, 0]), np.array([7, 12, 8]))
    with pytest.raises(CorruptedBlock, match="chunk 2, environment 1 of actor 0"):
        packed.frames.take(np.array([0, 1]), np.array([0, 9]))


def test_damage_is_located_and_does_not_stop_other_batches():
    plays = [UnevenPlay(seed, 2, (6, 6)) for seed in range(2)]
    packed, oracle, _ = make(
        plays[0], 200, 4, num_actors=2, storage=StorageParams("lz4", gather_threads=2), arena_bytes=9_000
    )
    for actor, play in enumerate(plays):
        play.with_states = True
        play.play(Writers(ChunkWriter(packed, actor, SPEC), ChunkWriter(oracle, actor, SPEC)), 100)
    packed.arrays["block_check"][1, 7, 1] ^= 4
    streams, serials = np.full(97, 3), np.arange(97)
    with pytest.raises(CorruptedBlock, match=r"chunk 7, environment 1 of actor 1 .*damaged"):
        packed.gather(streams, serials, SPEC)
    sound = (serials + 3 < 28) | (serials - 3 > 31)
    assert_same(
        packed.gather(streams[sound], serials[sound], SPEC), oracle.gather(streams[sound], serials[sound], SPEC)
    )


def test_a_chunk_whose_first_step_is_lost_still_reports_damage():
    play = UnevenPlay(7, 1, (6,), 0)
    packed, oracle, writer = make(play, 40, 4, arena_bytes=4_000)
    play.play(writer, 80)
    # the bootstrap step is in its first step; readers of a chunk ago may still read the others
    chunk = (80 - 40 + 4) // 4
    assert packed.still_valid(np.zeros(4, np.int64), chunk * 4 + np.arange(4)).tolist() == [False, True, True, True]
    packed.arrays["block_check"][0, chunk % 10, 0] ^= 1
    with pytest.raises(CorruptedBlock):
        packed.frames.take(np.zeros(1, np.int64), np.array([chunk * 4 + 1]))
    for lost in range(chunk):
        packed.frames.take(np.zeros(1, np.int64), np.array([lost * 4 + 1]))


def test_a_lost_chunk_does_not_hide_damage_of_its_successor():
    play = UnevenPlay(7, 1, (6,), 0)
    packed, oracle, writer = make(play, 40, 4, arena_bytes=4_000)
    play.play(writer, 80)
    packed.arrays["block_check"][0, 15 % 10, 0] ^= 1
    for serials in ([5 * 4, 15 * 4], [15 * 4, 5 * 4]):
        with pytest.raises(CorruptedBlock, match="chunk 15"):
            packed.frames.take(np.zeros(2, np.int64), np.array(serials))


# overtaken readers ------------------------------------------------------------------------------------------------
class Interruption:
    """Call `play` before `function`, the first `times` times."""

    def __init__(self, function: Callable[..., Any], play: Callable[[], Any], times: int):
        self.function, self.play, self.times, self.calls = function, play, times, 0

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            self.play()
        return self.function(*arguments, **settings)


class Interrupted:
    """Replace an array from which frames are taken."""

    def __init__(self, take: Callable[..., Any]):
        self.take = take


def interrupt(
    monkeypatch: pytest.MonkeyPatch, packed: Trajectories, where: str, play: Callable[[], Any], times: int
) -> Interruption:
    reader, (owner, name) = (
        packed.frames,
        {
            "newest": (None, "_unpacked"),
            "index": (CompressedFrameReader, "_unpack_some"),
            "block": (frames_module, "decompressed"),
            "blocks": (CompressedFrameReader, "_unpack"),
        }[where],
    )
    if owner is None:
        found = Interruption(reader._unpacked.take, play, times)
        monkeypatch.setattr(reader, name, Interrupted(found))
        return found
    function = getattr(owner, name)
    found = Interruption(function if owner is frames_module else function.__get__(reader), play, times)
    monkeypatch.setattr(owner if owner is frames_module else reader, name, found)
    return found


@pytest.mark.parametrize("where", ["newest", "index", "blocks", "block"])
@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("chunks", [1, 5, 13])
def test_steps_that_a_writer_did_not_reach_are_read_correctly(monkeypatch, where, evicts, chunks):
    play = UnevenPlay(11, 2, (8,), 2)
    packed, oracle, writer = make(play, 48, 4, arena_bytes=None if evicts else 6_000)
    play.play(writer, 230)
    for _ in range(5):  # steps of the open chunk
        play.play(writer, 1)
        keys = starts_of(packed, SPEC)
        with monkeypatch.context() as patches:
            interruption = interrupt(patches, packed, where, lambda: play.play(writer, 4 * chunks), times=1)
            window = packed.gather(*keys, SPEC)
            intact = packed.still_valid(*keys)
        assert interruption.calls == {"newest": 1 + (chunks > 1), "index": 1, "blocks": 1}.get(
            where, interruption.calls
        )
        assert_same(window, oracle.gather(*keys, SPEC), intact)
        assert not intact.all() and (evicts or intact.any() == (chunks < 10))


def test_a_reader_slower_than_its_writer_still_finishes(monkeypatch):
    play = UnevenPlay(11, 2, (8,), 2)
    packed, oracle, writer = make(play, 800, 4, arena_bytes=40_000)
    play.play(writer, 330)
    keys = starts_of(packed, SPEC)
    interruption = interrupt(monkeypatch, packed, "block", lambda: play.play(writer, 4), times=1_000)
    window = packed.gather(*keys, SPEC)
    intact = packed.still_valid(*keys)
    assert_same(window, oracle.gather(*keys, SPEC), intact)
    assert interruption.calls < 200 and intact.any() and not intact.all()


# killed writers ---------------------------------------------------------------------------------------------------
class Killed(Exception):
    pass


class Fuse:
    """Count assignments and raise Killed in the middle of one."""

    left = 10**9

    @classmethod
    def assign(cls, array: np.ndarray, where: Any, value: Any) -> None:
        cls.left -= 1
        if cls.left == 0:
            part, given = array[where], np.asarray(value)
            if isinstance(part, np.ndarray) and given.shape == part.shape and len(part) > 1:
                part[: len(part) // 2] = given[: len(part) // 2]
            raise Killed
        array[where] = value


class Fused(np.ndarray):
    def __setitem__(self, where: Any, value: Any) -> None:
        Fuse.assign(self.view(np.ndarray), where, value)


def fused(writer: ChunkWriter) -> ChunkWriter:
    """Return a writer that dies by the Fuse."""
    for holder in (vars(writer._compressor), writer._fields, vars(writer)):
        for name, array in list(holder.items()):
            if isinstance(array, np.ndarray):
                holder[name] = array.view(Fused)
    return writer


def test_a_writer_killed_at_any_assignment_leaves_whole_steps(monkeypatch):
    killed, steps = 0, 0
    for step in itertools.count(1):
        play = UnevenPlay(step % 7, 2, (8,), 2)
        packed, oracle, _ = make(play, 80, 2)
        for after in (60, 44, 41):  # several deaths one after another
            monkeypatch.setattr(Fuse, "left", 10**9)
            writer = Writers(fused(ChunkWriter(packed, 0, SPEC)), ChunkWriter(oracle, 0, SPEC))
            for trajectories in (packed, oracle):
                assert int(trajectories.written()[0]) == len(play.rows[0])
            play.play(writer, after)
            monkeypatch.setattr(Fuse, "left", step)
            published = [len(rows) // 2 * 2 for rows in play.rows]
            try:
                for _ in range(3):
                    play.play(writer, 1)
                died = False
            except Killed:
                died = True
            steps += 1
            killed += died
            for rows in play.rows:
                del rows[int(packed.written()[0]) :]
            assert published[0] <= len(play.rows[0]) <= published[0] + 2 * (1 + (not died))
            oracle.arrays["written"][0, 0] = packed.written()[0]
            check_blocks(packed)
            assert check_all(packed, oracle) > 0
            play.restart()
        if not died:
            break
    monkeypatch.setattr(Fuse, "left", 10**9)
    assert killed > 100 and step > 40 and packed.arrays["oldest"][0, 0] > 0


# snapshots --------------------------------------------------------------------------------------------------------
def restored_from(trajectories: Trajectories, state: dict[str, Any]) -> Trajectories:
    restored = Trajectories(trajectories.layout)
    restored.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    return restored


@pytest.mark.parametrize("arena_bytes", [None, 20_000])  # evicted, never full
@pytest.mark.parametrize("steps", [0, 3, 4, 9, 60, 77, 400])
def test_a_snapshot_restores_every_step_and_writing_continues(steps, arena_bytes):
    play = UnevenPlay(13, 2, (8, 8))
    packed, oracle, writer = make(play, 60, 4, arena_bytes=arena_bytes)
    play.play(writer, steps)
    state = packed.state_dict()
    restored = restored_from(packed, state)
    assert [bound.tolist() for bound in restored.starts(3)] == [bound.tolist() for bound in packed.starts(3)]
    assert check_all(restored, oracle) == check_all(packed, oracle) and restored.statistics() == packed.statistics()
    if arena_bytes and steps < 60:
        assert state["arena"].shape[1] == packed.arrays["packed"][0, 0] < arena_bytes
    for rows in play.rows:
        del rows[int(packed.written()[0]) :]
    play.restart()
    writer = Writers(*(ChunkWriter(trajectories, 0, SPEC) for trajectories in (packed, restored, oracle)))
    for _ in range(40):
        play.play(writer, 5)
        check_all(restored, oracle)
        assert [bound.tolist() for bound in restored.starts(3)] == [bound.tolist() for bound in packed.starts(3)]
        check_blocks(restored)


def test_a_snapshot_of_unequally_fast_actors_is_complete():
    plays = [UnevenPlay(seed, 2, (8, 8)) for seed in range(2)]
    packed, oracle, _ = make(plays[0], 400, 4, num_actors=2, arena_bytes=20_000)
    for actor, (play, steps) in enumerate(zip(plays, (8, 90))):
        play.with_states = True
        play.play(Writers(ChunkWriter(packed, actor, SPEC), ChunkWriter(oracle, actor, SPEC)), steps)
    restored = restored_from(packed, packed.state_dict())
    assert check_all(restored, oracle) == check_all(packed, oracle) > 100


class Overtaken:
    """Let the writer go on whenever an array is read: by the given numbers of steps first, then by one."""

    def __init__(self, arrays: Any, play: Callable[[int], Any], first: tuple[int, ...]):
        self.arrays, self.play, self.rows = arrays, play, iter(first)

    def __getitem__(self, name: str) -> np.ndarray:
        self.play(next(self.rows, 1))
        return self.arrays[name]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "arena_bytes"), [(9, 20_000), (300, None), (300, 20_000)])
@pytest.mark.parametrize("first", [(), (4, 4, 4), (0, 0, 0, 0, 8), (0, 9), (0, 17)])
def test_a_snapshot_taken_while_writing_holds_whole_steps_only(monkeypatch, steps, arena_bytes, first):
    play, counts = UnevenPlay(13, 2, (8, 8)), []
    packed, oracle, writer = make(play, 400, 4, arena_bytes=arena_bytes)
    play.play(writer, steps)
    for _ in range(4):
        taken = int(packed.written()[0])
        with monkeypatch.context() as patches:
            patches.setattr(packed, "arrays", Overtaken(packed.arrays, lambda rows: play.play(writer, rows), first))
            state = packed.state_dict()
        assert int(packed.written()[0]) > taken + 8
        restored = restored_from(packed, state)
        length = int(state["written"][0, 0])
        counts.append(check_all(restored, oracle))
        check_blocks(restored)
        again = UnevenPlay(17, 2, (8, 8))
        continued = oracle_of(packed.layout)
        for name in oracle.layout.arrays():
            continued.arrays[name][:] = oracle.arrays[name]
        continued.arrays["written"][0, 0] = length
        again.with_states = True
        for trajectories in (restored, continued):
            trajectories.arrays["last"][0, (length - 1) % trajectories.layout.ring_length] = False
        both = Writers(ChunkWriter(restored, 0, SPEC), ChunkWriter(continued, 0, SPEC))
        for _ in range(6):
            again.play(both, 35)
            assert check_all(restored, continued) > 0
            check_blocks(restored)
    assert min(counts) > 0


@pytest.mark.parametrize(
    ("written_by", "read_by", "field"),
    [
        ({}, {"storage": StorageParams()}, "frame"),
        ({"storage": StorageParams()}, {}, "frame"),
        ({"storage": StorageParams()}, {"storage": StorageParams(), "rows": 64}, "frame"),
        ({}, {"rows": 64}, "first"),
        ({}, {"arena_bytes": 900}, "arena"),
        ({"arena_bytes": 900}, {}, "arena"),
        ({}, {"chunk_length": 2}, "frame"),
    ],
)
def test_a_snapshot_of_other_sizes_is_refused_by_field(written_by, read_by, field):
    play = UnevenPlay(13, 2, (8, 8))
    play.with_states = True
    first, second = ({"rows": 60, "chunk_length": 4, "storage": LZ4, **settings} for settings in (written_by, read_by))
    layouts = [
        small_layout(play.spec, num_envs=2, extras=play.extras, states=play.states, **settings)
        for settings in (first, second)
    ]
    writer, reader = map(Trajectories, layouts)
    play.play(ChunkWriter(writer, 0, SPEC), 200)
    with pytest.raises(ValueError, match=f"stored replay does not fit: field {field} is"):
        reader.load_state_dict(writer.state_dict())
    assert not any(reader.arrays[name].any() for name in layouts[1].arrays())


@pytest.mark.parametrize("field", ["packed", "arena", "block_start", "block_bytes", "block_check", "oldest"])
def test_a_snapshot_without_a_field_is_refused_by_name(field):
    play = UnevenPlay(13, 2, (8, 8))
    packed, _, writer = make(play, 60, 4)
    play.play(writer, 200)
    state = packed.state_dict()
    del state[field]
    named = "arena" if field == "packed" else field  # the arena's length is unknown without it
    with pytest.raises(ValueError, match=f"field {named} is"):
        Trajectories(packed.layout).load_state_dict(state)


def test_memories_of_compressed_steps_sample_what_was_played():
    play = UnevenPlay(19, 3, (8, 8))
    packed, oracle, _ = make(play, 120, 4)
    memory = UniformMemory(UniformParams(), packed.layout, SPEC, 0)
    writer = Writers(memory.writer(0), ChunkWriter(oracle, 0, SPEC))
    seen = set()
    for _ in range(60):
        play.play(writer, 7)
        batch = memory.sample(40)
        if batch is not None:
            assert_same(batch.window, oracle.gather(*batch.keys, SPEC))
            assert batch.window.observations.dtype == torch.uint8
            seen.update(zip(*map(np.ndarray.tolist, batch.keys)))
    assert len(seen) > 300
    found = memory.statistics()
    assert set(found) == {"replay_steps", "replay_mb", "compression"} and found["replay_steps"] == memory.size()
