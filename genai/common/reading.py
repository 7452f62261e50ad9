"""Complete reads of files that users and models provide, with errors that name the file and the problem."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from genai.common.memory_limits import available_memory, format_bytes

from ..errors import CacheCapacityError, GenaiError, InputError, kind_of

E = TypeVar("E", bound=GenaiError)

_POINTER = b"version https://git-lfs"
# No sensible text is longer, and reads from a device may never end.
_MOST_BYTES, _PIECE = 2**28, 2**20
# The time to parse JSON is proportional to the number of values, which commas separate. Parsing this number of values
# takes about a second.
MOST_VALUES = 2**19
# NumPy's limits of a shape. Extents of 0 do not count in its product.
MOST_DIMENSIONS, _MOST_ADDRESS = 64, sys.maxsize


def is_addressable(shape: Sequence[int], itemsize: int) -> bool:
    """Return True if NumPy can represent a shape, so that later uses of an array of this shape do not fail."""
    addressed = math.prod(extent or 1 for extent in shape) * itemsize
    return len(shape) <= MOST_DIMENSIONS and min(shape, default=0) >= 0 and addressed <= _MOST_ADDRESS


def pointer_error(path: Path, kind: type[E]) -> E | None:
    """Return the error for a file that Git LFS left in place of the real file; None for any other file."""
    try:
        with path.open("rb") as file:
            return pointer_error_of(file.read(len(_POINTER)), path, kind)
    except OSError:
        return None


def pointer_error_of(start: bytes, path: Path, kind: type[E]) -> E | None:
    """Return the error for a file that Git LFS left in place of the real file, from the first 64 bytes of the file."""
    if not start.startswith(_POINTER):
        return None
    return kind(
        f"{path} is a pointer of Git LFS, not the file itself",
        "the repository was cloned without its large files",
        "run `git lfs pull` in the clone, or download the file again",
    )


def file_bytes(path: Path, unreadable: type[GenaiError], *, may_be_pipe: bool = False) -> bytes | None:
    """Return a file's bytes; None if it does not exist. Raises `unreadable` if it cannot be read or has no end."""
    try:
        if not (may_be_pipe or path.is_file() or path.is_dir()) and path.exists():
            raise unreadable(f"{path}: the file cannot be read", "the path is a pipe or a device", "use a regular file")
        with path.open("rb") as file:
            return bounded_bytes(file, path, unreadable)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(
            f"{path}: the file cannot be read", str(error), "check the file and its permissions"
        ) from error


def bounded_bytes(file: BinaryIO, name: object, unreadable: type[GenaiError]) -> bytes:
    """Return all bytes of a file or stream. Raises `unreadable` if it is too long or has no end."""
    # The file is read in pieces, because one call with the maximum size would allocate that amount of memory before it
    # reads. A short piece is the last one: reading again on a terminal would need a second Ctrl-D.
    pieces = [file.read(_PIECE)]
    while len(pieces[-1]) == _PIECE and len(pieces) <= _MOST_BYTES // _PIECE:
        pieces.append(file.read(_PIECE))
    data = b"".join(pieces)
    if len(data) > _MOST_BYTES:
        raise unreadable(
            f"{name}: the text cannot be read",
            f"the limit for text is {_MOST_BYTES >> 20} MiB",
            "shorten the text",
        )
    return data


def file_text(
    path: Path, unreadable: type[GenaiError], malformed: type[GenaiError], *, may_be_pipe: bool = False
) -> str | None:
    """Return a file's text; None if it does not exist.

    Raises:
        unreadable: the file cannot be read.
        malformed: the file is not UTF-8.
    """
    data = file_bytes(path, unreadable, may_be_pipe=may_be_pipe)
    return None if data is None else decoded(data, path, malformed)


def decoded(data: bytes, path: Path, malformed: type[GenaiError]) -> str:
    """Return the text of a file's contents. Raises `malformed` if the contents are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"{path}: the file is not UTF-8 text", str(error), "save the file as UTF-8") from error


def json_object(
    text: str, source: object, malformed: type[GenaiError], most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """Parse a JSON object from the text of a file or another source.

    Raises `malformed` if the text is not JSON, is not an object, or has more than `most_values` values.
    """
    if (count := text.count(",")) > most_values:
        raise malformed(
            f"{source}: the JSON text has {count} commas", f"at most {most_values} are accepted", "use a smaller file"
        )
    try:
        # The hook runs Python code for each object. Without it, the C parser would block interrupts for seconds.
        value = json.loads(text, object_hook=lambda found: found)
    except RecursionError as error:
        raise malformed(
            f"{source}: the JSON text is nested too deeply",
            "the parser accepts only about a thousand nested lists and objects",
            "reduce the nesting",
        ) from error
    except (ValueError, TypeError) as error:
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise malformed(
                f"{source}: the JSON text contains a number with too many digits",
                f"at most {sys.get_int_max_str_digits()} digits are accepted",
                "shorten the number",
            ) from error
        raise malformed(f"{source}: the text is not JSON", str(error), "correct the text at this position") from error
    if not isinstance(value, dict):
        raise malformed(
            f"{source}: the JSON value is {kind_of(value)}",
            "a JSON object is expected",
            'begin the text with {"name": …',
        )
    return value


def read_text_file(path: Path) -> str:
    """Return the text of a UTF-8 file that the user names. Raises InputError if it is missing or cannot be read."""
    text = file_text(path, InputError, InputError, may_be_pipe=True)
    if text is None:
        raise InputError(f"{path}: the file cannot be read", "the file does not exist", "check the path")
    return text


def whole_file(path: Path) -> bytes:
    """Return all bytes of a file. Raises OSError if it cannot be read, CacheCapacityError if memory is too small."""
    size = path.stat().st_size
    if size > available_memory():
        raise CacheCapacityError(
            f"{path} needs {format_bytes(size)} of memory",
            f"only {format_bytes(available_memory())} of memory is free",
            "use a smaller file",
        )
    return path.read_bytes()
