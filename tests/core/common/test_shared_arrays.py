import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from core.common.shared_arrays import ALIGNMENT, SharedArrays, total_bytes
from core.specs import ArraySpec

SPECS = {
    "bytes": ArraySpec((3, 5), "uint8"),
    "flags": ArraySpec((7,), "bool"),
    "counters": ArraySpec((2, 8), "int64"),
    "values": ArraySpec((4,), "float32"),
    "none": ArraySpec((0,), "float32"),
}


def negate(arrays: SharedArrays) -> None:
    arrays["values"][...] = -arrays["values"]
    arrays["counters"][1, 0] = 1 << 40


def test_a_spawned_process_shares_the_arrays():
    arrays = SharedArrays(SPECS)
    arrays["values"][...] = [1, 2, 3, 4]
    process = multiprocessing.get_context("spawn").Process(target=negate, args=(arrays,))
    process.start()
    assert os.readlink(f"/proc/self/fd/{arrays._fd}").startswith("/memfd:")  # without a name in the file system
    process.join()
    assert process.exitcode == 0
    assert arrays["values"].tolist() == [-1, -2, -3, -4] and arrays["counters"].tolist()[1][0] == 1 << 40


def test_an_unrelated_process_opens_the_arrays_while_they_exist():
    arrays = SharedArrays(SPECS)
    sent = pickle.dumps(arrays)
    program = "import pickle, sys; arrays = pickle.load(sys.stdin.buffer); arrays['values'][...] = [5, 6, 7, 8]"
    subprocess.run([sys.executable, "-c", program], input=sent, check=True, timeout=60)
    assert arrays["values"].tolist() == [5, 6, 7, 8]
    descriptor = arrays._fd
    del arrays
    with pytest.raises(ConnectionError):
        pickle.loads(sent)
    other = os.memfd_create("another")
    os.dup2(other, descriptor)
    with pytest.raises(ConnectionError, match="no longer"):
        pickle.loads(sent)
    for number in {other, descriptor}:
        os.close(number)


def test_arrays_start_at_zero_and_do_not_overlap():
    arrays = SharedArrays(SPECS)
    for name, spec in SPECS.items():
        assert (
            arrays[name].shape == spec.shape and arrays[name].dtype == np.dtype(spec.dtype) and not arrays[name].any()
        )
        arrays[name][...] = 1
    assert all((arrays[name] == 1).all() for name in SPECS) and "bytes" in arrays and "other" not in arrays
    starts = [arrays[name].__array_interface__["data"][0] for name in SPECS if arrays[name].size]
    assert all((start - starts[0]) % ALIGNMENT == 0 for start in starts)


def test_a_memory_shortage_is_an_error_before_the_allocation(monkeypatch):
    calls = []
    monkeypatch.setattr("core.common.shared_arrays.available_bytes", lambda: 10_000)
    monkeypatch.setattr(os, "memfd_create", lambda name: calls.append(name))
    with pytest.raises(MemoryError, match=r"80,000 bytes .* 10,000"):
        SharedArrays({"values": ArraySpec((10_000,), "float64")})
    assert not calls


def test_total_bytes_equals_the_mapped_bytes():
    arrays = SharedArrays(SPECS)
    assert os.fstat(arrays._fd).st_size == total_bytes(SPECS) == 64 + 64 + 128 + 64


def test_the_descriptor_is_closed_with_the_arrays():
    arrays = SharedArrays(SPECS)
    descriptor = arrays._fd
    del arrays
    with pytest.raises(OSError):
        os.fstat(descriptor)
