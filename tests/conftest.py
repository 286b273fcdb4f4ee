"""Fixtures of every test."""

import signal

import pytest
import torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise of nohup


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors: more threads only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture
def root(tmp_path):
    """A folder for models/ and logs/, as --root; its name holds what breaks careless quoting."""
    folder = tmp_path / "a folder é"
    folder.mkdir()
    return folder


@pytest.fixture
def alone(monkeypatch):
    """A run can be continued in this process, as if the first had ended."""
    monkeypatch.setattr("core.common.files.fcntl.flock", lambda descriptor, operation: None)
