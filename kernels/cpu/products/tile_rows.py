"""Activations as bfloat16 tiles: sixteen rows of 32 columns, in the order of columns that `tile_weights` has.

Every row is divided by a power of two, that of its largest number, so that tiles never overflow; products give it back.
This is exact: rounding to bfloat16 (nearest, ties to even) is all that happens to a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ..jit import native_op
from ..lazy import inline, intrinsic, types
from ..memory import load_first, read_float32, read_int32, store_float32, word, write_float32, write_int32
from ..tape.context import Word
from ..tape.program import Call, Items, Rows
from ..tiles import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS
from ..tiles import _bfloats as bfloats
from ..vector import FLOAT32, LANES, maximum, reduce_add, reduce_max, splat_float32
from .tile_weights import ROWS_SCALE

# Rows come in pairs of tiles.
PAIR_ROWS = 2 * TILE_ROWS
TILE_COLUMNS = 2 * LANES
_EXPONENT = 0x7F800000
# Rows of smaller numbers are divided by this: ROWS_SCALE / 2 ** -75 is the largest power of two in float32.
_SMALLEST_POWER = np.float32(2.0**-75)


@dataclass(frozen=True)
class RowTiles:
    """Tiles in memory: [tiles of rows, rounded up to pairs][columns / 32][16 rows][32], then a float32 per row.

    Attributes:
        address: of the first tile. powers: of what results of the rows are multiplied by: NaN for rows with infinities
            or NaNs.
        columns: of a row, a multiple of 64.
        counted: how many rows there are. first: the row of the step that the first one is.
    """

    address: int
    powers: int
    columns: int
    counted: Word
    first: Word
    held: Any


def row_tiles_size(columns: int, max_rows: int) -> int:
    """Bytes of memory for so many rows."""
    return _padded(max_rows) * (2 * columns + 4)


def row_tiles_in(memory: NDArray[np.uint8], columns: int) -> RowTiles:
    """Tiles of the step's MANY rows, in this memory, which begins on a cache line and holds whole pairs of tiles."""
    rows = memory.size // (2 * columns + 4) // PAIR_ROWS * PAIR_ROWS
    address = memory.ctypes.data
    return RowTiles(address, address + rows * 2 * columns, columns, Word.MANY, Word.FEW, memory)


def _padded(rows: int) -> int:
    return -(-rows // PAIR_ROWS) * PAIR_ROWS


@intrinsic
def _store_columns(typing_context: Any, address: Any, first: Any, second: Any) -> Any:
    """32 columns of a row: bfloat16, each four in the order 0, 2, 1, 3."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = bfloats(builder, args[1], args[2])
        order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(2 * LANES)]
        mixed = builder.shuffle_vector(bits, bits, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order))
        builder.store(mixed, builder.inttoptr(args[0], ir.PointerType()), align=64)
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32, FLOAT32), lower


(X, X_STRIDE, WIDTH, ROWS_WORD, FIRST_WORD, OUT, COLUMNS, POWERS) = range(8)


@inline
def _write_power(x: int, width: int, power: int) -> Any:
    """Write a row's power of two; returns what its numbers are multiplied by."""
    largest, poison = splat_float32(0.0), splat_float32(0.0)
    for first in range(0, width, LANES):
        values = load_first(x + 4 * first, width - first)
        largest = maximum(largest, maximum(values, splat_float32(0.0) - values))
        poison = poison + values * 0.0  # NaN where a value is infinite or NaN
    write_float32(power, reduce_max(largest))
    write_int32(power, read_int32(power) & _EXPONENT)
    exponent = max(read_float32(power), _SMALLEST_POWER)
    write_float32(power, exponent + reduce_add(poison))
    return np.float32(ROWS_SCALE) / exponent


@inline
def _write_row(x: int, width: int, out: int, columns: int, scale: float) -> None:
    for first in range(0, columns, TILE_COLUMNS):
        low = load_first(x + 4 * first, width - first) * scale
        high = load_first(x + 4 * first + 4 * LANES, width - first - LANES) * scale
        _store_columns(out + first // TILE_COLUMNS * TILE_BYTES, low, high)


@inline
def _clear_row(out: int, columns: int) -> None:
    for first in range(0, columns, TILE_COLUMNS):
        store_float32(out + first // TILE_COLUMNS * TILE_BYTES, splat_float32(0.0))


@native_op
def fill_row_tiles(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Items [begin, end): tiles of sixteen rows; the last one fills its pair up with rows of zeros."""
    rows, first = word(context, word(arguments, ROWS_WORD)), word(context, word(arguments, FIRST_WORD))
    width, columns = word(arguments, WIDTH), word(arguments, COLUMNS)
    last = -(-rows // TILE_ROWS)
    for tile in range(begin, end):
        for row in range(tile * TILE_ROWS, (tile + 1 + (tile + 1 == last)) * TILE_ROWS):
            out = word(arguments, OUT) + (row // TILE_ROWS) * (columns // TILE_COLUMNS) * TILE_BYTES
            out += row % TILE_ROWS * TILE_ROW_BYTES
            if row < rows:
                x = word(arguments, X) + (first + row) * word(arguments, X_STRIDE)
                scale = _write_power(x, width, word(arguments, POWERS) + 4 * row)
                _write_row(x, width, out, columns, scale)
            elif row < -(-rows // PAIR_ROWS) * PAIR_ROWS:
                _clear_row(out, columns)
    return 0


def row_tiles_call(x: Rows, out: RowTiles) -> Call:
    """Make the tiles of the step's rows [FEW, TOKENS) of x.

    Raises:
        ValueError: x is wider than the tiles, or not as long as the step.
    """
    if x.width > out.columns or x.counted != Word.TOKENS:
        raise ValueError(f"x has {x.width} columns, rows {x.counted.name}: expected {out.columns} at most, and TOKENS")
    arguments = (x.address, x.stride, x.width, out.counted, out.first, out.address, out.columns, out.powers)
    items = Items(out.counted, 1, TILE_ROWS)
    return Call(fill_row_tiles, arguments, items, held=(x.held, out.held))
