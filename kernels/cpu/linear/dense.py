"""Dense weight matrices packed for the kernels: [tile][column][16 rows]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import huge_array

from ...checks import FormatError
from ...weight_layout import TILE_ROWS, BlockMatrix, num_tiles
from .micro_kernels import DENSE_COLUMNS, ITEM_BYTES, DenseType

_PACK_TILES = 64
# Rows that are checked at a time, so that the first rows of most matrices decide.
_CHECKED_ROWS = 256


@dataclass(frozen=True)
class DenseMatrix:
    """A weight matrix [rows, columns] of float32, float16 or bfloat16.

    Attributes:
        rows: outputs N.
        columns: inputs K.
        type: type of the stored weights.
        data: bits of the weights, uint32 or uint16 [tiles, padded columns, 16]; padding is zero.
        narrowed: True if the weights are float32 numbers that are stored as bfloat16 because this is exact.
    """

    rows: int
    columns: int
    type: DenseType
    data: NDArray[Any]
    narrowed: bool = False

    @property
    def tiles(self) -> int:
        """The number of tiles of sixteen rows, including padding."""
        return num_tiles(self.rows)

    @property
    def padded_columns(self) -> int:
        """The number of columns, including padding."""
        return -(-self.columns // DENSE_COLUMNS) * DENSE_COLUMNS

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of a float32 or bfloat16 weight; NaN if any weight is NaN."""
        if self.type == "bfloat16":  # without the sign, floats are ordered as their bits
            bits = int(np.bitwise_and(self.data, 0x7FFF).max(initial=0))
            return float(np.array(bits << 16, np.uint32).view(np.float32))
        values = self.data.view(np.float32)
        return float(np.maximum(values.max(initial=0), -values.min(initial=0)))

    @property
    def records(self) -> int:
        """The number of steps of the micro-kernel per tile."""
        return self.padded_columns // DENSE_COLUMNS

    @property
    def nbytes(self) -> int:
        """The bytes that one matmul reads."""
        return self.data.nbytes


Matrix = BlockMatrix | DenseMatrix


def pack_dense(weight: NDArray[Any], *, transposed: bool = False) -> DenseMatrix:
    """Pack a matrix [columns, rows], the layout of MatMul's second input, or [rows, columns] if `transposed`.

    Float32 weights are stored as bfloat16 if this is exact: checkpoints are often bfloat16, and a matmul of few rows
    takes as long as the weights take to read.
    """
    if weight.ndim != 2:
        raise FormatError(f"weight is {weight.dtype} {list(weight.shape)}, expected a matrix")
    type_, bits = dense_bits(weight)
    rows_first = bits if transposed else bits.T
    rows, columns = rows_first.shape
    narrowed = has_bfloats(weight)
    data = huge_array(dense_shape(rows, columns), np.dtype(np.uint16) if narrowed else bits.dtype)
    fill_dense(data, rows_first)
    return DenseMatrix(rows, columns, "bfloat16" if narrowed else type_, data, narrowed)


def has_bfloats(weight: NDArray[Any]) -> bool:
    """Return True if a matrix is float32, but all of its numbers are bfloat16 numbers."""
    if weight.dtype != np.float32:
        return False
    bits = weight.view(np.uint32)
    parts = (bits[first : first + _CHECKED_ROWS] for first in range(0, len(bits), _CHECKED_ROWS))
    return not any(np.bitwise_and(part, 0xFFFF).any() for part in parts)


def dense_bits(weight: NDArray[Any]) -> tuple[DenseType, NDArray[Any]]:
    """Return the type of dense weights, and their bits as unsigned integers."""
    if weight.dtype.name not in ITEM_BYTES:
        raise FormatError(f"weight is {weight.dtype} {list(weight.shape)}, expected {', '.join(ITEM_BYTES)}")
    type_ = cast(DenseType, weight.dtype.name)
    return type_, weight.view(np.uint32 if ITEM_BYTES[type_] == 4 else np.uint16)


def dense_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Return the packed shape of a matrix [rows, columns]: [tiles, padded columns, 16]."""
    return num_tiles(rows), -(-columns // DENSE_COLUMNS) * DENSE_COLUMNS, TILE_ROWS


def fill_dense(data: NDArray[Any], bits: NDArray[Any]) -> None:
    """Write a matrix [rows, columns] into an array of zeros of its `dense_shape`.

    The bits of a float32 matrix may be written as bfloat16.
    """
    rows, columns = bits.shape
    for tile in range(0, -(-rows // TILE_ROWS), _PACK_TILES):
        part = bits[tile * TILE_ROWS : (tile + _PACK_TILES) * TILE_ROWS]
        if part.itemsize > data.itemsize:
            part = (part >> 16).astype(data.dtype)
        whole = len(part) // TILE_ROWS
        if whole:
            data[tile : tile + whole, :columns] = (
                part[: whole * TILE_ROWS].reshape(whole, TILE_ROWS, columns).transpose(0, 2, 1)
            )
        if rest := len(part) % TILE_ROWS:
            data[tile + whole, :columns, :rest] = part[whole * TILE_ROWS :].T
