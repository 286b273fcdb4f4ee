"""Find, claim and end the runs on disk. logs/<signature>/run.json stores the settings that a run was started with."""

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.checkpoint import model_file, run_checkpoint
from core.common.exit_codes import BAD_CHECKPOINT, BAD_OPTIONS
from core.common.files import TEMPORARY, try_lock, write_atomically
from core.common.settings import dotted
from core.runtime.options import RunOptions
from utils.errors import ConfigurationError
from utils.factory import did_you_mean, suggestion
from utils.options import Options

RUN_FILE = "run.json"
RESERVED_BYTES = 1 << 16  # that a run writes beside its weights: counters, manifests, metrics
locks: dict[Path, int] = {}  # log folder -> descriptor that holds its lock, until the process that runs it takes it
automatic: set[str] = set()  # timestamps that this process chose, which `claim` may therefore replace


class SavedRun(NamedTuple):
    """The settings that a run was started with, by dotted name and as JSON stores them."""

    signature: str
    config: str | None  # None if only the run's files in models/ are left
    options: dict[str, Any]
    file: dict[str, Any]  # settings of utils/options.py, without the command line
    exit_code: int | None = None  # of the run's last part; None while it runs, and after it was killed
    environment: str | None = None  # EnvSpec.name, the one spelling of the game; None for runs of older versions


def find(root: str, signature: str) -> SavedRun:
    """Return the run with this signature. Raises ConfigurationError (exit code 3) if there is none."""
    models, logs = Path(root) / "models", Path(root) / "logs"
    if (saved := read(logs / signature)) is not None:
        return saved
    # os.path.exists, because Path.exists raises for a name that is too long
    if any(os.path.exists(models / f"{signature}{suffix}") for suffix in ("_checkpoints", ".pth")):
        return SavedRun(signature, None, {}, {})
    names = [run.signature for run in all_runs(root)]
    hint = did_you_mean(name for name in names if name.endswith(f"_{signature}")) or suggestion(signature, names)
    raise ConfigurationError(f"there is no run {signature} in {logs}{hint}", BAD_CHECKPOINT)


def find_model(path: str | os.PathLike[str], root: str) -> Path:
    """Return the model file of this path or, if there is none, that of this file or run in `models` of the root."""
    file = Path(os.path.expanduser(path))
    in_models = Path(root) / "models" / file
    return next(filter(os.path.exists, (file, in_models, Path(f"{in_models}.pth"))), file)


def newest(root: str, wanted: Mapping[str, Any], environment: str | None, suffix: str) -> SavedRun:
    """Return the newest run that has all `wanted` settings and left models/<signature><suffix>.

    Args:
        root: Folder of `models` and `logs`.
        wanted: Dotted settings, among them `config` and `game`.
        environment: The environment's name for that game. If the run's name is known too, the names are compared
            instead of the games, so that the spelling does not matter.
        suffix: "_checkpoints/step_*" or ".pth".

    Raises:
        ConfigurationError: No such run (exit code 3). The message lists how the newest run of the config differs.
    """
    models = Path(root) / "models"
    candidates = [run for run in all_runs(root) if any(models.glob(f"{glob.escape(run.signature)}{suffix}"))]
    for run in candidates:
        if not _differences(run, wanted, environment):
            return run
    listed = ", ".join(f"{name}={value}" for name, value in wanted.items() if name != "config")
    other = next((run for run in candidates if run.config == wanted["config"]), None)
    hint = ""
    if other is not None:
        others = ", ".join(f"{name}={other.options.get(name)}" for name in _differences(other, wanted, environment))
        hint = f"; its newest run, {other.signature}, has {others}"
    raise ConfigurationError(
        f"no run of {wanted['config']} with {listed} in {Path(root) / 'logs'} has left "
        f"models/<signature>{suffix}: train one first{hint}",
        BAD_CHECKPOINT,
    )


def _differences(run: SavedRun, wanted: Mapping[str, Any], environment: str | None) -> list[str]:
    """Return the names of the settings in which a run differs from `wanted`."""
    settings = {**run.options, "config": run.config}
    different = [name for name, value in wanted.items() if settings.get(name) != value]
    if None not in (environment, run.environment):
        different = [name for name in different if name != "game"] + ["game"] * (run.environment != environment)
    return different


def all_runs(root: str) -> list[SavedRun]:
    """Return all runs whose settings are readable, newest first."""
    started: dict[Path, int] = {}
    for file in (Path(root) / "logs").glob(f"*/{RUN_FILE}"):
        with contextlib.suppress(OSError):  # a run that was refused has removed its file meanwhile
            started[file.parent] = file.stat().st_mtime_ns
    newest_first = sorted(started, key=lambda folder: started[folder], reverse=True)
    return [saved for folder in newest_first if (saved := read(folder))]


def read(log_folder: Path) -> SavedRun | None:
    """Return the run with this log folder, or None if its settings are not readable."""
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
        saved = json.loads((log_folder / RUN_FILE).read_text())
        config, options, file = saved["config"], saved["options"], saved["file"]
        if isinstance(config, str) and isinstance(options, dict) and isinstance(file, dict):
            ended = saved.get("exit_code"), saved.get("environment")
            return SavedRun(log_folder.resolve().name, config, dotted(options), file, *ended)
    return None


def signature_of(value: str) -> str:
    """Return the signature of a run, given the signature, its log folder or its checkpoints.

    Raises:
        ConfigurationError: The value is a model file, or not the newest of the run's checkpoints.
    """
    path = Path(value)
    if path.suffix == ".pth":
        name = path.name.removesuffix(".pth")
        raise ConfigurationError(
            f"{value} is a model file: --resume {name} continues its run, --model_file {value} starts another with it"
        )
    if not path.name.startswith("step_"):
        return path.name.removesuffix("_checkpoints")
    if (newest := [path, *run_checkpoint.checkpoints(path.parent)][-1].name) != path.name:
        raise ConfigurationError(f"a run continues from its newest checkpoint, {newest}; {value} is an older one")
    return path.parent.name.removesuffix("_checkpoints")


def claim(options: Options, size: int = 0) -> Options:
    """Make the run's log folder and lock it until its descriptor in `locks` is closed or this process ends.

    The disk must have room for `size` bytes, those of the first checkpoint and model.

    Returns:
        The options. A new run whose folder exists already has got another timestamp if this one was `automatic`.

    Raises:
        ConfigurationError: The folders cannot be written, the timestamp is taken, or the run that should be continued
            is still running.
    """
    asked = str(options.timestamp)
    try:
        _try_models(options, size)
        others = (f"{asked}-{number}" for number in itertools.count(2)) if asked in automatic else ()
        for timestamp in itertools.chain([asked], others):
            options = dataclasses.replace(options, timestamp=timestamp)
            with contextlib.suppress(FileExistsError):
                options.log_folder.mkdir(parents=True, exist_ok=options.resume is not None)
                break
        else:
            raise ConfigurationError(_exists(options))
        locks[options.log_folder] = os.open(options.log_folder, os.O_RDONLY)
        locked = try_lock(locks[options.log_folder])
    except OSError as error:
        abandon(options)
        raise ConfigurationError(
            f"the run's folders cannot be made: {error}; --root names another place for models and logs"
        ) from None
    if not locked:
        os.close(locks.pop(options.log_folder))
        raise ConfigurationError(
            f"run {options.signature} is still running: it cannot be continued twice; stop it, or begin another"
        )
    return options


def taken(options: Options) -> list[str]:
    """Return why no new run can have this signature; an empty list if one can."""
    return [_exists(options)] if os.path.exists(options.log_folder) else stale_checkpoints(options)


def _exists(options: Options) -> str:
    return f"run {options.signature} exists: continue it by --resume {options.signature}, or choose another timestamp"


def stale_checkpoints(options: Options) -> list[str]:
    """Return a sentence if there are checkpoints of this signature, but no settings of their run."""
    folder = options.checkpoint_folder
    if read(options.log_folder) is not None or not run_checkpoint.checkpoints(folder):
        return []
    remedy = "remove that folder, or choose another timestamp or name"
    return [f"{folder} has checkpoints, but {options.log_folder / RUN_FILE} of their run is gone: {remedy}"]


def abandon(options: Options) -> None:
    """Undo a claim of a run that does not start: unlock its log folder, and remove the folder if it is empty."""
    if options.log_folder in locks:
        os.close(locks.pop(options.log_folder))
    with contextlib.suppress(OSError):  # the folder has files, because the run was started before
        options.log_folder.rmdir()


def _try_models(options: Options, size: int) -> None:
    """Raise ConfigurationError if files of `size` bytes in all cannot be written beside the run's model.

    The trial file has a name as long as any of the run's files, and nothing is left of it.
    """
    folder, needed = options.model_path.parent, size + RESERVED_BYTES
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / longest_name(options.signature)
    try:
        with open(trial, "wb") as file:
            trial.unlink()
            os.posix_fallocate(file.fileno(), 0, needed)
    except OSError as error:
        raise ConfigurationError(
            f"models cannot be saved in {folder}, where {needed:,} bytes were tried ({error.strerror}): make room "
            "or lift the limit (ulimit -f), or name another place for models and logs with --root"
        ) from None


def longest_name(signature: str) -> str:
    """Return a file name as long as the longest that a run of this signature needs."""
    return f"{TEMPORARY}{signature}_checkpoints"


def save(options: Options, file_settings: Mapping[str, Any], environment: str | None = None) -> None:
    """Write run.json for later starts that continue or test this run.

    A continued run keeps the content that the file had `before`, because its checkpoint may not fit the new options. If
    that content was lost, `before` is None. A run that began from a model file keeps its `model_file`. The
    `file_settings` are those of utils/options.py by dotted name, without the command line.
    """
    previous = read(options.log_folder) if options.resume is not None else None
    before: dict[str, Any] = {} if options.resume is None else {"before": None}
    if previous is not None:
        before["before"] = json.loads((options.log_folder / RUN_FILE).read_text())
        before["before"].pop("before", None)  # of a part that was killed
    began_from = {"model_file": previous.options["model_file"]} if previous and "model_file" in previous.options else {}
    content = {
        "config": options.config,
        "options": {**options.to_dict(), **began_from},
        "file": dict(file_settings),
        "exit_code": None,
        "environment": environment,
        **before,
    }
    try:
        _write(options.log_folder, content)
    except OSError as error:
        problem = f"the run's folder cannot be written: {error}; make room, or name another place with --root"
        raise ConfigurationError(problem) from None


def fresh_timestamp() -> str:
    """Return the present time as a timestamp, which `claim` replaces if another run of this machine has it."""
    timestamp = time.strftime("%Y%m%d-%H%M%S")
    automatic.add(timestamp)
    return timestamp


def end(options: RunOptions, exit_code: int | None) -> None:
    """Store the exit code of this part of the run, and remove the temporary files of killed processes.

    - None stands for a part that another part follows: the run goes on.

    - The modification time of run.json stays that of the start, by which runs are ordered.
    - If the disk is full, the exit code stays None.
    - A run that was refused before it wrote anything else leaves nothing.
    - If the continuation of a run was refused, the file gets back what it had before, or is removed if that was lost.
    """
    file = options.log_folder / RUN_FILE
    with contextlib.suppress(OSError, ValueError):
        for path in options.log_folder.glob(f"{TEMPORARY}*"):
            path.unlink()
        run_checkpoint.clear(options.checkpoint_folder)
        model_file.clear(options.model_path)
        if exit_code == BAD_OPTIONS and [path.name for path in file.parent.iterdir()] == [RUN_FILE]:
            file.unlink()
            file.parent.rmdir()
            return
        started, content = file.stat().st_mtime_ns, json.loads(file.read_text())
        before = content.pop("before", content)
        if exit_code in (BAD_OPTIONS, BAD_CHECKPOINT):
            if before is None:
                file.unlink()
                return
            content = before
        _write(options.log_folder, {**content, "exit_code": exit_code})
        os.utime(file, ns=(started, started))


def _write(log_folder: Path, content: Mapping[str, Any]) -> None:
    write_atomically(log_folder / RUN_FILE, (json.dumps(content, indent=1) + "\n").encode())
