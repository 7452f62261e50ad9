"""External tensor data: files beside the model, memory-mapped once each and confined to the model's folder."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ExternalDataError
from .storage import ExternalStorage

_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)


class ExternalData:
    """Finds the bytes of external tensors of one model.

    Args:
        model_path: the model's file, or None if the model did not come from one. Data must lie in its folder; where
            the model's file is a link, as in a download cache, also in the folder that the link leads to.
        given: bytes by location, used in place of files.
    """

    def __init__(self, model_path: Path | None, given: Mapping[str, bytes] | None = None) -> None:
        self._folder = None if model_path is None else model_path.parent
        self._roots = () if model_path is None else (model_path.parent.resolve(), model_path.resolve().parent)
        self._given = dict(given or {})
        self._by_location: dict[str, tuple[NDArray[np.uint8], mmap.mmap | None]] = {}
        self._by_path: dict[Path, tuple[NDArray[np.uint8], mmap.mmap | None]] = {}

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
        found = self._by_location.get(location)
        if found is None:
            if location in self._given:
                found = np.frombuffer(self._given[location], np.uint8), None
            else:
                found = self._map(tensor, location, self._confined(tensor, location))
            self._by_location[location] = found
        return found

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
        if path not in self._by_path:
            try:
                # A pipe or device would block or never end, so only regular files are opened.
                is_file = path.is_file()
                if is_file:
                    self._by_path[path] = _mapped(path)
            except OSError as error:
                raise _unreadable(tensor, location, error) from error
            if not is_file:
                raise ExternalDataError(
                    f"the external data file {location!r} of tensor {tensor!r} is missing",
                    f"there is no such file in {str(self._folder)!r}",
                    "copy or download the data file that belongs to the model; its name must not change",
                )
        return self._by_path[path]


def _mapped(path: Path) -> tuple[NDArray[np.uint8], mmap.mmap | None]:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8), None
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8), mapping


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
    return int(value)


def _unreadable(tensor: str, location: str, error: Any) -> ExternalDataError:
    return ExternalDataError(
        f"the external data file {location!r:.200} of tensor {tensor!r} cannot be read: {error}",
        "the system refused it",
        "check the file's name and permissions",
    )
