"""Dense weight matrices laid out for the kernels: [tile][column][16 rows]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...block_matrix import num_tiles
from ...formats import TILE_ROWS, FormatError
from ..large import huge_array
from .float_kernel import DENSE_COLUMNS, ITEM_BYTES, DenseType

_PACK_TILES = 64


@dataclass(frozen=True)
class DenseMatrix:
    """A weight matrix [rows, columns] of float32, float16 or bfloat16.

    Attributes:
        rows, columns: outputs N, inputs K.
        data: its bits, uint32 or uint16 [tiles, padded columns, 16]; what is filled up is zero.
    """

    rows: int
    columns: int
    type: DenseType
    data: NDArray[Any]

    @property
    def tiles(self) -> int:
        """Groups of sixteen rows, those that only fill the matrix up included."""
        return num_tiles(self.rows)

    @property
    def padded_columns(self) -> int:
        """Columns, those that only fill the matrix up included."""
        return -(-self.columns // DENSE_COLUMNS) * DENSE_COLUMNS

    @property
    def records(self) -> int:
        """Steps of the micro-kernel per tile."""
        return self.padded_columns // DENSE_COLUMNS

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.data.nbytes


def pack_dense(weight: NDArray[Any], *, transposed: bool = False) -> DenseMatrix:
    """Pack [columns, rows], as MatMul has its second input, or [rows, columns] if `transposed`.

    Raises:
        FormatError: not a matrix of float32, float16 or bfloat16.
    """
    if weight.ndim != 2 or weight.dtype.name not in ITEM_BYTES:
        raise FormatError(
            f"weight is {weight.dtype} {list(weight.shape)}, expected a matrix of {', '.join(ITEM_BYTES)}"
        )
    type_ = cast(DenseType, weight.dtype.name)
    bits = weight.view(np.uint32 if ITEM_BYTES[type_] == 4 else np.uint16)
    rows_first = bits if transposed else bits.T
    rows, columns = rows_first.shape
    padded = -(-columns // DENSE_COLUMNS) * DENSE_COLUMNS
    data = huge_array((num_tiles(rows), padded, TILE_ROWS), bits.dtype)
    for tile in range(0, -(-rows // TILE_ROWS), _PACK_TILES):
        part = rows_first[tile * TILE_ROWS : (tile + _PACK_TILES) * TILE_ROWS]
        whole = len(part) // TILE_ROWS
        if whole:
            data[tile : tile + whole, :columns] = (
                part[: whole * TILE_ROWS].reshape(whole, TILE_ROWS, columns).transpose(0, 2, 1)
            )
        if rest := len(part) % TILE_ROWS:
            data[tile + whole, :columns, :rest] = part[whole * TILE_ROWS :].T
    return DenseMatrix(rows, columns, type_, data)
