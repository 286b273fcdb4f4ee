"""Imports between rooms go down the floors of docs/architecture.md, never up or sideways.

A room is a package, or a module that stands directly in core/ or utils/.
"""

import ast
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FLOORS = [  # lowest first; a room imports only from rooms of lower floors
    {"core.types"},
    {"core.ops", "core.specs"},
    {"core.common"},
    {"core.env", "core.model", "core.device", "core.checkpoint", "utils.errors"},
    {"core.agent", "core.envs", "core.trajectory", "utils.factory"},
    {"core.memory", "core.acting", "core.distributed"},
    {"core.runtime", "core.learning", "core.models.layers"},
    {"core.evaluation", "core.metrics", "core.agents.base", "core.models", "core.memories", "core.engines"},
    {"core.agents", "core.memories.unrolls", "core.engines.ray", "core.single_processes"},
    {"utils.options"},
    {"utils.run_registry"},
    {"utils.config"},
    {"utils.plot"},
    {"utils.launch", "utils.sweep"},
    {"utils.api", "utils.tune", "main"},
    {"utils.export"},
]
FOUNDATION_MAY_IMPORT = {"torch", "numpy", "core", "utils"}
# import the contracts, not the classes of a config
PROCESSES = {"core.engines", "core.engines.ray", "core.single_processes"}
CLASSES = {
    "core.agents",
    "core.agents.base",
    "core.models",
    "core.models.layers",
    "core.memories",
    "core.memories.unrolls",
    "core.envs",
}


def room(module):
    """Return the package of a module, or the module itself where it stands directly in core/, utils/ or the project."""
    package = module.rpartition(".")[0]
    return package if "." in package else module


def floor(module):
    return next(number for number, rooms in enumerate(FLOORS) if room(module) in rooms)


def violations(imports):
    """Return a line for each import that does not go down.

    Args:
        imports: The project's modules that each module imports.
    """
    found = []
    for module, targets in imports.items():
        for target in targets:
            outside = room(target) != room(module)
            classes = room(module) in PROCESSES and room(target) in CLASSES
            if outside and (floor(target) >= floor(module) or classes):
                found.append(f"{module} (floor {floor(module)}) imports {target} (floor {floor(target)})")
    return found


def cycles(imports):
    """Return the modules that import themselves through others."""
    reachable = {module: set(targets) for module, targets in imports.items()}
    for _ in reachable:
        for module, targets in reachable.items():
            reachable[module] = targets.union(*(reachable.get(target, set()) for target in targets))
    return sorted(module for module, targets in reachable.items() if module in targets)


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
    return {
        ".".join(path.relative_to(PROJECT).with_suffix("").parts): path for path in paths if path.name != "__init__.py"
    }


@pytest.fixture(scope="module")
def imports(files):
    def target(name):
        return next((known for known in (name, name.rpartition(".")[0]) if known in files), None)

    return {
        module: {found for name in imported_names(path) if (found := target(name))} for module, path in files.items()
    }


def test_the_imports_of_every_module_are_read(imports):
    assert {
        "main",
        "core.agent",
        "core.agents.dqn",
        "utils.options",
        "core.ops.returns",
        "core.engines.ray.engine",
    } <= imports.keys()
    assert "core.agents.base.action_values" in imports["core.agents.dqn"]


def test_every_room_has_one_floor_and_every_floor_real_rooms(files):
    rooms = [name for rooms in FLOORS for name in rooms]
    assert sorted(rooms) == sorted({room(module) for module in files})


def test_imports_between_rooms_go_down(imports):
    assert violations(imports) == []


def test_no_module_imports_itself_through_others(imports):
    assert cycles(imports) == []


def test_at_most_eight_modules_stand_directly_in_core():
    assert len([path for path in PROJECT.glob("core/*.py") if path.name != "__init__.py"]) <= 8


def test_every_room_has_a_line_in_the_architecture_page(files):
    page = (PROJECT / "docs" / "architecture.md").read_text()
    table = page[page.index("## Rooms and floors") :]
    missing = [
        name
        for rooms in FLOORS
        for name in rooms
        if f"`{name.replace('.', '/')}`" not in table and f"`{name.replace('.', '/')}.py`" not in table
    ]
    assert missing == []


def test_the_lowest_floor_needs_torch_and_numpy_only(files):
    for module, path in files.items():
        if floor(module) == 0:
            packages = {name.split(".")[0] for name in imported_names(path)}
            assert packages - sys.stdlib_module_names - FOUNDATION_MAY_IMPORT == set(), module


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("core.agent", "core.agents.dqn"),
        ("core.models.dqn", "core.agents.dqn"),
        ("core.engines.local", "core.single_processes.actor"),
        ("core.single_processes.actor", "core.envs.atari"),
        ("core.checkpoint.run_checkpoint", "core.agent"),
        ("core.engines.local", "utils.options"),
        ("utils.options", "main"),
        ("core.ops.returns", "core.model"),
        ("utils.config.rows", "utils.launch"),
    ],
)
def test_the_rule_detects_an_import_that_does_not_go_down(module, target):
    assert violations({module: {target}})


def test_the_rule_detects_a_cycle():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
