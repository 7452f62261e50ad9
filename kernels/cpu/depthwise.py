"""Convolution of each channel with its own kernel, as MobileNet has it: no sums across channels.

A plane is first spread into scratch memory, with its pads and with the columns of one residue modulo the stride side by
side, so that a tap's inputs of sixteen neighbouring outputs are neighbours too.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from .channels import NO_LIMITS, Limits
from .checks import Float32, check
from .jit import NativeOp, native_op
from .lazy import inline
from .memory import float_word, load_first, read_float32, store_first, store_float32, word, write_float32
from .memory import load_float32 as load
from .tape.program import Argument, Call, Hole, Items
from .tape.replay import Crew, Replay
from .vector import LANES, maximum, minimum, multiply_add, splat_float32

# Arguments: planes; kernels and biases of channels; sizes of a plane, a kernel, a result; steps; pads; limits.
(
    X, WEIGHT, BIAS, OUT, CHANNELS, X_ROWS, X_COLUMNS, HEIGHT, WIDTH, ROWS, COLUMNS, ROW_STRIDE, COLUMN_STRIDE, TOP,
    LEFT, LOW, HIGH,
) = range(17)  # fmt: skip
_NANOSECONDS_PER_PRODUCT = 0.03
# Kernels and steps along columns with code of their own.
_KNOWN_SIZES, _KNOWN_STEPS = (3, 5), (1, 2)


@inline
def _spread(arguments: int, x: int, step: int, lanes: int, bands: int, out: int) -> None:
    """A plane as [bands][residues of the column stride][lanes], zeros outside."""
    x_rows, x_columns = word(arguments, X_ROWS), word(arguments, X_COLUMNS)
    top, left_pad = word(arguments, TOP), word(arguments, LEFT)
    zeros = splat_float32(0.0)
    for band in range(bands):
        source = band - top
        row = x + 4 * source * x_columns
        for part in range(step):
            target = out + 4 * (band * step + part) * lanes
            for lane in range(0, lanes, LANES):
                store_float32(target + 4 * lane, zeros)
            if 0 <= source < x_rows:
                if step == 1:
                    count = min(x_columns, lanes - left_pad)
                    for first in range(0, count, LANES):
                        some = min(count - first, LANES)
                        store_first(target + 4 * (left_pad + first), load_first(row + 4 * first, some), some)
                else:
                    # Of the columns lane * step + part - left_pad, those that lie inside.
                    first = max(0, -((part - left_pad) // step))
                    last = min(lanes, (x_columns - 1 - part + left_pad) // step + 1)
                    for lane in range(first, last):
                        write_float32(target + 4 * lane, read_float32(row + 4 * (lane * step + part - left_pad)))


@cache
def depthwise_op(known: tuple[int, int, int] | None) -> NativeOp:
    """Items are planes; plane p has the kernel p modulo the number of channels.

    Args:
        known: height and width of the kernels and stride along columns, for code made for them; None = for any.
    """
    known_height, known_width, known_step = known or (0, 0, 0)

    def planes(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        height = known_height if known_height > 0 else word(arguments, HEIGHT)
        width = known_width if known_width > 0 else word(arguments, WIDTH)
        step = known_step if known_step > 0 else word(arguments, COLUMN_STRIDE)
        rows, columns, row_stride = word(arguments, ROWS), word(arguments, COLUMNS), word(arguments, ROW_STRIDE)
        low, high = float_word(arguments, LOW), float_word(arguments, HIGH)
        lanes, bands = spread_lanes(columns, width, step), (rows - 1) * row_stride + height
        plane_bytes = 4 * word(arguments, X_ROWS) * word(arguments, X_COLUMNS)
        for plane in range(begin, end):
            channel = plane % word(arguments, CHANNELS)
            _spread(arguments, word(arguments, X) + plane * plane_bytes, step, lanes, bands, scratch)
            bias = splat_float32(read_float32(word(arguments, BIAS) + 4 * channel))
            weight = word(arguments, WEIGHT) + 4 * channel * height * width
            out = word(arguments, OUT) + 4 * plane * rows * columns
            for row in range(rows):
                for column in range(0, columns, LANES):
                    value = bias
                    for i in range(height):
                        band = scratch + 4 * (row * row_stride + i) * step * lanes + 4 * column
                        for j in range(width):
                            inputs = load(band + 4 * (j % step * lanes + j // step))
                            value = multiply_add(inputs, read_float32(weight + 4 * (i * width + j)), value)
                    value = minimum(maximum(value, low), high)
                    store_first(out + 4 * (row * columns + column), value, min(columns - column, LANES))
        return 0

    planes.__name__ = "depthwise_" + ("any" if known is None else "_".join(map(str, known)))
    return native_op(planes)


@inline
def spread_lanes(columns: int, width: int, step: int) -> Any:
    """Columns of a residue that a whole number of vectors of outputs reads, themselves whole vectors."""
    needed = -(-columns // LANES) * LANES + (width - 1) // step
    return -(-needed // LANES) * LANES


def depthwise(
    x: Float32,
    weight: Float32,
    bias: Float32,
    sizes: tuple[int, int],
    *,
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int] = (0, 0),
    limits: Limits = NO_LIMITS,
    crew: Crew | None = None,
) -> Float32:
    """[N * C, rows, columns] with [C, height, width] and [C] to [N * C, *sizes], kept within limits.

    Args:
        pads: rows of zeros above, columns of zeros to the left; what lies beyond the image counts as 0 everywhere.
        crew: who works on it; None = this thread alone.

    Raises:
        ValueError: a shape or type does not fit.
    """
    channels, height, width = weight.shape
    check("x", x, (None, None, None))
    check("weight", weight, (None, None, None))
    check("bias", bias, (channels,))
    if min(strides) < 1 or min(pads) < 0 or min(sizes) < 1:
        raise ValueError(f"strides {strides}, pads {pads} and sizes {sizes} do not fit")
    if channels < 1 or len(x) % channels or not height * width:
        raise ValueError(f"planes {list(x.shape)} and kernels {list(weight.shape)} do not fit")
    out = np.empty((len(x), *sizes), np.float32)
    if len(x):
        shapes = (channels, *x.shape[1:], height, width, *sizes, *strides, *pads)
        addresses = {name: array.ctypes.data for name, array in zip("xwbo", (x, weight, bias, out), strict=True)}
        (crew or Crew(1)).run(_replay(len(x), shapes, limits), addresses)
    return out


@lru_cache(maxsize=256)
def _replay(planes: int, shapes: tuple[int, ...], limits: Limits) -> Replay:
    _, _, _, height, width, rows, columns, row_stride, step, _, _ = shapes
    scratch = 4 * ((rows - 1) * row_stride + height) * step * _lanes(columns, width, step)
    known = (height, width, step) if height == width and height in _KNOWN_SIZES and step in _KNOWN_STEPS else None
    arguments: tuple[Argument, ...] = (*map(Hole, "xwbo"), *shapes, *(float(limit) for limit in limits))
    work = planes * rows * columns * height * width * _NANOSECONDS_PER_PRODUCT
    return Replay([[Call(depthwise_op(known), arguments, Items(factor=planes), scratch)]], work)


def _lanes(columns: int, width: int, step: int) -> int:
    return int(spread_lanes(columns, width, step))
