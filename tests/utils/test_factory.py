"""The factory maps names to classes."""

import subprocess
import sys

import pytest

from core.agent import Agent
from core.agents.dqn import DQN
from core.models.dqn import DQNMLP
from utils import factory
from utils.factory import AgentsDict, EnginesDict, EnvsDict, Factory, MemoriesDict, ModelsDict, UnknownNameError


def test_classes_are_imported_on_use_only():
    program = (
        "import sys, utils.factory; loaded = {name for name in sys.modules if "
        "name.startswith('core.') or name == 'torch'}; "
        "allowed = {'core.common', *(f'core.common.{name}' for name in ('console', 'exit_codes', 'foreign_code'))}; "
        "sys.exit(bool(loaded - allowed))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=factory.__file__.rsplit("/", 2)[0]).returncode == 0


def test_a_misspelt_name_raises_a_key_error_with_the_closest_one():
    with pytest.raises(KeyError, match="did you mean shared"):
        MemoriesDict["shard"]


def test_a_users_own_class_is_found_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_package.py").write_text("from core.models.dqn import DQNMLP\nclass MyModel(DQNMLP):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ModelsDict["my_package:MyModel"].__name__ == "MyModel"
    for wrong in ("my_package:Absent", "no_such_package:MyModel", "my_package:", ":MyModel"):
        with pytest.raises(UnknownNameError, match="unknown model_type"):
            ModelsDict[wrong]


def test_a_class_named_without_a_colon_is_answered_by_the_form():
    with pytest.raises(UnknownNameError, match=r"classes of your own as package\.module:Class"):
        ModelsDict["my_package.MyModel"]


def test_a_missing_package_in_a_module_is_an_import_error(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import package_that_is_absent\nclass Env:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="package_that_is_absent"):
        Factory("env_type", {"mine": "needs_more:Env"})["mine"]


@pytest.mark.parametrize(
    ("names", "place", "contract"),
    [
        (AgentsDict, "core.models.dqn:DQNCNN", "core.agent.Agent"),
        (MemoriesDict, "core.models.dqn:DQNCNN", "core.memory.Memory"),
        (ModelsDict, "core.agents.dqn:DQN", "core.model.Model"),
        (EnvsDict, "core.env:checked_discrete", "core.env.Env"),
        (EnginesDict, "core.agents.dqn:DQN", "core.agent.Engine"),
    ],
)
def test_a_class_of_another_kind_is_refused(names, place, contract):
    with pytest.raises(
        UnknownNameError, match=f"{names.kind}={place} is of the wrong kind: it is no subclass of {contract}"
    ):
        names[place]


class HalfAgent(Agent):
    """An agent without `actions`, `window_kinds`, `checkpoint_parts` and the methods that DQN shares."""

    required_output = "q"
    act = window = exploration = init_learner = learn = None


def test_a_class_that_lacks_parts_of_its_contract_is_refused():
    lacks = r"lacks actions, window_kinds, checkpoint_parts of core\.agent\.Agent$"
    with pytest.raises(UnknownNameError, match=lacks):
        AgentsDict[f"{__name__}:HalfAgent"]


class MissingComma(DQN):
    window_kinds = "transitions"


class UnknownKind(DQN):
    window_kinds = ("transition",)


class NoType(DQN):
    actions = "discrete"


class Plural(DQNMLP):
    observations = "vectors"


@pytest.mark.parametrize(
    ("names", "own", "message"),
    [
        (AgentsDict, "MissingComma", r"window_kinds='transitions' is no tuple\[Literal\['transitions', 'sequences'"),
        (AgentsDict, "UnknownKind", r"window_kinds=\('transition',\) is no tuple\[Literal\['transitions', 'sequences'"),
        (AgentsDict, "NoType", r"actions='discrete' is no type \| types.UnionType \| tuple"),
        (ModelsDict, "Plural", r"observations='vectors' is no Literal\['image', 'vector'\]"),
    ],
)
def test_an_attribute_of_another_type_is_refused(names, own, message):
    with pytest.raises(UnknownNameError, match=message):
        names[f"{__name__}:{own}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import sys; sys.exit(0)", r"module leaves called sys.exit\(0\)"),
        ("None.attribute", "'NoneType' object has no attribute"),
    ],
)
def test_a_module_that_fails_on_import_reports_the_cause(tmp_path, monkeypatch, line, message):
    (tmp_path / "leaves.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "leaves", raising=False)
    with pytest.raises(Exception, match=message) as error:
        AgentsDict["leaves:Agent"]
    assert not isinstance(error.value, UnknownNameError)
