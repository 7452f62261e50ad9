"""External tensor data: files beside the model, memory-mapped once each and confined to the model's folder.

They are watched: a part of one that goes away while somebody reads it ends the process.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ExternalDataError
from .storage import ExternalStorage

_DIGITS = re.compile(r"[0-9]+", re.ASCII)
# More of them than any file's size has, and few enough to compute with.
_MOST_DIGITS = 40


class ExternalData:
    """Finds the bytes of external tensors of one model.

    Args:
        model_path: the model's file, or None if the model did not come from one. Data must lie in its folder; where
            the model's file is a link, as in a download cache, also in the folder that the link leads to.
        given: bytes by location, used in place of files.
        folder: where the files lie instead, if not beside the model.
        replaced: names of initializers that the caller replaces afterwards: their files are not needed.

    Attributes:
        files: those that were mapped.
    """

    def __init__(
        self,
        model_path: Path | None,
        contents: Mapping[str, bytes] | None = None,
        *,
        folder: Path | None = None,
        replaced: Collection[str] = (),
    ) -> None:
        self._folder = folder or (None if model_path is None else model_path.parent)
        self._roots = () if self._folder is None else (self._folder.resolve(),)
        if model_path is not None and folder is None:
            self._roots = (*self._roots, model_path.resolve().parent)
        self._contents, self._replaced = dict(contents or {}), set(replaced)
        self.files: list[MappedFile] = []
        self._opened: dict[str | Path, tuple[NDArray[np.uint8], mmap.mmap | None]] = {}  # by location, and by path

    def storage(self, tensor: str, entries: Mapping[str, str], nbytes: int) -> ExternalStorage:
        """The storage of one tensor: a view of exactly its bytes.

        Args:
            tensor: name, for messages.
            entries: its `external_data` entries.
            nbytes: what its shape and type need.

        Raises:
            ExternalDataError: if the file is missing, too short, outside the folder, or the entries contradict.
        """
        location = entries.get("location", "")
        offset = _number(tensor, entries, "offset", 0)
        length = _number(tensor, entries, "length", nbytes)
        if tensor in self._replaced and nbytes <= sys.maxsize:
            self._replaced.discard(tensor)  # a second tensor of the name, in a subgraph, is not the one meant
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
                "the data file is truncated, or is not the one that belongs to this model",
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
                f"tensor {tensor!r} is marked as external but names no file",
                "external data needs a 'location' entry",
                "export the model again",
            )
        if self._folder is None:
            raise ExternalDataError(
                f"tensor {tensor!r} is in the external file {location!r}, and the model has no folder",
                "the model was given as bytes or as a protobuf object",
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
                "put the data beside the model and export it again; do not use a model that you do not trust",
            )
        return path

    def _map(self, tensor: str, location: str, path: Path) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
        if path not in self._opened:
            try:
                # A pipe or device would block or never end, so only regular files are opened.
                is_file = path.is_file()
                if is_file and path.stat().st_size:
                    mapping, watch = map_file(path)
                    self.files.append(watch)
                    self._opened[path] = np.frombuffer(mapping, np.uint8), mapping
                elif is_file:
                    self._opened[path] = np.empty(0, np.uint8), None
            except OSError as error:
                raise _unreadable(tensor, location, error) from error
            if not is_file and path.exists():
                raise ExternalDataError(
                    f"the external data file {location!r} of tensor {tensor!r} is {_kind(path)}",
                    "weights are read from regular files only: a pipe or a device might never end",
                    "put the data into a file of that name beside the model",
                )
            if not is_file:
                raise ExternalDataError(
                    f"the external data file {location!r} of tensor {tensor!r} is missing",
                    f"there is no such file in {str(self._folder)!r}",
                    "copy or download the data file that belongs to the model; its name must not change",
                )
        return self._opened[path]


def _kind(path: Path) -> str:
    """What a path is that is no regular file."""
    kinds = (
        (path.is_dir, "a folder"), (path.is_fifo, "a pipe"), (path.is_socket, "a socket"),
        (path.is_char_device, "a device"), (path.is_block_device, "a device"),
    )  # fmt: skip
    return next((words for holds, words in kinds if holds()), "no regular file")


def _number(tensor: str, entries: Mapping[str, str], key: str, default: int) -> int:
    value = entries.get(key)
    if value is None:
        return default
    if not _DIGITS.fullmatch(value):
        raise ExternalDataError(
            f"tensor {tensor!r} has the external data {key} {value!r:.40}",
            "it must be a whole number of bytes, not negative",
            "export the model again",
        )
    if len(value) > _MOST_DIGITS:
        raise ExternalDataError(
            f"tensor {tensor!r} has an external data {key} of {len(value)} digits",
            "no file has so many bytes",
            "export the model again",
        )
    return int(value)


def _unreadable(tensor: str, location: str, error: Any) -> ExternalDataError:
    return ExternalDataError(
        f"the external data file {location!r:.200} of tensor {tensor!r} cannot be read: {error}",
        "the system refused it",
        "check the file's name and permissions",
    )


class MappedFile:
    """A file in memory, for as long as somebody looks at its bytes.

    Large constants are read from there when they are needed: a copy of an embedding would take gigabytes for the few
    rows of it that a step reads, once per process. So whoever is about to read asks `check` first.
    """

    def __init__(self, path: Path, file: FileIO, mapping: mmap.mmap) -> None:
        self._path, self._number, self._stamp = path, file.fileno(), _stamp(file.fileno())
        self._open = weakref.finalize(mapping, file.close)
        self._open.atexit = False

    def check(self) -> None:
        """Raise if bytes that somebody looks at have changed, or are gone."""
        known = self._open.peek()  # the mapping, which keeps the file open meanwhile
        if known is not None and _stamp(self._number) != self._stamp:
            raise ExternalDataError(
                f"{self._path} was changed while the model is in use",
                "parts of it are read when they are needed, and are not those that were loaded",
                "load the model again; to replace a file, write the new one beside it and rename it",
            )


def map_file(path: Path) -> tuple[mmap.mmap, MappedFile]:
    """A file that is not empty, in memory, and its watch."""
    file = path.open("rb", buffering=0)
    try:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mapping, MappedFile(path, file, mapping)
    except BaseException:
        file.close()
        raise


def check_unchanged(files: Iterable[MappedFile]) -> None:
    """Check them all; see MappedFile.check."""
    for file in files:
        file.check()


def _stamp(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_size, status.st_mtime_ns
