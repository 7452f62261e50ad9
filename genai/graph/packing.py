"""ONNX's packed layout for elements smaller than a byte: little-endian bit order, the last byte padded with zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed_size(num_elements: int, bits: int) -> int:
    """Bytes taken by `num_elements` elements of `bits` bits each."""
    return (num_elements * bits + 7) // 8


def unpack_codes(packed: NDArray[np.uint8], bits: int, num_elements: int) -> NDArray[np.uint8]:
    """The unsigned codes of packed elements, one per byte.

    Args:
        packed: uint8 [packed_size(num_elements, bits)].
        bits: 2, 4 or 6.
        num_elements: how many codes to return.
    """
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes: NDArray[np.uint8] = (packed[:, None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(-1)[:num_elements]
    bit_rows = np.unpackbits(packed, count=num_elements * bits, bitorder="little").reshape(num_elements, bits)
    return np.packbits(bit_rows, axis=1, bitorder="little").reshape(-1)


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of `unpack_codes`; bits above the element's own are dropped."""
    bit_rows = np.unpackbits(codes.reshape(-1, 1), axis=1, count=bits, bitorder="little")
    return np.packbits(bit_rows.reshape(-1), bitorder="little")


def unpack(packed: NDArray[np.uint8], bits: int, num_elements: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Packed bytes as a flat array of an ml_dtypes element type that stores one element per byte."""
    return unpack_codes(packed, bits, num_elements).view(dtype)


def pack(array: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """An array of a sub-byte ml_dtypes element type as packed bytes."""
    return pack_codes(np.ascontiguousarray(array).reshape(-1).view(np.uint8), bits)
