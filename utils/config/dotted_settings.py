"""Options by their dotted names ("agent.learning_rate"): listed, changed, and read from words of the command line."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from core.common.settings import sentences

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SWITCH = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}

P = TypeVar("P", bound="DataclassInstance")


def flatten(params: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a dataclass and of its sections: dotted name -> value."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        name, value = prefix + field.name, getattr(params, field.name)
        flat |= flatten(value, name + ".") if dataclasses.is_dataclass(value) else {name: value}
    return flat


def declared(params: Any, prefix: str = "") -> dict[str, FieldInfo]:
    """Return the declarations of a pydantic dataclass and of its sections: dotted name -> type, default, bounds."""
    found: dict[str, FieldInfo] = {}
    for name, field in type(params).__pydantic_fields__.items():
        value = getattr(params, name)
        found |= declared(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else {prefix + name: field}
    return found


def changed(params: P, settings: Mapping[str, Any], prefix: str = "") -> tuple[P, dict[str, str]]:
    """Return a copy with these values, and a sentence for each value that pydantic refuses; refused ones are left out.

    Args:
        params: the dataclass to copy.
        settings: dotted name -> value. Every name must exist.
        prefix: what stands before the names in sentences.
    """
    own: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, dot, rest = name.partition(".")
        if dot:
            sections.setdefault(section, {})[rest] = value
        else:
            own[name] = value
    try:
        copy, refused = dataclasses.replace(params, **own), dict[str, str]()
    except ValidationError as error:
        refused = sentences(error, prefix)
        copy = dataclasses.replace(
            params, **{name: value for name, value in own.items() if prefix + name not in refused}
        )
    for section, values in sections.items():
        part, more = changed(getattr(copy, section), values, f"{prefix}{section}.")
        copy, refused = dataclasses.replace(copy, **{section: part}), {**refused, **more}
    return copy, refused


def from_words(words: Sequence[str], annotation: Any) -> Any:
    """Return the value that words of the command line mean for an option of this type.

    `1e6` means a whole number too, `none` means None, and a switch without a word means True. Words that mean no value
    of the type are returned as text, which pydantic refuses.
    """
    allowed = kinds(annotation)
    if bool in allowed and not words:
        return True
    if tuple in allowed and (len(words) != 1 or int not in allowed):
        return tuple(_number(word, whole=True) for word in words)
    if len(words) != 1:
        return " ".join(words) if str not in allowed else [*words]
    word = words[0]
    if type(None) in allowed and word.lower() == "none":
        return None
    if bool in allowed:
        return SWITCH.get(word.lower(), word)
    return _number(word, whole=int in allowed) if allowed & {int, float} and str not in allowed else word


def kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation allows, without their parameters."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return set(map(type, parts))
    if origin is Annotated:
        return kinds(parts[0])
    if origin in (Union, types.UnionType):
        return set[Any]().union(*map(kinds, parts))
    return {origin or annotation}


def _number(word: str, whole: bool) -> int | float | str:
    try:
        if whole and word.lstrip("+-").replace("_", "").isdecimal():
            return int(word)
        number = float(word)
    except ValueError:
        return word
    return int(number) if whole and number.is_integer() else number


def split_values(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside the brackets, braces and quotes of JSON."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        depth += 0 if quoted else (character in "[{") - (character in "]}")
        if character == separator and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known dotted names that a misspelt name may mean, best first: by the last part, then by the whole."""
    known, last = list(known), name.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for candidate in known:
        ends.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    by_whole = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    by_end = [candidate for end in difflib.get_close_matches(last, ends, n=2, cutoff=0.75) for candidate in ends[end]]
    by_end.sort(key=lambda candidate: -difflib.SequenceMatcher(None, name, candidate).ratio())
    return list(dict.fromkeys([*(ends.get(last, [])), *by_whole, *by_end]))[:3]
