"""Rounding to nearest: a block's scale is that of its extreme values. onnxruntime's default, integer for integer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.rounding import ranges
from genai.kernels.weights import QuantizedWeight

from ..grids import CodeGrid, FindScales, Float32, UniformGrid
from .base import InputStatistics, Method, MethodResult, block_by_block


def extreme_scales(values: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
    """Scales and zeros [...] for blocks of values [..., block_size], as they are stored.

    Without zeros the value of largest magnitude becomes the lowest point, with its sign; with zeros the block's range,
    widened to hold 0, is spread over all points.
    """
    low, high = ranges(values)
    points = grid.points
    if not grid.has_zeros:
        extreme: Float32 = np.where(np.abs(high) > np.abs(low), high, low)
        extreme /= np.float32(points[0] - grid.centre)
        return grid.settled(extreme, np.full_like(extreme, grid.centre))
    least: Float32 = np.minimum(low, np.float32(0))
    reach: Float32 = np.maximum(high, np.float32(0)) - least
    reach /= np.float32(points[-1] - points[0])
    scales, _ = grid.settled(reach, np.zeros_like(least))
    return grid.settled(scales, range_zeros(least, scales, grid))


def range_zeros(low: Float32, scales: Float32, grid: CodeGrid) -> Float32:
    """Zeros that put the lowest value of a block on the lowest point."""
    start = np.full_like(low, grid.points[0])
    result: Float32 = start - np.divide(low, scales, out=np.zeros_like(low), where=scales != 0)
    return result


def round_to_nearest(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None = None) -> MethodResult:
    """See the module."""
    return block_by_block(weight, grid, extreme_scales)


def find_extremes(inputs: InputStatistics | None) -> FindScales:
    """Scales of the extreme values, whatever the inputs."""

    def find(weight: NDArray[Any], grid: CodeGrid) -> tuple[Float32, Float32]:
        blocks = round_to_nearest(weight, grid).blocks
        return blocks.scales, blocks.zeros

    return find


def quantize_blocks(
    weight: NDArray[Any], *, bits: int = 4, block_size: int = 32, symmetric: bool = True, half_scales: bool = True
) -> QuantizedWeight:
    """Round a matrix [rows, columns] to integers in blocks of columns: the same integers as onnxruntime's quantiser.

    Args:
        weight: any float type.
        bits, block_size, symmetric, half_scales: as `UniformGrid` has them.

    Raises:
        QuantizationError: a format that does not exist, not a matrix, or NaN or infinity in it.
    """
    return METHOD.quantize(weight, UniformGrid(bits, block_size, symmetric, half_scales), None).packed


METHOD = Method("rtn", "nothing", round_to_nearest, find_extremes, "round to nearest, scales of the extreme values")
