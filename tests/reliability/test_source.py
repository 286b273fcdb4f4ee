"""What the code does not contain (F40)."""

import ast
from pathlib import Path

import pytest

from tests.reliability.program import PROJECT

SOURCES = sorted([*PROJECT.glob("core/**/*.py"), *PROJECT.glob("utils/**/*.py"), *PROJECT.glob("benchmarks/**/*.py"), PROJECT / "main.py"])
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def name_of(node: ast.expr) -> str:
    """a.b.c of what is called."""
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def executes_data(source: str) -> list[str]:
    """Every call that would run what a file or a text contains."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = name_of(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        module, _, function = name.rpartition(".")
        constant = {key: getattr(value, "value", ...) for key, value in keywords.items()}
        if ((name in ("eval", "exec", "compile", "os.system", "os.popen", "builtins.eval", "builtins.exec"))
                or (module in UNPICKLERS and function in ("load", "loads", "Unpickler", "open"))
                or constant.get("shell", False) is not False or constant.get("allow_pickle", False) is not False
                or (name == "torch.load" and constant.get("weights_only") is not True)
                or (name.endswith("yaml.load"))):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_f40_nothing_in_the_code_executes_data(path: Path):
    assert executes_data(path.read_text()) == []


@pytest.mark.parametrize("line", ["pickle.load(file)", "eval(text)", "exec(text)", "subprocess.run(words, shell=True)", "torch.load(path)",
                                  "torch.load(path, weights_only=False)", "numpy.load(path, allow_pickle=True)", "os.system(text)"])
def test_f40_the_rule_tells_what_does(line):
    assert executes_data(line)
