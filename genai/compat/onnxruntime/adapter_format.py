"""Adapter files of onnxruntime (`.onnx_adapter`): named arrays in a FlatBuffer, read and written.

The file is a table of onnxruntime's schema: format, adapter and model version, and a vector of parameters, each a name,
an element type of ONNX, dimensions, and bytes on an eight-byte boundary. `flatbuffers` writes it. Reading checks every
offset against the file's size, since the library's own accessors would follow whatever a damaged file says.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from ...errors import GenaiError, InputError
from ...onnx.types import DataType
from .values import OrtValue

IDENTIFIER, FORMAT_VERSION = b"TORT", 1
# Numbers of the fields of a file and of a parameter, in the order of the schema.
_FORMAT, _ADAPTER, _MODEL, _PARAMETERS = 0, 1, 2, 3
_NAME, _DIMENSIONS, _TYPE, _DATA = 0, 1, 2, 3
_MOST_PARAMETERS, _MOST_RANK, _ALIGNMENT = 100_000, 16, 8


class AdapterFormat:
    """The contents of an adapter file; as in onnxruntime."""

    def __init__(self, adapter: AdapterFormat | None = None) -> None:
        self._versions: list[int] = [FORMAT_VERSION, 0, 0] if adapter is None else [*adapter._versions]
        self._parameters: dict[str, NDArray[Any]] = {} if adapter is None else dict(adapter._parameters)

    @staticmethod
    def read_adapter(file_path: str | os.PathLike[str]) -> AdapterFormat:
        """Read a file.

        Raises:
            InputError: there is no such file, or it is damaged or no adapter.
        """
        return _read(Path(file_path))

    def export_adapter(self, file_path: str | os.PathLike[str]) -> None:
        """Write a file. Raises InputError: the system refuses it."""
        try:
            Path(file_path).write_bytes(_written(self._versions, self._parameters))
        except OSError as error:
            raise InputError(f"{file_path}: cannot be written", str(error), "choose another place") from error

    def get_format_version(self) -> int:
        """The version of the file's form: 1."""
        return self._versions[_FORMAT]

    def set_adapter_version(self, adapter_version: int) -> None:
        """A number of the caller's, in the range of int32."""
        self._versions[_ADAPTER] = _int32("adapter_version", adapter_version)

    def get_adapter_version(self) -> int:
        """What `set_adapter_version` set; 0 if nothing did."""
        return self._versions[_ADAPTER]

    def set_model_version(self, model_version: int) -> None:
        """A number of the caller's, in the range of int32."""
        self._versions[_MODEL] = _int32("model_version", model_version)

    def get_model_version(self) -> int:
        """What `set_model_version` set; 0 if nothing did."""
        return self._versions[_MODEL]

    def set_parameters(self, params: Mapping[str, OrtValue]) -> None:
        """Set the named tensors."""
        self._parameters = {name: value.numpy() for name, value in params.items()}

    def get_parameters(self) -> dict[str, OrtValue]:
        """The named tensors."""
        return {name: OrtValue(array) for name, array in self._parameters.items()}

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The named tensors as arrays."""
        return self._parameters

    @staticmethod
    def of(arrays: Mapping[str, NDArray[Any]], adapter_version: int = 1, model_version: int = 1) -> AdapterFormat:
        """What `export_adapter` is to write, from arrays."""
        made = AdapterFormat()
        made._versions, made._parameters = [FORMAT_VERSION, adapter_version, model_version], dict(arrays)
        return made


class LoraAdapter:
    """Values for inputs of a model, for `RunOptions.add_active_adapter`; as in onnxruntime."""

    def __init__(self) -> None:
        self.arrays: Mapping[str, NDArray[Any]] | None = None

    def Load(self, file_path: str | os.PathLike[str]) -> None:
        """Read an adapter file. Raises InputError: there is no such file, or it is damaged or no adapter."""
        self.arrays = AdapterFormat.read_adapter(file_path).arrays


def _int32(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
        raise InputError(f"{name} = {value!r}", "a whole number that fits 32 bits is expected", "pass one")
    return int(value)


# --- reading ---------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """An offset or a size leads outside the file."""


class _Buffer:
    """A FlatBuffer of which every access is checked."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self._view, self._size = data, data.data, len(data)
        self._left = len(data)

    def number(self, form: str, place: int) -> int:
        """A number of a `struct` form at a place."""
        if not 0 <= place <= self._size - struct.calcsize(form):
            raise _Damaged(f"offset {place} is outside the file, which has {self._size} bytes")
        found: int = struct.unpack_from(form, self._view, place)[0]
        return found

    def follow(self, place: int) -> int:
        """Where the unsigned offset at a place leads."""
        return place + self.number("<I", place)

    def field(self, table: int, number: int) -> int:
        """Where a field of a table is; 0 = it is not there."""
        directory = table - self.number("<i", table)
        entry = 4 + 2 * number
        if entry + 2 > self.number("<H", directory):
            return 0
        offset = self.number("<H", directory + entry)
        return table + offset if offset else 0

    def integer(self, table: int, number: int, form: str = "<i") -> int:
        """The number in a field; 0 where it is not there."""
        place = self.field(table, number)
        return self.number(form, place) if place else 0

    def vector(self, table: int, number: int, item: int) -> tuple[int, int]:
        """Where the items of a vector begin, and how many there are; (0, 0) where it is not there."""
        field = self.field(table, number)
        if not field:
            return 0, 0
        place = self.follow(field)
        count = self.number("<I", place)
        if place + 4 + count * item > self._size:
            raise _Damaged(f"a vector of {count} items at {place} is longer than the file of {self._size} bytes")
        return place + 4, count

    def bytes(self, place: int, count: int) -> NDArray[np.uint8]:
        """A view of bytes that a vector has; none of them is another's, so all together are no more than the file."""
        self._left -= count
        if self._left < 0:
            raise _Damaged(f"names and numbers overlap: together they have more than the file's {self._size} bytes")
        return self._data[place : place + count]


def _read(path: Path) -> AdapterFormat:
    try:
        # A copy: a map of a file that is cut short later would end the process.
        data = np.fromfile(path, np.uint8) if path.is_file() or path.is_dir() else _missing(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read", str(error), "check the path and its permissions") from error
    if len(data) < 8 or bytes(data[4:8]) != IDENTIFIER:
        raise InputError(
            f"{path}: is no adapter file",
            f"bytes 4 to 8 of one are {IDENTIFIER.decode()}",
            "give an .onnx_adapter file",
        )
    buffer = _Buffer(data)
    try:
        root = buffer.follow(0)
        made = AdapterFormat()
        made._versions = [buffer.integer(root, field) for field in (_FORMAT, _ADAPTER, _MODEL)]
        if made._versions[_FORMAT] != FORMAT_VERSION:
            raise _Damaged(f"its format version is {made._versions[_FORMAT]}, known is {FORMAT_VERSION}")
        first, count = buffer.vector(root, _PARAMETERS, 4)
        if count > _MOST_PARAMETERS:
            raise _Damaged(f"it has {count} parameters, at most {_MOST_PARAMETERS} are read")
        for index in range(count):
            name, array = _parameter(buffer, buffer.follow(first + 4 * index))
            if name in made._parameters:
                raise _Damaged(f"it has two parameters named {name!r}")
            made._parameters[name] = array
    except _Damaged as error:
        raise InputError(f"{path}: is damaged", str(error), "copy or export the adapter again") from error
    return made


def _missing(path: Path) -> NDArray[np.uint8]:
    raise OSError("there is no such file" if not path.exists() else "it is a pipe or a device")


def _parameter(buffer: _Buffer, table: int) -> tuple[str, NDArray[Any]]:
    place, length = buffer.vector(table, _NAME, 1)
    try:
        name = bytes(buffer.bytes(place, length)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Damaged(f"a name is not UTF-8: {error}") from error
    place, rank = buffer.vector(table, _DIMENSIONS, 8)
    if rank > _MOST_RANK:
        raise _Damaged(f"{name!r} has {rank} dimensions, at most {_MOST_RANK} are read")
    shape = [buffer.number("<q", place + 8 * index) for index in range(rank)]
    kind = buffer.integer(table, _TYPE)
    dtype = None
    with suppress(GenaiError, ValueError, KeyError, TypeError):
        dtype = np.dtype(DataType(kind).numpy_dtype)
    if dtype is None or dtype.hasobject:
        raise _Damaged(f"{name!r} has element type {kind}, which is not read here")
    place, size = buffer.vector(table, _DATA, 1)
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise _Damaged(f"{name!r} has shape {shape} of {dtype}, and {size} bytes")
    data = buffer.bytes(place, size)
    array = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    return name, array.view(dtype).reshape(shape)


# --- writing ---------------------------------------------------------------------------------------------------------


def _written(versions: list[int], parameters: Mapping[str, NDArray[Any]]) -> bytes:
    total = sum(array.nbytes + len(name) + 128 for name, array in parameters.items())
    builder = flatbuffers.Builder(total + 1024)
    tables = [_add_parameter(builder, name, array) for name, array in parameters.items()]
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    vector = builder.EndVector()
    builder.StartObject(4)
    for field, version in enumerate(versions):
        builder.PrependInt32Slot(field, version, 0)
    builder.PrependUOffsetTRelativeSlot(_PARAMETERS, vector, 0)
    builder.Finish(builder.EndObject(), file_identifier=IDENTIFIER)
    return bytes(builder.Output())


def _add_parameter(builder: Any, name: str, array: NDArray[Any]) -> int:
    contiguous = np.ascontiguousarray(array)
    builder.StartVector(1, contiguous.nbytes, _ALIGNMENT)
    head = builder.head = builder.Head() - contiguous.nbytes
    builder.Bytes[head : head + contiguous.nbytes] = contiguous.reshape(-1).view(np.uint8).tobytes()
    data = builder.EndVector()
    builder.StartVector(8, array.ndim, 8)
    for size in reversed(array.shape):
        builder.PrependInt64(size)
    dimensions = builder.EndVector()
    text = builder.CreateString(name)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(_NAME, text, 0)
    builder.PrependUOffsetTRelativeSlot(_DIMENSIONS, dimensions, 0)
    builder.PrependInt32Slot(_TYPE, int(DataType.from_numpy(array.dtype)), 0)
    builder.PrependUOffsetTRelativeSlot(_DATA, data, 0)
    table: int = builder.EndObject()
    return table
