"""Depthwise convolution of images: each channel with its own small kernel, without laying windows out."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import Float32, check
from .jit import kernel
from .team import Team, run

_NANOSECONDS_PER_PRODUCT = 0.15


@kernel("void(float32[:,:,::1], float32[:,:,::1], float32[::1], int64, int64, float32[:,:,::1], int64, int64)")
def convolve_planes(
    x: Any, weight: Any, bias: Any, row_stride: int, column_stride: int, out: Any, begin: int, end: int
) -> None:
    """Planes [begin, end) of padded images; plane p has the kernel p modulo the number of channels."""
    channels, height, width = weight.shape
    columns = out.shape[2]
    for plane in range(begin, end):
        channel = plane % channels
        for row in range(out.shape[1]):
            target = out[plane, row]
            for column in range(columns):
                target[column] = bias[channel]
            for i in range(height):
                for j in range(width):
                    factor = weight[channel, i, j]
                    source = x[plane, row * row_stride + i, j:]
                    # Two loops, since only the one without a stride becomes vector instructions.
                    if column_stride == 1:
                        for column in range(columns):
                            target[column] += factor * source[column]
                    else:
                        for column in range(columns):
                            target[column] += factor * source[column * column_stride]


def depthwise(
    x: Float32, weight: Float32, bias: Float32, strides: tuple[int, int], *, team: Team | None = None
) -> Float32:
    """[N * C, rows, columns], padded, with [C, height, width] and [C] to [N * C, rows', columns'].

    Raises:
        ValueError: a shape or type does not fit, or a kernel is larger than the image.
    """
    channels, height, width = weight.shape
    check("x", x, (None, None, None))
    check("weight", weight, (None, None, None))
    check("bias", bias, (channels,))
    if min(strides) < 1:
        raise ValueError(f"strides {strides} do not fit: they are at least 1")
    rows, columns = ((x.shape[1 + i] - weight.shape[1 + i]) // strides[i] + 1 for i in range(2))
    if channels < 1 or len(x) % channels or rows < 1 or columns < 1:
        raise ValueError(f"planes {list(x.shape)}, kernels {list(weight.shape)} and strides {strides} do not fit")
    out = np.empty((len(x), rows, columns), np.float32)
    work = out.size * height * width * _NANOSECONDS_PER_PRODUCT
    run(team, convolve_planes, (x, weight, bias, strides[0], strides[1], out), len(x), work=work)
    return out
