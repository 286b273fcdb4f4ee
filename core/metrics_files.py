"""The metrics of a run on disk: metrics.jsonl, metrics.csv and TensorBoard's event file, each period appended whole or not at all.

TensorBoard's own writer hands events to a thread that dies with the first full disk; here its record format is written in one call a
period, so that such a period is lost and counted and the next one is fine.
"""

import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from core.logs import Record
from core.metrics import PASSED_THROUGH
from core.notices import notice

TAIL = 1 << 16  # bytes, longer than any line


class MetricsFiles:
    """Appends to the files of a folder, which may hold an earlier part of the run: wall seconds go on from there, and TensorBoard
    hides what that part wrote from `step` on (work lost between its last checkpoint and its end).

    `now` gives seconds since the epoch. `errors` counts writes that failed; they never raise.
    """

    def __init__(self, folder: Path, step: int, now: Callable[[], float] = time.time):
        self._now = now
        self._folder, self._first_step, self._events_begun = folder, step, False
        self._events = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.errors = 0
        self._begun = now()
        for name in ("metrics.jsonl", "metrics.csv"):
            self._guarded(cut_torn_line, folder / name)
        self._begun -= last_seconds(folder / "metrics.jsonl")

    @property
    def seconds(self) -> float:
        """Wall seconds of the run, its earlier parts included."""
        return self._now() - self._begun

    def write(self, records: list[Record], step: int) -> None:
        """One period that ends now, at this step."""
        self._guarded(append_whole, self._folder / "metrics.jsonl", self._json_lines(records, step))
        header = b"" if _size(self._folder / "metrics.csv") else b"time,step,name,value\n"
        self._guarded(append_whole, self._folder / "metrics.csv", header + _csv_lines(records))
        if self._guarded(append_whole, self._folder / self._events, self._event_records(records)):
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
                notice(f"warning: metrics cannot be written ({error}); training goes on, losses are counted in global/write_errors")
            return False

    def _json_lines(self, records: list[Record], step: int) -> bytes:
        """One object for the period, and one for each step of an evaluation in it."""
        objects: dict[tuple[bool, int], dict[str, Any]] = {}
        now = self._now()
        for record in records:
            passed = record.name.startswith(PASSED_THROUGH)
            key, moment = (passed, record.step if passed else step), record.time if passed else now
            line = objects.setdefault(key, {"step": key[1], "time": moment, "seconds": moment - self._begun, "values": {}})
            line["values"][record.name] = record.value if math.isfinite(record.value) else None
        return b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in objects.values())

    def _event_records(self, records: list[Record]) -> bytes:
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        if not self._events_begun:
            writer.write(Event(wall_time=self._now(), file_version="brain.Event:2").SerializeToString())
            if self._first_step:
                start = Event(wall_time=self._now(), step=self._first_step, session_log=SessionLog(status=SessionLog.START))
                writer.write(start.SerializeToString())
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


def _csv_lines(records: Iterable[Record]) -> bytes:
    return "".join(f"{record.time:.3f},{record.step},{record.name},{record.value!r}\n" for record in records).encode()


def _write_facts(folder: Path, name: str, data: bytes, step: int) -> None:
    path = folder / f"{name}.json"
    if _size(path) and not _same_facts(path.read_bytes(), data):
        path = folder / f"{name}_step_{step}.json"
    temporary = folder / f".temporary_{name}.json"
    temporary.write_bytes(data)
    os.replace(temporary, path)


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
