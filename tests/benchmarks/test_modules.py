"""Every benchmark can be imported."""

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py"))
OURS = ("benchmarks", "core", "utils")


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_finds_its_imports(name):
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OURS:
            raise
        pytest.skip(f"{error.name} is not installed")
