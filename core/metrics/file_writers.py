"""Write the metrics of a run to metrics.jsonl, metrics.csv and TensorBoard's event file.

- A period is appended to each file as a whole or not at all.
- metrics.csv is metrics.jsonl as a table with a column per metric. The metrics are not known ahead: when a new one
  arrives, and at each start, the table is rewritten from metrics.jsonl and replaced atomically.
- TensorBoard's own writer passes events to a thread that dies at the first full disk. Here its record format is written
  in one call per period, so that a failed period is lost and counted and the next one succeeds.
"""

import csv
import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from core.runtime.log_buffers import EVALUATOR, Record

METRICS = "metrics.jsonl"  # file in the log folder of a run
TAIL_BYTES = 1 << 16  # longer than any line
EVENTS = "events.out.tfevents."
POINT = ("step", "seconds")  # numbers that every line has beside its values
TIME_COLUMNS = (*POINT, "time")  # columns of metrics.csv that are not metrics
MAX_FOLDER_NAME_BYTES = 200  # file systems limit names to 255


class MetricsFiles:
    """The metrics files of a run, in a folder that may hold an earlier part of the run.

    - Wall seconds continue from the earlier part. If a logger is replaced, the time without one counts.
    - TensorBoard hides what the earlier part wrote after `step`, because that work was lost with its last checkpoint.
    - TensorBoard names a run by the folder of its events: the folder's own name, then `run`. A continued run keeps the
      name that it began with.
    - Failed writes are counted in `errors` and never raised.

    Args:
        folder: Log folder of the run.
        step: Agent steps at which this part of the run starts.
        run: Description of the run.
        settings: Dotted settings. TensorBoard shows those of each start as text, and those of the first as
            hyper-parameters.
        now: Returns seconds since the epoch.
        began: The time by `now` at which this start of the run began. If None, it begins now.
        heartbeat: Called while a long file is read.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        run: str = "",
        settings: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.time,
        began: float | None = None,
        heartbeat: Callable[[], None] = lambda: None,
    ):
        self._folder, self._first_step, self._settings, self._now = folder, step, settings or {}, now
        self._heartbeat, self._events_begun = heartbeat, False
        earlier = sorted([*folder.glob(f"{EVENTS}*"), *folder.glob(f"*/{EVENTS}*")], key=lambda path: path.name)
        plain = re.sub(r"[^\w.+-]", "-", run)  # without characters that a folder cannot have or a shell would interpret
        begun = (
            earlier[0].parent if earlier else folder / plain.encode()[:MAX_FOLDER_NAME_BYTES].decode(errors="ignore")
        )
        self._events = begun / f"{EVENTS}{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._has_earlier_events = bool(earlier)
        self._columns: Sequence[str] = ()  # metrics in metrics.csv
        self.errors = 0
        self._began = now() if began is None else began
        self._guarded(self._continue_lines, self._began)

    @property
    def continues(self) -> bool:
        """Return True if an earlier part of the run, or an earlier logger of this part, has written lines."""
        return _size(self._folder / METRICS) > 0

    @property
    def seconds(self) -> float:
        """Return the wall seconds of the run, its earlier parts included."""
        return self._now() - self._began

    def write(self, records: list[Record], step: int) -> None:
        """Write the records of a period that ends now, at this step."""
        lines = self._lines(records, step)
        json_lines = b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
        self._guarded(append_whole, self._folder / METRICS, json_lines)
        self._guarded(self._write_csv, lines)
        self._guarded(self._append_events, records)

    def write_facts(self, name: str, facts: dict[str, Any], step: int) -> None:
        """Write <name>.json, or <name>_step_<step>.json if an earlier part of the run wrote other facts."""
        data = (json.dumps(facts, indent=1, default=str) + "\n").encode()
        self._guarded(_write_facts, self._folder, name, data, step)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function. Its OSErrors are counted, and the first one is reported."""
        try:
            function(*arguments)
        except OSError as error:
            self.errors += 1
            if self.errors == 1:
                log_to_stderr(
                    f"warning: metrics cannot be written ({error}); "
                    "training goes on, losses are counted in global/metric_write_errors"
                )

    def _continue_lines(self, began: float) -> None:
        """Remove the incomplete last line that a killed writer left, and go on from the wall seconds before it.

        Time counts from that line on or, if an earlier start of the run wrote it, from `began` on.
        """
        path = self._folder / METRICS
        if not _size(path):
            return
        with open(path, "rb+") as file:
            start = max(_size(path) - TAIL_BYTES, 0)
            file.seek(start)
            tail = file.read()
            lines = tail[: tail.rfind(b"\n") + 1]
            with suppress(ValueError, IndexError, KeyError, TypeError):
                last = json.loads(lines.splitlines()[-1])
                self._began = min(self._now(), max(began, float(last["time"]))) - float(last["seconds"])
            file.truncate(start + len(lines))

    def _lines(self, records: list[Record], step: int) -> list[dict[str, Any]]:
        """Return an object for the period and one for each step at which an evaluation in it started, oldest first."""
        lines: dict[tuple[bool, int], dict[str, Any]] = {}
        now = self._now()
        for record in records:
            evaluation = record.name.startswith(EVALUATOR)
            at, moment = (record.step, record.time) if evaluation else (step, now)
            new = {"step": at, "time": moment, "seconds": moment - self._began, "values": {}}
            line = lines.setdefault((evaluation, at), new)
            line["values"][record.name] = record.value if math.isfinite(record.value) else None
        return sorted(lines.values(), key=lambda line: line["seconds"])

    def _write_csv(self, lines: list[dict[str, Any]]) -> None:
        """Append the lines to metrics.csv, or rewrite the file if it lacks a column for them."""
        path, table = self._folder / "metrics.csv", io.StringIO()
        if _size(path) and all(name in self._columns for line in lines for name in line["values"]):
            csv.writer(table, lineterminator="\n").writerows(_cells(line, self._columns) for line in lines)
            append_whole(path, table.getvalue().encode())
        else:
            self._columns = _rewrite_csv(path, self._folder / METRICS, self._heartbeat)

    def _append_events(self, records: list[Record]) -> None:
        buffer, now, step = io.BytesIO(), self._now(), self._first_step
        writer = RecordWriter(buffer)

        def write(moment: float, step: int = 0, **content: Any) -> None:
            writer.write(Event(wall_time=moment, step=step, **content).SerializeToString())

        if not self._events_begun:
            write(now, file_version="brain.Event:2")
            if step or self._has_earlier_events:
                write(now, step + 1, session_log=SessionLog(status=SessionLog.START))
            for summary in _settings_summaries(self._settings, self._folder.name):
                write(now, step, summary=summary)
        for record in records:
            value = Summary.Value(tag=record.name, simple_value=record.value)
            write(record.time, record.step, summary=Summary(value=[value]))
        self._events.parent.mkdir(exist_ok=True)
        append_whole(self._events, buffer.getvalue())
        self._events_begun = True


def append_whole(path: Path, data: bytes) -> None:
    """Append to the file. If that fails, restore the file's length and raise OSError."""
    with open(path, "ab", buffering=0) as file:
        size, written = file.seek(0, os.SEEK_END), 0
        try:
            while written < len(data):
                written += file.write(data[written:]) or 0
        except OSError:
            file.truncate(size)
            raise


def _settings_summaries(settings: Mapping[str, Any], signature: str) -> list[Summary]:
    """Return the settings as text, a table in markdown, and as the hyper-parameters of a session.

    No experiment is described, because TensorBoard then collects hyper-parameters and the last values of metrics from
    all runs.
    """
    if not settings:
        return []
    table = "".join(f"| {name} | `{value}` |\n" for name, value in settings.items())
    plain = {}
    for name, value in settings.items():
        finite = isinstance(value, (int, float)) and math.isfinite(value)
        plain[name] = value if finite or isinstance(value, (bool, str)) else str(value)
    text = text_pb("settings", f"| setting | value |\n| --- | --- |\n{table}")
    return [text, hparams_pb(plain, trial_id=signature)]


def _rewrite_csv(path: Path, lines_path: Path, heartbeat: Callable[[], None]) -> list[str]:
    """Replace a CSV file by the lines of a metrics.jsonl. Return its metrics in order of their first appearance."""
    names = list(dict.fromkeys(name for line in _read_lines(lines_path, heartbeat) for name in line["values"]))
    with replace_atomically(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*TIME_COLUMNS, *names])
        table.writerows(_cells(line, names) for line in _read_lines(lines_path, heartbeat))
    return names


def _read_lines(path: Path, heartbeat: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics.jsonl, after a heartbeat each; lines that are not valid are skipped."""
    with open(path, "rb") as file:
        for text in file:
            heartbeat()
            if (line := parse_line(text)) is not None:
                yield line


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Return a line of a metrics.jsonl. If no run writes such a line, return None."""
    try:
        line = json.loads(text)
        numbers = [*(line[name] for name in POINT), *filter(None, line["values"].values())]
        return line if all(isinstance(number, int | float) for number in numbers) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _cells(line: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return a row of metrics.csv. A cell is None, which is written empty, if its metric is missing or not finite."""
    return [*(line.get(name) for name in TIME_COLUMNS), *(line["values"].get(name) for name in names)]


def _write_facts(folder: Path, name: str, data: bytes, step: int) -> None:
    path = folder / f"{name}.json"
    if _size(path) and path.read_bytes() != data:
        path = folder / f"{name}_step_{step}.json"
    write_atomically(path, data)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
