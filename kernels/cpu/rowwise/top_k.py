"""The k largest numbers of every row, largest first."""

from __future__ import annotations

from ..jit import native_op
from ..lazy import inline
from ..memory import read_float32, read_int32, word, write_float32, write_int32
from ..tape.program import Call, Rows
from .layout import check_rows, group_items

X, X_STRIDE, WIDTH, VALUES, VALUES_STRIDE, INDICES, INDICES_STRIDE, K = range(8)


def top_k(x: Rows, values: Rows, indices: Rows) -> Call:
    """The largest numbers of each row and their columns; among equal ones the first comes first, NaNs before all.

    For the few choices of a router: the time grows with k.

    Args:
        x: rows [T, F]. values: rows [T, k] with k <= F.
        indices: rows [T, k] that get int32 numbers (as wide as float32). None of the three may overlap.

    Raises:
        ValueError: rows that do not fit.
    """
    k = values.width
    check_rows("values", values, x.counted, k)
    check_rows("indices", indices, x.counted, k)
    if not 1 <= k <= x.width:
        raise ValueError(f"values is [{values.counted.name}, {k}], but x has {x.width} numbers in a row")
    arguments = (
        x.address, x.stride, x.width, values.address, values.stride, indices.address, indices.stride, k,
    )  # fmt: skip
    return Call(top_k_op, arguments, group_items(x), held=(x.held, values.held, indices.held), label="top k")


@inline
def _before(a: float, b: float) -> bool:
    """Whether a comes before b, which stands to the left of it."""
    return a > b or (a != a and b == b)


@native_op
def top_k_op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Items are rows. The best so far are kept in order where the result will be."""
    width, k = word(arguments, WIDTH), word(arguments, K)
    for row in range(begin, end):
        x = word(arguments, X) + row * word(arguments, X_STRIDE)
        values = word(arguments, VALUES) + row * word(arguments, VALUES_STRIDE)
        indices = word(arguments, INDICES) + row * word(arguments, INDICES_STRIDE)
        for column in range(width):
            value = read_float32(x + 4 * column)
            if column < k:
                place = column
            elif _before(value, read_float32(values + 4 * (k - 1))):
                place = k - 1
            else:
                continue
            while place > 0 and _before(value, read_float32(values + 4 * (place - 1))):
                write_float32(values + 4 * place, read_float32(values + 4 * (place - 1)))
                write_int32(indices + 4 * place, read_int32(indices + 4 * (place - 1)))
                place -= 1
            write_float32(values + 4 * place, value)
            write_int32(indices + 4 * place, column)
    return 0
