"""Rows chosen by indices of the step: an embedding's rows by tokens or positions, the rows whose logits are wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numpy.typing import NDArray

from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import (
    load_bfloat16,
    load_float32,
    load_half,
    read_bfloat16,
    read_float32,
    read_half,
    read_int64,
    store_float32,
    word,
    write_float32,
)
from ..tape.context import ErrorCode, Word
from ..tape.program import Call, Rows
from ..vector import LANES
from .layout import check_rows, group_items

TABLE, TABLE_STRIDE, TABLE_ROWS, TABLE_COUNTED, OUT, OUT_STRIDE, WIDTH, INDICES, COLUMN_STRIDE = range(9)

_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)
# Element type of a table -> LANES of its numbers at an address, and one.
_ELEMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bfloat16": (load_bfloat16, read_bfloat16),
    "float16": (load_half, read_half),
    "float32": (load_float32, read_float32),
}
_INDICES = (Word.TOKEN_IDS, Word.POSITIONS)


def embedding(table: NDArray[Any], out: Rows, indices: Word = Word.TOKEN_IDS) -> Call:
    """out[i] = table[indices[i]] as float32; a walk with an index outside the table fails (INDEX_OUTSIDE_TABLE).

    Args:
        table: float32, float16 or bfloat16 [V, F], transposed ones included; it may be a memory-mapped file, of which
            only the rows asked for are touched.
        out: rows [TOKENS, F].
        indices: TOKEN_IDS or POSITIONS.

    Raises:
        ValueError: a shape or type does not fit.
    """
    name = table.dtype.name
    if name not in _ELEMENTS or not table.dtype.isnative or table.ndim != 2:
        raise ValueError(
            f"the table is {table.dtype} {list(table.shape)}, expected float32, float16 or bfloat16 [rows, width]"
        )
    if indices not in _INDICES:
        raise ValueError(f"indices is {indices!r}, expected one of {', '.join(word.name for word in _INDICES)}")
    check_rows("out", out, Word.TOKENS, table.shape[1])
    # The number of rows is written here, so it is context[ONE] times that.
    strides = table.strides[0], table.strides[1]
    return _call(name, table.ctypes.data, strides, table.shape[0], Word.ONE, table, out, indices)


def wanted_rows(x: Rows, out: Rows) -> Call:
    """out[i] = x[wanted_rows[i]]; a walk that wants a row which the step has not fails (INDEX_OUTSIDE_TABLE).

    Args:
        x: rows [TOKENS, F]. out: rows [WANTED, F], not x.

    Raises:
        ValueError: rows that do not fit.
    """
    check_rows("x", x, Word.TOKENS, out.width)
    check_rows("out", out, Word.WANTED, x.width)
    return _call("float32", x.address, (x.stride, 4), 1, Word.TOKENS, x.held, out, Word.WANTED_ROWS)


def _call(
    element: str,
    address: int,
    strides: tuple[int, int],
    rows: int,
    counted: Word,
    held: Any,
    out: Rows,
    indices: Word,
) -> Call:
    arguments = (address, strides[0], rows, counted, out.address, out.stride, out.width, indices, strides[1])
    op = gather_op(element, strides[1] == _itemsize(element))
    return Call(op, arguments, group_items(out), held=(held, out.held), label=op.name)


@cache
def gather_op(element: str, contiguous: bool) -> NativeOp:
    """The operator for tables of an element type, with contiguous rows or not; items are rows of the output."""
    load, read = _ELEMENTS[element]
    itemsize = _itemsize(element)

    @inline
    def copy_row(row: int, stride: int, out: int, width: int) -> None:
        whole = 0
        if contiguous:
            whole = width // LANES * LANES
        for column in range(0, whole, LANES):
            store_float32(out + 4 * column, load(row + itemsize * column))
        for column in range(whole, width):
            write_float32(out + 4 * column, read(row + stride * column))

    def op(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        indices = read_int64(context + 8 * word(arguments, INDICES))
        rows = read_int64(context + 8 * word(arguments, TABLE_COUNTED)) * word(arguments, TABLE_ROWS)
        for item in range(begin, end):
            index = read_int64(indices + 8 * item)
            if index < 0 or index >= rows:
                return _OUTSIDE
            row = word(arguments, TABLE) + index * word(arguments, TABLE_STRIDE)
            out = word(arguments, OUT) + item * word(arguments, OUT_STRIDE)
            copy_row(row, word(arguments, COLUMN_STRIDE), out, word(arguments, WIDTH))
        return 0

    op.__name__ = f"gather_{element}{'' if contiguous else '_strided'}"
    return native_op(op)


def _itemsize(element: str) -> int:
    return 4 if element == "float32" else 2
