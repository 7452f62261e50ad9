"""A file that is read once, from its beginning to its end, and must stay as it is meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...errors import InputError

# No prompt that anybody means is longer. The rest of a longer line is passed over, but not for ever.
MOST_LINE_BYTES = 2**24
_LONGEST_SKIPPED = 2**30


class InputFile:
    """The bytes of a file, line by line. It is open while it is read only.

    Args:
        path: of a file.

    Attributes:
        size: bytes of it.

    Raises:
        InputError: there is none, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
            if not path.is_file():
                raise InputError(f"{path}: cannot be read", "it is not a file", "give a file, or - for stdin")
            with path.open("rb"):
                pass  # it can be
        except OSError as error:
            raise _unreadable(path, error) from error
        self._identity, self.size = _identity(status), status.st_size

    def check_unchanged(self) -> None:
        """Raise InputError if the file is not what it was at the beginning, or its name means another one."""
        try:
            current = _identity(self.path.stat())
        except OSError:
            current = ()
        if current != self._identity:
            raise InputError(
                f"{self.path}: changed while it was read",
                "what is read of it no longer belongs together",
                "leave it as it is until the end, and start again with --resume: lines that are answered stay",
            )

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """From the beginning: each line with its end, and its length in bytes. A line that is too long is cut."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise _unreadable(self.path, error) from error
        with file:
            for line, size in bounded_lines(file):
                self.check_unchanged()
                yield line, size
        self.check_unchanged()


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read", str(error), "check the path and its permissions")


def bounded_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Each line with its length in bytes; of longer ones than MOST_LINE_BYTES, one byte more than those.

    Raises InputError: one is so long that it may have no end.
    """
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        size, end = len(line), line[-1:]
        while end != b"\n" and (more := file.readline(MOST_LINE_BYTES)):
            size, end = size + len(more), more[-1:]
            if size > _LONGEST_SKIPPED:
                raise InputError(
                    f"line {number + 1} goes on for more than {_LONGEST_SKIPPED >> 20} MiB",
                    "such an input may have no end",
                    "write a line for each request",
                )
        number += 1
        yield line, size


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
