"""What is said on stderr by the way: no place to say it is no reason to fail; and one line that says how far long work
is: on a terminal written over in place, elsewhere nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO


def tell(text: str, *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print to a stream, stderr unless another is given; not at all where it is closed, full or absent."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:
        with suppress(OSError, ValueError):
            print(text, end=end, file=stream, flush=True)


_BAR = 24
_SECONDS_BETWEEN = 0.1


class ProgressLine:
    """Such as "Packing weights [#####-----]  50 %  1.20 of 2.40 GB, 9 s left"; it goes away at the end.

    Args:
        label: what is done.
        total: for `add`, which counts by itself.
        amount: how a count is written; None = as a number.
        after: seconds before it shows, so that short work shows nothing.
        stream: where to; None = stderr. Nothing is written to what is no terminal.
    """

    def __init__(
        self, label: str, total: float = 0, *, amount: Callable[[float], str] | None = None, after: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        self._label, self._amount = label, amount or (lambda count: f"{count:,.0f}")
        self._stream = sys.stderr if stream is None else stream
        self.shows = self._stream is not None and self._stream.isatty()
        self._done, self._total = 0.0, total
        self._begin = time.monotonic()
        self._next = self._begin + after
        self._width = 0

    def add(self, count: float) -> None:
        """So much more of `total` is done; the line goes away when all is."""
        self._done += count
        self.show(self._done, self._total)
        if self._done >= self._total:
            self.close()

    def show(self, done: float, total: float, counted: str = "") -> None:
        """So much of it is done; `counted` says it in other words."""
        now = time.monotonic()
        if not done:
            self._begin = now
        # What is nearly over is not worth a line, but one that is there shows the end.
        if self.shows and (now >= self._next or (self._width and done >= total)):
            self._next = now + _SECONDS_BETWEEN
            self._write(self._line(done, max(total, done, 1e-9), now - self._begin, counted))

    def show_count(self, counted: str) -> None:
        """The same of work whose end nobody knows."""
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
            text = f"{share:4.0%}{left}"  # the time left is worth most
        bar = min(_BAR, columns - len(self._label) - len(text) - 4)
        filled = round(share * bar)
        bar_text = f"[{'#' * filled}{'-' * (bar - filled)}] " if bar > 3 else ""
        return f"{self._label} {bar_text}{text}"[:columns]

    def close(self) -> None:
        """Take the line away."""
        if self._width:
            self._write("")

    def _write(self, line: str) -> None:
        # Spaces, since not every terminal can erase.
        text = f"\r{line:<{self._width}}" if line else f"\r{'':<{self._width}}\r"
        self._width = len(line)
        tell(text, end="", stream=self._stream)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
