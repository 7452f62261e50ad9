"""Pools of blocked images (see `layout`): the max or the mean of sliding windows, and the mean of whole planes."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ....checks import Float32, check
from ...jit.arguments import Address, Arguments
from ...jit.dsl import inline
from ...jit.memory import load_float32, read_float32, store_float32
from ...jit.native import NativeOp, native_op
from ...jit.variants import once
from ...jit.vector import splat_float32
from ...program.bound_program import run_alone
from ...program.calls import Items
from ...program.thread_pool import Threads
from ..gemm.windows import Windows
from ..pooling import PoolArguments, reduction
from .layout import BLOCK, BLOCK_BYTES, aligned, new_image

_NANOSECONDS_PER_TAP, _NANOSECONDS_PER_INPUT = 0.06, 0.15
# Number of pixels that are summed before the sum is added to the total, which limits rounding errors.
_SUMMED = 64


class BlockedPoolArguments(PoolArguments):
    """Planes of pixels with sixteen channels. Windows take every `row_gap`-th row and `column_gap`-th column."""

    row_gap: int
    column_gap: int


@once
def pool_blocks(kind: Literal["max", "mean"]) -> NativeOp:
    """Return the operator. Items are rows of result planes."""
    is_max, (combined, fill) = kind == "max", reduction(kind)

    @inline
    def finish(value: Any, out: int, count: int) -> None:
        store_float32(out, value if is_max else value / read_float32(count))

    def pool(arguments: BlockedPoolArguments, context: int, begin: int, end: int, scratch: int) -> int:
        x_rows, x_columns, rows, columns = arguments.x_rows, arguments.x_columns, arguments.rows, arguments.columns
        height, width, step = arguments.height, arguments.width, arguments.column_stride
        row_gap, gap, left = arguments.row_gap, arguments.column_gap, arguments.left
        step_bytes = BLOCK_BYTES * step
        for item in range(begin, end):
            plane, row = item // rows, item % rows
            top = row * arguments.row_stride - arguments.top
            image, out = (
                arguments.x + BLOCK_BYTES * plane * x_rows * x_columns,
                arguments.out + BLOCK_BYTES * item * columns,
            )
            counts = arguments.counts + 4 * row * columns
            column = 0
            while column < columns:
                first = column * step - left
                is_inner = column + 4 <= columns and first >= 0 and first + 3 * step + (width - 1) * gap < x_columns
                a = b = c = d = splat_float32(fill)
                for i in range(height):
                    line = top + i * row_gap
                    if line < 0 or line >= x_rows:
                        continue
                    line_at = image + BLOCK_BYTES * line * x_columns
                    for j in range(width):
                        place = first + j * gap
                        at = line_at + BLOCK_BYTES * place
                        if is_inner:
                            a = combined(a, at)
                            b = combined(b, at + step_bytes)
                            c = combined(c, at + 2 * step_bytes)
                            d = combined(d, at + 3 * step_bytes)
                        elif 0 <= place < x_columns:
                            a = combined(a, at)
                there, count = out + BLOCK_BYTES * column, counts + 4 * column
                finish(a, there, count)
                if is_inner:
                    finish(b, there + BLOCK_BYTES, count + 4)
                    finish(c, there + 2 * BLOCK_BYTES, count + 8)
                    finish(d, there + 3 * BLOCK_BYTES, count + 12)
                column += 4 if is_inner else 1
        return 0

    return native_op(BlockedPoolArguments, name=f"pool_blocks_{kind}")(pool)


def pooled_blocks(
    x: Float32, windows: Windows, pads: tuple[int, int], *, counts: Float32 | None = None,
    threads: Threads | None = None,
) -> Float32:  # fmt: skip
    """Return the max of the windows of x [N, blocks, rows, columns, 16], or their sums divided by counts.

    Args:
        pads: rows above and columns to the left of x. Everything outside x is ignored.
        counts: float32 [rows, columns] of the result; None = the max.
    """
    check("x", x, (None, None, None, None, BLOCK))
    if counts is not None:
        check("counts", counts, windows.counts)
    (rows, columns), (height, width) = windows.counts, windows.kernel
    out = new_image((*x.shape[:2], rows, columns, BLOCK))
    if out.size:
        run_alone(
            pool_blocks("max" if counts is None else "mean"), Items(factor=x.shape[0] * x.shape[1] * rows),
            out.size * height * width * _NANOSECONDS_PER_TAP + x.size * _NANOSECONDS_PER_INPUT, threads, x=x, out=out,
            counts=counts,
            x_rows=x.shape[2], x_columns=x.shape[3], height=height, width=width, row_stride=windows.strides[0],
            column_stride=windows.strides[1], row_gap=windows.dilations[0], column_gap=windows.dilations[1],
            top=pads[0], left=pads[1], rows=rows, columns=columns,
        )  # fmt: skip
    return out


class BlockedMeanArguments(Arguments):
    """Planes of `pixels`, and one pixel per plane."""

    x: Address
    out: Address
    pixels: int


@native_op(BlockedMeanArguments)
def mean_of_blocks(arguments: BlockedMeanArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute the means of planes. Items are planes."""
    pixels = arguments.pixels
    for plane in range(begin, end):
        x, total = arguments.x + BLOCK_BYTES * plane * pixels, splat_float32(0.0)
        for first in range(0, pixels, _SUMMED):
            a = b = c = d = splat_float32(0.0)
            last = min(pixels, first + _SUMMED)
            whole = first + (last - first) // 4 * 4
            for pixel in range(first, whole, 4):
                at = x + BLOCK_BYTES * pixel
                a = a + load_float32(at)
                b = b + load_float32(at + BLOCK_BYTES)
                c = c + load_float32(at + 2 * BLOCK_BYTES)
                d = d + load_float32(at + 3 * BLOCK_BYTES)
            for pixel in range(whole, last):
                a = a + load_float32(x + BLOCK_BYTES * pixel)
            total = total + ((a + b) + (c + d))
        store_float32(arguments.out + BLOCK_BYTES * plane, total / np.float32(pixels))
    return 0


def mean_blocks(x: Float32, threads: Threads | None = None) -> Float32:
    """Return the means [N, blocks, 1 ..., 16] of the planes of x [N, blocks, extents ..., 16]."""
    check("x", x, (*[None] * (x.ndim - 1), BLOCK))
    pixels = math.prod(x.shape[2:-1])
    out = aligned((*x.shape[:2], *[1] * (x.ndim - 3), BLOCK))
    if out.size:
        run_alone(
            mean_of_blocks, Items(factor=x.shape[0] * x.shape[1]), x.size * _NANOSECONDS_PER_INPUT, threads, x=x,
            out=out, pixels=pixels,
        )  # fmt: skip
    return out
