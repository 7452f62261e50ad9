"""Lines on stderr, for the command line and `log.to_stderr`. It is not an error if stderr cannot be written.

A `ProgressLine` shows the progress of long work. It is redrawn in place on a terminal, and not shown elsewhere.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from .progress import Task


def tell(text: str, *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print to a stream, by default stderr; do nothing if it is closed, full or absent."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:
        with suppress(OSError, ValueError):
            print(text, end=end, file=stream, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if lines of a stream can be overwritten; False if it is closed or absent."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


_BAR = 24
_SECONDS_BETWEEN = 0.1


class ProgressLine(Task):
    """A line such as "Packing weights [#####-----]  50 %  1.20 of 2.40 GB, 9 s left". It is erased at the end.

    Args:
        label: description of the work.
        total: the amount at which `add` ends the task.
        amount: the function that formats a count; None = counts are shown as numbers.
        after: seconds before the line appears, so that short work shows nothing.
        stream: the output; None = stderr. Nothing is written to a stream that is not a terminal.
    """

    def __init__(
        self, label: str, total: float = 0, *, amount: Callable[[float], str] | None = None, after: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        self._label, self._amount = label, amount or (lambda count: f"{count:,.0f}")
        self._stream = sys.stderr if stream is None else stream
        self.shows = is_terminal(self._stream)
        self._done, self._total = 0.0, total
        self._begin = time.monotonic()
        self._next = self._begin + after
        self._width = 0

    def add(self, count: float) -> None:
        """Report that `count` more of the total is done; when the total is reached, the line is erased."""
        self._done += count
        self.show(self._done, self._total)
        if self._done >= self._total:
            self.close()

    def show(self, done: float, total: float, counted: str = "") -> None:
        """Report that `done` of `total` is done; `counted` is the amount as text."""
        now = time.monotonic()
        if not done:
            self._begin = now
        # A new line is not worth showing for work that is nearly over, but a line that is already visible shows the
        # end.
        if self.shows and (now >= self._next or (self._width and done >= total)):
            self._next = now + _SECONDS_BETWEEN
            self._write(self._line(done, max(total, done, 1e-9), now - self._begin, counted))

    def show_count(self, counted: str) -> None:
        """Report an amount of work that has no known total."""
        now = time.monotonic()
        if self.shows and now >= self._next:
            self._next = now + _SECONDS_BETWEEN
            self._write(f"{self._label} {counted}"[: shutil.get_terminal_size().columns - 1])

    def _line(self, done: float, total: float, seconds: float, counted: str) -> str:
        share = done / total
        left = f", {seconds * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
        text = f"{share:4.0%}  {counted or f'{self._amount(done)} of {self._amount(total)}'}{left}"
        columns = shutil.get_terminal_size().columns - 1
        if len(self._label) + 1 + len(text) > columns:
            text = f"{share:4.0%}{left}"  # the remaining time matters most
        bar = min(_BAR, columns - len(self._label) - len(text) - 4)
        filled = round(share * bar)
        shown = f"[{'#' * filled}{'-' * (bar - filled)}] " if bar > 3 else ""
        return f"{self._label} {shown}{text}"[:columns]

    def close(self) -> None:
        """Erase the line."""
        if self._width:
            self._write("")

    def _write(self, line: str) -> None:
        # The old line is overwritten with spaces, because not every terminal can erase.
        text = f"\r{line:<{self._width}}" if line else f"\r{'':<{self._width}}\r"
        self._width = len(line)
        tell(text, end="", stream=self._stream)
