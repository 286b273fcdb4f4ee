"""Fixtures that every test can use."""

import signal

import pytest
import torch

# as in a shell's background job; child processes would inherit it
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise under nohup


# directories whose files last long come first, so that both processes end together
LONGEST_FIRST = ("tests/reliability/test_deaths", "tests/test_", "tests/reliability", "tests/core", "tests/utils")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files of tests, each of which keeps its order, and skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: [not item.nodeid.startswith(first) for first in LONGEST_FIRST])


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Limit torch to one thread: tensors are small, so more threads only slow each other down."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    """Seed torch, so that what a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def root(tmp_path):
    """Return a folder for --root whose name contains a space and a non-ASCII letter."""
    folder = tmp_path / "a folder é"
    folder.mkdir()
    return folder


@pytest.fixture
def alone(monkeypatch):
    """Disable the lock of runs, so that a run can be resumed in the process that trained it."""
    monkeypatch.setattr("core.common.files.fcntl.flock", lambda descriptor, operation: None)
