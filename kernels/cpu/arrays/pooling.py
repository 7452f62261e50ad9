"""The max or the sum of sliding windows over planes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import load_first, load_float32, read_float32, store, store_first, store_float32, write_float32
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, every_other, larger, maximum, multiply_add, reduce_add, splat_float32
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import Threads

_NANOSECONDS_PER_TAP = 0.03
# Number of lines that are computed at a time.
_LINES = 8
# Planes that need more memory than this are not supported.
MAX_SCRATCH = 4 << 20


class PoolArguments(Arguments):
    """Planes [x_rows, x_columns] and result planes [rows, columns] of windows [height, width].

    `top` and `left` are pads. `counts` [rows, columns] are divisors of sums.
    """

    x: Address
    out: Address
    counts: Address
    x_rows: int
    x_columns: int
    height: int
    width: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    top: int
    left: int


@once
def reduction(kind: Literal["max", "mean"]) -> tuple[Callable[[Any, int], Any], float]:
    """Return the function that adds sixteen numbers at an address to the result of a window, and its first value."""
    is_max = kind == "max"

    @inline
    def combined(value: Any, address: int) -> Any:
        found = load_float32(address)
        return larger(value, found) if is_max else value + found

    return combined, -np.inf if is_max else 0.0


def _combination(kind: Literal["max", "mean"], finite: bool) -> Any:
    """Return the function that combines two vectors. `finite`: True if NaNs need not be preserved."""
    return inline(lambda a, b: a + b) if kind == "mean" else maximum if finite else larger


@once
def _combine_rows(kind: Literal["max", "mean"], finite: bool) -> Callable[..., Any]:
    """Return the helper that combines the rows of windows to a line.

    Args:
        finite: True to assume that all numbers are finite, because preserving NaNs takes four instructions. The helper
            then returns a vector that is 0 if the assumption is right.
    """
    fill, combine, checks = reduction(kind)[1], _combination(kind, finite), kind == "max" and finite

    @inline
    def checked(total: Any, found: Any) -> Any:
        return multiply_add(found, 0.0, total) if checks else total

    @inline
    def combine_rows(arguments: PoolArguments, plane: int, row: int, line: int, total: Any) -> Any:
        columns, row_bytes = arguments.x_columns, 4 * arguments.x_columns
        top = row * arguments.row_stride - arguments.top
        first, last = max(top, 0), min(top + arguments.height, arguments.x_rows)
        x, line, other = plane + first * row_bytes, line + 4 * arguments.left, total
        if columns < LANES or last <= first:
            for column in range(0, columns, LANES):
                value = splat_float32(fill)
                for number in range(last - first):
                    found = load_first(x + number * row_bytes, columns)
                    value, total = combine(value, found), checked(total, found)
                store(line + 4 * column, value, columns - column)
            return total
        # Two vectors at a time. The last vectors may overlap or repeat others.
        end = 4 * (columns - LANES)
        for column in range(0, 4 * columns, 8 * LANES):
            a_at, b_at = min(column, end), min(column + 4 * LANES, end)
            a, b = load_float32(x + a_at), load_float32(x + b_at)
            total, other = checked(total, a), checked(other, b)
            for number in range(1, last - first):
                below = x + number * row_bytes
                a_found, b_found = load_float32(below + a_at), load_float32(below + b_at)
                a, b = combine(a, a_found), combine(b, b_found)
                total, other = checked(total, a_found), checked(other, b_found)
            store_float32(line + a_at, a)
            store_float32(line + b_at, b)
        return total + other

    return combine_rows


@once
def _combine_columns(kind: Literal["max", "mean"], finite: bool) -> Callable[..., None]:
    """Return the helper that combines the columns of windows in a line to a row of results."""
    is_max, fill, combine = kind == "max", reduction(kind)[1], _combination(kind, finite)

    @inline
    def combined_columns(one: int, two: int, width: int, step: int) -> Any:
        """Return the results of sixteen neighbouring windows from each of two addresses in a line."""
        if step == 1:
            a, b = load_float32(one), load_float32(two)
            for column in range(4, 4 * width, 4):
                a, b = combine(a, load_float32(one + column)), combine(b, load_float32(two + column))
            return a, b
        a_low, a_high = load_float32(one), load_float32(one + 4 * LANES)
        b_low, b_high = load_float32(two), load_float32(two + 4 * LANES)
        a, b = every_other(a_low, a_high, 0), every_other(b_low, b_high, 0)
        if width > 1:
            a, b = combine(a, every_other(a_low, a_high, 1)), combine(b, every_other(b_low, b_high, 1))
        for column in range(8, 4 * width, 8):
            a_low, a_high = load_float32(one + column), load_float32(one + column + 4 * LANES)
            b_low, b_high = load_float32(two + column), load_float32(two + column + 4 * LANES)
            a, b = combine(a, every_other(a_low, a_high, 0)), combine(b, every_other(b_low, b_high, 0))
            if column + 4 < 4 * width:
                a, b = combine(a, every_other(a_low, a_high, 1)), combine(b, every_other(b_low, b_high, 1))
        return a, b

    @inline
    def combine_far_columns(arguments: PoolArguments, line: int, out: int, counts: int) -> None:
        columns, width, step = arguments.columns, arguments.width, arguments.column_stride
        for column in range(columns):
            number = np.float32(fill)
            for at in range(step * column, step * column + width):
                found = read_float32(line + 4 * at)
                if not is_max:
                    number = number + found
                elif found > number or found != found:
                    number = found
            write_float32(out + 4 * column, number if is_max else number / read_float32(counts + 4 * column))

    @inline
    def combine_columns(arguments: PoolArguments, line: int, out: int, counts: int) -> None:
        columns, width, step = arguments.columns, arguments.width, arguments.column_stride
        if step > 2:
            combine_far_columns(arguments, line, out, counts)
        elif columns >= LANES:
            end = 4 * (columns - LANES)
            for first in range(0, 4 * columns, 8 * LANES):
                a_at, b_at = min(first, end), min(first + 4 * LANES, end)
                a, b = combined_columns(line + step * a_at, line + step * b_at, width, step)
                store_float32(out + a_at, a if is_max else a / load_float32(counts + a_at))
                store_float32(out + b_at, b if is_max else b / load_float32(counts + b_at))
        else:
            a, b = combined_columns(line, line, width, step)
            store_first(out, a if is_max else a / load_first(counts, columns), columns)

    return combine_columns


@once
def pool_op(kind: Literal["max", "mean"]) -> NativeOp:
    """Return the operator. Items are planes.

    The rows of a window are combined first, for all columns of the image, to a line with pads. Then the columns of each
    window are combined. So numbers that neighbouring windows share are read from memory only once.
    """
    is_max, fill = kind == "max", reduction(kind)[1]
    fast_rows, fast_columns = _combine_rows(kind, True), _combine_columns(kind, True)
    any_rows, any_columns = _combine_rows(kind, False), _combine_columns(kind, False)

    def pool(arguments: PoolArguments, context: int, begin: int, end: int, scratch: int) -> int:
        rows, columns, x_columns = arguments.rows, arguments.columns, arguments.x_columns
        x_size = arguments.x_rows * x_columns
        lanes = line_lanes(columns, arguments.width, arguments.column_stride, x_columns, arguments.left)
        for first in range(0, _LINES * lanes, LANES):
            store_float32(scratch + 4 * first, splat_float32(fill))
        for plane in range(begin, end):
            x, out = arguments.x + 4 * plane * x_size, arguments.out + 4 * plane * rows * columns
            # Several lines at a time, because numbers that were just written cannot be read at other offsets at once.
            for row in range(0, rows, _LINES):
                last, total = min(row + _LINES, rows), splat_float32(0.0)
                for number in range(row, last):
                    total = fast_rows(arguments, x, number, scratch + 4 * (number - row) * lanes, total)
                is_finite = not is_max or reduce_add(total) == 0.0
                if not is_finite:
                    for number in range(row, last):
                        any_rows(arguments, x, number, scratch + 4 * (number - row) * lanes, total)
                for number in range(row, last):
                    line, place = scratch + 4 * (number - row) * lanes, 4 * number * columns
                    if is_finite:
                        fast_columns(arguments, line, out + place, arguments.counts + place)
                    else:
                        any_columns(arguments, line, out + place, arguments.counts + place)
        return 0

    return native_op(PoolArguments, name=f"pool_{kind}")(pool)


@inline
def line_lanes(columns: int, width: int, step: int, x_columns: int, left: int) -> Any:
    """Return the numbers of a line: all that windows and vectors of results need, a multiple of LANES."""
    needed = step * (columns + LANES) + width + 2 * LANES
    return (max(needed, left + x_columns) + LANES - 1) // LANES * LANES


def scratch_bytes(x_columns: int, columns: int, width: int, step: int, left: int) -> int:
    """Return the memory that a thread needs for results of these sizes."""
    return 4 * _LINES * int(line_lanes(columns, width, step, x_columns, left))


def pooled(
    x: Float32, kernel: tuple[int, int], sizes: tuple[int, int], *, strides: tuple[int, int], pads: tuple[int, int],
    counts: Float32 | None = None, threads: Threads | None = None,
) -> Float32:  # fmt: skip
    """Return the max of the windows of x [planes, rows, columns], or their sums divided by counts.

    Args:
        kernel: height and width of the windows.
        sizes: rows and columns of the result.
        pads: rows above and columns to the left of x. Everything outside x is ignored.
        counts: float32 of the shape `sizes`; None = max.
    """
    check("x", x, (None, None, None))
    if min(*sizes, *kernel, *strides) < 1 or min(pads) < 0:
        raise ValueError(f"sizes {sizes}, windows {kernel}, strides {strides} and pads {pads} are out of range")
    if counts is not None:
        check("counts", counts, sizes)
    out = np.empty((len(x), *sizes), np.float32)
    if out.size:
        program = _program("max" if counts is None else "mean", x.shape, kernel, sizes, strides, pads)
        addresses = {"x": first_element(x), "out": first_element(out)}
        if counts is not None:
            addresses["counts"] = first_element(counts)
        program.run_bound(addresses, threads, 0, out.size * kernel[0] * kernel[1] * _NANOSECONDS_PER_TAP)
    return out


@lru_cache(maxsize=256)
def _program(
    kind: Literal["max", "mean"], shape: tuple[int, ...], kernel: tuple[int, int], sizes: tuple[int, int],
    strides: tuple[int, int], pads: tuple[int, int],
) -> NodeProgram:  # fmt: skip
    arguments = PoolArguments(
        x=Binding("x"), out=Binding("out"), counts=Binding("counts") if kind == "mean" else None, x_rows=shape[1],
        x_columns=shape[2], height=kernel[0], width=kernel[1], rows=sizes[0], columns=sizes[1], row_stride=strides[0],
        column_stride=strides[1], top=pads[0], left=pads[1],
    )  # fmt: skip
    scratch = scratch_bytes(shape[2], sizes[1], kernel[1], strides[1], pads[1])
    call = Call(pool_op(kind), arguments, Items(factor=shape[0]), scratch)
    return NodeProgram([[call]])
