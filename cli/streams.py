"""Reliable stdin, stdout and stderr for commands, even if a stream is closed, full or has no reader."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from genai.common.progress import Task
from genai.common.progress_line import ProgressLine, other_output

_FALSE = ("", "0", "false", "f", "no", "n", "off")
_LONGEST_NAME = 20


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
    """An output stream that waits if its file descriptor is not ready: another process may make it non-blocking.

    On a terminal, the status line makes room for the output.
    """

    def write(self, data: Any, /) -> int:
        with other_output(self, data):
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


def first_sign(arguments: Sequence[str]) -> Task:
    """Show on the terminal that the command has started, before modules that load slowly are imported.

    The sign ends when the command starts a task or prints anything. There is no sign if the user wants none (--quiet),
    or if a shell runs the command to complete a command line.
    """
    is_quiet = not {"-q", "--quiet"}.isdisjoint(arguments) or os.environ.get("GENAI_QUIET", "0").lower() not in _FALSE
    if is_quiet or "_GENAI_COMPLETE" in os.environ:
        return Task()
    named = next((argument for argument in arguments if not argument.startswith("-")), "")
    return ProgressLine(f"Starting genai {named[:_LONGEST_NAME]}".rstrip(), is_first=True)
