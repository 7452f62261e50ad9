"""Adapter files of onnxruntime (`.onnx_adapter`), which contain named arrays in a FlatBuffer.

The file is a table in onnxruntime's schema: format version, adapter version, model version, and a vector of parameters.
A parameter has a name, an ONNX element type, dimensions, and bytes aligned to eight bytes. `flatbuffers` writes the
file. The reader checks every offset against the file's size, because the library's own accessors would follow any
offset in a damaged file.
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

from ..common.atomic_files import write_whole
from ..common.reading import is_addressable
from ..errors import GenaiError, InputError
from ..onnx.types import DataType

IDENTIFIER, FORMAT_VERSION = b"TORT", 1
# Field numbers of a file and of a parameter, in the order of the schema.
_FORMAT, _ADAPTER, _MODEL, _PARAMETERS = 0, 1, 2, 3
_NAME, _DIMENSIONS, _TYPE, _DATA = 0, 1, 2, 3
_MOST_PARAMETERS, _MOST_RANK, _ALIGNMENT = 100_000, 16, 8


@dataclass
class AdapterFile:
    """The content of an adapter file.

    Attributes:
        arrays: arrays by name.
        adapter_version, model_version: versions set by the writer, int32.
        format_version: version of the file format.
    """

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    adapter_version: int = 0
    model_version: int = 0
    format_version: int = FORMAT_VERSION


def read_adapter_file(path: Path) -> AdapterFile:
    """Read an adapter file.

    Raises:
        InputError: the file is missing, damaged, or not an adapter file.
    """
    try:
        # Read a copy, because access to a mapped file that is truncated later would crash the process.
        data = np.fromfile(path, np.uint8) if path.is_file() or path.is_dir() else _missing(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: the file cannot be read", str(error), "check the path and its permissions"
        ) from error
    if len(data) < 8 or bytes(data[4:8]) != IDENTIFIER:
        raise InputError(
            f"{path}: not an adapter file",
            f"bytes 4 to 8 of an adapter file are {IDENTIFIER.decode()}",
            "pass an .onnx_adapter file",
        )
    try:
        return _read(_Buffer(data))
    except _Damaged as error:
        raise InputError(f"{path}: the file is damaged", str(error), "copy or export the adapter again") from error


def write_adapter_file(path: Path, file: AdapterFile) -> None:
    """Write an adapter file. Raises InputError if writing fails; an existing file is then unchanged."""
    try:
        write_whole(path, _written(file))
    except OSError as error:
        raise InputError(f"{path}: the file cannot be written", str(error), "choose another path") from error


# --- reading ---------------------------------------------------------------------------------------------------------


class _Damaged(Exception):
    """An offset or a size that points outside the file."""


class _Buffer:
    """A FlatBuffer with bounds checks on every access."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data, self._view, self._size = data, data.data, len(data)
        self._left = len(data)

    def number(self, struct_format: str, offset: int) -> int:
        """Read a number with a `struct` format at an offset."""
        if not 0 <= offset <= self._size - struct.calcsize(struct_format):
            raise _Damaged(f"offset {offset} is outside the file, which has {self._size} bytes")
        number: int = struct.unpack_from(struct_format, self._view, offset)[0]
        return number

    def follow(self, offset: int) -> int:
        """Return the target of the unsigned offset stored at `offset`."""
        return offset + self.number("<I", offset)

    def field(self, table: int, number: int) -> int:
        """Return the position of a field in a table; 0 if the field is absent."""
        directory = table - self.number("<i", table)
        entry = 4 + 2 * number
        if entry + 2 > self.number("<H", directory):
            return 0
        offset = self.number("<H", directory + entry)
        return table + offset if offset else 0

    def integer(self, table: int, number: int, struct_format: str = "<i") -> int:
        """Read the number in a field; 0 if the field is absent."""
        offset = self.field(table, number)
        return self.number(struct_format, offset) if offset else 0

    def vector(self, table: int, number: int, item: int) -> tuple[int, int]:
        """Return the position of a vector's first item, and the number of items; (0, 0) if the field is absent."""
        field = self.field(table, number)
        if not field:
            return 0, 0
        offset = self.follow(field)
        count = self.number("<I", offset)
        if offset + 4 + count * item > self._size:
            raise _Damaged(f"a vector of {count} items at {offset} is longer than the file of {self._size} bytes")
        return offset + 4, count

    def bytes(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Return a view of a vector's bytes. Vectors must not overlap: their total size must not exceed the file's."""
        self._left -= count
        if self._left < 0:
            raise _Damaged(f"names and arrays overlap: their total size exceeds the file's {self._size} bytes")
        return self._data[offset : offset + count]


def _read(buffer: _Buffer) -> AdapterFile:
    root = buffer.follow(0)
    adapter, model, version = (buffer.integer(root, number) for number in (_ADAPTER, _MODEL, _FORMAT))
    if version != FORMAT_VERSION:
        raise _Damaged(f"the format version is {version}, but only version {FORMAT_VERSION} is supported")
    first, count = buffer.vector(root, _PARAMETERS, 4)
    if count > _MOST_PARAMETERS:
        raise _Damaged(f"the file has {count} parameters, but the limit is {_MOST_PARAMETERS}")
    arrays: dict[str, NDArray[Any]] = {}
    for index in range(count):
        name, array = _parameter(buffer, buffer.follow(first + 4 * index))
        if name in arrays:
            raise _Damaged(f"the file has two parameters named {name!r}")
        arrays[name] = array
    return AdapterFile(arrays, adapter, model)


def _missing(path: Path) -> NDArray[np.uint8]:
    raise OSError("there is no such file" if not path.exists() else "the path is a pipe or a device")


def _parameter(buffer: _Buffer, table: int) -> tuple[str, NDArray[Any]]:
    offset, length = buffer.vector(table, _NAME, 1)
    try:
        name = bytes(buffer.bytes(offset, length)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Damaged(f"a name is not UTF-8: {error}") from error
    offset, rank = buffer.vector(table, _DIMENSIONS, 8)
    if rank > _MOST_RANK:
        raise _Damaged(f"{name!r} has {rank} dimensions, but the limit is {_MOST_RANK}")
    shape = [buffer.number("<q", offset + 8 * index) for index in range(rank)]
    kind = buffer.integer(table, _TYPE)
    dtype = None
    with suppress(GenaiError, ValueError, KeyError, TypeError):
        dtype = np.dtype(DataType(kind).numpy_dtype)
    if dtype is None or dtype.hasobject:
        raise _Damaged(f"{name!r} has element type {kind}, which is not supported")
    offset, size = buffer.vector(table, _DATA, 1)
    if not is_addressable(shape, dtype.itemsize) or math.prod(shape) * dtype.itemsize != size:
        raise _Damaged(f"{name!r} has {size} bytes, which does not match shape {shape} of {dtype}")
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
