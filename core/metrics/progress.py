"""Show the progress of a run: one live line on a terminal, a plain line every few seconds elsewhere."""

import time
from collections import deque
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from core.common.terminal import Terminal
from core.runtime.options import RunOptions

PLAIN_PERIOD = 10.0  # seconds between lines without a terminal
RATE_SECONDS = 30.0  # Shown rates are means over this time, in which long rollouts and updates take turns.


class QuietConsole(Console):
    """A console that stays silent once its output is closed, where rich would exit the process.

    The width is that of the main process's `terminal`, if its output goes to one.
    """

    def __init__(self, terminal: Terminal, **settings: Any):
        self._terminal = terminal
        super().__init__(force_terminal=True if terminal.columns else None, highlight=False, soft_wrap=True, **settings)

    @property  # type: ignore[misc]  # the size of rich's console can be set, which nothing does here
    def size(self) -> ConsoleDimensions:
        columns = self._terminal.columns
        return super().size._replace(width=columns) if columns else super().size

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """The progress line of a run, which began so many seconds ago.

    A closed standard output or a full disk does not stop the run.
    """

    def __init__(self, options: RunOptions, console: Console, seconds: float = 0.0):
        self._options, self._console = options, console
        self._began = time.monotonic() - seconds
        self._printed_at = float("-inf")
        self._recent = deque[tuple[float, dict[str, float]]]()  # time and values, of RATE_SECONDS or more
        self._parts: list[str] = []  # of the newest line

    def show(self, values: dict[str, float], scores: tuple[float, float] | None) -> None:
        """Show the global/ values of a period, and the mean returns of the last and of the best evaluation."""
        now = time.monotonic()
        self._recent.append((now, values))
        while len(self._recent) > 2 and now - self._recent[1][0] > RATE_SECONDS:
            self._recent.popleft()
        steps, limit, left = values["global/agent_steps"], self._options.steps, self._seconds_left(values)
        updates = self._rate("updates")
        self._parts = [  # most important first, because a narrow terminal shows the beginning only
            f"steps {count(steps)}" + (f"/{count(limit)}" if limit else ""),
            f"score {scores[0]:.2f} (best {scores[1]:.2f})" if scores else "score -",
            f"for {duration(time.monotonic() - self._began)}" if left is None else f"left {duration(left)}",
            f"{self._rate('agent_steps'):,.0f} steps/s",
            f"{updates:,.{1 if updates < 10 else 0}f} updates/s",
            f"ratio {values['global/samples_per_insert']:.2f}",
        ]
        if self._console.is_terminal:
            self._print(self._line(), end="\r")
        elif time.monotonic() - self._printed_at >= PLAIN_PERIOD:
            self._printed_at = time.monotonic()
            self._print(self._line())

    def evaluation(self, step: int, score: float) -> None:
        """Print a line about an evaluation, which the progress line does not overwrite."""
        line = f"evaluation at step {step:,}: mean return {score:.2f}"
        self._print(Text(line.ljust(self._console.width - 1) if self._console.is_terminal else line))

    def close(self, table: Table | None = None) -> None:
        """Print the last progress line once more, and the table below it."""
        self._print(self._line())
        if table is not None:
            self._print(table)

    def _line(self) -> Text:
        """Return the progress line; on a terminal as many parts as fit, padded to overwrite the previous line."""
        if not self._console.is_terminal:
            return Text(" | ".join(self._parts))
        width = max(self._console.width - 1, 1)
        lines = [" | ".join(self._parts[:number]) for number in range(len(self._parts), 0, -1)]
        line = next((line for line in lines if len(line) <= width), lines[-1][:width])
        return Text(line.ljust(width), no_wrap=True)

    def _seconds_left(self, values: dict[str, float]) -> float | None:
        """Return the time until the first stop condition is met; None if it cannot be estimated.

        Before the first updates, the steps of actors that wait for nobody say nothing about it.
        """
        options = self._options
        estimates = [] if options.seconds is None else [options.seconds - (time.monotonic() - self._began)]
        for name, limit in (("agent_steps", options.steps), ("updates", options.updates)):
            rate = self._rate(name)
            if limit is not None and rate > 0 and self._rate("updates") > 0:
                estimates.append((limit - values[f"global/{name}"]) / rate)
        return max(min(estimates), 0.0) if estimates else None

    def _rate(self, name: str) -> float:
        (start, first), (end, last) = self._recent[0], self._recent[-1]
        if end == start:  # the first line
            return last[f"global/{name}_per_second"]
        return (last[f"global/{name}"] - first[f"global/{name}"]) / (end - start)

    def _print(self, text: Text | Table, end: str = "\n") -> None:
        with suppress(OSError, ValueError):  # ValueError if an environment of this process has closed it
            self._console.print(text, end=end)


def count(number: float) -> str:
    """Format a number as 98,765 or 1.23M."""
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
