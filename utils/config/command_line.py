"""Read options from utils/options.py, a saved run and the command line.

Every problem is found before a process or a folder is made. Options that are wrong by themselves are printed together
by main's early answer (utils/config/early_answer.py), before errors of their combination.
"""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from core.checkpoint.run_checkpoint import STEP_FOLDER, checkpoints
from core.common.console import log_to_stderr
from core.common.exit_codes import BAD_CHECKPOINT, BAD_OPTIONS
from core.common.settings import dotted
from utils import run_registry
from utils.config import rows, validation
from utils.config.options_page import TOP, WIDTH, help_text
from utils.errors import ConfigurationError
from utils.factory import EnginesDict, ProcessesDict, did_you_mean, suggestion
from utils.options import CONFIGS, Options
from utils.run_registry import SavedRun

# fmt: off
# Options that a saved run does not hand on: each start has its own.
OF_THIS_START = ("config", "mode", "machine", "timestamp", "device", "actor.device", "resume", "model_file", "render",
                 "record", "profile", "profile_trace", "episodes", "check", "root", "seconds")
# Sections that say nothing of what is learnt.
NOT_OF_LEARNING = ("evaluator", "logger", "supervisor", "ray", "video")
# Options and sections that no continuation may change.
FIXED = ("config", "agent_type", "env_type", "game", "model_type", "agent.distribution", "agent.optimizer",
         "agent.rmsprop_centered", "agent.squash_actions", "agent.v_min", "agent.v_max", "agent.rescaling_eps", "env",
         "model")
# Options that give the stored replay its size, its shape and its priorities.
FIXED_WITH_REPLAY = ("memory_type", "memory.capacity", "num_learners", "num_actors", "num_envs_per_actor",
                     "actor.chunk_length", "agent.n_step", "agent.unroll_length", "agent.burn_in",
                     "agent.sequence_period", "memory.replay_parameters", "memory.on_full", "memory.num_batches",
                     "memory.feature_dtype", "memory.alpha", "memory.priority_epsilon", "replay.frame_compression",
                     "replay.max_frame_bytes")
# fmt: on
OF_A_MODEL = tuple(name for name in rows.CHOICES if name != "memory_type")  # choices that decide which weights fit

Words = dict[str, list[str]]  # option -> the words behind it
Row = dict[str, Any]


@contextmanager
def refusing() -> Iterator[None]:
    """Print every problem of a ConfigurationError and exit with its code. Decorates a function or holds a block."""
    try:
        yield
    except ConfigurationError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(error.code)


@refusing()
def read_options(arguments: Sequence[str]) -> Options:
    """Return the options of this start. Exits with 2 or 3 after printing every problem, with 0 after --help."""
    return read(arguments)


def judge_words(arguments: Sequence[str]) -> None:
    """Refuse words that are wrong each by itself, and answer --help, where that takes neither a saved run nor a model.

    Raises:
        ConfigurationError: with every such problem.
    """
    words, problems = split(arguments)
    help_of, start = words.pop("help", None), _peek(words)
    row = rows.find_row(start.config)
    if start.resume is not None or (start.mode == 2 and start.model_file is None):
        return
    if any(":" in str(words.get(type_field, row.get(type_field))) for type_field, _ in rows.SECTIONS.values()):
        return  # a class of a user may need anything
    options, more, _ = _chosen(row, words)
    if rows.missing_classes(options):
        return
    if help_of is not None:
        _help(options, help_of)
    if problems := problems + more:
        raise ConfigurationError(problems)


def preload(arguments: Sequence[str]) -> bool:
    """Import what the processes of a run need, and no class of a user, so that processes of the fork server have it.

    Returns:
        False, without imports, if the words and RUN say that the engine `local` starts no process.
    """
    words, _ = split(arguments)
    start = _peek(words)
    engine = " ".join(words.get("engine", [start.engine]))
    if "help" in words or engine != "local" or start.check:
        return False
    list(ProcessesDict.values())
    EnginesDict["local"]
    with suppress(ConfigurationError):  # no such row, which is reported later
        row = rows.find_row(start.config)
        for type_field, factory in rows.SECTIONS.values():
            name = " ".join(words.get(type_field, [str(row.get(type_field))]))
            if name in factory:
                with suppress(ImportError):
                    factory[name]
    return True


def read(arguments: Sequence[str]) -> Options:
    """Return the options of this start. --help prints and exits.

    Sources are the row, the lines of RUN, a saved run and the command line; a later source wins.

    Raises:
        ConfigurationError: with every problem.
    """
    words, problems = split(arguments)
    help_of = words.pop("help", None)
    if "root" in words:  # absolute, because an environment may change the working folder
        words["root"] = [os.path.abspath(os.path.expanduser(root)) for root in words["root"]]
    start = _peek(words)
    row = rows.find_row(start.config)
    saved, missing = _saved_run(start, row, words)
    if saved is not None and "config" not in words:
        if saved.config is None:
            problems.append(
                f"run {saved.signature} has no {run_registry.RUN_FILE} that could be read, which says of which row it "
                "is: name that with --config"
            )
        else:
            row = rows.find_row(saved.config)
    options, more, refused = _chosen(row, words, saved)
    if help_of is not None and not rows.missing_classes(options):
        _help(options, help_of)
    problems += more
    naming = "resume" if start.mode == 1 else "model_file"
    if "timestamp" in words and (named := getattr(start, naming)) is not None:
        problems.append(f"timestamp={start.timestamp} and {naming}={named} both name a run: leave one out")
    is_named, machine = options.timestamp is not None, options.machine
    options = dataclasses.replace(options, config=row["name"], **_identity(options, saved))
    if is_named and options.mode == 1 and options.resume is None:
        problems += run_registry.taken(options)
    if saved is not None and "machine" in words and machine != options.machine:
        problems.append(f"machine={machine} is not the machine of run {saved.signature}: leave it out")
    if saved is not None and options.num_envs_per_actor == 0:  # the number was found when the run began
        options, _ = rows.changed(options, {"num_envs_per_actor": saved.options.get("num_envs_per_actor", 0)})
    problems += validation.problems(options, refused)
    told = list[str]()
    if saved is not None and options.mode == 2:
        problems += _of_another_row(options, saved, words)
    if saved is not None and options.mode == 1 and not rows.missing_classes(options):  # which was reported
        refusals, told = _continuation(options, saved)
        problems += refusals
    code = missing.code if missing and not problems else BAD_OPTIONS
    if problems := [*problems, *(missing.problems if missing else ())]:
        if options.check:
            from utils.config.check import table, wide_console

            with suppress(Exception):  # Why the environment cannot be made is one of the problems.
                wide_console().print(table(validation.environment_spec(options), None))
        raise ConfigurationError(problems, code)
    for line in told:
        print(line)
    if saved is not None:
        classes = [options.config, *(f"{name}={getattr(options, name)}" for name in OF_A_MODEL)]
        print(f"{'continuing' if options.mode == 1 else 'testing'} run {saved.signature}: {', '.join(classes)}")
    chosen, asked = validation.resolved(options), options.device
    if (asked, chosen.device, options.mode, options.learner.replay_device) == ("auto", "cpu", 1, "learner"):
        log_to_stderr("device=auto is cpu, where learner.replay_device=learner is slow: torch sees no CUDA device here")
    return chosen


# words ----------------------------------------------------------------------------------------------------------------
def split(arguments: Sequence[str]) -> tuple[Words, list[str]]:
    """Return the words behind each option, and words that stand alone as problems.

    --name value ..., --name=value and --name alone are options; hyphens and underscores in names are the same, and so
    are -h and --help.
    """
    words: Words = {}
    problems: list[str] = []
    name: str | None = None
    for argument in ("--help" if argument == "-h" else argument for argument in arguments):
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            words[name] = [value] if equals else []
        elif name is None:
            problems.append(f"{argument!r} stands alone: options are written --name value")
        else:
            words[name].append(argument)
    return words, problems


def _peek(words: Words) -> Options:
    """Return the options that decide which run and row the others belong to.

    Values that are refused here are reported later.
    """
    options, _ = rows.with_lines(Options())
    known = rows.declared(options)
    given = {name: rows.from_words(words[name], known[name].annotation) for name in OF_THIS_START if name in words}
    return rows.changed(options, given)[0]


def _chosen(row: Row, words: Words, saved: SavedRun | None = None) -> tuple[Options, list[str], Iterable[str]]:
    """Return the options of a row and a saved run, with what the command line says.

    Returns:
        The options, a sentence for each problem, and the names of the command line's options whose values are refused.
    """
    choices = {name: words[name][0] for name in rows.CHOICES if words.get(name)}
    if saved is None or saved.config is None:
        options, problems = rows.from_row(row, choices)
    else:
        options, problems = _of_saved_run(saved, row, choices)
    known, missing, settings = rows.declared(options), rows.missing_classes(options), dict[str, Any]()
    for name, texts in words.items():
        section, dot, last = name.rpartition(".")
        switch = f"{section}{dot}{last.removeprefix('no_')}"
        if name in known and not texts and not rows.kinds(known[name].annotation) & {bool, tuple}:
            problems.append(f"--{name} needs a value")
        elif name in known and len(texts) > 1 and tuple not in rows.kinds(known[name].annotation):
            problems.append(f"--{name} takes one value, not {' '.join(texts)!r}: options are written --name value")
        elif name in known:
            settings[name] = rows.from_words(texts, known[name].annotation)
        elif switch in known and not texts and bool in rows.kinds(known[switch].annotation):
            settings[switch] = False
        elif section not in missing:  # why its class is missing was reported
            type_field = rows.SECTIONS[section][0] if section in rows.SECTIONS else None
            owner = f" of {type_field}={getattr(options, type_field)}" if type_field else ""
            problems.append(f"unknown option --{name}{owner}{did_you_mean(rows.closest(name, known), '--')}")
    options, refused = rows.changed(options, settings)
    return options, [*problems, *refused.values()], refused


def _help(options: Options, words: Sequence[str]) -> NoReturn:
    """Print the options of this row, or of the sections that stand behind --help, and exit with 0.

    Raises:
        ConfigurationError: an unknown section.
    """
    sections, declared = [word.replace("-", "_") for word in words], rows.declared(options)
    groups = list(dict.fromkeys(name.rpartition(".")[0] or TOP for name in declared))
    known = [*groups, *declared]
    if unknown := [section for section in sections if section not in known]:
        raise ConfigurationError(
            [
                f"--help {section}: there is no such group or option; groups are {', '.join(groups)}"
                f"{suggestion(section, known)}"
                for section in unknown
            ]
        )
    if not sections:
        names = "Rows: " + ", ".join(f"{number} {row['name']}" for number, row in enumerate(CONFIGS))
        print(
            "usage: python main.py [--name value ...]\n\n"
            "Train or test what RUN and CONFIGS in utils/options.py say; every option below overrides them.\n"
            "Values are those of the chosen row (--config). Hyphens and underscores are the same. --help agent "
            "shows one group.\n"
            f"{textwrap.fill(names, WIDTH, break_on_hyphens=False)}\n"
        )
    for section in sections or [""]:
        print(help_text(options, section))
    sys.exit(0)


# saved runs -----------------------------------------------------------------------------------------------------------
def _saved_run(start: Options, row: Row, words: Words) -> tuple[SavedRun | None, ConfigurationError | None]:
    """Return the run to continue or to test, or why there is none; (None, None) if no saved run is asked for."""
    if start.mode == 1:
        asked, sections, suffix = start.resume, ["env", "model"], "_checkpoints/step_*"
    else:
        asked = None if start.model_file is not None else "newest" if start.timestamp is None else start.signature
        sections, suffix = ["model"], ".pth"
    if asked is None:
        return None, None
    try:
        asked = run_registry.signature_of(asked)
        if asked == "newest":
            return run_registry.newest(start.root, *_wanted(row, words, sections), suffix), None
        return run_registry.find(start.root, asked), None
    except ConfigurationError as error:
        return None, error


def _wanted(row: Row, words: Words, sections: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Return the options that a saved run must have, and the environment's own name of the game.

    These options are the row, the choices that decide which weights fit, and what the command line says of these
    sections. The name is None if the environment cannot be made, which is reported later.
    """
    options, _, _ = _chosen(row, words)
    known = dotted(options.to_dict())
    wanted = {
        "config": row["name"],
        **{name: known[name] for name in OF_A_MODEL},
        **{name: known[name] for name in words if name in known and name.partition(".")[0] in sections},
    }
    try:
        return wanted, validation.environment_spec(options).name
    except Exception:  # the code of an environment can fail in any way
        return wanted, None


def _of_saved_run(saved: SavedRun, row: Row, choices: dict[str, str]) -> tuple[Options, list[str]]:
    """Return the options of a saved run, except those that changed in utils/options.py since, and their problems.

    The `choices` are classes and game that the command line names.

    Raises:
        ConfigurationError: the run was saved with options that no longer exist.
    """
    on_file = rows.settings_on_file(row).items()
    since = {name: value for name, value in on_file if (name, value) not in saved.file.items()}
    settings = {name: value for name, value in {**saved.options, **since}.items() if name not in OF_THIS_START}
    saved_choices = {name: str(settings[name]) for name in rows.CHOICES if name in settings}
    options, problems = rows.from_row(row, {**saved_choices, **choices})
    known = rows.declared(options)
    other = rows.missing_classes(options).keys() | {
        section for section, (field, _) in rows.SECTIONS.items() if saved.options.get(field) != getattr(options, field)
    }
    if renamed := [name for name in saved.options if name not in known and name.partition(".")[0] not in other]:
        raise ConfigurationError(
            f"run {saved.signature} was saved by another version, with options that this one does not have "
            f"({', '.join(renamed)}): use that version, or start a new run",
            BAD_CHECKPOINT,
        )
    kept = {name: value for name, value in settings.items() if name in known and name not in rows.CHOICES}
    options, refused = rows.changed(options, kept)
    where = f"{run_registry.RUN_FILE} of run {saved.signature}"
    return options, problems + [f"{where}: {sentence}" for sentence in refused.values()]


def _identity(options: Options, saved: SavedRun | None) -> dict[str, Any]:
    """Return machine and timestamp, which make the signature, and the absolute path of a model file."""
    if saved is not None:
        machine, timestamp = str(saved.options.get("machine")), str(saved.options.get("timestamp"))
        if f"{machine}_{timestamp}" != saved.signature:
            machine, _, timestamp = saved.signature.rpartition("_")
        return {"machine": machine, "timestamp": timestamp}
    timestamp = options.timestamp or run_registry.fresh_timestamp()
    if options.model_file is None:
        return {"timestamp": timestamp}
    file = run_registry.find_model(options.model_file, options.root)
    return {"timestamp": timestamp, "model_file": os.path.realpath(file)}


def _of_another_row(options: Options, saved: SavedRun, words: Words) -> list[str]:
    """Return a problem if a run to test has another agent or network, and the row that is named gives this one."""
    classes = {name: saved.options.get(name) for name in ("agent_type", "model_type") if name not in words}
    if all(value in (None, getattr(options, name)) for name, value in classes.items()):
        return []
    trained = ", ".join(f"{name}={value}" for name, value in classes.items())
    return [f"run {saved.signature} is of config={saved.config} ({trained}): leave --config out"]


def _continuation(options: Options, saved: SavedRun) -> tuple[list[str], list[str]]:
    """Return a problem for each difference that a continued run may not have, and what to tell of the others."""
    before, after = saved.options, dotted(options.to_dict())
    may_differ = set(OF_THIS_START) - {"config"}
    different = [name for name in after if name not in may_differ and name in before and before[name] != after[name]]
    told, problems, run = list[str](), list[str](), saved.signature
    if before.get("seconds") is not None and options.seconds is None:
        told.append(
            f"{run} continues without seconds={before['seconds']!r}: seconds count from one start; give "
            "--seconds again to stop by time"
        )
    newest = [options.checkpoint_folder, *checkpoints(options.checkpoint_folder)][-1]
    made = STEP_FOLDER.fullmatch(newest.name)
    if made and options.steps is not None and int(made[1]) >= options.steps:
        done = f"{run} has made {int(made[1]):,} agent steps: give a larger --steps to train it further"
        # It may lack its last evaluation, for which other options can be given.
        if any(name.partition(".")[0] not in NOT_OF_LEARNING for name in different):
            return [f"{done}; steps={options.steps} counts the whole run"], []
        told.append(done)
    fixed = [*FIXED]
    if (newest / "memory.pt").exists():
        fixed += FIXED_WITH_REPLAY
        batch_sizes = (before.get("agent.batch_size"), options.agent.batch_size)
        if len({options.memory_class.ring_steps(options.memory, size or 0, 1, 1) for size in batch_sizes}) > 1:
            fixed.append("agent.batch_size")
    trained = {f"agent.{name}": f"agent.{switch}" for name, switch in options.agent_class.trained_options.items()}
    for name in different:
        refusal = f"{name}={after[name]!r} cannot continue run {run}, which has {name}={before[name]!r}"
        if name in fixed or name.partition(".")[0] in fixed:
            problems.append(refusal)
        elif all(each.get(trained.get(name, "")) and each[name] for each in (before, after)):
            told.append(f"{run} keeps the {name} that it has learnt: {name}={after[name]!r} is for new runs")
        else:
            told.append(f"{run} continues with {name}={after[name]!r} (was {before[name]!r})")
    return problems, told
