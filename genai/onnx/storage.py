"""Storage of a tensor's elements: inline bytes, typed protobuf fields, strings, a mapped file, or an array.

Every storage returns its elements as a flat array and as ONNX raw bytes. Raw bytes are little-endian; elements smaller
than a byte are packed in little-endian bit order, and the last byte is padded with zeros.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .types import DataType


class Storage(Protocol):
    """The elements of one tensor."""

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        """Return the `count` elements as a flat array."""

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        """Return the elements in ONNX's raw layout, flat uint8."""


@dataclass(frozen=True, eq=False)
class RawStorage:
    """Raw bytes of exactly one tensor, uint8."""

    buffer: NDArray[np.uint8]

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        target = dtype.numpy_dtype
        if dtype.is_sub_byte:
            return unpack_codes(self.buffer, dtype.bits, count).view(target)
        if sys.byteorder == "big":
            return np.frombuffer(self.buffer, target).byteswap()
        return self.buffer.view(target)

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        return self.buffer


@dataclass(frozen=True, eq=False)
class ExternalStorage(RawStorage):
    """Raw bytes in another file, or bytes that the caller passes in place of a file.

    Attributes:
        entries: the model's own `external_data` entries (location, offset, length, checksum).
        mapping: the mapped file that backs `buffer`; None if the caller passed the bytes.
        offset: start of `buffer` in `mapping`, in bytes.
    """

    entries: Mapping[str, str]
    mapping: mmap.mmap | None = None
    offset: int = 0

    def release_pages(self) -> None:
        """Release the pages that lie entirely within this tensor; the next access reads them from the file again."""
        if self.mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.offset + self.buffer.size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self.mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


@dataclass(frozen=True, eq=False)
class FieldStorage:
    """A typed repeated protobuf field (`float_data`, `int32_data`, ...), which is written back unchanged.

    Attributes:
        field: name of the protobuf field.
        values: values in the field's own type. Elements of 16 bits or fewer are stored as codes in int32; several 2- or
            4-bit elements share a byte.
    """

    field: str
    values: NDArray[Any]

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        target = dtype.numpy_dtype
        if dtype is DataType.BOOL:
            return self.values.astype(np.bool_)
        if dtype in (DataType.COMPLEX64, DataType.COMPLEX128) or self.values.dtype.itemsize == target.itemsize:
            return self.values.view(target)
        if dtype.is_sub_byte and dtype.bits != 6:
            return unpack_codes(self.values.astype(np.uint8), dtype.bits, count).view(target)
        codes: NDArray[Any] = self.values.astype(np.dtype(f"u{target.itemsize}"))
        if dtype.bits == 6:
            codes &= np.uint8(0x3F)
        return codes.view(target)

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        return raw_of_elements(self.elements(dtype, count), dtype)


@dataclass(frozen=True, eq=False)
class ArrayStorage:
    """A NumPy array in the tensor's own element type."""

    array: NDArray[Any]

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        return self.array.reshape(-1)

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        return raw_of_elements(self.array, dtype)


@dataclass(eq=False)
class ComputedStorage:
    """Elements that are computed when they are read, and stored only as long as an array of them is in use.

    Attributes:
        make: function that returns the elements, in the tensor's own element type.
    """

    make: Callable[[], NDArray[Any]]
    _made: weakref.ref[NDArray[Any]] | None = None

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        array = None if self._made is None else self._made()
        if array is None:
            array = np.ascontiguousarray(self.make()).reshape(-1).copy()  # an array that owns its memory
            self._made = weakref.ref(array)
        return array.view()

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        return raw_of_elements(self.elements(dtype, count), dtype)


@dataclass(frozen=True, eq=False)
class StringStorage:
    """Strings, as bytes."""

    strings: Sequence[bytes] = field(default_factory=tuple)

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        result = np.empty(len(self.strings), dtype=object)
        result[:] = [_text_if_utf8(value) for value in self.strings]
        return result

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        raise TypeError("string tensors have no raw layout")


def _text_if_utf8(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def raw_of_elements(array: NDArray[Any], dtype: DataType) -> NDArray[np.uint8]:
    """Return the elements of an array in ONNX's raw layout, flat uint8; the array has the NumPy type of `dtype`."""
    if dtype.is_sub_byte:
        return pack_codes(np.ascontiguousarray(array).reshape(-1).view(np.uint8), dtype.bits)
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat.byteswap() if sys.byteorder == "big" else flat).view(np.uint8)


def packed_size(num_elements: int, bits: int) -> int:
    """Return the size in bytes of `num_elements` elements of `bits` bits each."""
    return (num_elements * bits + 7) // 8


def unpack_codes(packed: NDArray[np.uint8], bits: int, num_elements: int) -> NDArray[np.uint8]:
    """Unpack elements to unsigned codes, one per byte.

    Args:
        packed: uint8 [packed_size(num_elements, bits)].
        bits: 2, 4 or 6.
        num_elements: number of codes to return.
    """
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes: NDArray[np.uint8] = (packed[:, None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(-1)[:num_elements]
    bit_rows = np.unpackbits(packed, count=num_elements * bits, bitorder="little").reshape(num_elements, bits)
    return np.packbits(bit_rows, axis=1, bitorder="little").reshape(-1)


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes, the inverse of `unpack_codes`; bits above the element's width are discarded."""
    bit_rows = np.unpackbits(codes.reshape(-1, 1), axis=1, count=bits, bitorder="little")
    return np.packbits(bit_rows.reshape(-1), bitorder="little")
