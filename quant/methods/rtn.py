"""Round to nearest: the extreme values of a block determine its scale.

The integers are the same as those of onnxruntime's default quantiser.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.rounding import ranges
from genai.kernels.weights import QuantizedWeight

from ..grids import CodeGrid, FindScales, Float32, UniformGrid
from .base import InputStatistics, Method, MethodResult, block_by_block


def extreme_scales(values: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
    """Return scales and zeros [...] for blocks of values [..., block_size], in the form in which they are stored.

    Without zeros, the value with the largest magnitude is mapped, with its sign, to the lowest point. With zeros, the
    block's range, widened to include 0, is mapped to all points.
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
    """Return the zeros that map the lowest value of each block to the lowest point."""
    start = np.full_like(low, grid.points[0])
    result: Float32 = start - np.divide(low, scales, out=np.zeros_like(low), where=scales != 0)
    return result


def round_to_nearest(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None = None) -> MethodResult:
    """Quantise a matrix as described in the module docstring."""
    return block_by_block(weight, grid, extreme_scales)


def find_extremes(inputs: InputStatistics | None) -> FindScales:
    """Return a search that determines scales from the extreme values and ignores the inputs."""

    def find(weight: NDArray[Any], grid: CodeGrid) -> tuple[Float32, Float32]:
        blocks = round_to_nearest(weight, grid).blocks
        return blocks.scales, blocks.zeros

    return find


def quantize_blocks(
    weight: NDArray[Any], *, bits: int = 4, block_size: int = 32, symmetric: bool = True, half_scales: bool = True
) -> QuantizedWeight:
    """Round a matrix [rows, columns] to integers in blocks of columns: the same integers as onnxruntime's quantiser.

    Args:
        weight: the matrix, of any float type.
        bits, block_size, symmetric, half_scales: see `UniformGrid`.

    Raises:
        QuantizationError: there is no such format, the weight is not a matrix, or it contains NaN or infinity.
    """
    return METHOD.quantize(weight, UniformGrid(bits, block_size, symmetric, half_scales), None).packed


METHOD = Method(
    "rtn", "nothing", round_to_nearest, find_extremes, "round to nearest, with scales from the extreme values"
)
