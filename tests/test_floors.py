"""Imports go down the floors of the house, never up, never sideways between rooms of one floor."""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FOUNDATION_MAY_IMPORT = {"torch", "numpy"}


def place(module):
    """Floor and room of a module of the project."""
    parts = module.split(".")
    if module == "main":
        return 5, "main"
    if parts[0] == "utils":
        return (0, "files") if module in ("core.checkpoint.run_checkpoint", "core.checkpoint.tensor_file", "core.checkpoint.model_file") else (4, "utils")
    room = parts[1] if len(parts) > 2 or parts[1] in FLOORS else "contracts"
    return FLOORS[room], room


FLOORS = {"ops": 0, "contracts": 1, "agents": 2, "models": 2, "memories": 2, "envs": 2, "single_processes": 3, "engines": 3}


def violations(imports):
    """imports: module -> modules of the project that it imports."""
    found = []
    for module, targets in imports.items():
        floor, room = place(module)
        for target in targets:
            target_floor, target_room = place(target)
            sideways = target_floor == floor and target_room != room
            if target_floor > floor or sideways or (floor == 3 and target_floor == 2):  # processes and engines know contracts only
                found.append(f"{module} (floor {floor}, {room}) imports {target} (floor {target_floor}, {target_room})")
    return found


def cycles(imports):
    """Modules that import themselves by way of others."""
    reachable = {module: set(targets) for module, targets in imports.items()}
    for _ in reachable:
        for module, targets in reachable.items():
            reachable[module] = targets.union(*(reachable.get(target, set()) for target in targets))
    return sorted(module for module, targets in reachable.items() if module in targets)


def module_name(path):
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


@pytest.fixture(scope="module")
def files():
    paths = [*PROJECT.glob("core/**/*.py"), *PROJECT.glob("utils/**/*.py"), PROJECT / "main.py"]
    return {module_name(path): path for path in paths if path.name != "__init__.py"}


@pytest.fixture(scope="module")
def imports(files):
    def target(name):
        return next((known for known in (name, name.rpartition(".")[0]) if known in files), None)

    return {module: {found for name in imported_names(path) if (found := target(name))} for module, path in files.items()}


def test_the_whole_house_is_looked_at(imports):
    assert {"main", "core.agent", "core.agents.dqn", "utils.options", "core.ops.returns"} <= imports.keys()
    assert "core.memory" in imports["core.agents.dqn"]


def test_imports_go_down_the_floors_only(imports):
    assert violations(imports) == []


def test_no_module_imports_itself_by_way_of_others(imports):
    assert cycles(imports) == []


def test_the_foundation_needs_torch_and_numpy_only(files):
    standard = __import__("sys").stdlib_module_names
    for module, path in files.items():
        if place(module)[0] == 0:
            packages = {name.split(".")[0] for name in imported_names(path)}
            assert packages - standard - FOUNDATION_MAY_IMPORT - {"core", "utils"} == set(), module


@pytest.mark.parametrize(("module", "target"), [
    ("core.agent", "core.agents.dqn"), ("core.models.dqn", "core.agents.dqn"), ("core.engines.local", "core.single_processes.actor"),
    ("core.single_processes.actor", "core.envs.atari"), ("core.checkpoint.run_checkpoint", "core.agent"), ("core.engines.local", "utils.options"),
    ("utils.options", "main"), ("core.ops.returns", "core.model")])
def test_the_rule_tells_a_wrong_import(module, target):
    assert violations({module: {target}})


def test_the_rule_tells_a_cycle():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
