"""The figures of a small replay are consistent."""

import pytest

from benchmarks.history import COLUMNS, measure, table


@pytest.fixture(scope="module")
def found():
    return measure("pong", 1_000, 1, "lz4")


@pytest.mark.slow
def test_the_parts_add_up_and_compressed_frames_are_smaller(found):
    assert found["steps_held"] >= 1_000 - 8 * found["chunk_length"]
    assert found["frame_bytes"] + found["other_bytes_per_step"] * found["steps_held"] == pytest.approx(
        found["used_bytes"]
    )
    assert found["frame_bytes"] * found["compression"] == pytest.approx(84 * 84 * found["steps_held"])
    assert found["used_bytes"] < found["allocated_bytes"] < found["raw_bytes"]
    other = found["other_bytes_per_step"] * found["steps_held"]
    assert found["parts"]["arena"] + other == pytest.approx(found["allocated_bytes"], rel=1e-3)
    assert table({"pong": found}).splitlines()[2].count("|") == len(COLUMNS) + 2


@pytest.mark.slow
def test_a_raw_replay_is_measured_as_allocated(found):
    raw = measure("pong", 1_000, 1, "raw")
    assert raw["steps_held"] == found["steps_held"]
    assert raw["allocated_bytes"] == pytest.approx(found["raw_bytes"] - found["parts"]["sum tree"])
    assert "raw MB/M" not in table({"pong": raw}) and "resident MB/M" in table({"pong": raw})
