"""Docstrings begin with a sentence that says what they document; ruff checks their form."""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOMS = ("benchmarks", "core", "tests", "utils")
FILES = sorted([PROJECT / "main.py", *(path for room in ROOMS for path in PROJECT.glob(f"{room}/**/*.py"))])
NO_BEGINNING = {"Of", "That", "Those", "What", "Whether", "How", "As", "With"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def violations(source):
    """Return (line, first word) of each docstring that begins with a word of NO_BEGINNING."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    words = [(getattr(node, "lineno", 1), (ast.get_docstring(node) or "").split(maxsplit=1)[:1]) for node in nodes]
    return [(line, word[0]) for line, word in words if word and word[0].strip(",.:") in NO_BEGINNING]


def test_no_docstring_begins_with_a_preposition_pronoun_or_question_word():
    assert [
        f"{path.relative_to(PROJECT)}:{line}: {word}" for path in FILES for line, word in violations(path.read_text())
    ] == []


@pytest.mark.parametrize(
    "text", ['"""Of them."""', 'def f():\n    """What it does."""', 'class A:\n    """How."""', '"""\nAs it is."""']
)
def test_a_dangling_beginning_is_found(text):
    assert len(violations(text)) == 1


def test_a_verb_and_a_word_that_only_resembles_one_are_no_violations():
    assert violations('"""Return it."""\ndef f():\n    """Offer a window of that size."""\ndef g():\n    pass') == []
