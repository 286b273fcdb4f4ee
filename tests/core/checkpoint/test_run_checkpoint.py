import errno
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from core.checkpoint import run_checkpoint
from core.checkpoint.model_file import file_beside, load_into, load_weights, save_weights
from core.checkpoint.run_checkpoint import CheckpointError, load, save


def state_of(number: int) -> dict:
    return {
        "learner": {
            "weights": torch.full((100,), float(number)),
            "count": number,
            "names": ["a", "b"],
            "pair": (1, None, True),
        },
        "clock": {"random": np.random.default_rng(0).bit_generator.state, "by_index": {0: 1.5}},
    }


def assert_state(state: dict, number: int) -> None:
    assert torch.equal(state["learner"].pop("weights"), torch.full((100,), float(number)))
    assert state["learner"] == {"count": number, "names": ["a", "b"], "pair": (1, None, True)}
    assert state["clock"] == state_of(number)["clock"]


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Make writes past `size` bytes fail with OSError, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_saved_state_is_loaded_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "with space and ünicode"
    path = save(folder, state_of(7), 7, keep=2)
    state, loaded_from = load(folder)
    assert_state(state, 7)
    assert loaded_from == path == folder / "step_000000000007"


def test_only_the_newest_are_kept_and_no_temporary_is_left(tmp_path: Path) -> None:
    for step in (1, 2, 10, 3_000):
        save(tmp_path, state_of(step), step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000000010", "step_000000003000"]


def test_a_second_checkpoint_of_one_step_is_the_newer_one(tmp_path: Path) -> None:
    for number in range(12):
        save(tmp_path, state_of(number), 5, keep=20)
    assert_state(load(tmp_path)[0], 11)


def test_the_newest_of_many_checkpoints_of_one_step_are_kept(tmp_path: Path) -> None:
    for number in range(6):
        newest = save(tmp_path, state_of(number), 5, keep=2)
        assert_state(load(tmp_path)[0], number)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000000000005.4", "step_000000000005.5"]
    assert newest.name == "step_000000000005.5"


def test_a_disk_without_room_for_one_more_keeps_the_newest_and_the_new_one(tmp_path: Path, monkeypatch) -> None:
    write_torch = run_checkpoint.write_torch

    def on_a_small_disk(path: Path, value: object) -> dict:
        if len([*tmp_path.glob("step_*")]) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_torch(path, value)

    monkeypatch.setattr(run_checkpoint, "write_torch", on_a_small_disk)
    room = 1
    for step in range(1, 6):
        save(tmp_path, state_of(step), step, keep=2)
        assert_state(load(tmp_path)[0], step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000000000004", "step_000000000005"]
    room = 0
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, state_of(6), 6, keep=2)
    assert_state(load(tmp_path)[0], 5)


def test_a_full_disk_never_takes_the_only_intact_checkpoint(tmp_path: Path, monkeypatch) -> None:
    for step in (1, 2):
        save(tmp_path, state_of(step), step, keep=2)
    flip_byte(tmp_path / "step_000000000002" / "learner.pt", 50)

    def on_a_full_disk(path: Path, value: object) -> dict:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_checkpoint, "write_torch", on_a_full_disk)
    for step in (1, 3):
        with pytest.raises(CheckpointError, match="No space left"):
            save(tmp_path, state_of(step), step, keep=2)
        assert_state(load(tmp_path)[0], 1)


def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(tmp_path: Path, monkeypatch) -> None:
    for step in (1, 2):
        save(tmp_path, state_of(step), step, keep=2)
    sha256 = run_checkpoint.file_sha256

    def without_descriptors(path: Path) -> str:
        if "2" in path.parent.name:
            raise OSError(errno.EMFILE, "Too many open files")
        return sha256(path)

    with monkeypatch.context() as patched:
        patched.setattr(run_checkpoint, "file_sha256", without_descriptors)
        with pytest.raises(CheckpointError, match=r"step_000000000002 cannot be read: .*Too many open files"):
            load(tmp_path)
    assert_state(load(tmp_path)[0], 2)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")]
)
def test_a_checkpoint_that_does_not_fit_into_memory_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch, error: Exception
) -> None:
    for number in (1, 2):
        newest = save(tmp_path, state_of(number), number, 2)
    torch_load = torch.load

    def load_small(path: Path, **settings: object) -> object:
        if path.parent == newest:
            raise error
        return torch_load(path, **settings)

    monkeypatch.setattr(torch, "load", load_small)
    with pytest.raises(MemoryError, match=r"step_0+2/\w+\.pt needs more memory than this machine has free"):
        load(tmp_path)


def test_saving_an_earlier_step_removes_later_checkpoints(tmp_path: Path) -> None:
    for number in (100, 200, 150):
        save(tmp_path, state_of(number), number, keep=5)
    assert_state(load(tmp_path)[0], 150)
    assert not (tmp_path / "step_000000000200").exists()


def test_parts_written_by_others_join_and_can_be_read_alone(tmp_path: Path) -> None:
    run_checkpoint.save_parts(tmp_path, {"learner_1": {"count": 5}, "stale": 0})
    run_checkpoint.save_parts(tmp_path, {"learner_1": {"count": 6}})
    path = save(tmp_path, state_of(1), 1, keep=1, parts=["learner_1"])
    assert {file.name for file in path.iterdir()} == {"clock.pt", "learner.pt", "learner_1.pt", "manifest.json"}
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    state, _ = load(tmp_path)
    assert state.pop("learner_1") == {"count": 6}
    assert_state(state, 1)
    assert load(tmp_path, ["learner_1", "memory_1"])[0] == {"learner_1": {"count": 6}}


def test_damage_to_any_part_invalidates_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save(tmp_path, state_of(1), 1, keep=2)
    run_checkpoint.save_parts(tmp_path, {"learner_1": {"count": 5}})
    flip_byte(save(tmp_path, state_of(2), 2, keep=2, parts=["learner_1"]) / "learner_1.pt", 40)
    assert load(tmp_path, ["clock"])[1].name == "step_000000000001"


def test_a_missing_part_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), 1, keep=1)
    with pytest.raises(CheckpointError, match="learner_1"):
        save(tmp_path, state_of(2), 2, keep=1, parts=["learner_1"])
    assert_state(load(tmp_path)[0], 1)
    assert not list(tmp_path.glob(".temporary_*"))


def test_a_view_is_stored_without_its_base(tmp_path: Path) -> None:
    path = save(tmp_path, {"view": torch.zeros(1_000_000)[:10]}, 1, keep=1)
    assert (path / "view.pt").stat().st_size < 10_000


def test_tensors_changed_while_being_written_still_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(3_000_000, dtype=torch.uint8)
    write = run_checkpoint.HashingFile.write

    def disturbed(file: run_checkpoint.HashingFile, data: memoryview) -> int:
        rows.add_(1)
        return write(file, data)

    monkeypatch.setattr(run_checkpoint.HashingFile, "write", disturbed)
    save(tmp_path, {"rows": rows}, 1, keep=1)
    assert load(tmp_path)[0]["rows"].shape == rows.shape


def test_mapped_files_load_as_private_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_checkpoint, "MAPPED_BYTES", 1)
    save(tmp_path, state_of(1), 1, keep=1)
    state, _ = load(tmp_path)
    state["learner"]["weights"].add_(1)
    assert_state(load(tmp_path)[0], 1)


@pytest.mark.parametrize(
    "value", [np.float64(1), np.zeros(2), object(), {"deep": [np.int64(3)]}, {1, 2}, {np.int64(1): 2}]
)
def test_values_that_could_not_be_loaded_again_are_refused(tmp_path: Path, value: object) -> None:
    save(tmp_path, state_of(1), 1, keep=1)
    with pytest.raises(TypeError, match=r"learner.odd"):
        save(tmp_path, {"learner": {"odd": value}}, 2, keep=1)
    assert_state(load(tmp_path)[0], 1)
    assert not list(tmp_path.glob(".temporary_*"))


@pytest.mark.parametrize("name", ["learner.pt", "clock.pt", "manifest.json"])
def test_a_flipped_byte_falls_back_to_the_checkpoint_before(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    save(tmp_path, state_of(1), 1, keep=2)
    newest = save(tmp_path, state_of(2), 2, keep=2)
    generator = random.Random(0)
    original = (newest / name).read_bytes()
    for position in [0, len(original) - 1, *(generator.randrange(len(original)) for _ in range(20))]:
        flip_byte(newest / name, position)
        state, path = load(tmp_path)
        assert_state(state, 1)
        printed = capsys.readouterr().err
        assert (
            name in printed and "step_000000000002" in printed and f"falling back to checkpoint {path.name}" in printed
        )
        (newest / name).write_bytes(original)
    assert_state(load(tmp_path)[0], 2)


def test_missing_and_truncated_files_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for step in (1, 2, 3):
        save(tmp_path, state_of(step), step, keep=3)
    (tmp_path / "step_000000000003" / "clock.pt").unlink()
    os.truncate(tmp_path / "step_000000000002" / "clock.pt", 100)
    assert_state(load(tmp_path)[0], 1)
    assert "clock.pt has 100 bytes" in capsys.readouterr().err


def test_loading_fails_if_no_intact_checkpoint_is_left(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint"):
        load(tmp_path / "absent")
    path = save(tmp_path, state_of(1), 1, keep=1)
    flip_byte(path / "learner.pt", 50)
    with pytest.raises(CheckpointError, match=r"every checkpoint .* damaged .*learner.pt"):
        load(tmp_path)


def test_a_malicious_checkpoint_executes_nothing(tmp_path: Path) -> None:
    path, victim = save(tmp_path, state_of(1), 1, keep=1), tmp_path / "victim"
    torch.save(Malicious(victim), path / "learner.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["learner.pt"] = {
        "size": (path / "learner.pt").stat().st_size,
        "sha256": run_checkpoint.file_sha256(path / "learner.pt"),
    }
    manifest.pop("sha256")
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": run_checkpoint._manifest_sha256(manifest)}))
    with pytest.raises(CheckpointError, match=r"refused"):
        load(tmp_path)
    assert not victim.exists()


def test_a_full_disk_raises_and_keeps_the_old_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), 1, keep=1)
    with file_size_limit(50_000), pytest.raises(CheckpointError, match=r"cannot write a checkpoint of step 2"):
        save(tmp_path, {"learner": torch.zeros(1_000_000)}, 2, keep=1)
    assert_state(load(tmp_path)[0], 1)
    assert not list(tmp_path.glob(".temporary_*"))
    save(tmp_path, state_of(3), 3, keep=1)
    assert_state(load(tmp_path)[0], 3)


def save_until_killed(folder: Path, step: int) -> None:
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    while True:
        save(folder, {**state_of(step), "replay": torch.full((200_000,), step)}, step, keep=2)
        step += 1


@pytest.mark.timeout(60)
def test_f23_a_writer_killed_at_random_leaves_a_full_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, {**state_of(99), "replay": torch.full((200_000,), 99)}, 99, keep=2)
    generator, steps = random.Random(1), [99]
    for _ in range(12):
        process = multiprocessing.get_context("fork").Process(target=save_until_killed, args=(tmp_path, steps[-1] + 1))
        process.start()
        time.sleep(generator.uniform(0.02, 0.2))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        state, path = load(tmp_path)
        steps.append(state["learner"]["count"])
        assert torch.equal(state.pop("replay"), torch.full((200_000,), steps[-1]))
        assert_state(state, steps[-1])
        assert path.name == f"step_{steps[-1]:012d}" == max(entry.name for entry in tmp_path.glob("step_*"))
    assert steps == sorted(steps) and steps[-1] > 99


def die_at_call(folder: Path, number: int) -> None:
    """Save a second checkpoint and exit at the number-th file-system call."""
    calls = 0

    def dying(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **keywords):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == number:
                os._exit(9)
            return function(*arguments, **keywords)

        return call

    for name in ("fsync", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    save(folder, state_of(2), 2, keep=1)
    os._exit(0)


@pytest.mark.timeout(60)
def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    loaded = []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        save(folder, state_of(1), 1, keep=1)
        process = multiprocessing.get_context("fork").Process(target=die_at_call, args=(folder, number))
        process.start()
        process.join()
        state, _ = load(folder)
        loaded.append(state["learner"]["count"])
        assert_state(state, loaded[-1])
        save(folder, state_of(3), 3, keep=1)
        assert sorted(path.name for path in folder.iterdir()) == ["step_000000000003"]
        if process.exitcode == 0:
            break
    assert process.exitcode == 0 and loaded == sorted(loaded) and loaded[0] == 1 and loaded.count(2) > 3
    assert "damaged" not in capsys.readouterr().err


# model files ----------------------------------------------------------------------------------------------------------
class Malicious:
    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.system, (f"touch '{self.victim}'",)


def model_file(folder: Path) -> Path:
    path = folder / "models" / "a model.pth"
    save_weights(path, nn.Linear(3, 2).state_dict(), {"game": "pong", "score": 1.5})
    return path


def test_weights_and_metadata_round_trip(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 2), tmp_path / "models" / "m.pth"
    save_weights(path, model.state_dict(), {"game": "pong", "score": 1.5})
    weights, metadata = load_weights(path)
    other = nn.Linear(3, 2)
    load_into(other, weights, path)
    assert metadata == {"game": "pong", "score": 1.5}
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert [entry.name for entry in path.parent.iterdir()] == ["m.pth"]


def test_a_missing_model_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent.pth does not exist"):
        load_weights(tmp_path / "absent.pth")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in"):
        load_weights(tmp_path)


def test_every_truncated_model_file_is_refused(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="empty" if size == 0 else "truncated|damaged"):
            load_weights(path)


def test_random_bytes_are_refused_as_a_model(tmp_path: Path) -> None:
    path, generator = tmp_path / "random.pth", random.Random(3)
    for start in (b"", b"PK\x03\x04", b"\x80\x02", b"text"):
        path.write_bytes(start + generator.randbytes(5_000))
        with pytest.raises(CheckpointError, match=r"random.pth is"):
            load_weights(path)


def test_a_flipped_weight_fails_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    save_weights(path, {"weight": torch.full((1_000,), 3.0)}, {"k": 1})
    position = path.read_bytes().index(torch.full((10,), 3.0).numpy().tobytes())
    flip_byte(path, position + 20)
    with pytest.raises(CheckpointError, match=r"damaged: .*data/0 fails its checksum"):
        load_weights(path)


def test_malicious_model_files_execute_nothing(tmp_path: Path) -> None:
    path, victim = tmp_path / "evil.pth", tmp_path / "victim"
    writers = [
        lambda: path.write_bytes(pickle.dumps(Malicious(victim))),
        lambda: torch.save({"weights": {"a": Malicious(victim)}, "metadata": {}}, path),
        lambda: torch.save({"weights": Malicious(victim)}, path, _use_new_zipfile_serialization=False),
    ]
    for write in writers:
        write()
        with pytest.raises(CheckpointError, match=r"refused, nothing in it was executed"):
            load_weights(path)
        assert not victim.exists()
    # control: outside the loader the attack works
    assert os.system(pickle.loads(pickle.dumps(f"touch '{victim}'"))) == 0 and victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"weights": {}, "metadata": {}},
        {"weights": {"a": 1}, "metadata": {}},
        {"weights": {"a": torch.zeros(1)}},
        {"weights": [torch.zeros(1)], "metadata": {}},
    ],
)
def test_a_file_of_another_structure_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"not a model of this framework"):
        load_weights(tmp_path / "other.pth")


def test_a_foreign_architecture_is_reported_by_tensor(tmp_path: Path) -> None:
    weights, _ = load_weights(model_file(tmp_path))
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"another architecture: weight: \[2, 3\] in the file, \[2, 4\] in the model$"
    ):
        load_into(model, weights, Path("x.pth"))
    assert torch.equal(model.weight, before)
    with pytest.raises(CheckpointError, match=r"0.bias: absent in the file, \[2\] in the model"):
        load_into(nn.Sequential(nn.Linear(3, 2)), weights, Path("x.pth"))


def test_a_full_disk_leaves_the_old_model_file(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    before = path.read_bytes()
    with file_size_limit(20_000), pytest.raises(CheckpointError, match=r"cannot write the model file"):
        save_weights(path, {"weight": torch.zeros(1_000_000)}, {})
    assert path.read_bytes() == before and [entry.name for entry in path.parent.iterdir()] == [path.name]


STRANGE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse (rows)": lambda: torch.eye(3).to_sparse_csr(),
    "without values": lambda: torch.empty(3, 3, device="meta"),
    "complex": lambda: torch.eye(3, dtype=torch.complex64),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "nested (jagged)": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
def test_f44_tensors_of_unsupported_kinds_are_refused_by_name(tmp_path: Path, kind: str, capsys) -> None:
    named = rf"holds {{}}, which is {kind.partition(' (')[0]}"
    torch.save({"weights": {"a": torch.zeros(1), "layer.weight": STRANGE[kind]()}, "metadata": {}}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"m.pth " + named.format("weights.layer.weight")):
        load_weights(tmp_path / "m.pth")
    save(tmp_path / "run", {"agent": {"model": torch.zeros(1)}}, 1, keep=2)
    newest = save(tmp_path / "run", {"agent": {"model": torch.ones(1)}}, 2, keep=2)
    write_as_listed(newest, {"moments": [torch.zeros(1), STRANGE[kind]()]})
    with pytest.raises(CheckpointError, match=r"agent.pt " + named.format(r"moments\[1\]")):
        run_checkpoint.read(newest, None)
    assert (
        torch.equal(load(tmp_path / "run")[0]["agent"]["model"], torch.zeros(1))
        and "agent.pt holds" in capsys.readouterr().err
    )


def write_as_listed(folder: Path, agent: dict) -> None:
    """Replace the agent's file of a checkpoint and its entry in the manifest."""
    entry = run_checkpoint.write_torch(folder / "agent.pt", agent)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["agent.pt"] = entry
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": run_checkpoint._manifest_sha256(manifest)}))


def test_a_list_that_contains_itself_is_loaded(tmp_path: Path) -> None:
    endless: list = [torch.zeros(1)]
    endless.append(endless)
    torch.save({"weights": {"a": torch.zeros(1)}, "metadata": {"endless": endless}}, tmp_path / "m.pth")
    assert set(load_weights(tmp_path / "m.pth")[0]) == {"a"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_f44_non_finite_weights_are_refused_by_tensor_name(value: float) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    weights = {"weight": torch.zeros(2, 3, dtype=torch.float64), "bias": torch.zeros(2)}
    weights["weight"][1, 2] = value
    with pytest.raises(
        CheckpointError, match=r"x.pth holds 1 of 6 values of weight that are no finite float32 numbers"
    ):
        load_into(model, weights, Path("x.pth"))
    assert torch.equal(model.weight, before)


def test_infinities_of_the_models_own_buffers_are_loaded() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))
    load_into(model, model.state_dict(), Path("x.pth"))


@pytest.mark.timeout(30)
def test_f44_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path, capsys) -> None:
    os.mkfifo(tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"m.pth is no regular file"):
        load_weights(tmp_path / "m.pth")
    for name in ("manifest.json", "agent.pt"):
        save(tmp_path / name, {"agent": {"model": torch.zeros(1)}}, 1, keep=2)
        newest = save(tmp_path / name, {"agent": {"model": torch.ones(1)}}, 2, keep=2)
        (newest / name).unlink()
        os.mkfifo(newest / name)
        assert torch.equal(load(tmp_path / name)[0]["agent"]["model"], torch.zeros(1))
        assert f"{name} is no regular file" in capsys.readouterr().err


# checkpoints as models ------------------------------------------------------------------------------------------------
def checkpoint_of(folder: Path, steps: int) -> Path:
    weights, metadata = {"weight": torch.full((2,), float(steps))}, {"signature": "local_x", "agent_steps": steps}
    state = {"agent": {"model": weights}, "clock": {}, "metadata": metadata}
    return save(folder, state, steps, keep=2)


def test_the_weights_of_a_checkpoint_load_as_a_model(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "models" / "local_x_checkpoints"
    first, second = checkpoint_of(folder, 5), checkpoint_of(folder, 9)
    for path, steps in ((first, 5), (second, 9), (folder, 9)):
        weights, metadata = load_weights(path)
        assert weights["weight"].tolist() == [steps] * 2
        assert metadata == {"signature": "local_x", "agent_steps": steps, "checkpoint": f"step_{steps:012}"}
    flip_byte(second / "agent.pt", 100)
    assert load_weights(folder)[1]["agent_steps"] == 5 and "falling back" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"step_000000000009 cannot be used: agent.pt does not have the SHA-256"):
        load_weights(second)


@pytest.mark.parametrize(
    "state",
    [
        {"metadata": {}},
        {"agent": {"model": {"a": 1}}, "metadata": {}},
        {"agent": [], "metadata": {}},
        {"agent": {"model": {}}, "metadata": []},
        {"agent": {"model": {}}},
    ],
)
def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path, state: dict) -> None:
    with pytest.raises(CheckpointError, match="holds no model and metadata of a run"):
        load_weights(save(tmp_path / "x_checkpoints", state, 1, keep=2))


def test_the_report_of_mode_2_is_written_beside_the_models(tmp_path: Path) -> None:
    folder = tmp_path / "local_x_checkpoints"
    path = checkpoint_of(folder, 5)
    (tmp_path / "m.y.pth").touch()
    found = [file_beside(each, "_test.json") for each in (path, folder, tmp_path / "m.y.pth")]
    assert found == [
        tmp_path / f"{name}_test.json" for name in ("local_x_step_000000000005", "local_x_checkpoints", "m.y")
    ]
