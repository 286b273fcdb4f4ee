"""Settings by their dotted names ("agent.lr"): listing them, changing them, reading their values from text."""

import contextlib
import dataclasses
import difflib
import io
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tyro

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def flatten(params: Any, prefix: str = "") -> dict[str, Any]:
    """dotted name -> value of every setting of a dataclass and of those inside it."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        name, value = prefix + field.name, getattr(params, field.name)
        flat |= flatten(value, name + ".") if _is_params(value) else {name: value}
    return flat


def annotations(params: Any, prefix: str = "") -> dict[str, Any]:
    """dotted name -> declared type of every setting."""
    hints = typing.get_type_hints(type(params))
    found: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        name, value = prefix + field.name, getattr(params, field.name)
        found |= annotations(value, name + ".") if _is_params(value) else {name: hints[field.name]}
    return found


def changed(params: Any, settings: Mapping[str, Any]) -> Any:
    """A copy with these dotted settings; each must exist. Lists become tuples, whole numbers floats where declared so."""
    hints = typing.get_type_hints(type(params))
    direct: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        head, _, rest = name.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            direct[head] = _cast(value, hints[head])
    for head, group in inner.items():
        direct[head] = changed(getattr(params, head), group)
    return dataclasses.replace(params, **direct)


def parse(texts: Sequence[str], annotation: Any) -> Any:
    """The words of one option as its declared type. Raises ValueError naming that type."""
    if annotation is bool:
        return _parse_bool(texts)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(annotation, args=[_normal(text, annotation) for text in texts], console_outputs=False)
    except SystemExit:
        raise ValueError(f"is not {type_name(annotation)}") from None


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


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value written in Python is of the declared type."""
    value = _cast(value, annotation)
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return any(value is None if kind in (None, type(None)) else _is_a(value, kind) for kind in kinds)


def type_name(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
    if _is_union(annotation):
        return " or ".join(type_name(kind) for kind in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        parts = typing.get_args(annotation)
        return f"{'several' if parts[1:] == (...,) else len(parts)} {'whole numbers' if parts[0] is int else 'values'}"
    return names.get(annotation) or str(annotation)


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Known dotted names that a misspelt one may have meant, best first: by their last part, then by the whole."""
    known, last = list(known), name.rpartition(".")[2]
    ends: dict[str, list[str]] = {}
    for candidate in known:
        ends.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    by_whole = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    by_end = [candidate for end in difflib.get_close_matches(last, ends, n=2, cutoff=0.75) for candidate in ends[end]]
    by_end.sort(key=lambda candidate: -difflib.SequenceMatcher(None, name, candidate).ratio())
    return list(dict.fromkeys([*(ends.get(last, [])), *by_whole, *by_end]))[:3]


def _parse_bool(texts: Sequence[str]) -> bool:
    word = texts[0].lower() if len(texts) == 1 else ("" if texts else "true")
    if word not in TRUE + FALSE:
        raise ValueError(f"is not {type_name(bool)}")
    return word in TRUE


def _normal(text: str, annotation: Any) -> str:
    """1e6 is a whole number too, and none means None."""
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if type(None) in kinds and text.lower() == "none":
        return "None"
    if int in kinds and float not in kinds:
        with contextlib.suppress(ValueError, OverflowError):
            if float(text) == int(float(text)):
                return str(int(text) if text.lstrip("-").isdigit() else int(float(text)))
    return text


def _cast(value: Any, annotation: Any) -> Any:
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    if isinstance(value, (list, dict)) and str in kinds:
        with contextlib.suppress(TypeError, ValueError):  # what JSON cannot carry stays, and is no text
            return json.dumps(value)  # replay lists and arguments of environments, written in Python
    if type(value) is int and float in kinds and int not in kinds:
        with contextlib.suppress(OverflowError):  # larger than any float: it stays, and is out of bounds
            return float(value)
    return value


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if isinstance(value, bool):
        return origin is bool
    if origin is tuple and isinstance(value, tuple):
        parts = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(value) == len(parts) and all(map(_is_a, value, parts))
    return isinstance(value, origin) if isinstance(origin, type) else True


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_params(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
