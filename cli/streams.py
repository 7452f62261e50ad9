"""Reliable stdin, stdout and stderr for commands, even if a stream is closed, full or has no reader."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO


class OutputLost(Exception):
    """An error: stdout accepts no more data. Not an OSError, so that no library catches it as one of its own errors.

    Attributes:
        reason: the system's error text; None if the reader closed the pipe, as `| head` does.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        closed = "stdout is closed" if error.errno == errno.EBADF else error.strerror
        self.reason = None if isinstance(error, BrokenPipeError) else closed


class _Stream(io.FileIO):
    """An output stream that waits if its file descriptor is not ready: another process may make it non-blocking."""

    def write(self, data: Any, /) -> int:
        written: int | None
        while (written := super().write(data)) is None:
            select.select([], [self], [])
        return written


class _Output(_Stream):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error) from None


class _Messages(_Stream):
    """A stream that drops messages that it cannot write, so that they do not make a command fail."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare_streams() -> None:
    """Make the process's streams usable: open closed streams, and let stdout and stderr handle write errors.

    If a stream stayed closed, the next opened file would get its descriptor number and receive the output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Writing to a descriptor that was opened for reading fails, as on a closed stream.
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))
    if os.name == "posix":
        sys.stdout, sys.stderr = _rebuilt(sys.stdout, _Output), _rebuilt(sys.stderr, _Messages)


def _rebuilt(stream: TextIO, kind: type[_Stream]) -> TextIO:
    try:
        stream.fileno()
    except OSError:
        return stream  # a replacement without a descriptor, such as a test's, stays unchanged
    by_line = kind is _Messages or bool(stream.line_buffering)
    buffer = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=by_line)


def drop_output() -> None:
    """Redirect stdout to the null device after it was lost; otherwise the interpreter reports an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
