import os
import signal
import time

import numpy as np
import pytest
import torch

from core.memories.prioritized import PrioritizedMemory, PrioritizedParams
from core.memories.uniform import UniformMemory, UniformParams
from core.memory import Memory
from core.specs import ArraySpec, WindowSpec
from core.trajectory.ring_buffer import Trajectories
from tests.core.memories.trees import check_tree
from tests.core.tapes import (
    CODE,
    check_coded_frames,
    check_coded_window,
    coded_spec,
    small_layout,
    started,
    write_coded_row,
)

SPEC = WindowSpec(3, (0, 3))
SEQUENCES = WindowSpec(9, tuple(range(10)), stride=4)
pytestmark = pytest.mark.timeout(400)


def make(memory_type: type[Memory], rows: int, num_actors: int = 2, spec: WindowSpec = SPEC) -> Memory:
    layout = small_layout(
        coded_spec((16, 16), 4),
        rows=rows,
        chunk_length=4,
        num_envs=2,
        num_actors=num_actors,
        states=(ArraySpec((8,), "int64"),) if spec.stride else (),
        with_priority=memory_type.with_priority,
    )
    params = PrioritizedParams() if memory_type is PrioritizedMemory else UniformParams()
    return memory_type(params, layout, spec, 0)


def random_priorities(window) -> np.ndarray:
    return np.random.default_rng().random(window.lasts.shape[1])


def write_without_end(memory: Memory, actor_ind: int, ready) -> None:
    writer, serial = memory.writer(actor_ind, random_priorities), 0
    while True:
        write_coded_row(writer, memory.layout, actor_ind, serial)
        serial += 1
        if serial == 2 * memory.layout.ring_length:
            ready.set()


def wrote_since(memory, before):
    """Return True if both actors have written meanwhile, which on a busy machine takes longer than some batches."""
    return (memory.trajectories.written() - before > 4).all()


def check_coded_sequences(layout, spec, env_ids, step_ids, window):
    """Assert that every element of the windows, states included, was written at their keys."""
    assert not (step_ids % spec.stride).any()
    rows = step_ids + np.arange(spec.length + 1)[:, None]
    codes = (env_ids + 1) * CODE + rows
    assert (window.actions.numpy() == codes).all() and (window.rewards.numpy() == codes % (1 << 20)).all()
    assert (window.firsts.numpy() == (rows % 7 == 0)).all() and (window.lasts.numpy() == (rows % 7 == 6)).all()
    assert (window.states[0].numpy() == codes[0][:, None]).all()
    for position, row in enumerate(rows):
        check_coded_frames(layout, env_ids, row, window.observations[position].numpy())


@pytest.mark.parametrize(
    ("spec", "rows", "size", "check"),
    [(SPEC, 200, 32, check_coded_window), (SEQUENCES, 60, 16, check_coded_sequences)],
    ids=["transitions", "sequences"],
)
@pytest.mark.parametrize("memory_type", [UniformMemory, PrioritizedMemory])
def test_samples_are_never_torn_or_stale_while_writers_overwrite(memory_type, spec, rows, size, check, monkeypatch):
    memory = make(memory_type, rows, spec=spec)
    lapped, intact = [], Trajectories.still_valid

    def counting(self, streams, serials):
        found = intact(self, streams, serials)
        lapped.append(int((~found).sum()))
        return found

    monkeypatch.setattr(Trajectories, "still_valid", counting)
    generator, batches, late = np.random.default_rng(0), 0, []
    with started(write_without_end, memory, 0), started(write_without_end, memory, 1):
        before, end = memory.trajectories.written(), time.monotonic() + 60
        while (batches < 60 or not sum(lapped) or not wrote_since(memory, before)) and time.monotonic() < end:
            batch = memory.sample(size)
            if batch is None:
                continue
            batches += 1
            check(memory.layout, spec, *batch.keys, batch.window)
            assert np.isfinite(batch.weights.numpy()).all()
            late.append(batch.keys)
            if len(late) > 3:  # some of these steps are gone by now
                memory.update_priorities(late.pop(0), generator.random(size))
        if isinstance(memory, PrioritizedMemory):
            check_tree(memory.tree)
        assert batches >= 20 and sum(lapped) > 0 and wrote_since(memory, before)  # the race did happen and was detected


def test_the_device_ring_is_not_torn_and_keeps_overwritten_steps():
    memory = make(PrioritizedMemory, rows=200)
    resident, batches, overwritten = memory.device_class(memory, torch.device("cpu")), 0, 0
    with started(write_without_end, memory, 0), started(write_without_end, memory, 1):
        before, end = memory.trajectories.written(), time.monotonic() + 60
        while (batches < 30 or not overwritten or not wrote_since(memory, before)) and time.monotonic() < end:
            if not resident.refresh():
                continue
            resident.plan(1)
            time.sleep(0.01)  # writers go on
            batch, places = resident.sample(32)
            streams, serials = (part.numpy() for part in batch.keys)
            check_coded_window(memory.layout, SPEC, streams, serials, batch.window)
            overwritten += int((~memory.trajectories.still_valid(streams, serials)).sum())
            assert np.isfinite(batch.weights.numpy()).all()
            resident.update_priorities(places, torch.rand(32))
            batches += 1
        assert batches >= 20 and overwritten > 0 and wrote_since(memory, before)


@pytest.mark.parametrize("memory_type", [UniformMemory, PrioritizedMemory])
def test_sampling_and_a_new_writer_continue_after_a_killed_one(memory_type):
    memory = make(memory_type, rows=40)
    survivor = memory.writer(1, random_priorities)
    with started(write_without_end, memory, 0) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    written = int(memory.trajectories.written()[0])
    for serial in range(60):
        write_coded_row(survivor, memory.layout, 1, serial)
        batch = memory.sample(16)
        assert batch is not None
        check_coded_window(memory.layout, SPEC, *batch.keys, batch.window)
        assert (batch.keys.step_ids[batch.keys.env_ids < 2] + SPEC.length < written).all()
    successor = memory.writer(0, random_priorities)
    memory.trajectories.flat("last")[memory.trajectories.slots(np.arange(2), np.full(2, written - 1))] = (
        written - 1
    ) % 7 == 6
    for serial in range(written, written + 100):  # without the mark of the takeover one coded tape goes through
        write_coded_row(successor, memory.layout, 0, serial)
        batch = memory.sample(16)
        assert batch is not None
        check_coded_window(memory.layout, SPEC, *batch.keys, batch.window)
    assert int(memory.trajectories.written()[0]) == written + 100
