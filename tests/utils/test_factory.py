"""Names to classes."""

import subprocess
import sys

import pytest

from utils import factory
from utils.factory import AgentsDict, EnginesDict, EnvsDict, Factory, MemoriesDict, ModelsDict, ProcessesDict, UnknownNameError

ALL = [EnvsDict, MemoriesDict, ModelsDict, AgentsDict, ProcessesDict, EnginesDict]


@pytest.mark.parametrize(("names", "name"), [(names, name) for names in ALL for name in names])
def test_every_registered_name_resolves(names, name):
    assert callable(names[name])


def test_classes_are_imported_on_use_only():
    program = "import sys, utils.factory; sys.exit(any(name.startswith('core.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], cwd=factory.__file__.rsplit("/", 2)[0]).returncode == 0


def test_a_misspelt_name_raises_a_key_error_with_the_closest_one():
    with pytest.raises(KeyError, match="did you mean shared"):
        MemoriesDict["shard"]


def test_a_class_of_the_users_own_is_found_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "my_package.py").write_text("class MyModel:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ModelsDict["my_package:MyModel"].__name__ == "MyModel"
    for wrong in ("my_package:Absent", "no_such_package:MyModel", "my_package:", ":MyModel"):
        with pytest.raises(UnknownNameError, match="unknown model_type"):
            ModelsDict[wrong]


def test_a_missing_package_inside_a_class_is_an_import_error_and_no_unknown_name(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import package_that_is_absent\nclass Env:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="package_that_is_absent"):
        Factory("env_type", {"mine": "needs_more:Env"})["mine"]
