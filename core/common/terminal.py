"""Relay standard output and standard error, so that no process of a run waits for a slow reader.

- Inside `relay_output`, descriptors 1 and 2 of this process and its children are pipes, which one thread empties.
- A thread per stream writes to the original destination. Only that thread waits for the reader.
- The lines that wait are bounded. The oldest are dropped, and their number is printed once the reader continues.
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

MAX_WAITING_BYTES = 1 << 18  # lines of one stream that wait for the reader
READER_TIMEOUT = 2.0  # seconds that a reader may take for one line once the run has ended
DRAIN_TIMEOUT = 10.0  # seconds that all readers may take then
DRAIN_POLL = 0.005  # seconds between two looks at their progress
DEFAULT_COLUMNS = 80  # width of a terminal that does not report one


class Terminal:
    """The main process's original standard output, passed to spawned processes to read the width of the terminal."""

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor

    @property
    def columns(self) -> int:
        """Return the width in characters; 0 if standard output is not a terminal or was not passed on."""
        try:
            return 0 if self._descriptor is None else os.get_terminal_size(self._descriptor).columns or DEFAULT_COLUMNS
        except OSError:
            return 0

    def __getstate__(self) -> dict[str, Any]:
        if self._descriptor is None or get_spawning_popen() is None:
            return {"descriptor": None}
        return {"descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptor = state["descriptor"] and state["descriptor"].detach()


class _StreamRelay:
    """The relay of standard output, of standard error, or of both if they share a destination.

    Printed text arrives at descriptor `source` and is written to descriptor `target`.
    """

    def __init__(self, *descriptors: int):
        self._descriptors, self.target = descriptors, os.dup(descriptors[0])
        os.set_blocking(self.target, True)  # Another program on it may have changed that.
        self.source, sink = os.pipe()
        for descriptor in descriptors:
            os.dup2(sink, descriptor)
        os.close(sink)
        self._changed = threading.Condition()
        self._lines, self._bytes, self._dropped = deque[bytes](), 0, 0
        self._writing = self._ended = False
        self.written = 0  # lines

    def read(self) -> bool:
        """Queue the arrived text, and drop the oldest lines over the bound. Return False at the end of file."""
        with self._changed:
            lines = os.read(self.source, 1 << 16).splitlines(keepends=True)
            self._lines.extend(lines)
            self._bytes += sum(map(len, lines))
            while self._bytes > MAX_WAITING_BYTES:
                self._bytes -= len(self._lines.popleft())
                self._dropped += 1
            self._changed.notify()
            return bool(lines)

    def write(self) -> None:
        """Write queued lines to the target until the relay ends."""
        while True:
            with self._changed:
                self._writing = False
                self._changed.wait_for(lambda: self._lines or self._ended)
                if not self._lines:
                    return os.close(self.target)
                self._writing, line = True, self._lines.popleft()
                self._bytes -= len(line)
                if self._dropped:
                    line = f"\n[{self._dropped:,} lines were dropped here: nobody read them]\n".encode() + line
                    self._dropped = 0
            with suppress(OSError):  # a closed pipe or a full disk must not stop a run
                while line:
                    line = line[os.write(self.target, line) :]
            self.written += 1

    def end(self) -> None:
        """Restore the descriptors to the target, or to /dev/null if unread lines remain."""
        with open(os.devnull, "wb") as null:
            target = self.target if self.idle else null.fileno()
            for descriptor in self._descriptors:
                os.dup2(target, descriptor)
        with self._changed:
            self._ended = True
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Return True if all printed text has been written to the target."""
        with self._changed:
            unread = array.array("i", [0])
            fcntl.ioctl(self.source, termios.FIONREAD, unread)
            return not (unread[0] or self._lines or self._writing)


@contextmanager
def relay_output() -> Iterator[Terminal]:
    """Relay standard output and standard error inside the block.

    At the end readers get READER_TIMEOUT to take the waiting lines; lines that remain are dropped.
    """
    streams = [_StreamRelay(1, 2)] if os.path.sameopenfile(1, 2) else [_StreamRelay(1), _StreamRelay(2)]
    threading.Thread(target=_read_all, args=(streams,), daemon=True, name="relay").start()
    for stream in streams:
        threading.Thread(target=stream.write, daemon=True, name="relay").start()
    try:
        yield Terminal(streams[0].target)
    finally:
        for file in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                file.flush()
        _drain(streams)
        for stream in streams:
            stream.end()


def _read_all(streams: list[_StreamRelay]) -> None:
    """Read from every stream until all have reached their end of file."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    os.close(key.fd)


def _drain(streams: list[_StreamRelay]) -> None:
    """Wait until all lines are written, no line has been written for READER_TIMEOUT, or DRAIN_TIMEOUT has passed."""
    began = progressed = time.monotonic()
    written = [stream.written for stream in streams]
    while not all(stream.idle for stream in streams) and time.monotonic() < min(
        progressed + READER_TIMEOUT, began + DRAIN_TIMEOUT
    ):
        time.sleep(DRAIN_POLL)
        if written != (written := [stream.written for stream in streams]):
            progressed = time.monotonic()
