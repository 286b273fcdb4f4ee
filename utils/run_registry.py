"""Runs on the disk: their names, the settings they were started with, finding one again, claiming a new one."""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.checkpoint import model_file, run_checkpoint, tensor_file
from core.common.settings import dotted
from core.runtime.options import RunOptions
from utils.errors import BAD_CHECKPOINT, BAD_CONFIGURATION, ConfigurationError
from utils.factory import suggestion
from utils.options import Options

RUN_FILE = "run.json"
LEAST = 1 << 16  # bytes that a run writes beside its weights: counters, manifests, metrics
locks: dict[Path, int] = {}  # log folder -> open descriptor, until whoever runs it takes it


class SavedRun(NamedTuple):
    """What a run was started with: dotted settings as JSON knows them."""

    signature: str
    config: str | None             # None: only its files in models/ are left
    options: dict[str, Any]
    file: dict[str, Any]           # what utils/options.py said, without the command line
    exit_code: int | None = None   # of its last part; None while that runs, or when it was killed
    environment: str | None = None  # EnvSpec.name, the one spelling of its game; None where an older version began it


def find(root: str, signature: str) -> SavedRun:
    """Raises Refused (exit code 3) when there is no such run."""
    models, known = Path(root) / "models", [run.signature for run in all_runs(root)]
    for run in all_runs(root):
        if run.signature == signature:
            return run
    if any(os.path.exists(models / f"{signature}{suffix}") for suffix in ("_checkpoints", ".pth")):  # False for a name that is too long
        return SavedRun(signature, None, {}, {})
    raise ConfigurationError([f"there is no run {signature} in {models.parent / 'logs'}{suggestion(signature, known)}"], BAD_CHECKPOINT)


def newest(root: str, wanted: Mapping[str, Any], environment: str | None, suffix: str) -> SavedRun:
    """Return the newest run that has all `wanted` settings and left models/<signature><suffix>.

    Args:
        wanted: dotted settings, among them the row (`config`) and the `game`.
        environment: the name that the environment has for that game; if known on both sides it decides, so that spelling does not.

    Raises:
        Refused: no such run (exit code 3); a run of the row that differs is named with its differences.
    """
    left = [run for run in all_runs(root) if (Path(root) / "models" / f"{run.signature}{suffix}").exists()]
    for run in left:
        if not _misfits(run, wanted, environment):
            return run
    listed = ", ".join(f"{name}={value}" for name, value in wanted.items() if name != "config")
    other = next((run for run in left if run.config == wanted["config"]), None)
    hint = "" if other is None else f"; its newest run, {other.signature}, has " + ", ".join(
        f"{name}={other.options.get(name)}" for name in _misfits(other, wanted, environment))
    raise ConfigurationError([f"no run of {wanted['config']} with {listed} in {Path(root) / 'logs'} has left models/<signature>{suffix}: "
                   f"train one first{hint}"], BAD_CHECKPOINT)


def _misfits(run: SavedRun, wanted: Mapping[str, Any], environment: str | None) -> list[str]:
    """Return the names of the settings in which a run differs."""
    different = [name for name, value in wanted.items() if {**run.options, "config": run.config}.get(name) != value]
    if None not in (environment, run.environment):
        different = [name for name in different if name != "game"] + ["game"] * (run.environment != environment)
    return different


def all_runs(root: str) -> list[SavedRun]:
    """Newest first."""
    files = sorted((Path(root) / "logs").glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return [saved for file in files if (saved := read(file.parent))]


def read(log_folder: Path) -> SavedRun | None:
    """What the run with this log folder was started with; None where that cannot be read."""
    try:
        saved = json.loads((log_folder / RUN_FILE).read_text())
        config, options, of_file = saved["config"], saved["options"], saved["file"]
        if isinstance(config, str) and isinstance(options, dict) and isinstance(of_file, dict):
            return SavedRun(log_folder.resolve().name, config, dotted(options), of_file, saved.get("exit_code"), saved.get("environment"))
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        pass
    return None


def signature_of(value: str) -> str:
    """The signature that a signature, a log folder, a model file or a checkpoint folder names."""
    path = Path(value)
    name = path.parent.name if path.name.startswith("step_") else path.name
    return name.removesuffix(".pth").removesuffix("_checkpoints")


def claim(options: Options, size: int = 0) -> Options:
    """Make the run's log folder and lock it until its descriptor in `locks` is closed, or this process ends. A new run whose folder
    exists by now gets another timestamp. `size`: bytes that its first checkpoint and model take; room for them must be there.

    Raises Refused when a run that is to be continued still runs, or the folders cannot be written.
    """
    timestamp, number = options.timestamp, 1
    try:
        _try_models(options, size)
        while True:
            with contextlib.suppress(FileExistsError):
                options.log_folder.mkdir(parents=True, exist_ok=options.resume is not None)
                break
            number += 1
            options = dataclasses.replace(options, timestamp=f"{timestamp}-{number}")
        locks[options.log_folder] = folder = os.open(options.log_folder, os.O_RDONLY)  # stays open: so long the lock holds
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            [f"run {options.signature} is still running: it cannot be continued twice; stop it, or begin another"]) from None
    except OSError as error:
        abandon(options)
        raise ConfigurationError([f"the run's folders cannot be made: {error}; --root names another place for models and logs"]) from None
    return options


def abandon(options: Options) -> None:
    """Undo a claim that came to nothing: unlock the run's log folder, and remove it where this start has made it."""
    if options.log_folder in locks:
        os.close(locks.pop(options.log_folder))
    with contextlib.suppress(OSError):  # it is not empty: the run goes back further
        options.log_folder.rmdir()


def _try_models(options: Options, size: int) -> None:
    """Write a file of `size` bytes beside the run's model under a name as long as any of its files. Raises Refused if it cannot be
    written: training would have nothing to show. Nothing is left of it."""
    folder = options.model_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / longest_name(options.signature)
    try:
        with open(trial, "wb") as file:
            trial.unlink()
            os.posix_fallocate(file.fileno(), 0, size + LEAST)
    except OSError as error:
        raise ConfigurationError(
            [f"models cannot be saved in {folder}, where {size + LEAST:,} bytes were tried ({error.strerror}): make room or "
                       "lift the limit (ulimit -f), or name another place for models and logs with --root"]) from None


def longest_name(signature: str) -> str:
    """Return a file name as long as the longest that a run of this signature needs."""
    return f".temporary_{signature}_checkpoints"


def save(options: Options, file_settings: Mapping[str, Any], environment: str | None = None) -> None:
    """Keep what this start was told, for whoever continues or tests the run: all its settings, those of the file alone, and the name
    that the environment has for the game.

    A run that is continued and whose own are lost may be of another row than --config says: it is `unproven`. One that began
    from a model file keeps saying so.
    """
    before = read(options.log_folder) if options.resume is not None else None
    unproven = {"unproven": True} if options.resume is not None and before is None else {}
    began_from = {"model_file": before.options["model_file"]} if before and "model_file" in before.options else {}
    content = {"config": options.config, "options": {**options.to_dict(), **began_from}, "file": dict(file_settings),
               "exit_code": None, "environment": environment, **unproven}
    try:
        _write(options.log_folder, content)
    except OSError as error:
        raise ConfigurationError([f"the run's folder cannot be written: {error}; make room, or name another place with --root"]) from None


def fresh_timestamp(root: str, machine: str) -> str:
    """Now, as a timestamp that no run has taken."""
    now, number = time.strftime("%Y%m%d-%H%M%S"), 1
    timestamp = now
    while os.path.exists(Path(root) / "logs" / f"{machine}_{timestamp}"):
        number += 1
        timestamp = f"{now}-{number}"
    return timestamp


def end(options: RunOptions, exit_code: int) -> None:
    """Keep how this part of the run ended; on a full disk it counts as not ended. The file's time stays: that of the start. Files that a
    killed process was writing go.

    A run that was refused after it was claimed, before anything else was written, leaves nothing, and settings that were unproven when it
    was refused go.
    """
    file = options.log_folder / RUN_FILE
    with contextlib.suppress(OSError, ValueError):
        for path in options.log_folder.glob(".temporary_*"):
            path.unlink()
        run_checkpoint.clear(options.checkpoint_folder)
        model_file.clear(options.model_path)
        if exit_code == BAD_CONFIGURATION and [path.name for path in file.parent.iterdir()] == [RUN_FILE]:
            file.unlink()
            file.parent.rmdir()
            return
        started, content = file.stat().st_mtime_ns, json.loads(file.read_text())
        if content.pop("unproven", False) and exit_code in (BAD_CONFIGURATION, BAD_CHECKPOINT):
            file.unlink()
            return
        _write(options.log_folder, {**content, "exit_code": exit_code})
        os.utime(file, ns=(started, started))


def _write(log_folder: Path, content: Mapping[str, Any]) -> None:
    tensor_file.write_atomically(log_folder / RUN_FILE, (json.dumps(content, indent=1) + "\n").encode())


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted settings as they look once JSON has carried them."""
    return json.loads(json.dumps(settings))
