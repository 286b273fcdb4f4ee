"""From a row of CONFIGS to Options: the classes it names, their defaults, and the settings in which it differs."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from utils.config.dotted_settings import annotations, changed, closest, fits, type_name
from utils.errors import ConfigurationError
from utils.factory import AgentsDict, EnvsDict, Factory, MemoriesDict, ModelsDict, suggestion, why_not
from utils.options import CONFIGS, Options, Run

GROUPS: dict[str, tuple[str, Factory]] = {"agent": ("agent_type", AgentsDict), "env": ("env_type", EnvsDict),
                                          "memory": ("memory_type", MemoriesDict), "model": ("model_type", ModelsDict)}
OPEN_LINES = [name for name, kind in annotations(Run()).items() if type(None) in typing.get_args(kind)]  # a row may set them
CHOICES = (*(type_field for type_field, _ in GROUPS.values()), "game")


def find_row(config: str) -> dict[str, Any]:
    """The row of this name or number. Raises Refused with the valid ones in one line, or when a row has no name of its own."""
    names: list[Any] = [row.get("name") if isinstance(row, dict) else None for row in CONFIGS]
    faults = [f"CONFIGS row {number} must be a dict with a name" for number, name in enumerate(names) if not isinstance(name, str)]
    faults += [f"CONFIGS row {number} must not be named {name!r} again" for number, name in enumerate(names) if name in names[:number]]
    if faults:
        raise ConfigurationError(faults)
    if config in names:
        return CONFIGS[names.index(config)]
    if config.isdecimal() and int(config) < len(CONFIGS):
        return CONFIGS[int(config)]
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    raise ConfigurationError([f"config={config!r} is no row of CONFIGS{suggestion(config, names)}; there are {listed}"])


def from_row(row: Mapping[str, Any], choices: Mapping[str, str] | None = None) -> tuple[Options, list[str]]:
    """What the file says for this row, and its problems. `choices` replaces agent_type, ..., game; then settings of the row that the
    other class does not have are left out. The Params of a class that cannot be had are None.
    """
    problems = [f"CONFIGS row {row['name']!r} lacks {name}" for name in CHOICES if name not in row]
    problems += [f"CONFIGS row {row['name']!r}: {name}={row[name]!r} is not {type_name(str)}" for name in CHOICES
                 if not isinstance(row.get(name, ""), str)]
    chosen = {**{name: str(row.get(name, "")) for name in CHOICES}, **(choices or {})}
    groups: dict[str, Any] = {}
    for group, (type_field, factory) in GROUPS.items():
        try:
            groups[group] = factory[chosen[type_field]].Params()
        except Exception as error:  # a module of the user's own can fail in any way
            problems.append(why_not(f"{type_field}={chosen[type_field]}", error))
    lines = {name: value for name, value in dataclasses.asdict(Run()).items() if value is not None}
    options = Options(**{**lines, **chosen, **groups, "config": row["name"]})
    replaced = {group for group, (type_field, _) in GROUPS.items() if chosen[type_field] != row.get(type_field)}
    settings, more = _settings(row, options, replaced | (GROUPS.keys() - groups.keys()))
    return changed(options, settings), problems + more


def _settings(row: Mapping[str, Any], options: Options, lenient: set[str]) -> tuple[dict[str, Any], list[str]]:
    known, problems, settings = annotations(options), [], {}
    for name, value in row.items():
        if name in (*CHOICES, "name"):
            continue
        where = f"CONFIGS row {row['name']!r}: {name}"
        if name not in known:
            if str(name).partition(".")[0] not in lenient:
                near = closest(str(name), known)
                problems.append(f"{where} is no setting" + (f", did you mean {' or '.join(near)}?" if near else ""))
        elif not fits(value, known[name]):
            problems.append(f"{where}={value!r} is not {type_name(known[name])}")
        elif "." not in name and name not in OPEN_LINES:
            problems.append(f"{where} is not a row's to set: edit the line in utils/options.py")
        elif "." in name or getattr(Run(), name) is None:
            settings[name] = value
    return settings, problems
