"""Sections of docs/options.md, and --help, made of the declarations of options: python -m utils.config.options_page."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from utils.config.rows import OPEN_LINES, SECTIONS, declared, flatten
from utils.factory import EnginesDict
from utils.options import PROJECT, RUN, Options

DOCUMENT = Path(PROJECT) / "docs" / "options.md"
LINES = "The lines to edit"
LINES_TEXT = (
    "The lines of `RUN` at the top of `utils/options.py`. A row may set "
    f"{', '.join(f'`{name}`' for name in OPEN_LINES)} too."
)
CHOICES_TEXT = (
    "What a row is made of. Each `_type` is a name of `utils/factory.py` or `package.module:Class` of your own, see "
    "[extending](extending.md)."
)
# Options that name a class -> the names that the factory knows.
NAMES: dict[str, Iterable[str]] = {"engine": EnginesDict, **dict(SECTIONS.values())}
TOP = "run"  # section of the options without a dot, in --help
WIDTH, INDENT = 120, " " * 8  # columns of --help, and space before a description
HEADER = "| option | type | default | allowed | unit or meaning |\n|---|---|---|---|---|\n"
SIGNS = {"gt": ">", "ge": "≥", "le": "≤"}  # attribute of a bound in pydantic's metadata -> sign


def page() -> str:
    """Return docs/options.md with the introduction as it is, and the sections of the present declarations."""
    own = [name for name in declared(Options()) if name not in RUN]
    parts = [
        DOCUMENT.read_text().partition("\n## ")[0],
        _section(LINES, LINES_TEXT, table(Options, only=RUN)),
        _section("The choices of a row", CHOICES_TEXT, table(Options, only=own)),
    ]
    for name, params in fixed_sections():
        parts.append(_section(f"`{name}.`", _first_line(params), table(params, f"{name}.")))
    for name, (type_field, factory) in SECTIONS.items():
        for selected in factory:
            title, text = f"`{name}.` with {type_field} {selected}", _first_line(inspect.getmodule(factory[selected]))
            parts.append(_section(title, text, table(factory[selected].Params, f"{name}.")))
    return "\n".join(parts)


def fixed_sections() -> Iterator[tuple[str, type]]:
    """Yield name and Params of each section whose class no row chooses."""
    options = Options()
    for field in dataclasses.fields(options):
        section = getattr(options, field.name)
        if dataclasses.is_dataclass(section) and field.name not in SECTIONS:
            yield field.name, type(section)


def table(params: type, prefix: str = "", only: Iterable[str] | None = None) -> str:
    """Return one line for each option of a dataclass, or for `only` these. Sections inside it are left out."""
    sentences = descriptions(params)
    return "".join(
        _line(prefix + name, field, sentences.get(name, ""))
        for name, field in declared(params()).items()
        if "." not in name and (only is None or name in only)
    )


def help_text(options: Options, section: str) -> str:
    """Return what --help prints of a section or of an option, or of all options of this row if `section` is ""."""
    lines, values = [], flatten(options)
    for name, field in declared(options).items():
        owner, _, last = name.rpartition(".")
        if section not in ("", name, owner or TOP):
            continue
        params: type = type(getattr(options, owner) if owner else options)
        # Signs that any terminal can show.
        allowed = _allowed(name, field).replace("`", "").replace("≥", ">=").replace("≤", "<=")
        value = _default(values[name]).strip("`")
        lines.append(f"  --{name} {_type_name(field.annotation)} = {value}" + (f"  ({allowed})" if allowed else ""))
        sentences = textwrap.wrap(descriptions(params).get(last, ""), WIDTH - len(INDENT))
        lines += [INDENT + line for line in sentences]
    return "\n".join(lines)


@cache
def descriptions(params: type) -> dict[str, str]:
    """Return field name -> the sentences below the field, of the class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(params.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        with suppress(OSError):
            (statement,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            if not isinstance(statement, ast.ClassDef):
                continue  # Python 3.13 finds a line of core.common.settings.combined, which made this class
            for pair in pairwise(statement.body):
                match pair:
                    case ast.AnnAssign(target=name), ast.Expr(value=ast.Constant(value=text)):
                        found[ast.unparse(name)] = " ".join(str(text).split())
    return found


def _section(title: str, text: str, rows: str) -> str:
    return f"## {title}\n\n{text}\n\n{HEADER}{rows}"


def _first_line(documented: Any) -> str:
    """Return the first line of the docstring of a class or module."""
    return _cell((inspect.getdoc(documented) or "").partition("\n")[0])


def _line(name: str, field: FieldInfo, sentences: str) -> str:
    default = field.default if RUN.get(name) is None else RUN[name]
    cells = f"`{name}`", _type_name(field.annotation), _default(default), _allowed(name, field), sentences
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _cell(text: str) -> str:
    """Escape what Markdown would take for a tag or the end of a cell."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def _type_name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type_name(parts[0])
    if origin is Literal:
        return type(parts[0]).__name__
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_name, parts))
    if origin is tuple:
        return f"tuple[{', '.join('...' if part is ... else _type_name(part) for part in parts)}]"
    return "None" if annotation is type(None) else annotation.__name__


def _default(value: Any) -> str:
    if value == PROJECT:
        return "folder of `main.py`"
    if value == "":
        return "the row says"
    return f"`{value:_}`" if type(value) is int else f"`{value}`"


def _allowed(name: str, field: FieldInfo) -> str:
    """Return the choices or bounds of an option; the names where the factory knows them."""
    is_literal = typing.get_origin(field.annotation) is Literal
    if choices := NAMES.get(name) or (is_literal and typing.get_args(field.annotation)):
        return ", ".join(f"`{choice}`" for choice in choices)
    bounds = [
        (sign, getattr(each, attribute))
        for attribute, sign in SIGNS.items()
        for each in dict.fromkeys([*field.metadata, *_nested(field.annotation)])
        if hasattr(each, attribute)
    ]
    return ", ".join(f"{sign} {bound:_}" if type(bound) is int else f"{sign} {bound:g}" for sign, bound in bounds)


def _nested(annotation: Any) -> Iterator[Any]:
    """Yield the bounds of values inside tuples and unions."""
    for part in typing.get_args(annotation):
        yield from part.metadata if isinstance(part, FieldInfo) else _nested(part)


if __name__ == "__main__":
    DOCUMENT.write_text(page())
