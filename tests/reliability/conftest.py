"""Fixtures of the tests that watch whole runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from main import main
from tests.reliability.faults import Faulty
from tests.reliability.program import NO_ENVIRONMENT


@pytest.fixture
def start_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., Any]:
    """Return a function that does in this process what `start` does in one of its own, which takes seconds less.

    It suits refusals, and runs on the inline engine that no signal must reach.
    """

    def start(root: Path, *arguments: str, environment: Mapping[str, str] = NO_ENVIRONMENT) -> SimpleNamespace:
        monkeypatch.chdir(root)
        monkeypatch.setattr(Faulty, "made", 0)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        try:
            exit_code: Any = main(["--root", str(root), "--machine", "test", *arguments])
        except SystemExit as exit:
            exit_code = exit.code
        said = capfd.readouterr()
        return SimpleNamespace(returncode=exit_code, stdout=said.out, stderr=said.err)

    return start
