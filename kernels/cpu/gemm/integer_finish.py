"""What is done with a finished tile of integer sums: zero points are made up for, and the sums stay, or become float32
numbers, or are rounded to 8 bits again.

With operands moved to signed a and unsigned b, whose zero points are p and q, the product of a row and a column is
sum(a b) - q sum(a) - p sum(b) + K p q: the operator adds a factor per column times a number per row, then a number per
row and a number per column.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from ..bytes import store_bytes
from ..jit import NativeOp, native_op
from ..memory import (
    float_word,
    load_first,
    load_int32,
    read_float32,
    read_int32,
    read_uint8,
    store_first,
    word,
    write_int8,
)
from ..rowwise.unary import UNARY
from ..vector import (
    LANES,
    bits_as_float32,
    bits_as_int32,
    maximum,
    minimum,
    splat_float32,
    splat_int32,
    to_float32,
)
from .tiling import VECTOR_BYTES, Tiling

# Addresses are 0 where nothing is to be done.
(
    OUT, OUT_STRIDE, WIDTH, ROW_SUMS, COLUMN_FACTORS, ROW_TERMS, COLUMN_TERMS, ROW_SCALES, COLUMN_SCALES, BIAS, P, Q,
    POINT, LOW, HIGH, ADDEND, ADDEND_STRIDE,
) = range(17)  # fmt: skip
# Adding 1.5 * 2 ** 23 rounds a small float32 to an integer, halves to even.
_ROUND = 12582912.0

Result = Literal["int32", "float32", "bytes"]


@cache
def finish_integers_op(tiling: Tiling, result: Result, function: str) -> NativeOp:
    """(arguments, address of the sums, first row, first column, rows); results: int32 sums, or
    function(scaled + bias + addend), or bytes: round(scaled) + point, saturated."""
    apply, vectors = UNARY[function].function, tiling.vectors
    is_int32, is_bytes = result == "int32", result == "bytes"
    item = 1 if is_bytes else 4

    def finish(arguments: int, sums: int, row: int, column: int, rows: int) -> int:
        width, stride = word(arguments, WIDTH), word(arguments, OUT_STRIDE)
        row_sums, factors = word(arguments, ROW_SUMS), word(arguments, COLUMN_FACTORS)
        row_terms, column_terms = word(arguments, ROW_TERMS), word(arguments, COLUMN_TERMS)
        row_scales, column_scales = word(arguments, ROW_SCALES), word(arguments, COLUMN_SCALES)
        bias, p, q = word(arguments, BIAS), float_word(arguments, P), float_word(arguments, Q)
        point, low, high = float_word(arguments, POINT), float_word(arguments, LOW), float_word(arguments, HIGH)
        addend, addend_stride = word(arguments, ADDEND), word(arguments, ADDEND_STRIDE)
        out = word(arguments, OUT) + row * stride
        for vector in range(vectors):
            first = column + vector * LANES
            left = min(width - first, LANES)
            if left > 0:
                # What a column has is read once for all rows: results are written between them.
                factor, term = splat_int32(0), splat_int32(0)
                scales, shift = splat_float32(1.0), splat_float32(0.0)
                if factors != 0:
                    factor = bits_as_int32(load_first(factors + 4 * first, left))
                if column_terms != 0:
                    term = bits_as_int32(load_first(column_terms + 4 * first, left))
                if column_scales != 0:
                    scales = load_first(column_scales + 4 * first, left)
                if bias != 0:
                    shift = load_first(bias + 4 * first, left)
                for m in range(rows):
                    place = sums + (m * vectors + vector) * VECTOR_BYTES
                    total = load_int32(place) + term
                    if factors != 0:
                        total = total + factor * read_int32(row_sums + 4 * (row + m))
                    if row_terms != 0:
                        total = total + read_int32(row_terms + 4 * (row + m))
                    there = out + m * stride + item * first
                    if is_int32:
                        store_first(there, bits_as_float32(total), left)
                    else:
                        value = to_float32(total)
                        if row_scales != 0:
                            value = value * read_float32(row_scales + 4 * (row + m))
                        value = value * scales + shift
                        if addend != 0:
                            value = value + load_first(addend + (row + m) * addend_stride + 4 * first, left)
                        value = apply(value, p, q)
                        if is_bytes:
                            value = minimum(maximum(value, low - point), high - point)
                            value = ((value + _ROUND) - _ROUND) + point
                            if left == LANES:
                                store_bytes(there, value)
                            else:
                                store_bytes(place, value)
                                for index in range(left):
                                    write_int8(there + index, read_uint8(place + index))
                        else:
                            store_first(there, value, left)
        return 0

    finish.__name__ = f"finish_{result}_{function}_{vectors}"
    return native_op(finish)
