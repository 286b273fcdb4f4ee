"""Relay of standard output and error: no process of a run waits for whoever reads what is printed.

While `relayed` is entered, descriptors 1 and 2 of this process and of all that it starts are pipes. One thread empties them, so that
whoever prints (the logger, an environment, a library in C) goes on; one thread a stream writes to where the stream led before, and
only that thread waits when nobody reads. Lines that wait are bounded: the oldest are dropped, counted, and their number is printed
when somebody reads again.
"""

import array
import fcntl
import os
import selectors
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

MOST_BYTES = 1 << 18  # of a stream's lines that wait for their reader
PATIENCE = 2.0        # seconds that a reader may take for a line once the run has ended
LONGEST_END = 10.0    # seconds that all readers may take then
UNKNOWN_COLUMNS = 80  # of a terminal that does not say its width


class Terminal:
    """The standard output of main, as processes that it spawns are given it, to see how wide the terminal is."""

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor

    @property
    def columns(self) -> int:
        """Width of the terminal; 0 where standard output is none or was not passed on."""
        try:
            return 0 if self._descriptor is None else os.get_terminal_size(self._descriptor).columns or UNKNOWN_COLUMNS
        except OSError:
            return 0

    def __getstate__(self) -> dict[str, Any]:
        if self._descriptor is None or get_spawning_popen() is None:
            return {"descriptor": None}
        return {"descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptor = state["descriptor"] and state["descriptor"].detach()


class _Stream:
    """Standard output, error, or both where they lead to one place: what is printed arrives at `source` and goes on to `target`."""

    def __init__(self, *numbers: int):
        self.numbers, self.target = numbers, os.dup(numbers[0])
        self.source, sink = os.pipe()
        for number in numbers:
            os.dup2(sink, number)
        os.close(sink)
        self._changed = threading.Condition()
        self._lines, self._bytes, self._dropped = deque[bytes](), 0, 0
        self._writing = self._ended = False
        self.written = 0

    def read(self) -> bool:
        """Queue what has arrived; lines too many are dropped. Return False if nothing can arrive any more."""
        with self._changed:
            lines = os.read(self.source, 1 << 16).splitlines(keepends=True)
            self._lines.extend(lines)
            self._bytes += sum(map(len, lines))
            while self._bytes > MOST_BYTES:
                self._bytes -= len(self._lines.popleft())
                self._dropped += 1
            self._changed.notify()
            return bool(lines)

    def write(self) -> None:
        """Write line by line to the end."""
        while True:
            with self._changed:
                self._writing = False
                self._changed.wait_for(lambda: self._lines or self._ended)
                if not self._lines:
                    return os.close(self.target)
                self._writing, line = True, self._lines.popleft()
                self._bytes -= len(line)
                if self._dropped:
                    line, self._dropped = f"\n[{self._dropped:,} lines were dropped here: nobody read them]\n".encode() + line, 0
            with suppress(OSError):  # closed by its reader, or a full disk: no reason to stop a run
                while line:
                    line = line[os.write(self.target, line):]
            self.written += 1

    def end(self) -> None:
        """Have what is printed from now on go where it went before; nowhere, if nobody has read."""
        with open(os.devnull, "wb") as nowhere:
            target = self.target if self.idle else nowhere.fileno()
            for number in self.numbers:
                os.dup2(target, number)
        with self._changed:
            self._ended = True
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Return True if all that was printed has been written."""
        with self._changed:
            waiting = array.array("i", [0])
            fcntl.ioctl(self.source, termios.FIONREAD, waiting)
            return not (waiting[0] or self._lines or self._writing)


@contextmanager
def relayed() -> Iterator[Terminal]:
    """Relay what is printed until the end of the block, and give readers a moment then: what they have not read by that time is lost."""
    streams = [_Stream(1, 2)] if os.path.sameopenfile(1, 2) else [_Stream(1), _Stream(2)]
    threading.Thread(target=_read_all, args=(streams,), daemon=True, name="relay").start()
    for stream in streams:
        threading.Thread(target=stream.write, daemon=True, name="relay").start()
    try:
        yield Terminal(streams[0].target)
    finally:
        for file in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                file.flush()
        _wait_for_readers(streams)
        for stream in streams:
            stream.end()


def _read_all(streams: list[_Stream]) -> None:
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    os.close(key.fd)


def _wait_for_readers(streams: list[_Stream]) -> None:
    began = moved = time.monotonic()
    written = [stream.written for stream in streams]
    while not all(stream.idle for stream in streams) and time.monotonic() < min(moved + PATIENCE, began + LONGEST_END):
        time.sleep(0.005)
        if written != (written := [stream.written for stream in streams]):
            moved = time.monotonic()
