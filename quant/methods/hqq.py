"""Half-quadratic quantisation without calibration data (Badri & Shaji 2023, mobiusml.github.io/hqq_blog).

The method minimises sum(|W - V| ** p) with p = 0.7, which is robust to outliers. Two steps alternate: the proximal
operator of the p-norm shrinks the error, and then the zeros (or, in a grid without zeros, the scales) are fitted to the
weights minus the shrunk error. Zeros are stored as whole numbers here, so scales are fitted together with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..grids import CodeGrid, Float32, reciprocal
from .base import InputStatistics, Method, MethodResult, block_by_block
from .rtn import extreme_scales
from .search import find_alike

_NORM, _BETA, _GROWTH, _ROUNDS = 0.7, 10.0, 1.01, 20
# Added to the magnitude before the magnitude is raised to the power -0.3, so that an error of 0 has a finite weight.
_TINY = np.float32(1e-8)


def half_quadratic(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None = None) -> MethodResult:
    """Quantise a matrix as described in the module docstring."""
    return block_by_block(weight, grid, _optimised)


def _optimised(values: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
    """Return scales and zeros [rows, blocks]. Each block keeps the best result of all rounds."""
    scales, zeros = extreme_scales(values, grid)
    best = scales.copy(), zeros.copy()
    stored, points = _stored(values, scales, zeros, grid)
    least = _error(values - stored)
    # The published threshold assumes that weights are in the usual range for a layer. Relative to the block's maximum,
    # it fits any range.
    unit = np.maximum(np.abs(values).max(axis=2, keepdims=True), np.float32(1e-30))
    beta = np.float32(_BETA)
    for _ in range(_ROUNDS):
        kept = _shrunk((values - stored) / unit, beta) * unit
        target = values - kept
        if grid.has_zeros:
            estimates = points - target * reciprocal(scales)[..., None]
            zeros = estimates.mean(axis=2)
            _, zeros = grid.settled(scales, zeros)
        offset = points - zeros[..., None]
        across = np.einsum("rbi,rbi->rb", offset, offset)
        fitted = np.divide(np.einsum("rbi,rbi->rb", target, offset), across, out=scales.copy(), where=across > 0)
        scales, zeros = grid.settled(fitted, zeros)
        stored, points = _stored(values, scales, zeros, grid)
        error = _error(values - stored)
        better = error < least
        for old, new in ((best[0], scales), (best[1], zeros), (least, error)):
            np.copyto(old, new, where=better)
        beta = np.float32(beta * _GROWTH)
    return best


def _stored(values: Float32, scales: Float32, zeros: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
    """Return the stored values, and the points that represent them."""
    points = grid.nearest(values * reciprocal(scales)[..., None] + zeros[..., None])
    return (points - zeros[..., None]) * scales[..., None], points


def _error(difference: Float32) -> Float32:
    """Return sum(|difference| ** p) per block."""
    result: Float32 = (np.abs(difference) ** np.float32(_NORM)).sum(axis=2)
    return result


def _shrunk(difference: Float32, beta: np.float32) -> Float32:
    """Apply the proximal operator of |x| ** p: sign(x) * max(|x| - |x| ** (p - 1) / beta, 0)."""
    size = np.abs(difference)
    result: Float32 = np.sign(difference) * np.maximum(size - (size + _TINY) ** np.float32(_NORM - 1) / beta, 0)
    return result


METHOD = Method(
    "hqq",
    "nothing",
    half_quadratic,
    find_alike,
    "half-quadratic: minimises the sum of |error| ** 0.7, without calibration data",
)
