"""External tensor data: files beside the model. They are memory-mapped, once each, and confined to the model's folder.

Mapped files are checked for changes, because reading a truncated part of a file kills the process.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..common.reading import pointer_error_of
from ..errors import ExternalDataError
from .storage import ExternalStorage

_DIGITS = re.compile(r"[0-9]+", re.ASCII)
Opened: TypeAlias = Callable[[Path, BinaryIO], object]
"""A function that is called with the path of a file and the open file."""

# More digits than any file size has, but few enough for a fast conversion.
_MOST_DIGITS = 40


class ExternalData:
    """Locates the bytes of one model's external tensors.

    Args:
        model_path: the model's file, or None if the model was not read from a file. Data must be in its folder. If the
            file is a symbolic link, as in a download cache, data may also be in the folder of the link's target.
        contents: bytes by location, used instead of files.
        folder: the folder with the data files, if it is not the model's folder.
        replaced: names of initializers that the caller replaces later, so their files are not needed.
        opened: called for each file that is opened, with its location in the folder.

    Attributes:
        files: the mapped files.
    """

    def __init__(
        self,
        model_path: Path | None,
        contents: Mapping[str, bytes] | None = None,
        *,
        folder: Path | None = None,
        replaced: Collection[str] = (),
        opened: Opened | None = None,
    ) -> None:
        self._folder = folder or (None if model_path is None else model_path.parent)
        self._roots = () if self._folder is None else (self._folder.resolve(),)
        if model_path is not None and folder is None:
            self._roots = (*self._roots, model_path.resolve().parent)
        self._contents, self._replaced, self._call = dict(contents or {}), set(replaced), opened
        self.files: list[MappedFile] = []
        self._opened: dict[str | Path, tuple[NDArray[np.uint8], mmap.mmap | None]] = {}  # keys: locations and paths

    def storage(self, tensor: str, entries: Mapping[str, str], nbytes: int) -> ExternalStorage:
        """Return the storage of one tensor: a view of exactly the tensor's bytes.

        Args:
            tensor: name of the tensor, for messages.
            entries: the tensor's `external_data` entries.
            nbytes: size in bytes that the tensor's shape and type require.

        Raises:
            ExternalDataError: the file is missing, too short or outside the folder, or an entry is invalid.
        """
        location = entries.get("location", "")
        offset = _number(tensor, entries, "offset", 0)
        length = _number(tensor, entries, "length", nbytes)
        if tensor in self._replaced and nbytes <= sys.maxsize:
            self._replaced.discard(tensor)  # another tensor of this name, in a subgraph, is not replaced
            return ExternalStorage(np.broadcast_to(np.zeros(1, np.uint8), nbytes), dict(entries))
        if length != nbytes:
            raise ExternalDataError(
                f"tensor {tensor!r} stores {length} bytes in {location!r}, but its shape and type need {nbytes}",
                "the length of external data must match the tensor",
                "export the model again",
            )
        buffer, mapping = self._open(tensor, location)
        if offset + length > buffer.size:
            raise ExternalDataError(
                f"tensor {tensor!r} needs bytes {offset} to {offset + length} of {location!r}, which has {buffer.size}",
                "the data file is truncated, or does not belong to this model",
                "download or export the model again; both files must come from the same export",
            )
        return ExternalStorage(buffer[offset : offset + length], dict(entries), mapping, offset)

    def _open(self, tensor: str, location: str) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
        if location not in self._opened:
            if location in self._contents:
                self._opened[location] = np.frombuffer(self._contents[location], np.uint8), None
            else:
                self._opened[location] = self._map(tensor, location, self._confined(tensor, location))
        return self._opened[location]

    def _confined(self, tensor: str, location: str) -> Path:
        if not location:
            raise ExternalDataError(
                f"tensor {tensor!r} is marked as external but does not name a file",
                "external data needs a 'location' entry",
                "export the model again",
            )
        if self._folder is None:
            raise ExternalDataError(
                f"tensor {tensor!r} is in the external file {location!r}, but the model has no folder",
                "the model was passed as bytes or as a protobuf object",
                "read the model from its path, or pass external_data={location: bytes}",
            )
        try:
            path = (self._folder / location).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise _unreadable(tensor, location, error) from error
        absolute = location.startswith(("/", "\\")) or Path(location).is_absolute()
        if absolute or not any(path.is_relative_to(root) for root in self._roots):
            raise ExternalDataError(
                f"tensor {tensor!r} points to {location!r}, outside the model folder {str(self._folder)!r}",
                "a model may only read files in its own folder",
                "export the model again with the data beside it; do not use a model that you do not trust",
            )
        return path

    def _noted(self, location: str) -> Callable[[BinaryIO], object] | None:
        call, folder = self._call, self._folder
        return None if call is None or folder is None else lambda file: call(folder / location, file)

    def _map(self, tensor: str, location: str, path: Path) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
        if path not in self._opened:
            try:
                # Only regular files are opened, because a pipe or device might block when it is opened, or never end.
                is_file = path.is_file()
                if is_file and path.stat().st_size:
                    mapping, watch = map_file(path, self._noted(location))
                    # A pointer may be larger than the data, so that no tensor would lie outside of it.
                    if pointer := pointer_error_of(mapping[:64], path, ExternalDataError):
                        raise pointer
                    self.files.append(watch)
                    self._opened[path] = np.frombuffer(mapping, np.uint8), mapping
                elif is_file:
                    self._opened[path] = np.empty(0, np.uint8), None
            except OSError as error:
                raise _unreadable(tensor, location, error) from error
            if not is_file and path.exists():
                raise ExternalDataError(
                    f"the external data file {location!r} of tensor {tensor!r} is {_kind(path)}",
                    "weights are read from regular files only, because reading a pipe or a device might never end",
                    "put the data in a regular file of that name beside the model",
                )
            if not is_file:
                raise ExternalDataError(
                    f"the external data file {location!r} of tensor {tensor!r} is missing",
                    f"there is no such file in {str(self._folder)!r}",
                    "copy or download the data file that belongs to the model; its name must not change",
                )
        return self._opened[path]


def _kind(path: Path) -> str:
    """Describe a path that is not a regular file."""
    kinds = (
        (path.is_dir, "a folder"), (path.is_fifo, "a pipe"), (path.is_socket, "a socket"),
        (path.is_char_device, "a device"), (path.is_block_device, "a device"),
    )  # fmt: skip
    return next((words for holds, words in kinds if holds()), "not a regular file")


def _number(tensor: str, entries: Mapping[str, str], key: str, default: int) -> int:
    value = entries.get(key)
    if value is None:
        return default
    if not _DIGITS.fullmatch(value):
        raise ExternalDataError(
            f"tensor {tensor!r} has the external data {key} {value!r:.40}",
            "the value must be a whole number of bytes, and not negative",
            "export the model again",
        )
    if len(value) > _MOST_DIGITS:
        raise ExternalDataError(
            f"tensor {tensor!r} has an external data {key} of {len(value)} digits",
            "no file is that large",
            "export the model again",
        )
    return int(value)


def _unreadable(tensor: str, location: str, error: Any) -> ExternalDataError:
    return ExternalDataError(
        f"the external data file {location!r:.200} of tensor {tensor!r} cannot be read: {error}",
        "the operating system refused access",
        "check the file's name and permissions",
    )


class MappedFile:
    """A mapped file, checked for changes while its bytes are in use.

    Large constants are read from the mapping when they are needed: to copy an embedding table for the few rows that a
    step reads would take gigabytes per process. Therefore, readers call `check` before they read.
    """

    def __init__(self, path: Path, file: FileIO, mapping: mmap.mmap) -> None:
        self._path, self._number, self._stamp = path, file.fileno(), _stamp(file.fileno())
        self._open = weakref.finalize(mapping, file.close)
        self._open.atexit = False

    def check(self) -> None:
        """Raise ExternalDataError if bytes that are in use were changed or removed."""
        known = self._open.peek()  # holds the mapping, so that the file stays open during the check
        if known is not None and _stamp(self._number) != self._stamp:
            raise ExternalDataError(
                f"{self._path} was changed while the model was in use",
                "parts of the file are read on demand, and no longer match the parts already loaded",
                "load the model again; to replace a file, write the new one beside it and rename it",
            )


def map_file(path: Path, opened: Callable[[BinaryIO], object] | None = None) -> tuple[mmap.mmap, MappedFile]:
    """Map a non-empty file; return the mapping and the object that checks the file for changes."""
    file = path.open("rb", buffering=0)
    try:
        if opened is not None:
            opened(cast(BinaryIO, file))
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mapping, MappedFile(path, file, mapping)
    except BaseException:
        file.close()
        raise


def check_unchanged(files: Iterable[MappedFile]) -> None:
    """Check all files for changes; see `MappedFile.check`."""
    for file in files:
        file.check()


def _stamp(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_size, status.st_mtime_ns
