"""Depthwise convolution of images: each channel with its own small kernel, without laying windows out.

A plane is first spread out so that what one tap of the kernel reads is contiguous, whatever the strides: by the
remainders of row and column, padded, and as wide as the output plus the kernel. Then each tap is one long loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .channels import NO_LIMITS, Limits
from .checks import Float32, check
from .jit import kernel
from .team import Team, run

_NANOSECONDS_PER_PRODUCT = 0.15
# Sums of so many outputs are kept at a time, which stay in the first cache.
_SUMS = 2048


@kernel(
    "void(float32[:,:,::1], float32[:,:,::1], float32[::1], float32, float32, int64, int64, int64, int64, "
    "float32[:,:,::1], int64, int64)",
    allocates=True,
)
def convolve_planes(
    x: Any, weight: Any, bias: Any, low: float, high: float, row_stride: int, column_stride: int, top: int, left: int,
    out: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Planes [begin, end) of images; plane p has the kernel p modulo the number of channels."""
    channels, height, width = weight.shape
    rows, columns = out.shape[1], out.shape[2]
    lanes = columns + (width - 1) // column_stride
    bands = rows + (height - 1) // row_stride
    spread = np.zeros((row_stride, column_stride, bands * lanes + width), np.float32)
    block = max(1, min(rows, _SUMS // lanes))
    sums = np.empty(block * lanes, np.float32)
    for plane in range(begin, end):
        channel = plane % channels
        for band in range(bands * row_stride):
            source_row = band - top
            row_part, at = band % row_stride, band // row_stride * lanes
            for part in range(column_stride):
                target = spread[row_part, part, at : at + lanes]
                target[:] = 0
                if 0 <= source_row < x.shape[1]:
                    source = x[plane, source_row]
                    # Of the columns lane * stride + part - left, those that lie inside.
                    first = max(0, -((part - left) // column_stride))
                    last = min(lanes, (x.shape[2] - 1 - part + left) // column_stride + 1)
                    for lane in range(first, last):
                        target[lane] = source[lane * column_stride + part - left]
        for first_row in range(0, rows, block):
            count = min(block, rows - first_row)
            total = sums[: count * lanes]
            total[:] = bias[channel]
            for i in range(height):
                for j in range(width):
                    factor = weight[channel, i, j]
                    at = (first_row + i // row_stride) * lanes + j // column_stride
                    values = spread[i % row_stride, j % column_stride, at : at + count * lanes]
                    for index in range(count * lanes):
                        total[index] += factor * values[index]
            for row in range(count):
                found, target = total[row * lanes : row * lanes + columns], out[plane, first_row + row]
                for column in range(columns):
                    value = found[column]
                    value = low if value < low else value
                    target[column] = high if value > high else value


def depthwise(
    x: Float32,
    weight: Float32,
    bias: Float32,
    sizes: tuple[int, int],
    *,
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int] = (0, 0),
    limits: Limits = NO_LIMITS,
    team: Team | None = None,
) -> Float32:
    """[N * C, rows, columns] with [C, height, width] and [C] to [N * C, *sizes], kept within limits.

    Args:
        pads: rows of zeros above, columns of zeros to the left; what lies beyond the image counts as 0 everywhere.

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
    work = out.size * height * width * _NANOSECONDS_PER_PRODUCT
    run(team, convolve_planes, (x, weight, bias, *limits, *strides, *pads, out), len(x), work=work)
    return out
