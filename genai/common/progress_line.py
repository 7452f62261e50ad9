"""The status line: the last line of a terminal, on stderr, which shows what the program is doing.

A `ProgressLine` is a task that is shown there. The line shows the task that was started last. Other output replaces the
line, and the line comes back below the output. Nothing is drawn on a stream that is not a terminal, and it is not an
error if stderr cannot be written.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO

from .shown_tasks import ShownTask, TaskDisplay, width

_SPINNER = "|/-\\"
# Sequences that move no cursor, at the end of a program's output.
_COLOURS = re.compile(rb"(?:\x1b\[[0-9;?]*[ -/]*[@-~])+$")


def tell(text: str, *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print to a stream, by default stderr; do nothing if it is closed, full or absent."""
    stream = sys.stderr if stream is None else stream
    if stream is not None:
        with suppress(OSError, ValueError), other_output(stream, f"{text}{end}".encode("utf-8", "replace")):
            print(text, end=end, file=stream, flush=True)


def is_terminal(stream: IO[Any] | None) -> bool:
    """Return True if lines of a stream can be overwritten; False if it is closed or absent."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


class StatusLine(TaskDisplay):
    """The last line of a terminal, which shows the task that was started last.

    Args:
        stream: the terminal.
        animated: True to redraw the line in a thread while there are tasks.
    """

    def __init__(self, stream: TextIO, *, animated: bool = True) -> None:
        super().__init__(animated=animated)
        self.stream = stream
        self._width, self._turns = 0, 0
        self._at_start = True

    def draw(self) -> None:
        """Draw the current task, or erase the line if there is no task or other output fills the line."""
        if not self.tasks or not self._at_start:
            self.erase()
            return
        self.drawn = time.monotonic()
        self._turns += 1
        columns = _columns(self.stream)
        line = _cut(f"{_SPINNER[self._turns % 4]} {self.tasks[-1].text(columns - 3)}", columns - 1)
        # The old line is overwritten with spaces, because not every terminal can erase.
        rest = " " * (min(self._width, columns - 1) - width(line))
        self._write(f"\r{line}{rest}")
        self._width, self.visible = width(line), True

    def erase(self) -> None:
        """Erase the line, so that other output can take its place."""
        if self.visible:
            # If the user pressed Ctrl-C, the terminal shows ^C after the line.
            self._write(f"\r{' ' * min(self._width + 2, _columns(self.stream) - 1)}\r")
            self._width, self.visible = 0, False

    def output_begins(self) -> None:
        """Make room for other output."""
        with self.lock:
            self.erase()
            self.output_elsewhere()
            self.silent_since = time.monotonic()

    def output_elsewhere(self) -> None:
        """End the tasks that last until the first output, which may also go to a file or a pipe."""
        with self.lock:
            left = [one for one in self.tasks if not one.until_output]
            if len(left) < len(self.tasks):
                self.tasks = left
                if self.visible:
                    self.draw()

    def output_ends(self, data: bytes) -> None:
        """Note where other output left the cursor. The line returns only at the start of a line of the terminal."""
        rest = _COLOURS.sub(b"", bytes(data[-64:]))
        if rest:
            self._at_start = rest.endswith((b"\n", b"\r"))

    def _write(self, text: str) -> None:
        # The descriptor is written directly: a lock of the stream could be held when another thread forks.
        with suppress(OSError, ValueError):
            data = text.encode(getattr(self.stream, "encoding", None) or "ascii", "replace")
            try:
                number = self.stream.fileno() if os.name == "posix" else -1
            except OSError:  # a stream without a descriptor, such as a test's
                number = -1
            if number >= 0:
                os.write(number, data)
            else:
                self.stream.write(text)
                self.stream.flush()


_line: StatusLine | None = None


def line_on(stream: TextIO) -> StatusLine:
    """Return the status line of a terminal."""
    global _line
    if _line is None or _line.stream is not stream:
        _line = StatusLine(stream)
    return _line


@contextmanager
def other_output(stream: IO[Any], data: bytes) -> Iterator[None]:
    """Write `data` to a stream inside the block: the status line makes room if the stream is a terminal."""
    if _line is None:
        yield
    elif is_terminal(stream):
        _line.output_begins()
        yield
        _line.output_ends(data)
    else:
        _line.output_elsewhere()
        yield


def at_line_start() -> None:
    """Note that the user ended the current line of the terminal, by pressing Enter."""
    if _line is not None:
        _line.output_ends(b"\n")


def _forked() -> None:
    if _line is not None:
        _line.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class ProgressLine(ShownTask):
    """A task on the status line; see `ShownTask`.

    Args:
        line: the status line; None = the line on stderr, if stderr is a terminal.
    """

    def __init__(
        self, label: str, total: float = 0, *, amount: Callable[[float], str] | None = None,
        until_output: bool = False, is_first: bool = False, line: StatusLine | None = None,
    ) -> None:  # fmt: skip
        if line is None and is_terminal(sys.stderr):
            line = line_on(sys.stderr)
        super().__init__(label, total, line, amount=amount, until_output=until_output, is_first=is_first)


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal, at least 2. The variable COLUMNS takes precedence, as in other programs."""
    variable = os.environ.get("COLUMNS", "")
    columns = int(variable[:9]) if variable.isdecimal() else 0
    with suppress(OSError, ValueError):
        columns = columns or os.get_terminal_size(stream.fileno()).columns
    return max(columns or 80, 2)


def _cut(text: str, columns: int) -> str:
    while width(text) > columns:
        text = text[:-1]
    return text
