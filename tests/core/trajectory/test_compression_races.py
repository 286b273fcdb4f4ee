"""Compressed frames stay correct with real writer processes whose small arenas evict constantly."""

import json
import os
import signal
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memories.uniform import UniformMemory, UniformParams
from core.memories.unrolls.circular import CircularMemory, CircularParams
from core.memories.unrolls.mixed import MixedMemory, MixedParams
from core.memories.unrolls.queue import QueueMemory, QueueParams
from core.memory import Memory
from core.specs import WindowSpec
from core.trajectory.frame_compression import CompressedFrameReader, StorageParams
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter
from tests.core.memories.trees import check_tree
from tests.core.tapes import (
    CODED_FEATURES,
    CodedActor,
    check_blocks,
    check_coded_unrolls,
    check_coded_window,
    coded_features,
    coded_last,
    coded_spec,
    small_layout,
    started,
    unroll_memory,
    write_coded_row,
)

ACTORS, LENGTH = 2, 4
SPEC = WindowSpec(3, (0, 3))
FRAMES = (16, 16)  # of int64: a chunk has 8 kB, about 75 bytes compressed
ARENA = 2_000
pytestmark = pytest.mark.timeout(240)


def packed_layout(threads: int, with_priority: bool = False, arena_bytes: int = ARENA, rows: int = 400) -> Layout:
    return small_layout(
        coded_spec(FRAMES, 4),
        rows=rows,
        chunk_length=LENGTH,
        num_envs=2,
        num_actors=ACTORS,
        with_priority=with_priority,
        storage=StorageParams("lz4", gather_threads=threads),
        kept_steps_per_env=SPEC.length,
        arena_bytes=arena_bytes,
    )


def windows_memory(memory_type: type[Memory], threads: int) -> Memory:
    params = PrioritizedParams() if memory_type is PrioritizedMemory else UniformParams()
    return memory_type(params, packed_layout(threads, memory_type.with_priority), SPEC, 0)


def unrolls_memory(memory_type: type[Memory], params: Any, threads: int) -> Any:
    memory = unroll_memory(
        memory_type,
        params,
        coded_spec(FRAMES, 4),
        batch_size=10,
        length=LENGTH,
        num_actors=ACTORS,
        extras=CODED_FEATURES,
        storage=StorageParams("lz4", gather_threads=threads),
        arena_bytes=ARENA,
    )
    memory.features_of = coded_features
    return memory


def random_priorities(window) -> np.ndarray:
    return np.random.default_rng().random(window.lasts.shape[1])


def write_without_end(memories: list[Memory], actor_ind: int, ready) -> None:
    actors = [CodedActor(memory, actor_ind) for memory in memories]
    for actor in actors:
        actor.writer = actor.memory.writer(actor_ind, random_priorities)
    while True:
        for actor in actors:
            actor.write(1)
        if actors[0].serial == 400:
            ready.set()


@pytest.mark.slow
def test_no_memory_reads_a_wrong_frame_while_arenas_evict(monkeypatch):
    windows = [
        windows_memory(memory_type, threads) for memory_type in (UniformMemory, PrioritizedMemory) for threads in (1, 2)
    ]
    replay = [
        {"type": "queue", "capacity": 20, "on_full": "keep_latest", "sample_ratio": 0.5},
        {"type": "standard", "capacity": 60, "sample_ratio": 0.5},
    ]
    unrolls = [
        unrolls_memory(MixedMemory, MixedParams(json.dumps(replay)), 1),
        unrolls_memory(QueueMemory, QueueParams(20, "alternating"), 2),
        unrolls_memory(CircularMemory, CircularParams(10, "keep_latest", num_batches=2, max_reuse=3), 2),
    ]
    lost, unpacked, batches = Counter[int](), Counter[int](), Counter[int]()
    intact, unpack = Trajectories.still_valid, CompressedFrameReader._unpack

    def counting(self, streams, serials):
        found = intact(self, streams, serials)
        lost[id(self)] += int((~found).sum())
        return found

    def slowly(self, chunks, streams):
        unpacked[id(self)] += len(chunks)
        time.sleep(0.001 * (len(chunks) > 4))  # lets writers reach what was valid when it was drawn
        return unpack(self, chunks, streams)

    monkeypatch.setattr(Trajectories, "still_valid", counting)
    monkeypatch.setattr(CompressedFrameReader, "_unpack", slowly)
    generator, memories = np.random.default_rng(0), windows + unrolls
    with started(write_without_end, memories, 0), started(write_without_end, memories, 1):
        end = time.monotonic() + 15
        while time.monotonic() < end and not (
            len(lost) >= len(memories) and all(lost.values()) and min(batches.values()) >= 20
        ):
            for number, memory in enumerate(memories):
                batch = memory.sample(10)
                if batch is None:
                    continue
                batches[number] += 1
                if number < len(windows):
                    check_coded_window(memory.layout, SPEC, *batch.keys, batch.window)
                    memory.update_priorities(batch.keys, generator.random(10))
                else:
                    check_coded_unrolls(memory.layout, batch.window)
    assert len(batches) == len(memories) and min(batches.values()) >= 20
    assert all(lost[id(memory.trajectories)] for memory in memories)  # the race did happen and was detected
    assert all(unpacked[id(memory.trajectories.frames)] for memory in memories)
    assert all((memory.trajectories.arrays["oldest"][:, 0] > 0).all() for memory in memories)
    for memory in memories[1:4]:
        assert not isinstance(memory, PrioritizedMemory) or check_tree(memory.tree) is None


def check_every_row(trajectories: Trajectories, streams: range, low: int = 0, high: int = 10**9) -> int:
    """Check the readable steps in low .. high that were not overtaken meanwhile, and return their number of windows."""
    count, (lows, highs) = 0, trajectories.starts(SPEC.length)
    for stream in streams:
        actor = stream // trajectories.layout.num_envs
        serials = np.arange(max(lows[actor], low), min(highs[actor], high))
        serials = serials[~coded_last(serials)]
        key = np.full(len(serials), stream), serials
        window = trajectories.gather(*key, SPEC)
        whole = trajectories.still_valid(*key)
        window = trajectories.gather(key[0][whole], serials[whole], SPEC)
        again = trajectories.still_valid(key[0][whole], serials[whole])
        if again.all():
            check_coded_window(trajectories.layout, SPEC, key[0][whole], serials[whole], window)
            count += len(window.lasts[0])
    return count


def write_alone(trajectories: Trajectories, actor_ind: int, ready) -> None:
    """Write from the step where a predecessor stopped."""
    writer, serial = ChunkWriter(trajectories, actor_ind, SPEC), int(trajectories.written()[actor_ind])
    if serial:  # without the mark of the takeover one coded tape goes through
        rows = trajectories.slots(np.arange(2) + 2 * actor_ind, np.full(2, serial - 1))
        trajectories.flat("last")[rows] = coded_last(np.array(serial - 1))
    for count in range(10**9):
        write_coded_row(writer, trajectories.layout, actor_ind, serial + count)
        if count == 400:
            ready.set()


@pytest.mark.slow
def test_steps_can_be_read_sent_and_copied_while_writers_die(monkeypatch):
    trajectories = Trajectories(packed_layout(2, arena_bytes=60_000, rows=2_000))
    restored, overtaken, checked, lengths = Trajectories(trajectories.layout), 0, 0, Trajectories._lengths

    def slowly(self, *sizes):
        time.sleep(0.002)  # lets the writer go on during the copy
        return lengths(self, *sizes)

    monkeypatch.setattr(Trajectories, "_lengths", slowly)
    other = ChunkWriter(trajectories, 1, SPEC)
    for serial in range(400):
        write_coded_row(other, trajectories.layout, 1, serial)
    assert check_every_row(trajectories, range(2, 4)) > 200 and trajectories._threads._pool is not None
    for death in range(2):
        with started(write_alone, trajectories, 0) as process:
            for _ in range(6):
                state = trajectories.state_dict()
                overtaken += int(trajectories.written()[0]) > int(state["written"][0, 0])
                restored.load_state_dict(state)
                check_blocks(restored)
                checked += check_every_row(restored, range(4))
                check_every_row(trajectories, range(4))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        written = int(trajectories.written()[0])
        check_blocks(trajectories)
        assert check_every_row(trajectories, range(4)) > 400 and written > 400 * (death + 1) - LENGTH
    assert overtaken and checked > 2_000
    successor, written = ChunkWriter(trajectories, 0, SPEC), int(trajectories.written()[0])
    trajectories.flat("last")[trajectories.slots(np.arange(2), np.full(2, written - 1))] = coded_last(
        np.array(written - 1)
    )
    for serial in range(written, written + 40):
        write_coded_row(successor, trajectories.layout, 0, serial)
        assert check_every_row(trajectories, range(2), written - 80) > 40
    check_blocks(trajectories)
