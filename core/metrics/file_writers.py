"""The metrics of a run on disk: metrics.jsonl, metrics.csv and TensorBoard's event file, each period appended whole or not at all.

metrics.csv is metrics.jsonl as a table, a line each and a column for each metric. Which metrics there are is not known ahead: when a new
one comes, and at each start, the table is made anew from metrics.jsonl and replaces the old one at once.

TensorBoard's own writer hands events to a thread that dies with the first full disk; here its record format is written in one call a
period, so that such a period is lost and counted and the next one is fine.
"""

import csv
import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from core.common.console import log_to_stderr
from core.common.files import replace_atomically, write_atomically
from core.metrics.aggregation import PASSED_THROUGH
from core.runtime.log_buffers import Record

TAIL = 1 << 16  # bytes, longer than any line
EVENTS = "events.out.tfevents."
POINT = ("step", "seconds", "time")  # the columns of metrics.csv that are no metrics
NAME_BYTES = 200  # of a folder's name, which file systems limit to 255


class MetricsFiles:
    """Appends to the files of a folder, which may hold an earlier part of the run: wall seconds go on from there, and TensorBoard
    hides what that part wrote from `step` on (work lost between its last checkpoint and its end).

    TensorBoard calls a run by the folder of its events: the folder's own name, then `run`, which says what was run. A run that is
    continued keeps the name it began with. `settings`, dotted, are shown as text, those of each start, and as hyper-parameters, those of
    the first. `now` gives seconds since the epoch. `errors` counts writes that failed; they never raise.
    """

    def __init__(self, folder: Path, step: int, run: str = "", settings: Mapping[str, Any] | None = None,
                 now: Callable[[], float] = time.time):
        self._folder, self._first_step, self._settings, self._events_begun = folder, step, settings or {}, False
        self._now = now
        earlier = sorted([*folder.glob(f"{EVENTS}*"), *folder.glob(f"*/{EVENTS}*")], key=lambda path: path.name)
        self._events = (earlier[0].parent if earlier else folder / _file_name(run)) / (
            f"{EVENTS}{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}")
        self._columns: Sequence[str] = ()  # of metrics.csv
        self.errors = 0
        self._begun = now()
        self._guarded(cut_torn_line, folder / "metrics.jsonl")
        self._begun -= last_seconds(folder / "metrics.jsonl")

    @property
    def seconds(self) -> float:
        """Wall seconds of the run, its earlier parts included."""
        return self._now() - self._begun

    def write(self, records: list[Record], step: int) -> None:
        """One period that ends now, at this step."""
        lines = self._lines(records, step)
        json_lines = b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
        self._guarded(append_whole, self._folder / "metrics.jsonl", json_lines)
        self._guarded(self._tabulate, lines)
        if self._guarded(_append_in_folder, self._events, self._event_records(records)):
            self._events_begun = True

    def write_facts(self, name: str, facts: dict[str, Any], step: int) -> None:
        """folder/name.json; facts that have changed since an earlier part of the run go beside it, named by the step."""
        self._guarded(_write_facts, self._folder, name, (json.dumps(facts, indent=1, default=str) + "\n").encode(), step)

    def _guarded(self, function: Any, *arguments: Any) -> bool:
        try:
            function(*arguments)
            return True
        except OSError as error:
            self.errors += 1
            if self.errors == 1:
                log_to_stderr(f"warning: metrics cannot be written ({error}); training goes on, losses are counted in global/write_errors")
            return False

    def _lines(self, records: list[Record], step: int) -> list[dict[str, Any]]:
        """One object for the period, and one for each step of an evaluation in it."""
        objects: dict[tuple[bool, int], dict[str, Any]] = {}
        now = self._now()
        for record in records:
            passed = record.name.startswith(PASSED_THROUGH)
            key, moment = (passed, record.step if passed else step), record.time if passed else now
            line = objects.setdefault(key, {"step": key[1], "time": moment, "seconds": moment - self._begun, "values": {}})
            line["values"][record.name] = record.value if math.isfinite(record.value) else None
        return list(objects.values())

    def _tabulate(self, lines: list[dict[str, Any]]) -> None:
        """Append the lines to metrics.csv, or make it anew where it lacks a column for them."""
        path = self._folder / "metrics.csv"
        if _size(path) and all(name in self._columns for line in lines for name in line["values"]):
            append_whole(path, _csv_lines(lines, self._columns))
        else:
            self._columns = _write_table(path, self._folder / "metrics.jsonl")

    def _event_records(self, records: list[Record]) -> bytes:
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        if not self._events_begun:
            writer.write(Event(wall_time=self._now(), file_version="brain.Event:2").SerializeToString())
            if self._first_step:
                start = Event(wall_time=self._now(), step=self._first_step, session_log=SessionLog(status=SessionLog.START))
                writer.write(start.SerializeToString())
            for summary in _settings_summaries(self._settings, self._folder.name):
                writer.write(Event(wall_time=self._now(), step=self._first_step, summary=summary).SerializeToString())
        for record in records:
            value = Summary.Value(tag=record.name, simple_value=record.value)
            writer.write(Event(wall_time=record.time, step=record.step, summary=Summary(value=[value])).SerializeToString())
        return buffer.getvalue()


def append_whole(path: Path, data: bytes) -> None:
    """Append, or leave the file as it was and raise OSError."""
    with open(path, "ab", buffering=0) as file:
        size, written = file.seek(0, os.SEEK_END), 0
        try:
            while written < len(data):
                written += file.write(data[written:]) or 0
        except OSError:
            file.truncate(size)
            raise


def cut_torn_line(path: Path) -> None:
    """Remove what a killed writer left after the last whole line."""
    if not _size(path):
        return
    with open(path, "rb+") as file:
        start = max(_size(path) - TAIL, 0)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


def last_seconds(path: Path) -> float:
    """Wall seconds at the last line of a metrics.jsonl, 0 without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(_size(path) - TAIL, 0))
            return float(json.loads(file.read().splitlines()[-1])["seconds"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0.0


def run_name(config: str, game: str, agent: str, seed: int) -> str:
    """Return what tells a run from others, as TensorBoard shows it."""
    return f"{config}__{game}__{agent}__seed{seed}"


def _file_name(name: str) -> str:
    """Return the name with everything replaced that a folder's name cannot have, or that a shell would read."""
    return re.sub(r"[^\w.+-]", "-", name).encode()[:NAME_BYTES].decode(errors="ignore")


def _settings_summaries(settings: Mapping[str, Any], signature: str) -> list[Summary]:
    """Return the settings as text, a table in markdown, and as the hyper-parameters of a session.

    No experiment is described: TensorBoard then finds hyper-parameters and metrics, of which it shows the last values, in all runs.
    """
    if not settings:
        return []
    table = "".join(f"| {name} | `{value}` |\n" for name, value in settings.items())
    plain = {name: value if isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and math.isfinite(value)) else str(value)
             for name, value in settings.items()}
    return [text_pb("settings", f"| setting | value |\n| --- | --- |\n{table}"), hparams_pb(plain, trial_id=signature)]


def _append_in_folder(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    append_whole(path, data)


def _write_table(path: Path, lines_path: Path) -> list[str]:
    """Replace a CSV file by the lines of a metrics.jsonl at once. Returns its metrics, in the order in which they came."""
    names = list(dict.fromkeys(name for line in _read_lines(lines_path) for name in line["values"]))
    with replace_atomically(path) as temporary, open(temporary, "wb") as file:
        file.write(_csv_row([*POINT, *names]))
        for line in _read_lines(lines_path):
            file.write(_csv_lines([line], names))
    return names


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl; one that somebody spoilt is passed over."""
    with open(path, "rb") as file:
        for text in file:
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("values"), dict):
                    yield line


def _csv_lines(lines: Iterable[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Return the lines as rows of a table; an empty cell is a metric that was not reported then, or not finite."""
    return b"".join(_csv_row([*(line.get(name) for name in POINT), *(line["values"].get(name) for name in names)]) for line in lines)


def _csv_row(cells: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _write_facts(folder: Path, name: str, data: bytes, step: int) -> None:
    path = folder / f"{name}.json"
    if _size(path) and not _same_facts(path.read_bytes(), data):
        path = folder / f"{name}_step_{step}.json"
    write_atomically(path, data)


def _same_facts(old: bytes, new: bytes) -> bool:
    try:
        return bool(json.loads(old) == json.loads(new))
    except ValueError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
