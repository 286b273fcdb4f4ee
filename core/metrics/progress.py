"""What a person sees of a run: one live line on a terminal, a plain line every few seconds elsewhere."""

import time
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from core.common.terminal import Terminal
from core.runtime.options import RunOptions

PLAIN_PERIOD = 10.0  # seconds between lines when there is no terminal
SMOOTHING = 0.1      # weight of the newest rate in the time left


class QuietConsole(Console):
    """Falls silent when nobody reads any more; rich would exit the process. Shows itself in `terminal`, main's, if there is one."""

    def __init__(self, terminal: Terminal | None = None, **settings: Any):
        self._terminal = terminal
        super().__init__(**settings, force_terminal=True if terminal is not None and terminal.columns else None)

    @property  # type: ignore[misc]  # rich's may be set, which nobody does here
    def size(self) -> ConsoleDimensions:
        columns = 0 if self._terminal is None else self._terminal.columns
        return super().size._replace(width=columns) if columns else super().size

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Shows values as the logger names them. `options` gives the stop conditions: steps, updates, seconds. A closed or full standard output
    is no reason to stop a run."""

    def __init__(self, options: RunOptions, console: Console | None = None, terminal: Terminal | None = None):
        self._options = options
        self._console = QuietConsole(terminal, highlight=False, soft_wrap=True) if console is None else console
        self._begun = time.monotonic()
        self._printed = float("-inf")
        self._rates: dict[str, float] = {}
        self._last: list[str] = []

    def show(self, values: dict[str, float], scores: tuple[float, float] | None) -> None:
        """`values`: global/ values of the period; `scores`: mean returns of the last and of the best evaluation."""
        for name in ("global/agent_steps_per_second", "global/updates_per_second"):
            self._rates[name] = (1 - SMOOTHING) * self._rates.get(name, values[name]) + SMOOTHING * values[name]
        self._last = self._parts(values, scores)
        if self._console.is_terminal:
            self._print(self._line(self._last), end="\r")
        elif time.monotonic() - self._printed >= PLAIN_PERIOD:
            self._printed = time.monotonic()
            self._print(self._line(self._last))

    def evaluation(self, step: int, score: float) -> None:
        """A line that stays."""
        line = f"evaluation at step {step:,}: mean return {score:.2f}"
        self._print(Text(line.ljust(self._console.width - 1) if self._console.is_terminal else line))

    def close(self, table: Table | None = None) -> None:
        """The last line stays, and a table of the run below it."""
        self._print(self._line(self._last))
        if table is not None:
            self._print(table)

    def _line(self, parts: list[str]) -> Text:
        """Join the parts; on a terminal those that fit its width, from the first on, and blanks over what stood there before."""
        if not self._console.is_terminal:
            return Text(" | ".join(parts))
        width = max(self._console.width - 1, 1)
        fitting = [" | ".join(parts[:number]) for number in range(len(parts), 0, -1)] or [""]
        line = next((joined for joined in fitting if len(joined) <= width), fitting[-1][:width])
        return Text(line.ljust(width), no_wrap=True)

    def _parts(self, values: dict[str, float], scores: tuple[float, float] | None) -> list[str]:
        """What matters most comes first: a narrow terminal shows the beginning."""
        steps, limit, left = values["global/agent_steps"], self._options.steps, self._seconds_left(values)
        return [f"steps {count(steps)}" + (f"/{count(limit)}" if limit else ""),
                f"score {scores[0]:.2f} (best {scores[1]:.2f})" if scores else "score -",
                f"for {duration(time.monotonic() - self._begun)}" if left is None else f"left {duration(left)}",
                f"{values['global/fps']:,.0f} frames/s", f"{values['global/updates_per_second']:,.0f} updates/s",
                f"ratio {values['global/samples_per_insert']:.2f}"]

    def _seconds_left(self, values: dict[str, float]) -> float | None:
        options = self._options
        estimates = [] if options.seconds is None else [options.seconds - (time.monotonic() - self._begun)]
        for name, limit in (("agent_steps", options.steps), ("updates", options.updates)):
            if limit is not None and (rate := self._rates[f"global/{name}_per_second"]) > 0:
                estimates.append((limit - values[f"global/{name}"]) / rate)
        return max(min(estimates), 0.0) if estimates else None

    def _print(self, text: Text | Table, end: str = "\n") -> None:
        with suppress(OSError):
            self._console.print(text, end=end)


def count(number: float) -> str:
    """98,765 or 1.23M"""
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """1:02:03"""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
