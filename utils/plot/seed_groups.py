"""Decide which runs are seeds of one experiment, for curves, for summaries over games and for tables of sweeps.

Runs are alike if they differ, besides the seed, in no option that changes what is learned or how it is measured. A
difference counts unless the option only

- names the run or its folder (machine, timestamp, root),
- belongs to one start of the run (device, engine, resume, profile, ...), so that a resumed run may change it,
- says when the run ends (steps, updates, seconds, target_score), so that one curve is longer,
- configures what does not affect learning (evaluator, logger, supervisor, ray, video); evaluator.max_steps counts.

A run of an older version that lacks an option is alike if the runs that have the option agree.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from utils.config.command_line import OF_THIS_START
from utils.config.rows import CHOICES, SECTIONS
from utils.plot.curves import Run

STOPS = ("steps", "updates", "seconds", "target_score")
BESIDE = ("evaluator", "logger", "supervisor", "ray", "video")
COUNTS = ("config", "model_file", "evaluator.max_steps")  # Exceptions, which count despite the rules above.
NAMES = ("run", "config", "method")  # Settings of a Run that are no options.


def counts(setting: str) -> bool:
    """Return True if runs that differ in this option are different experiments."""
    return setting in COUNTS or not (
        setting in (*OF_THIS_START, *STOPS, "engine") or setting.partition(".")[0] in BESIDE
    )


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the options, including the seed, that both runs have and that make them different experiments."""
    return [name for name in other if name in one and counts(name) and one[name] != other[name]]


def alike(runs: Iterable[Run], title: str = "config") -> dict[str, list[Run]]:
    """Return groups of runs that are alike, by labels that say in what a group differs from others of the same title.

    Args:
        runs: Runs to group.
        title: Start of the labels: "config" is the row, "method" the row without its game. With "method" a group may
            contain several games, and only differences between runs of one row divide groups.
    """
    groups: dict[str, list[Run]] = {}
    for name, same_title in _split(runs, lambda run: run.settings[title]).items():
        known = [run for run in same_title if run.settings.keys() - {*NAMES}]
        names = list(
            dict.fromkeys(
                setting
                for same_row in _split(known, lambda run: run.settings["config"]).values()
                for setting in _differing(same_row, ("game",) if title == "method" else ())
            )
        )
        for run in same_title:
            parts = [f"{setting} {run.settings[setting]}" for setting in names if setting in run.settings]
            if known and run not in known:  # A CSV holds no settings.
                parts = ["settings unknown"]
            groups.setdefault(", ".join([name, *parts]), []).append(run)
    return groups


def _differing(runs: Sequence[Run], ignored: Sequence[str]) -> list[str]:
    """Return the options in which these runs differ, classes and game first.

    Options of a class are compared between runs of that class only.
    """
    choices = [name for name in ("game", *CHOICES) if name not in ignored]
    of_classes = _split(runs, lambda run: json.dumps([run.settings.get(name) for name in choices])).values()
    names = [name for name in choices if len({run.settings.get(name) for run in runs}) > 1]
    for same, classes in ((runs, False), *((same, True) for same in of_classes)):
        names += [
            name
            for name in dict.fromkeys(name for run in same for name in run.settings)
            if counts(name)
            and name not in (*NAMES, "seed", *CHOICES)
            and (classes or name.partition(".")[0] not in SECTIONS)
            and len({json.dumps(run.settings[name]) for run in same if name in run.settings}) > 1
        ]
    return list(dict.fromkeys(names))


def _split(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    parts: dict[str, list[Run]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    return parts
