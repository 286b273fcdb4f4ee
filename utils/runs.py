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

from core.settings import dotted
from utils import checkpoint, weights_file
from utils.factory import suggestion
from utils.options import Options
from utils.refused import BAD_CHECKPOINT, BAD_CONFIGURATION, Refused

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


def find(root: str, signature: str) -> SavedRun:
    """Raises Refused (exit code 3) when there is no such run."""
    models, known = Path(root) / "models", [run.signature for run in all_runs(root)]
    for run in all_runs(root):
        if run.signature == signature:
            return run
    if any(os.path.exists(models / f"{signature}{suffix}") for suffix in ("_checkpoints", ".pth")):  # False for a name that is too long
        return SavedRun(signature, None, {}, {})
    raise Refused([f"there is no run {signature} in {models.parent / 'logs'}{suggestion(signature, known)}"], BAD_CHECKPOINT)


def newest(root: str, config: str, suffix: str) -> SavedRun:
    """The newest run of this row which left models/<signature><suffix>. Raises Refused (exit code 3) when there is none."""
    for run in all_runs(root):
        if run.config == config and (Path(root) / "models" / f"{run.signature}{suffix}").exists():
            return run
    raise Refused([f"no run of {config} in {Path(root) / 'logs'} has left models/<signature>{suffix}: train one first"], BAD_CHECKPOINT)


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
            return SavedRun(log_folder.resolve().name, config, dotted(options), of_file, saved.get("exit_code"))
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
        raise Refused([f"run {options.signature} is still running: it cannot be continued twice; stop it, or begin another"]) from None
    except OSError as error:
        raise Refused([f"the run's folders cannot be made: {error}; --root names another place for models and logs"]) from None
    return options


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
        raise Refused([f"models cannot be saved in {folder}, where {size + LEAST:,} bytes were tried ({error.strerror}): make room or "
                       "lift the limit (ulimit -f), or name another place for models and logs with --root"]) from None


def longest_name(signature: str) -> str:
    """Return a file name as long as the longest that a run of this signature needs."""
    return f".temporary_{signature}_checkpoints"


def save(options: Options, file_settings: Mapping[str, Any]) -> None:
    """Keep what this start was told, for whoever continues or tests the run: all its settings, and those of the file alone.

    A run that is continued and whose own are lost may be of another row than --config says: it is `unproven`.
    """
    unproven = {"unproven": True} if options.resume is not None and read(options.log_folder) is None else {}
    content = {"config": options.config, "options": options.to_dict(), "file": dict(file_settings), "exit_code": None, **unproven}
    try:
        _write(options.log_folder, content)
    except OSError as error:
        raise Refused([f"the run's folder cannot be written: {error}; make room, or name another place with --root"]) from None


def fresh_timestamp(root: str, machine: str) -> str:
    """Now, as a timestamp that no run has taken."""
    now, number = time.strftime("%Y%m%d-%H%M%S"), 1
    timestamp = now
    while os.path.exists(Path(root) / "logs" / f"{machine}_{timestamp}"):
        number += 1
        timestamp = f"{now}-{number}"
    return timestamp


def end(options: Options, exit_code: int) -> None:
    """Keep how this part of the run ended; on a full disk it counts as not ended. The file's time stays: that of the start. Files that a
    killed process was writing go.

    A run that was refused after it was claimed, before anything else was written, leaves nothing, and settings that were unproven when it
    was refused go.
    """
    file = options.log_folder / RUN_FILE
    with contextlib.suppress(OSError, ValueError):
        checkpoint.clear(options.checkpoint_folder)
        weights_file.clear(options.model_path)
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
    temporary = log_folder / f".{RUN_FILE}"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, log_folder / RUN_FILE)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted settings as they look once JSON has carried them."""
    return json.loads(json.dumps(settings))
