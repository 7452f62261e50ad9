"""What is done with a finished tile of float32 sums: terms are added, a function applied, results written."""

from __future__ import annotations

from functools import cache

from ..jit import NativeOp, native_op
from ..memory import float_word, load_first, load_float32, read_float32, store_first, word
from ..rowwise.unary import UNARY
from ..vector import LANES, splat_float32
from .tiling import VECTOR_BYTES, Tiling

# Where the tile goes, and what is added to it (addresses, 0 = nothing): per column, per row, per element.
OUT, OUT_STRIDE, WIDTH, COLUMN_BIAS, ROW_BIAS, ADDEND, ADDEND_STRIDE, P, Q = range(9)


@cache
def finish_op(tiling: Tiling, function: str) -> NativeOp:
    """out = function(sums + biases + addend): (arguments, address of the sums, first row, first column, rows)."""
    apply, vectors = UNARY[function].function, tiling.vectors

    def finish(arguments: int, sums: int, row: int, column: int, rows: int) -> int:
        width, column_bias, row_bias = word(arguments, WIDTH), word(arguments, COLUMN_BIAS), word(arguments, ROW_BIAS)
        stride, addend = word(arguments, OUT_STRIDE), word(arguments, ADDEND)
        p, q = float_word(arguments, P), float_word(arguments, Q)
        out = word(arguments, OUT) + row * stride
        for vector in range(vectors):
            first = column + vector * LANES
            left = min(width - first, LANES)
            if left > 0:
                # Read once for all rows: results are written between them.
                shift = splat_float32(0.0)
                if column_bias != 0:
                    shift = load_first(column_bias + 4 * first, left)
                for m in range(rows):
                    value = load_float32(sums + (m * vectors + vector) * VECTOR_BYTES)
                    if column_bias != 0:
                        value = value + shift
                    if row_bias != 0:
                        value = value + read_float32(row_bias + 4 * (row + m))
                    if addend != 0:
                        there = addend + (row + m) * word(arguments, ADDEND_STRIDE)
                        value = value + load_first(there + 4 * first, left)
                    store_first(out + m * stride + 4 * first, apply(value, p, q), left)
        return 0

    finish.__name__ = f"finish_{function}_{tiling.vectors}"
    return native_op(finish)
