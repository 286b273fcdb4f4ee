"""A chunk that was sent equals in the ring what its actor would have written there."""

import dataclasses

import numpy as np
import pytest
import torch

from core.specs import ArraySpec, Discrete, EnvSpec, WindowSpec
from core.trajectory.frame_compression import StorageParams
from core.trajectory.ring_buffer import Layout, Trajectories
from core.trajectory.writer import ChunkWriter, DamagedChunk, newest_chunk, single_actor_layout
from core.types import TimeStep

ENVS, LENGTH = 3, 4
EXTRAS = {"logits": ArraySpec((2,), "float32")}
SPECS = {
    "frames": EnvSpec("dots", ArraySpec((5, 5), "uint8"), 2, Discrete(2), is_image=True, max_value=255.0),
    "vectors": EnvSpec("numbers", ArraySpec((3,), "float32"), 0, Discrete(2)),
    "masks": EnvSpec("numbers", ArraySpec((3,), "float32"), 0, Discrete(2), has_action_mask=True),
}
WINDOWS = {"steps": WindowSpec(3, (0, 3)), "unrolls": WindowSpec(LENGTH, tuple(range(LENGTH + 1)), stride=LENGTH)}


def layout(kind: str, codec: str, states: bool) -> Layout:
    return Layout.of(
        SPECS[kind],
        EXTRAS,
        capacity=2 * ENVS * 40,
        num_actors=2,
        num_envs=ENVS,
        chunk_length=LENGTH,
        with_priority=True,
        states=(ArraySpec((6,), "float32"),) if states else (),
        storage=StorageParams(codec),
        kept_steps_per_env=8,
    )


def played(spec: EnvSpec, steps: int, seed: int):
    """Yield steps of an invented game with episodes of every length, with actions, extras and states."""
    generator, first = np.random.default_rng(seed), np.ones(ENVS, bool)
    before = None
    for _ in range(steps + 1):
        last = ~first & (generator.random(ENVS) < 0.2)
        shape = (ENVS, *spec.observation_shape)
        seen = generator.integers(0, 4, shape).astype("uint8") if spec.is_image else generator.random(shape, np.float32)
        after = TimeStep(
            seen,
            generator.random(ENVS, np.float32),
            np.where(last, 0, 1).astype(np.float32),
            first,
            last,
            np.zeros(ENVS),
            generator.random((ENVS, 2)) < 0.5 if spec.has_action_mask else None,
        )
        if before is not None:
            yield (
                before,
                generator.integers(0, 2, ENVS),
                after,
                {"logits": generator.random((ENVS, 2), np.float32)},
                (torch.from_numpy(generator.random((ENVS, 6), np.float32)),),
            )
        before, first = after, last


def priorities(window):
    return window.rewards.sum(0).numpy() + window.extras["logits"][0, :, 0].numpy()


def assert_equal(ring: Trajectories, twin: Trajectories) -> None:
    for name in ring.layout.arrays():
        first, second = (
            np.ascontiguousarray(trajectories.arrays[name]).view(np.uint8) for trajectories in (ring, twin)
        )
        assert (first == second).all(), name


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "kind, codec, states",
    [("frames", "raw", False), ("frames", "lz4", True), ("vectors", "raw", True), ("masks", "raw", False)],
)
def test_a_ring_fed_with_chunks_equals_its_actors_own(kind, codec, states, window):
    rings = [Trajectories(layout(kind, codec, states)) for _ in range(2)]
    spec, steps = WINDOWS[window], 23 * LENGTH  # around the ring and around the arena
    own = Trajectories(single_actor_layout(rings[0].layout, spec.length))
    writers = [ChunkWriter(trajectories, actor, spec, priorities) for trajectories, actor in ((rings[0], 1), (own, 0))]
    store = ChunkWriter(rings[1], 1, spec, priorities)
    assert own.layout.nbytes < rings[0].layout.nbytes / 2
    for number, (before, action, after, extras, state) in enumerate(played(SPECS[kind], steps, 1), 1):
        counts = [writer.append(before, action, after, extras, state if states else ()) for writer in writers]
        assert counts[0] == counts[1]
        if number % LENGTH == 0:
            assert store.store(newest_chunk(own, spec.length)) == counts[0]
            assert_equal(*rings)


def test_a_second_actor_ends_open_episodes_without_priorities():
    spec, ring = WINDOWS["steps"], Trajectories(layout("vectors", "raw", False))
    for seed in (1, 2):
        own = Trajectories(single_actor_layout(ring.layout, spec.length))
        writer, store = ChunkWriter(own, 0, spec, priorities), ChunkWriter(ring, 1, spec)
        for before, action, after, extras, _ in played(SPECS["vectors"], LENGTH, seed):
            writer.append(before, action, after, extras)
        store.store(newest_chunk(own, spec.length))
    lasts, supplied = ring.arrays["last"][1], ring.arrays["priority"][1]
    assert ring.written().tolist() == [0, 2 * LENGTH] and lasts[LENGTH - 1].all()
    assert np.isfinite(supplied[0]).all() and np.isnan(supplied[1:LENGTH]).all() and np.isfinite(supplied[LENGTH]).all()


def test_damage_in_transit_is_an_error_and_nothing_is_stored():
    spec, ring = WINDOWS["steps"], Trajectories(layout("frames", "lz4", False))
    own = Trajectories(single_actor_layout(ring.layout, spec.length))
    writer, store = ChunkWriter(own, 0, spec, priorities), ChunkWriter(ring, 1, spec)
    for before, action, after, extras, _ in played(SPECS["frames"], LENGTH, 1):
        writer.append(before, action, after, extras)
    chunk = newest_chunk(own, spec.length)
    chunk.blocks[ENVS - 1][0][-3] ^= 1
    with pytest.raises(DamagedChunk):
        store.store(chunk)
    assert_equal(ring, Trajectories(ring.layout))


def test_the_outbox_has_the_fields_of_the_ring():
    ring = layout("frames", "lz4", True)
    own = single_actor_layout(ring, 3)
    assert own.num_actors == 1
    assert dataclasses.replace(own, num_actors=2, ring_length=ring.ring_length, arena_bytes=ring.arena_bytes) == ring
