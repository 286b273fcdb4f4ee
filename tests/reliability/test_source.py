"""The source contains no call that executes data (F40)."""

import ast

import pytest

from tests.reliability.program import PROJECT

SOURCES = sorted(
    [
        *PROJECT.glob("core/**/*.py"),
        *PROJECT.glob("utils/**/*.py"),
        *PROJECT.glob("benchmarks/**/*.py"),
        PROJECT / "main.py",
    ]
)
SHELLS = {"sh", "bash", "dash", "zsh", "/bin/sh", "/bin/bash", "/usr/bin/env"}
# starts a shell with a fixed text: see docs/reliability.md
SWEEPER = PROJECT / "core" / "engines" / "ray" / "cluster.py"
# lets Ray's workers unpickle what home has pickled
WORKER = PROJECT / "core" / "engines" / "ray" / "worker.py"
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the full name of each alias that `import a.b as c` and `from a import b as c` define."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def name_of(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of a called function."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_unpickler(name: str) -> bool:
    """Return True if the dotted name is that of a function that unpickles, such as ray.cloudpickle.loads."""
    module, _, function = name.rpartition(".")
    return module.rpartition(".")[2] in UNPICKLERS and function in ("load", "loads", "Unpickler", "open")


def executes_data(source: str) -> list[str]:
    """Return every call that would execute the contents of a file or text."""
    found, tree = [], ast.parse(source)
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and is_unpickler(name_of(node, names)):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if not isinstance(node, ast.Call):
            continue
        name, keywords = name_of(node.func, names), {keyword.arg: keyword.value for keyword in node.keywords}
        words = node.args[0].elts if node.args and isinstance(node.args[0], ast.List | ast.Tuple) else []
        constant = {key: getattr(value, "value", ...) for key, value in keywords.items()}
        if (
            (name in ("eval", "exec", "compile", "os.system", "os.popen", "builtins.eval", "builtins.exec"))
            or constant.get("shell", False) is not False
            or constant.get("allow_pickle", False) is not False
            or (name == "torch.load" and constant.get("weights_only") is not True)
            or (name.endswith("yaml.load"))
            or (words and getattr(words[0], "value", ...) in SHELLS)
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_f40_no_source_file_executes_data():
    found = [(path, call) for path in SOURCES for call in executes_data(path.read_text())]
    assert [path for path, _ in found] == [SWEEPER, WORKER], found
    assert "['sh', '-c', SWEEP, 'sweeper', folder]" in found[0][1]
    assert found[1][1].endswith(": cloudpickle.loads")


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(file)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(words, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from pickle import loads as read; read(text)",
        "from ray import cloudpickle; cloudpickle.loads(text)",
        "import pickle; read = pickle.loads",
        "import dill as d; d.load(file)",
        "from torch import load; load(path)",
        "from os import system; system(text)",
        "numpy.load(path, allow_pickle=True)",
        "os.system(text)",
        "subprocess.Popen(['sh', '-c', text])",
    ],
)
def test_f40_the_rule_detects_calls_that_execute_data(line):
    assert executes_data(line)
