"""From a row of CONFIGS to Options: the classes that the row names, and the options that it sets."""

from collections.abc import Mapping
from typing import Any

from utils import run_registry
from utils.config.dotted_settings import changed, closest, declared, flatten
from utils.errors import ConfigurationError
from utils.factory import AgentsDict, EnvsDict, Factory, MemoriesDict, ModelsDict, suggestion, why_not
from utils.options import CONFIGS, RUN, Options

SECTIONS: dict[str, tuple[str, Factory]] = {  # section -> the option that names its class, and the classes
    "agent": ("agent_type", AgentsDict),
    "env": ("env_type", EnvsDict),
    "memory": ("memory_type", MemoriesDict),
    "model": ("model_type", ModelsDict),
}
CHOICES = (*(type_field for type_field, _ in SECTIONS.values()), "game")
OPEN_LINES = (
    "timestamp",
    "num_envs_per_actor",
    "resume",
    "model_file",
    "steps",
    "updates",
    "seconds",
    "target_score",
)  # lines of RUN that a row may set


def find_row(config: str) -> dict[str, Any]:
    """Return the row of this name or number.

    Raises:
        ConfigurationError: no such row, with those that exist in one line; or a row without a name of its own.
    """
    names: list[Any] = [row.get("name") if isinstance(row, dict) else None for row in CONFIGS]
    faults = [
        f"CONFIGS row {number} must be a dict with a name"
        for number, name in enumerate(names)
        if not isinstance(name, str)
    ]
    faults += [
        f"CONFIGS row {number} must not be named {name!r} again"
        for number, name in enumerate(names)
        if name in names[:number]
    ]
    if faults:
        raise ConfigurationError(faults)
    if config in names:
        return CONFIGS[names.index(config)]
    if config.isdecimal() and int(config) < len(CONFIGS):
        return CONFIGS[int(config)]
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    raise ConfigurationError(f"config={config!r} is no row of CONFIGS{suggestion(config, names)}; there are {listed}")


def from_row(row: Mapping[str, Any], choices: Mapping[str, str] | None = None) -> tuple[Options, list[str]]:
    """Return what utils/options.py says for this row, and its problems.

    Args:
        row: of CONFIGS.
        choices: replace the row's agent_type, env_type, memory_type, model_type and game. The row's options for a
            replaced class are left out if the other class does not have them.
    """
    where = f"CONFIGS row {row['name']!r}"
    problems = [f"{where} lacks {name}" for name in CHOICES if name not in row]
    problems += [
        f"{where}: {name}={row[name]!r} must be a valid string"
        for name in CHOICES
        if not isinstance(row.get(name, ""), str)
    ]
    chosen = {**{name: str(row.get(name, "")) for name in CHOICES}, **(choices or {})}
    options, _ = changed(Options(), {**chosen, "config": row["name"]})
    missing = missing_classes(options)
    options, _ = changed(
        options,
        {
            section: factory[chosen[type_field]].Params()
            for section, (type_field, factory) in SECTIONS.items()
            if section not in missing
        },
    )
    options, wrong_lines = with_lines(options)
    problems += [*missing.values(), *wrong_lines]

    known, settings = declared(options), {}
    replaced = {section for section, (type_field, _) in SECTIONS.items() if chosen[type_field] != row.get(type_field)}
    for name, value in row.items():
        if name in (*CHOICES, "name"):
            continue
        if name not in known:
            if str(name).partition(".")[0] not in replaced | missing.keys():
                near = closest(str(name), known)
                problems.append(
                    f"{where}: {name} is no option" + (f", did you mean {' or '.join(near)}?" if near else "")
                )
        elif "." not in name and name not in OPEN_LINES:
            problems.append(f"{where}: {name} is not a row's to set: edit its line in RUN of utils/options.py")
        elif RUN.get(name) is None:
            settings[name] = value
    options, refused = changed(options, settings)
    return options, problems + [f"{where}: {sentence}" for sentence in refused.values()]


def settings_on_file(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what utils/options.py says for this row: dotted name -> value, as JSON carries it."""
    return run_registry.plain(flatten(from_row(row)[0]))


def with_lines(options: Options) -> tuple[Options, list[str]]:
    """Return the options with the lines of RUN that are not None, and a sentence for each line that is wrong."""
    known, lines = (
        declared(options),
        {name: value for name, value in RUN.items() if value is not None and name != "config"},
    )
    unknown = [f"{name} is no option" + suggestion(name, known) for name in lines if name not in known]
    options, refused = changed(options, {name: value for name, value in lines.items() if name in known})
    return options, [f"RUN of utils/options.py: {sentence}" for sentence in (*unknown, *refused.values())]


def missing_classes(options: Options) -> dict[str, str]:
    """Return the sections whose class cannot be had: section -> why not."""
    missing: dict[str, str] = {}
    for section, (type_field, factory) in SECTIONS.items():
        name = getattr(options, type_field)
        try:
            factory[name].Params()
        except Exception as error:  # a module of the user's own can fail in any way
            missing[section] = why_not(f"{type_field}={name}", error)
    return missing
