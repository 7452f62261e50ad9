"""stdin, stdout and stderr as commands can rely on them, whether they are closed, full or without a reader."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO


class OutputLost(Exception):
    """stdout takes no more. No OSError, so that no library between takes it for its own.

    Attributes:
        reason: what the system says; None where the reader went away, as `| head` does.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        closed = "stdout is closed" if error.errno == errno.EBADF else error.strerror
        self.reason = None if isinstance(error, BrokenPipeError) else closed


class _Stream(io.FileIO):
    """A stream for writing; whoever else has it open may have made it one that does not block."""

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
    """What cannot be said is left out: messages are no reason to fail."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare_streams() -> None:
    """Make the process's streams usable: closed ones are opened, and those for writing say what became of it.

    Where nothing is open, the next file that is opened would take the stream's number, and be written to.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Nothing can be written to what is opened for reading.
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", closefd=False))
    if os.name == "posix":
        sys.stdout, sys.stderr = _rebuilt(sys.stdout, _Output), _rebuilt(sys.stderr, _Messages)


def _rebuilt(stream: TextIO, kind: type[_Stream]) -> TextIO:
    try:
        stream.fileno()
    except OSError:
        return stream  # somebody's own, which knows what it does
    by_line = kind is _Messages or bool(stream.line_buffering)
    buffer = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=by_line)


def drop_output() -> None:
    """Nothing more can be written to stdout: lead it elsewhere, or the interpreter complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
