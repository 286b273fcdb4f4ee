"""Options from the file and the command line. Everything that is wrong is found before a process or folder is made, and told at once."""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from core.common import settings
from utils import run_registry
from utils.config import device_validation, validation
from utils.config.dotted_settings import annotations, changed, closest, fits, flatten, parse, type_name
from utils.config.options_page import WIDTH, help_groups, help_text
from utils.config.rows import CHOICES, GROUPS, find_row, from_row
from utils.errors import BAD_CONFIGURATION, ConfigurationError
from utils.factory import suggestion
from utils.options import CONFIGS, Options

HELP = ("-h", "--help")
OF_THIS_START = ("config", "mode", "machine", "timestamp", "device", "actor.device", "resume", "model_file", "render", "record",
                 "profile", "profile_trace", "episodes", "check", "root", "seconds")
FIXED = ("config", "agent_type", "env_type", "game", "model_type", "agent.optimizer", "agent.rmsprop_centered", "env",
         "model")  # for all lives of a run
FIXED_WITH_REPLAY = ("memory_type", "memory.capacity", "num_learners", "num_actors", "num_envs_per_actor", "actor.chunk_length",
                     "agent.nstep", "agent.unroll_length", "agent.burn_in", "agent.stride", "memory.replay_parameters", "memory.overflow",
                     "memory.num_batches", "memory.feature_dtype")

OF_A_MODEL = tuple(name for name in CHOICES if name != "memory_type")  # what it is of

Words = dict[str, list[str]]


def read_options(arguments: Sequence[str]) -> Options:
    """The options of this start. Exits with 2 or 3 after printing every problem, with 0 after --help."""
    try:
        return read(arguments)
    except ConfigurationError as refused:
        refuse(refused)


def refuse(refused: ConfigurationError) -> NoReturn:
    for problem in refused.problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(refused.code)


def read(arguments: Sequence[str]) -> Options:
    """The options of this start. Raises Refused with every problem; --help exits."""
    arguments, help_group = _without_help(arguments)
    words, problems = split(arguments)
    if "root" in words:  # an environment may change the working folder
        words["root"] = [os.path.abspath(os.path.expanduser(root)) for root in words["root"]]
    start = _peek(words)
    row = find_row(start["config"])
    saved, missing = _saved_run(start, row, words)
    if saved and "config" not in words:
        if saved.config is None:
            problems.append(
                f"run {saved.signature} has no {run_registry.RUN_FILE} that could be read, which says of which row it is: name that "
                            "with --config")
        else:
            row = find_row(saved.config)
    options, file_problems = _base(row, words, saved)
    options, word_problems = _apply(options, words)
    if help_group is not None:
        _help(options, help_group)
    own_timestamp = options.timestamp is not None  # one that is made up is made up again where another run has taken it meanwhile
    options = dataclasses.replace(options, config=row["name"], **_identity(options, saved))
    if own_timestamp and options.mode == 1 and options.resume is None and os.path.exists(options.log_folder):
        problems.append(f"run {options.signature} exists: continue it by --resume {options.signature}, or choose another timestamp")
    if saved and options.num_envs_per_actor == 0:  # it was found when the run began
        options = dataclasses.replace(options, num_envs_per_actor=saved.options.get("num_envs_per_actor", 0))
    problems += file_problems + word_problems + validation.problems(options)
    if saved and options.mode == 1:
        problems += _differences(options, saved)
    if problems or missing:
        raise ConfigurationError([*problems, *(missing.problems if missing else ())],
                                 BAD_CONFIGURATION if problems or not missing else missing.code)
    if saved:
        print(f"{'continuing' if options.mode == 1 else 'testing'} run {saved.signature}: {options.config}, "
              + ", ".join(f"{name}={getattr(options, name)}" for name in OF_A_MODEL))
    return device_validation.resolved(options)


# words ----------------------------------------------------------------------------------------------------------------
def split(arguments: Sequence[str]) -> tuple[Words, list[str]]:
    """--name value ..., --name=value and --name alone, hyphens or underscores, as name -> words."""
    words: Words = {}
    problems: list[str] = []
    name: str | None = None
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            words[name] = [value] if equals else []
        elif name is None:
            problems.append(f"{argument!r} stands alone: options are written --name value")
        else:
            words[name].append(argument)
    return words, problems


def _apply(options: Options, words: Words) -> tuple[Options, list[str]]:
    """The options with what the command line says, and all that is wrong with it."""
    known, problems, settings = annotations(options), [], {}
    for name, texts in words.items():
        positive = name.replace("no_", "", 1) if name.rpartition(".")[2].startswith("no_") else name
        if name not in known and not texts and known.get(positive) is bool:
            settings[positive] = False
        elif name not in known:
            group, dot, _ = name.partition(".")
            if dot and getattr(options, group, ...) is None:  # its class could not be had, which was reported
                continue
            near = [f"--{candidate}" for candidate in closest(name, known)]
            type_field = GROUPS[group][0] if dot and group in GROUPS else None
            problems.append(f"unknown option --{name}" + (f" of {type_field}={getattr(options, type_field)}" if type_field else "")
                            + (f", did you mean {' or '.join(near)}?" if near else ""))
        else:
            try:
                settings[name] = parse(texts, known[name])
            except ValueError as error:
                problems.append(f"{name}={' '.join(texts)!r} {error}")
    return changed(options, settings), problems


def _peek(words: Words) -> dict[str, Any]:
    """The settings that decide what the others mean; a bad one is reported later and counts as not given."""
    options = Options()
    known = annotations(options)
    for name in set(OF_THIS_START) & words.keys():
        try:
            options = changed(options, {name: parse(words[name], known[name])})
        except ValueError:
            continue
    return flatten(options)


def _without_help(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words but for --help and the group behind it, and that group: "" for all, None where no help is asked for."""
    asked = next((index for index, word in enumerate(arguments) if word in HELP), None)
    if asked is None:
        return list(arguments), None
    follows = arguments[asked + 1:asked + 2]
    group = follows[0] if follows and not follows[0].startswith("-") else ""
    rest = [*arguments[:asked], *arguments[asked + 1 + bool(group):]]
    return [word for word in rest if word not in HELP], group.replace("-", "_")


def _help(options: Options, group: str) -> NoReturn:
    """Print the options of this row, or of one group, and exit with 0. Raises Refused for a group that there is not."""
    known = help_groups(options)
    if group and group not in known:
        groups = [name for name in known if f"{name}." in "".join(known) or name == known[0]]
        raise ConfigurationError(
            [f"--help {group}: there is no such group or option; groups are {', '.join(groups)}{suggestion(group, known)}"])
    if not group:
        print("usage: python main.py [--name value ...]\n\n"
              "Train or test what the lines and rows at the top of utils/options.py say; every option below overrides them.\n"
              "Values are those of the chosen row (--config). Hyphens and underscores are the same. --help agent shows one group.\n"
              + textwrap.fill("Rows: " + ", ".join(f"{number} {row['name']}" for number, row in enumerate(CONFIGS)), WIDTH,
                              break_on_hyphens=False) + "\n")
    print(help_text(options, group))
    sys.exit(0)


# a run that went before -----------------------------------------------------------------------------------------------
def _saved_run(start: Mapping[str, Any], row: Mapping[str, Any], words: Words) -> tuple[run_registry.SavedRun | None,
                                                                                        ConfigurationError | None]:
    """The run to continue or to test; or why it cannot be had."""
    root, training = start["root"], start["mode"] == 1
    try:
        if training and start["resume"] == "newest":
            return run_registry.newest(root, *_wanted(row, words, ("env", "model")), "_checkpoints"), None
        if training and start["resume"] is not None:
            return run_registry.find(root, run_registry.signature_of(start["resume"])), None
        if not training and start["model_file"] is None and start["timestamp"] is None:
            return run_registry.newest(root, *_wanted(row, words, ("model",)), ".pth"), None
        if not training and start["model_file"] is None:
            return run_registry.find(root, f"{start['machine']}_{start['timestamp']}"), None
    except ConfigurationError as refused:
        return None, refused
    return None, None


def _wanted(row: Mapping[str, Any], words: Words, groups: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Return the settings that a run must have to be the one that is meant, and the name that the environment has for their game.

    These are the row, what a model is of (of the row, or as the command line says), and what the command line says of these groups.
    The name is None where the environment cannot be made, which is reported later.
    """
    options, _ = _base(row, words, None)
    options, _ = _apply(options, words)
    known = run_registry.plain(flatten(options))
    wanted = {"config": row["name"], **{name: known[name] for name in OF_A_MODEL},
              **{name: known[name] for name in words if name in known and name.partition(".")[0] in groups}}
    if any(problem.startswith("env.") for problem in settings.problems(options)):
        return wanted, None
    try:
        return wanted, validation.environment_spec(options).name
    except Exception:  # the code of an environment can fail in any way
        return wanted, None


def _base(row: Mapping[str, Any], words: Words, saved: run_registry.SavedRun | None) -> tuple[Options, list[str]]:
    """What stands before the command line is applied: the row; for a run that went before, its own settings, and of the file's
    those which changed since."""
    choices = {name: words[name][0] for name in CHOICES if words.get(name)}
    if saved is None or saved.config is None:
        return from_row(row, choices)
    on_file, _ = from_row(row)
    since = {name: value for name,
             value in run_registry.plain(flatten(on_file)).items() if name not in saved.file or saved.file[name] != value}
    settings = {name: value for name, value in {**saved.options, **since}.items() if name not in OF_THIS_START}
    options, problems = from_row(row, {**{name: str(settings[name]) for name in CHOICES if name in settings}, **choices})
    known = annotations(options)
    settings = {name: value for name, value in settings.items() if name in known and name not in CHOICES}
    wrong = [name for name, value in settings.items() if not fits(value, known[name])]
    problems += [
        f"{run_registry.RUN_FILE} of run {saved.signature}: {name}={settings[name]!r} is not {type_name(known[name])}" for name in wrong]
    return changed(options, {name: value for name, value in settings.items() if name not in wrong}), problems


def _identity(options: Options, saved: run_registry.SavedRun | None) -> dict[str, Any]:
    """Machine and timestamp, hence the signature, and the model file as a whole path."""
    if saved is not None:
        machine, timestamp = saved.options.get("machine"), saved.options.get("timestamp")
        if f"{machine}_{timestamp}" != saved.signature:
            machine, _, timestamp = saved.signature.rpartition("_")
        return {"machine": machine, "timestamp": timestamp}
    identity: dict[str, Any] = {"timestamp": options.timestamp or run_registry.fresh_timestamp(options.root, options.machine)}
    if options.model_file is not None:
        given = os.path.expanduser(options.model_file)
        in_models = os.path.join(options.root, "models", given)
        identity["model_file"] = os.path.realpath(in_models if not os.path.exists(given) and os.path.exists(in_models) else given)
    return identity


def _differences(options: Options, saved: run_registry.SavedRun) -> list[str]:
    """Settings that may not change when a run is continued; those that may are printed."""
    before, after = saved.options, run_registry.plain(flatten(options))
    different = [name for name in after if name in before and before[name] != after[name] and name not in OF_THIS_START[1:]]
    if before.get("seconds") is not None and options.seconds is None:
        print(f"{saved.signature} continues without seconds={before['seconds']!r}: seconds count from one start; give --seconds again to "
              "stop by time")
    fixed = FIXED + (FIXED_WITH_REPLAY if before.get("learner.checkpoint_replay") else ())
    forbidden = [name for name in different if name in fixed or name.partition(".")[0] in fixed]
    for name in different:
        if name not in forbidden:
            print(f"{saved.signature} continues with {name}={after[name]!r} (was {before[name]!r})")
    return [f"{name}={after[name]!r} cannot continue run {saved.signature}, which has {name}={before[name]!r}" for name in forbidden]
