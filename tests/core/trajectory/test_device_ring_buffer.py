"""Every window of the ring on the learner's device equals that of the shared ring bit for bit."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.common.shared_arrays import SharedArrays, total_bytes
from core.device.torch_runtime import Transfers, _register, upload
from core.specs import ArraySpec, WindowSpec
from core.trajectory.device_ring_buffer import DeviceRingBuffer
from core.trajectory.frame_compression import StorageParams
from core.trajectory.ring_buffer import Trajectories
from core.trajectory.writer import ChunkWriter
from core.types import Window
from tests.core.devices import DEVICES
from tests.core.tapes import RandomPlay, small_layout


class Rings:
    """Provide two actors that play at different speeds into rings of 24 steps, and their device ring."""

    def __init__(
        self,
        device: str,
        spec: WindowSpec,
        *,
        rows: int = 24,
        chunk_length: int = 4,
        with_states: bool = False,
        **options,
    ):
        drawn = ("frame_stack", "frame_shape", "frame_dtype", "end")
        play = {name: options.pop(name) for name in drawn if name in options}
        self.plays = [RandomPlay(seed, 2, **play) for seed in (1, 2)]
        states = RandomPlay.states if with_states else ()
        layout = small_layout(
            self.plays[0].spec,
            rows=rows,
            chunk_length=chunk_length,
            num_envs=2,
            num_actors=2,
            extras=RandomPlay.extras,
            states=states,
            with_priority=True,
            **options,
        )
        self.trajectories, self.spec = Trajectories(layout), spec
        self.writers = [ChunkWriter(self.trajectories, actor, spec) for actor in range(2)]
        for each in self.plays:
            each.with_states = with_states
        self.mirror = DeviceRingBuffer(self.trajectories, torch.device(device))

    def play(self, *steps: int) -> None:
        for play, writer, count in zip(self.plays, self.writers, steps):
            play.play(writer, count)

    def check(self) -> int:
        """Check every window that the device ring offers, and return their number."""
        low, high = self.mirror.refresh(self.spec.length)
        keys = [
            (actor * 2 + stream, serial)
            for actor in range(2)
            for stream in range(2)
            for serial in range(low[actor], high[actor])
            if not self.spec.stride or serial % self.spec.stride == 0
        ]
        if not keys:
            return 0
        streams, serials = np.array(keys).T
        expected = self.trajectories.gather(streams, serials, self.spec)
        assert self.trajectories.still_valid(streams, serials).all()
        device = self.mirror.tensors["last"].device
        found = self.mirror.gather(
            torch.from_numpy(streams).to(device), torch.from_numpy(serials).to(device), self.spec
        )
        assert_equal_windows(found, expected)
        return len(keys)


def assert_equal_windows(found: Window, expected: Window) -> None:
    """Assert equality of values bit for bit, and of types."""
    pairs = [*zip(found[:6], expected[:6]), *zip(found.states, expected.states, strict=True)]
    assert found.extras.keys() == expected.extras.keys()
    pairs += [(found.extras[name], expected.extras[name]) for name in expected.extras]
    for one, other in pairs:
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.cpu().contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frame_stack", [0, 1, 4])
@pytest.mark.parametrize(
    ("length", "observations", "crosses"),
    [(1, (0, 1), False), (3, (0, 3), False), (5, (0, 2, 5), True), (2, (), False)],
)
@pytest.mark.parametrize("chunk_length", [1, 4])
def test_every_window_equals_that_of_the_shared_ring(device, frame_stack, length, observations, crosses, chunk_length):
    rings = Rings(
        device,
        WindowSpec(length, observations, stride=int(crosses)),
        frame_stack=frame_stack,
        chunk_length=chunk_length,
    )
    checked = 0
    for part in range(20):
        rings.play(3, 1 + part % 6)
        checked += rings.check()
    assert int(rings.trajectories.written().min()) > 2 * 24 and checked > 300


@pytest.mark.parametrize("device", DEVICES)
def test_stacks_may_be_of_any_type_of_numbers(device):
    rings, checked = Rings(device, WindowSpec(3, (0, 3)), frame_dtype="uint16"), 0
    for _ in range(10):
        rings.play(3, 5)
        checked += rings.check()
    assert checked > 100


@pytest.mark.parametrize("device", DEVICES)
def test_after_a_long_pause_the_readable_steps_are_copied(device):
    rings = Rings(device, WindowSpec(3, (0, 3)), end=0.05)
    for steps in (7, 19, 200, 25, 24, 90):
        rings.play(steps, steps // 2)
        assert rings.check() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_have_the_states_of_their_chunks(device):
    rings = Rings(device, WindowSpec(9, tuple(range(10)), stride=4), rows=40, with_states=True)
    assert sum(bool(rings.play(5, 11)) or rings.check() for _ in range(20)) > 100


@pytest.mark.parametrize("device", DEVICES)
def test_compressed_frames_are_decompressed_once_and_equal(device):
    rings = Rings(device, WindowSpec(3, (0, 3)), storage=StorageParams(frame_compression="lz4"), frame_shape=(6, 6))
    assert sum(bool(rings.play(3, 5)) or rings.check() for _ in range(20)) > 300


@pytest.mark.parametrize(("copy_bytes", "most"), [(1, 4), (2 * 4 * 2 * 6, 8)])  # below a chunk; two chunks
def test_many_steps_are_copied_in_parts(monkeypatch, copy_bytes, most):
    monkeypatch.setattr("core.trajectory.device_ring_buffer.COPY_BYTES", copy_bytes)
    rings = Rings("cpu", WindowSpec(3, (0, 3)))
    parts = []
    copy = rings.mirror._copy
    rings.mirror._copy = lambda way, actor, first, last: (parts.append(last - first), copy(way, actor, first, last))
    rings.play(18, 22)
    # of 20 steps the first chunk is behind the overwrite margin
    assert rings.check() > 0 and max(parts) == most and sum(parts) == 16 + 16


def test_a_step_is_copied_once_except_the_newest():
    rings = Rings("cpu", WindowSpec(3, (0, 3)), end=0.0)
    parts = []
    copy = rings.mirror._copy
    rings.mirror._copy = lambda way, *rows: (parts.append(rows), copy(way, *rows))
    rings.play(8, 0)
    rings.check(), rings.check()
    rings.plays[0].rows = [rows[:8] for rows in rings.plays[0].rows]
    rings.plays[0].restart()
    # the first writer died: step 7 is now the last of its episode
    rings.writers[0] = ChunkWriter(rings.trajectories, 0, rings.spec)
    rings.play(4, 0)
    assert rings.check() > 0 and parts == [(0, 0, 8), (0, 7, 12)]
    assert rings.mirror.tensors["last"][0, 7].all() and not rings.mirror.tensors["last"][0, 6].any()


def test_steps_overwritten_while_being_copied_are_not_offered():
    rings = Rings("cpu", WindowSpec(3, (0, 3)), end=0.0)
    rings.play(24, 24)
    copy = rings.mirror._copy
    rings.mirror._copy = lambda way, actor, *rows: (copy(way, actor, *rows), rings.play(16 * (actor == 0), 0))
    low, high = rings.mirror.refresh(3)
    assert rings.trajectories.written().tolist() == [40, 24]
    # of the steps left afterwards, minus the overwrite margin and the first stack
    assert low.tolist() == [16 + 8 + 3, 0 + 8 + 3]
    assert high.tolist() == [27, 24 - 3]  # nothing of actor 0: steps 8 .. 23 had been copied and step 24 had not


def test_copies_wait_for_updates_only_if_they_overwrite_steps(monkeypatch):
    rings, waits = Rings("cpu", WindowSpec(3, (0, 3)), end=0.0), []
    together = rings.mirror._transfers.together
    monkeypatch.setattr(
        rings.mirror._transfers, "together", lambda after_work: (waits.append(after_work), together(after_work))[1]
    )
    reachable = list[int]()  # the oldest steps of updates that may still run: of all since the last wait
    for steps in (8, 4, 12, 8, 0, 9, 3, 12, 8, 4, 1):
        rings.play(steps, 0)
        low, _ = rings.mirror.refresh(3)
        if waits[-1]:
            reachable.clear()
        overwritten = rings.mirror.copied[0] - 24  # steps before it are gone
        assert all(overwritten <= oldest for oldest in reachable)
        reachable.append(max(low[0] - 3, 0))  # the steps of the stack are read too
    assert waits == [False, True, True, False, False, True, False, True, False, True, False]


@pytest.mark.cuda
@pytest.mark.parametrize("refused", [False, True])
def test_steps_come_from_pinned_memory_or_by_copies_if_refused(monkeypatch, capsys, refused):
    if refused:
        monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *arguments: 801)
    rings = Rings("cuda", WindowSpec(3, (0, 3)))
    assert (rings.mirror._transfers._stream is None) == refused
    assert torch.from_numpy(rings.trajectories.arrays["frame"]).is_pinned() != refused
    assert ("cannot be pinned (CUDA error 801)" in capsys.readouterr().err) == refused
    rings.play(20, 11)
    assert rings.check() > 0


@pytest.mark.parametrize("error", [0, 801])
def test_the_whole_mapping_is_pinned_and_a_refusal_is_reported(monkeypatch, capsys, error):
    asked, undone = [], []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *arguments: (asked.append(arguments), error)[1], cudaHostUnregister=undone.append
    )
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr("torch.ones", lambda *arguments, **options: None)
    arrays = SharedArrays({"a": ArraySpec((3, 5), "int16"), "b": ArraySpec((7,), "float64")})
    assert _register(arrays, torch.device("cuda")) == (not error)
    ((address, size, flags),) = asked
    assert address == arrays["a"].ctypes.data and address + size >= arrays["b"].ctypes.data + arrays["b"].nbytes
    assert size == total_bytes({"a": ArraySpec((3, 5), "int16"), "b": ArraySpec((7,), "float64")}) and flags == 0
    assert ("cannot be pinned (CUDA error 801)" in capsys.readouterr().err) == bool(error)
    _register(arrays, torch.device("cuda"))
    assert len(asked) == (2 if error else 1) and not undone  # pinned memory is not pinned again
    del arrays
    assert undone == ([] if error else [address])


def test_temporary_arrays_are_copied_through_lasting_memory(monkeypatch):
    arrays, uploads = SharedArrays({"a": ArraySpec((3, 5), "int16")}), []
    monkeypatch.setattr("core.device.torch_runtime.upload", lambda array, target: uploads.append(array))
    transfers, target = Transfers(arrays, torch.device("cpu")), torch.zeros(2, 5, dtype=torch.int16)
    arrays["a"][1:] = 3
    transfers._copy_in_place(arrays["a"][1:], target)
    assert (target == 3).all() and not uploads
    transfers._copy_in_place(arrays["a"][1:] + 1, target)
    assert len(uploads) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
def test_an_array_may_change_once_it_is_uploaded(pinned):
    source = torch.zeros(1 << 26, dtype=torch.uint8, pin_memory=pinned)
    target = torch.ones_like(source, device="cuda")
    for _ in range(20):
        target.copy_(target.flip(0))  # gives the device work to do first
    upload(source, target)
    source.fill_(7)
    assert not target.any()
