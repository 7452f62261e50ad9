"""The max or the sum of sliding windows over planes, in the layout of `depthwise`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import load, load_float32, store_first
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, larger, splat_float32
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import Threads
from .depthwise import spread_lanes, spread_plane_of

_NANOSECONDS_PER_TAP = 0.03
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


@once
def pool_op(kind: Literal["max", "mean"]) -> NativeOp:
    """Return the operator. Items are planes."""
    is_max, (combined, fill), spread = kind == "max", reduction(kind), spread_plane_of("float32")

    @inline
    def finish(value: Any, arguments: PoolArguments, out: int, row: int, column: int) -> None:
        left, at = min(arguments.columns - column, LANES), 4 * (row * arguments.columns + column)
        store_first(out + at, value if is_max else value / load(arguments.counts + at, left), left)

    def pool(arguments: PoolArguments, context: int, begin: int, end: int, scratch: int) -> int:
        height, width, step = arguments.height, arguments.width, arguments.column_stride
        rows, columns, row_stride = arguments.rows, arguments.columns, arguments.row_stride
        lanes, bands = spread_lanes(columns, width, step), (rows - 1) * row_stride + height
        band_bytes = 4 * step * lanes
        for plane in range(begin, end):
            x = arguments.x + plane * 4 * arguments.x_rows * arguments.x_columns
            spread(arguments, x, step, lanes, bands, scratch, fill)
            out = arguments.out + 4 * plane * rows * columns
            # Four rows at a time, because each operation waits for the one before it. The last row may repeat.
            for row in range(0, rows, 4):
                second, third, fourth = min(row + 1, rows - 1), min(row + 2, rows - 1), min(row + 3, rows - 1)
                for column in range(0, columns, LANES):
                    a = b = c = d = splat_float32(fill)
                    for i in range(height):
                        part, band = 0, scratch + i * band_bytes + 4 * column
                        for _ in range(width):
                            at = band + 4 * part * lanes
                            a = combined(a, at + row * row_stride * band_bytes)
                            b = combined(b, at + second * row_stride * band_bytes)
                            c = combined(c, at + third * row_stride * band_bytes)
                            d = combined(d, at + fourth * row_stride * band_bytes)
                            part += 1
                            if part == step:
                                part, band = 0, band + 4
                    finish(a, arguments, out, row, column)
                    finish(b, arguments, out, second, column)
                    finish(c, arguments, out, third, column)
                    finish(d, arguments, out, fourth, column)
        return 0

    return native_op(PoolArguments, name=f"pool_{kind}")(pool)


def scratch_bytes(sizes: tuple[int, int], kernel: tuple[int, int], strides: tuple[int, int]) -> int:
    """Return the memory that a thread needs for results of these sizes."""
    bands = (sizes[0] - 1) * strides[0] + kernel[0]
    return 4 * bands * strides[1] * int(spread_lanes(sizes[1], kernel[1], strides[1]))


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
    call = Call(pool_op(kind), arguments, Items(factor=shape[0]), scratch_bytes(sizes, kernel, strides))
    return NodeProgram([[call]])
