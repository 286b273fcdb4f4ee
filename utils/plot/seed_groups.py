"""What makes runs seeds of one experiment: one definition, for curves, for summaries over games and for the tables of sweeps.

Runs are alike if they differ in no setting that changes what is learnt or how it is measured, but for the seed. A difference
counts unless it only

- names the run or says where its files are (machine, timestamp, root),
- belongs to one start of it (device, engine, resume, profile, ...), which a continued run may change,
- says when the run ends (steps, updates, seconds, target_score): then one curve is longer,
- is of what stands beside the learning (evaluator, logger, supervisor, ray, video). The cap of an evaluation episode counts.

A run of an older version that did not have a setting is alike as long as those that have it agree.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from utils.config.command_line import OF_THIS_START
from utils.config.rows import CHOICES, SECTIONS
from utils.plot.curves import Run

STOPS = ("steps", "updates", "seconds", "target_score")
BESIDE = ("evaluator", "logger", "supervisor", "ray", "video")
COUNTS = ("config", "model_file", "evaluator.max_steps")  # although the rules above would pass them over
NAMES = ("run", "config", "method")                       # in the settings of a Run, beside those that it was started with


def counts(setting: str) -> bool:
    """Return True if runs that differ in this setting differ in more than their names, their place and their length."""
    return setting in COUNTS or not (setting in (*OF_THIS_START, *STOPS, "engine") or setting.partition(".")[0] in BESIDE)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings, seed included, that both have and that make them different experiments."""
    return [name for name in other if name in one and counts(name) and one[name] != other[name]]


def alike(found: Iterable[Run], title: str = "config") -> dict[str, list[Run]]:
    """Return groups of runs that are alike, by labels that say what a group differs in from the others of its title.

    Args:
        title: What labels begin with. "config": the row. "method": the row without its game. Then runs of several games make a
            group, and only what differs between runs of one row divides it.
    """
    groups: dict[str, list[Run]] = {}
    for name, runs in _split(found, lambda run: run.settings[title]).items():
        known = [run for run in runs if run.settings.keys() - {*NAMES}]
        names = list(dict.fromkeys(setting for same_row in _split(known, lambda run: run.settings["config"]).values()
                                   for setting in _differing(same_row, ("game",) if title == "method" else ())))
        for run in runs:
            parts = [f"{setting} {run.settings[setting]}" for setting in names if setting in run.settings]
            if known and run not in known:  # from a CSV
                parts = ["settings unknown"]
            groups.setdefault(", ".join([name, *parts]), []).append(run)
    return groups


def _differing(runs: Sequence[Run], ignored: Sequence[str]) -> list[str]:
    """Return the settings in which these runs differ: choices first. Those of a class are compared between runs of that class."""
    choices = [name for name in ("game", *CHOICES) if name not in ignored]
    of_classes = _split(runs, lambda run: json.dumps([run.settings.get(name) for name in choices])).values()
    names = [name for name in choices if len({run.settings.get(name) for run in runs}) > 1]
    for same, classes in ((runs, False), *((same, True) for same in of_classes)):
        names += [name for name in dict.fromkeys(name for run in same for name in run.settings)
                  if counts(name) and name not in (*NAMES, "seed", *CHOICES)
                  and (classes or name.partition(".")[0] not in SECTIONS)
                  and len({json.dumps(run.settings[name]) for run in same if name in run.settings}) > 1]
    return list(dict.fromkeys(names))


def _split(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    parts: dict[str, list[Run]] = {}
    for run in runs:
        parts.setdefault(key(run), []).append(run)
    return parts
