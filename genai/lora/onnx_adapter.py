"""Adapter files of onnxruntime (`.onnx_adapter`): named arrays in a FlatBuffer, read and written.

The file is a table of onnxruntime's schema: format, adapter and model version, and a vector of parameters, each a name,
an element type of ONNX, dimensions, and bytes on an eight-byte boundary. `flatbuffers` writes it. Reading checks every
offset against the file's size, since the library's own accessors would follow whatever a damaged file says.
"""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from ..errors import GenaiError, InputError
from ..onnx.types import DataType

IDENTIFIER, FORMAT_VERSION = b"TORT", 1
# Numbers of the fields of a file and of a parameter, in the order of the schema.
_FORMAT, _ADAPTER, _MODEL, _PARAMETERS = 0, 1, 2, 3
_NAME, _DIMENSIONS, _TYPE, _DATA = 0, 1, 2, 3
_MOST_PARAMETERS, _MOST_RANK, _ALIGNMENT = 100_000, 16, 8


@dataclass
class AdapterFile:
    """The contents of an adapter file.

    Attributes:
        arrays: by name.
        adapter_version, model_version: numbers of the caller's, in the range of int32.
        format_version: of the file's form.
    """

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    adapter_version: int = 0
    model_version: int = 0
    format_version: int = FORMAT_VERSION


def read_adapter_file(path: Path) -> AdapterFile:
    """Read a file.

    Raises:
        InputError: there is no such file, or it is damaged or no adapter.
    """
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
    try:
        return _read(_Buffer(data))
    except _Damaged as error:
        raise InputError(f"{path}: is damaged", str(error), "copy or export the adapter again") from error


def write_adapter_file(path: Path, file: AdapterFile) -> None:
    """Write a file. Raises InputError: the system refuses it."""
    try:
        path.write_bytes(_written(file))
    except OSError as error:
        raise InputError(f"{path}: cannot be written", str(error), "choose another place") from error


# --- reading ---------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """An offset or a size leads outside the file."""


class _Buffer:
    """A FlatBuffer of which every access is checked."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self._view, self._size = data, data.data, len(data)
        self._left = len(data)

    def number(self, struct_format: str, offset: int) -> int:
        """A number of a `struct` form at a place."""
        if not 0 <= offset <= self._size - struct.calcsize(struct_format):
            raise _Damaged(f"offset {offset} is outside the file, which has {self._size} bytes")
        number: int = struct.unpack_from(struct_format, self._view, offset)[0]
        return number

    def follow(self, offset: int) -> int:
        """Where the unsigned offset at a place leads."""
        return offset + self.number("<I", offset)

    def field(self, table: int, number: int) -> int:
        """Where a field of a table is; 0 = it is not there."""
        directory = table - self.number("<i", table)
        entry = 4 + 2 * number
        if entry + 2 > self.number("<H", directory):
            return 0
        offset = self.number("<H", directory + entry)
        return table + offset if offset else 0

    def integer(self, table: int, number: int, struct_format: str = "<i") -> int:
        """The number in a field; 0 where it is not there."""
        offset = self.field(table, number)
        return self.number(struct_format, offset) if offset else 0

    def vector(self, table: int, number: int, item: int) -> tuple[int, int]:
        """Where the items of a vector begin, and how many there are; (0, 0) where it is not there."""
        field = self.field(table, number)
        if not field:
            return 0, 0
        offset = self.follow(field)
        count = self.number("<I", offset)
        if offset + 4 + count * item > self._size:
            raise _Damaged(f"a vector of {count} items at {offset} is longer than the file of {self._size} bytes")
        return offset + 4, count

    def bytes(self, offset: int, count: int) -> NDArray[np.uint8]:
        """A view of bytes that a vector has; none of them is another's, so all together are no more than the file."""
        self._left -= count
        if self._left < 0:
            raise _Damaged(f"names and numbers overlap: together they have more than the file's {self._size} bytes")
        return self._data[offset : offset + count]


def _read(buffer: _Buffer) -> AdapterFile:
    root = buffer.follow(0)
    adapter, model, version = (buffer.integer(root, number) for number in (_ADAPTER, _MODEL, _FORMAT))
    if version != FORMAT_VERSION:
        raise _Damaged(f"its format version is {version}, known is {FORMAT_VERSION}")
    first, count = buffer.vector(root, _PARAMETERS, 4)
    if count > _MOST_PARAMETERS:
        raise _Damaged(f"it has {count} parameters, at most {_MOST_PARAMETERS} are read")
    arrays: dict[str, NDArray[Any]] = {}
    for index in range(count):
        name, array = _parameter(buffer, buffer.follow(first + 4 * index))
        if name in arrays:
            raise _Damaged(f"it has two parameters named {name!r}")
        arrays[name] = array
    return AdapterFile(arrays, adapter, model)


def _missing(path: Path) -> NDArray[np.uint8]:
    raise OSError("there is no such file" if not path.exists() else "it is a pipe or a device")


def _parameter(buffer: _Buffer, table: int) -> tuple[str, NDArray[Any]]:
    offset, length = buffer.vector(table, _NAME, 1)
    try:
        name = bytes(buffer.bytes(offset, length)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Damaged(f"a name is not UTF-8: {error}") from error
    offset, rank = buffer.vector(table, _DIMENSIONS, 8)
    if rank > _MOST_RANK:
        raise _Damaged(f"{name!r} has {rank} dimensions, at most {_MOST_RANK} are read")
    shape = [buffer.number("<q", offset + 8 * index) for index in range(rank)]
    kind = buffer.integer(table, _TYPE)
    dtype = None
    with suppress(GenaiError, ValueError, KeyError, TypeError):
        dtype = np.dtype(DataType(kind).numpy_dtype)
    if dtype is None or dtype.hasobject:
        raise _Damaged(f"{name!r} has element type {kind}, which is not read here")
    offset, size = buffer.vector(table, _DATA, 1)
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise _Damaged(f"{name!r} has shape {shape} of {dtype}, and {size} bytes")
    data = buffer.bytes(offset, size)
    array = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    return name, array.view(dtype).reshape(shape)


# --- writing ---------------------------------------------------------------------------------------------------------


def _written(file: AdapterFile) -> bytes:
    total = sum(array.nbytes + len(name) + 128 for name, array in file.arrays.items())
    builder = flatbuffers.Builder(total + 1024)
    tables = [_add_parameter(builder, name, array) for name, array in file.arrays.items()]
    builder.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    vector = builder.EndVector()
    builder.StartObject(4)
    versions = ((_FORMAT, file.format_version), (_ADAPTER, file.adapter_version), (_MODEL, file.model_version))
    for number, version in versions:
        builder.PrependInt32Slot(number, version, 0)
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
