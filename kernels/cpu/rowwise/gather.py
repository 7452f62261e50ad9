"""Selection of rows by indices of the step: embeddings of tokens or positions, and the rows of the logits.

Columns can be selected by a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import memory
from ..jit.arguments import Address, Arguments, Binding, Held
from ..jit.dsl import inline
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES
from ..program.calls import Call, Rows, check_rows, group_items, row_at
from ..program.step_table import ErrorCode, StepField


class GatherArguments(Arguments):
    """A table of `table_rows` * context[table_counted] rows. `indices`: context field with the indices' address."""

    table: Address
    table_stride: int
    table_rows: int
    table_counted: int
    out: Rows
    indices: int
    column_stride: int
    held: Held = None


_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)
# Element type of a table -> functions that load LANES numbers and one number, and the bytes of a number.
ELEMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "bfloat16": (memory.load_bfloat16, memory.read_bfloat16, 2),
    "float16": (memory.load_half, memory.read_half, 2),
    "float32": (memory.load_float32, memory.read_float32, 4),
}


def embedding(table: NDArray[Any], out: Rows, indices: StepField = StepField.TOKEN_IDS) -> Call:
    """Return a call that computes out[i] = table[indices[i]] as float32.

    A run with an index outside the table fails (INDEX_OUTSIDE_TABLE).

    Args:
        table: float32, float16 or bfloat16 [V, F], which may be transposed. It may be a memory-mapped file, and only
            the requested rows are read.
        out: rows [TOKENS, F].
        indices: TOKEN_IDS, POSITIONS or TOKEN_TYPES.
    """
    name = table.dtype.name
    if name not in ELEMENTS or not table.dtype.isnative or table.ndim != 2:
        raise ValueError(
            f"the table is {table.dtype} {list(table.shape)}, expected float32, float16 or bfloat16 [rows, width]"
        )
    check_rows("out", out, StepField.TOKENS, table.shape[1])
    # This table has a fixed number of rows, so this number is multiplied by context[ONE].
    strides = table.strides[0], table.strides[1]
    return _call(name, table.ctypes.data, strides, table.shape[0], StepField.ONE, table, out, indices)


def logits_rows(x: Rows, out: Rows) -> Call:
    """Return a call that computes out[i] = x[logits_indices[i]].

    A run with an index that is not a row of the step fails (INDEX_OUTSIDE_TABLE).

    Args:
        x: rows [TOKENS, F].
        out: rows [LOGITS_ROWS, F], other than x.
    """
    check_rows("x", x, StepField.TOKENS, out.width)
    check_rows("out", out, StepField.LOGITS_ROWS, x.width)
    return _call("float32", x.address, (x.stride, 4), 1, StepField.TOKENS, x.held, out, StepField.LOGITS_INDICES)


def _call(
    element: str, address: int | Binding, strides: tuple[int, int], rows: int, counted: StepField, held: Any, out: Rows,
    indices: StepField,
) -> Call:  # fmt: skip
    arguments = GatherArguments(
        table=address, table_stride=strides[0], table_rows=rows, table_counted=counted, out=out, indices=indices,
        column_stride=strides[1], held=held,
    )  # fmt: skip
    return Call(gather_op(element, strides[1] == ELEMENTS[element][2]), arguments, group_items(out))


@once
def gather_op(element: str, contiguous: bool) -> NativeOp:
    """Return the operator for tables of an element type, with or without contiguous rows. Items are output rows."""
    load, read, itemsize = ELEMENTS[element]

    @inline
    def copy_row(row: int, stride: int, out: int, width: int) -> None:
        whole = 0
        if contiguous:
            whole = width // LANES * LANES
        for column in range(0, whole, LANES):
            memory.store_float32(out + 4 * column, load(row + itemsize * column))
        for column in range(whole, width):
            memory.write_float32(out + 4 * column, read(row + stride * column))

    def op(arguments: GatherArguments, context: int, begin: int, end: int, scratch: int) -> int:
        indices = memory.read_int64(context + 8 * arguments.indices)
        rows = memory.read_int64(context + 8 * arguments.table_counted) * arguments.table_rows
        for item in range(begin, end):
            index = memory.read_int64(indices + 8 * item)
            if index < 0 or index >= rows:
                return _OUTSIDE
            row = arguments.table + index * arguments.table_stride
            copy_row(row, arguments.column_stride, row_at(arguments.out, item), arguments.out.width)
        return 0

    return native_op(GatherArguments, name=f"gather_{element}{'' if contiguous else '_strided'}")(op)


class ReorderArguments(Arguments):
    """Rows, and the columns of x to select.

    Attributes:
        order: int64 [width of out], columns of x.
    """

    x: Rows
    out: Rows
    order: Address
    held: Held = None


def reordered(x: Rows, order: NDArray[Any], out: Rows) -> Call:
    """Return a call that computes out[:, i] = x[:, order[i]].

    Args:
        x, out: different rows with the same count.
        order: int64 [width of out], each from 0 to the width of x - 1.
    """
    columns = np.ascontiguousarray(order, np.int64)
    if columns.shape != (out.width,) or columns.min() < 0 or columns.max() >= x.width or x.counted != out.counted:
        raise ValueError(
            f"order is {list(columns.shape)} with values from {columns.min()} to {columns.max()}, expected one of the "
            f"{x.width} columns of x for each column of out"
        )
    arguments = ReorderArguments(x=x, out=out, order=columns.ctypes.data, held=(columns, x.held))
    return Call(_reorder, arguments, group_items(out))


@native_op(ReorderArguments)
def _reorder(arguments: ReorderArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy selected columns. Items are rows."""
    for item in range(begin, end):
        source, target = row_at(arguments.x, item), row_at(arguments.out, item)
        for column in range(arguments.out.width):
            index = memory.read_int64(arguments.order + 8 * column)
            memory.write_float32(target + 4 * column, memory.read_float32(source + 4 * index))
    return 0
