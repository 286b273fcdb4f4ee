"""Fixtures of every test."""

import pytest
import torch


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
    monkeypatch.setattr("utils.runs.fcntl.flock", lambda descriptor, operation: None)
