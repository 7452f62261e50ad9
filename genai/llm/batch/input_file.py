"""An input file that is read from start to end and must not change in the meantime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...errors import InputError

# No sensible prompt is longer. The rest of a longer line is skipped, up to a second limit.
MOST_LINE_BYTES = 2**24
_LONGEST_SKIPPED = 2**30


class InputFile:
    """The bytes of a file, line by line. The file is open only during iteration.

    Args:
        path: the file.

    Attributes:
        size: the file's size in bytes.

    Raises:
        InputError: the file does not exist, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
            if not path.is_file():
                raise InputError(
                    f"{path}: the file cannot be read", "the path is not a file", "pass a file, or - for stdin"
                )
            with path.open("rb"):
                pass  # opening the file checks that it is readable
        except OSError as error:
            raise _unreadable(path, error) from error
        self._identity, self.size = _identity(status), status.st_size

    def check_unchanged(self) -> None:
        """Raise InputError if the file has changed, or if its name now refers to another file."""
        try:
            current = _identity(self.path.stat())
        except OSError:
            current = ()
        if current != self._identity:
            raise InputError(
                f"{self.path}: the file changed while it was read",
                "lines read before and after the change do not belong together",
                "leave the file unchanged during the run, and continue with --resume, which keeps finished lines",
            )

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Yield each line, including its line end, and the line's length in bytes. Lines that are too long are cut."""
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
    why = "the file does not exist" if isinstance(error, FileNotFoundError) else str(error)
    return InputError(f"{path}: the file cannot be read", why, "check the path and its permissions")


def bounded_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its length in bytes. A line longer than MOST_LINE_BYTES is cut one byte after that limit.

    Raises:
        InputError: a line is so long that the input may be endless.
    """
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        size, end = len(line), line[-1:]
        while end != b"\n" and (more := file.readline(MOST_LINE_BYTES)):
            size, end = size + len(more), more[-1:]
            if size > _LONGEST_SKIPPED:
                raise InputError(
                    f"line {number + 1} is longer than {_LONGEST_SKIPPED >> 20} MiB",
                    "the input may be endless",
                    "write one request per line",
                )
        number += 1
        yield line, size


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
