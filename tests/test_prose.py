"""Docstrings begin with a sentence that says what they document, and sentences are short; ruff checks the rest."""

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOMS = ("benchmarks", "core", "tests", "utils")
FILES = sorted([PROJECT / "main.py", *(path for room in ROOMS for path in PROJECT.glob(f"{room}/**/*.py"))])
PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")])
NO_BEGINNING = {"Of", "That", "Those", "What", "Whether", "How", "As", "With"}
MOST_WORDS = 25
WORDS = "word " * (MOST_WORDS + 1)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_PROSE = re.compile(  # fenced and indented code, tables, headings
    r"^[ \t]*```[\s\S]*?^[ \t]*```|(?<=\n\n)(?: {4,}[^\n]*\n?)+|^\s*\|[^\n]*$|^#[^\n]*$", re.MULTILINE
)


def docstrings(source):
    """Return (line, docstring) of every module, class and function that has one."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [(getattr(node, "lineno", 1), text) for node in nodes if (text := ast.get_docstring(node))]


def violations(source):
    """Return (line, first word) of each docstring that begins with a word of NO_BEGINNING."""
    words = [(line, text.split(maxsplit=1)[0]) for line, text in docstrings(source)]
    return [(line, word) for line, word in words if word.strip(",.:") in NO_BEGINNING]


def long_sentences(text):
    """Return the sentences of more than MOST_WORDS words; code is one word; colons end sentences too."""
    text = re.sub(r"`[^`]+`", "x", NO_PROSE.sub("\n\n", text))
    text = re.sub(r"\]\([^)]*\)", "]", text)  # addresses of links
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    sentences = [sentence for part in paragraphs for sentence in re.split(r"(?<=[.!?:;])\s+", part.strip())]
    return [" ".join(s.split()) for s in sentences if len(re.findall(r"\S*\w\S*", s)) > MOST_WORDS]


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


def test_no_docstring_has_a_long_sentence():
    found = [
        (f"{path.relative_to(PROJECT)}:{line}", sentence)
        for path in FILES
        for line, text in docstrings(path.read_text())
        for sentence in long_sentences(text)
    ]
    assert found == []


def test_no_page_has_a_long_sentence():
    found = [(str(path.relative_to(PROJECT)), text) for path in PAGES for text in long_sentences(path.read_text())]
    assert found == []


@pytest.mark.parametrize("text", [WORDS, f"# A\n\n{WORDS}", f"A b.\n\n- {WORDS}", f"A b: {WORDS}; c."])
def test_a_long_sentence_is_found(text):
    assert len(long_sentences(text)) == 1


@pytest.mark.parametrize(
    "text",
    ["word " * MOST_WORDS, f"`{WORDS}`", f"A:\n\n    {WORDS}", f"```\n{WORDS}\n```", f"| {WORDS} |", f"# {WORDS}"],
)
def test_code_and_short_sentences_are_not_long(text):
    assert long_sentences(text) == []
