"""Files that users and models bring: whole, or an error that names the file and what is wrong with it."""

from __future__ import annotations

import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from genai.common.memory_limits import available_memory, format_bytes

from ..errors import CacheCapacityError, GenaiError, InputError, kind_of

# No text that anybody means is longer; a device may never end.
_MOST_BYTES, _PIECE = 2**28, 2**20
# JSON is read in time for the values that it lists, which commas part: so many take about a second.
MOST_VALUES = 2**19


def file_bytes(path: Path, unreadable: type[GenaiError], *, may_be_pipe: bool = False) -> bytes | None:
    """What a file holds; None if there is none. Raises `unreadable`: the system refuses it, or it has no end."""
    try:
        if not (may_be_pipe or path.is_file() or path.is_dir()) and path.exists():
            raise unreadable(f"{path}: cannot be read", "it is a pipe or a device", "put a file there")
        with path.open("rb") as file:
            return bounded_bytes(file, path, unreadable)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(f"{path}: cannot be read", str(error), "check the file and its permissions") from error


def bounded_bytes(file: BinaryIO, name: object, unreadable: type[GenaiError]) -> bytes:
    """All that a file or a stream holds. Raises `unreadable`: it has more than anybody means, or no end."""
    # Piece by piece: one call for so much would take the memory of all before it has read any.
    data = b"".join(takewhile(bool, (file.read(_PIECE) for _ in range(_MOST_BYTES // _PIECE + 1))))
    if len(data) > _MOST_BYTES:
        raise unreadable(f"{name}: cannot be read", f"it has more than {_MOST_BYTES >> 20} MiB", "give a smaller text")
    return data


def file_text(
    path: Path, unreadable: type[GenaiError], malformed: type[GenaiError], *, may_be_pipe: bool = False
) -> str | None:
    """The text of a file; None if there is none. Raises also `malformed`: it is not UTF-8."""
    data = file_bytes(path, unreadable, may_be_pipe=may_be_pipe)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"{path}: is not UTF-8 text", str(error), "write the file again as UTF-8") from error


def json_object(
    text: str, source: object, malformed: type[GenaiError], most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """The object that the JSON text of a file, or of another source, is.

    Raises `malformed`: it is not JSON, or not an object, or lists more than so many values.
    """
    if (count := text.count(",")) > most_values:
        raise malformed(f"{source}: has {count} commas", f"at most {most_values} are read", "give a smaller file")
    try:
        # A function of Python's per object: the parser alone would let no interrupt through for seconds.
        value = json.loads(text, object_hook=lambda found: found)
    except RecursionError as error:
        raise malformed(
            f"{source}: is nested too deeply",
            "thousands of lists or objects lie in each other",
            "correct it, or get it again",
        ) from error
    except (ValueError, TypeError) as error:
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise malformed(
                f"{source}: holds a number of too many digits",
                f"at most {sys.get_int_max_str_digits()} are read",
                "correct it, or get it again",
            ) from error
        raise malformed(f"{source}: is not JSON", str(error), "correct it at that place") from error
    if not isinstance(value, dict):
        raise malformed(f"{source}: holds {kind_of(value)}", "an object is expected", 'begin with {"name": …')
    return value


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file that a user names, as it is. Raises InputError: there is none, or another."""
    text = file_text(path, InputError, InputError, may_be_pipe=True)
    if text is None:
        raise InputError(f"{path}: cannot be read", "there is no such file", "check the path")
    return text


def whole_file(path: Path) -> bytes:
    """All of a file. Raises OSError: it cannot be read. CacheCapacityError: there is no memory for it."""
    size = path.stat().st_size
    if size > available_memory():
        raise CacheCapacityError(
            f"{path} has {format_bytes(size)}", f"{format_bytes(available_memory())} are free", "give a smaller file"
        )
    return path.read_bytes()
