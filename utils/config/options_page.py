"""docs/options.md, made of the dataclasses: python -m utils.config.options_page > docs/options.md"""

import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from utils.config.dotted_settings import annotations, flatten
from utils.config.rows import GROUPS
from utils.factory import EnginesDict
from utils.options import PROJECT, Options, Run

INTRODUCTION = """\
# Options

Every option, its default, the values it may take, and its unit or meaning. This page is made of the code, by

```bash
.venv/bin/python -m utils.config.options_page > docs/options.md
```

An option is set in one of three places; a later one wins:

1. **here**: the default beside the class that it configures;
2. **a row of `CONFIGS`** in `utils/options.py`, as `"agent.lr": 1e-4`;
3. **the command line**, as `--agent.lr 1e-4`. Hyphens and underscores are the same, `1e6` is a whole number, `none` means None,
   and a switch is written `--record`, `--record true` or `--no-record`.

`python main.py --config <row> --help` lists the options that this row has, with the values it gives them, and what this page says of them;
`--help agent` lists those of one group, `--help agent.lr` one.
"""
RUN = "The lines to edit"
RUN_TEXT = "The fields of `Run` at the top of `utils/options.py`. Those that are None here may be set by a row too."
CHOICES_TEXT = ("What a row is made of. Each `_type` is a name of `utils/factory.py` or `package.module:Class` of your own, "
                "see [extending](extending.md).")
NAMES: dict[str, Iterable[str]] = {"engine": EnginesDict, **dict(GROUPS.values())}  # what the factory knows, by the option that takes it
TOP = "run"  # group of the options without a dot, in --help
WIDTH = 120  # columns of --help
HEADER = "| option | type | default | allowed | unit or meaning |\n|---|---|---|---|---|\n"


def page() -> str:
    """The whole of docs/options.md."""
    own = {field.name for field in dataclasses.fields(Options)} - {field.name for field in dataclasses.fields(Run)}
    parts = [INTRODUCTION, section(RUN, RUN_TEXT, table(Run)), section("The choices of a row", CHOICES_TEXT, table(Options, only=own))]
    parts += [section(f"`{group}.`", _first_line(params), table(params, f"{group}.")) for group, params in fixed_groups()]
    for group, (type_field, factory) in GROUPS.items():
        for name in factory:
            chosen = factory[name]
            parts.append(section(f"`{group}.` with {type_field} {name}", _first_line(chosen), table(chosen.Params, f"{group}.")))
    return "\n".join(parts)


def section(title: str, text: str, rows: str) -> str:
    return f"## {title}\n\n{text}\n\n{HEADER}{rows}"


def fixed_groups() -> Iterator[tuple[str, type]]:
    """Params that no row replaces by those of another class."""
    for field in dataclasses.fields(Options):
        if dataclasses.is_dataclass(field.default) and not isinstance(field.default, type):
            yield field.name, type(field.default)


def _first_line(chosen: type) -> str:
    """What the file of this class says it is."""
    return _cell((inspect.getdoc(inspect.getmodule(chosen)) or "").partition("\n")[0])


def table(params: type, prefix: str = "", only: Iterable[str] | None = None) -> str:
    """One line for each setting of a dataclass; for `only` these, where given. Groups inside it are left out."""
    meanings, types = comments(params), annotations(params())
    fields = [field for field in dataclasses.fields(params) if field.name in types and types[field.name] is not Any]
    chosen = [field for field in fields if only is None or field.name in only]
    return "".join(_line(prefix + field.name, types[field.name], field, meanings.get(field.name, "")) for field in chosen)


def help_text(options: Options, group: str = "") -> str:
    """Return what --help shows: every option of this row (of one group, or one option) with its value, allowed values and meaning."""
    lines = []
    for name, owner, annotation, value in _settings(options):
        if group not in ("", name, name.rpartition(".")[0] or TOP):
            continue
        field = next(field for field in dataclasses.fields(owner) if field.name == name.rpartition(".")[2])
        allowed = _allowed_values(name, field).replace("`", "").replace("≥", ">=").replace("≤", "<=")  # whatever the terminal can show
        lines.append(f"  --{name} {_kind(annotation)} = {_default(value).strip('`')}" + (f"  ({allowed})" if allowed else ""))
        lines += textwrap.wrap(comments(owner).get(field.name, ""), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def help_groups(options: Options) -> list[str]:
    """Return what `--help` may be followed by: the groups, then the options by their dotted names."""
    names = [name for name, *_ in _settings(options)]
    return [*dict.fromkeys(name.rpartition(".")[0] or TOP for name in names), *names]


def _settings(options: Options) -> Iterator[tuple[str, type, Any, Any]]:
    """Yield dotted name, owning dataclass, declared type and value of each option that this row has."""
    values, types = flatten(options), annotations(options)
    for name, annotation in types.items():
        group = name.rpartition(".")[0]
        if annotation is not Any:
            yield name, type(getattr(options, group) if group else options), annotation, values[name]


@cache
def comments(params: type) -> dict[str, str]:
    """Return field name -> meaning: the comment at the end of its line and in the column below, of the class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(params.__mro__):
        if dataclasses.is_dataclass(owner):
            found |= _comments_of(inspect.getsource(owner))
    return found


def _comments_of(source: str) -> dict[str, str]:
    found: dict[str, str] = {}
    words: list[str] = []  # of the logical line so far
    name, end = "", (0, 0)  # row and column of the comment of the field that was read last
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline):
        if token.type == tokenize.COMMENT and words[1:2] == [":"]:
            name, end = words[0], token.start
            found[name] = token.string.lstrip("# ")
        elif token.type == tokenize.COMMENT and not words and token.start == (end[0] + 1, end[1]):
            end = token.start
            found[name] += " " + token.string.lstrip("# ")
        elif token.type == tokenize.NEWLINE:
            words = []
        elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            words.append(token.string)
    return found


def _line(name: str, annotation: Any, field: Any, meaning: str) -> str:
    cells = f"`{name}`", _kind(annotation), _default(field.default), _allowed_values(name, field), meaning
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _kind(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _allowed_values(name: str, field: Any) -> str:
    """Return the choices or bounds of an option: of those that the factory knows by name, the names."""
    return _listed(NAMES[name]) if name in NAMES else _allowed(**field.metadata)


def _cell(text: str) -> str:
    """What Markdown would take for a tag or the end of a cell is escaped."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def _default(value: Any) -> str:
    if value == PROJECT:
        return "folder of `main.py`"
    if value == "":
        return "the row says"
    return f"`{value:_}`" if type(value) is int else f"`{value}`"


def _allowed(low: float | None = None, high: float | None = None, above: float | None = None,
             choices: tuple[Any, ...] | None = None) -> str:
    if choices is not None:
        return _listed(choices)
    bounds = [(sign, bound) for sign, bound in ((">", above), ("≥", low), ("≤", high)) if bound is not None]
    return ", ".join(f"{sign} {bound:_}" if type(bound) is int else f"{sign} {bound:g}" for sign, bound in bounds)


def _listed(choices: Iterable[Any]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


if __name__ == "__main__":
    print(page(), end="")
