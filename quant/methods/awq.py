"""AWQ: columns with large inputs are scaled up before rounding, and the inputs are scaled down by the same factors.

Lin et al. 2023 (arXiv 2306.00978). The factors are the root mean squares of the inputs, raised to a power between 0 and
1 that is searched for the smallest output error. The caller divides the inputs by the factors, either in the weight of
the preceding norm or in the rows of the preceding projection. Matrices with the same inputs share the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..grids import CodeGrid
from .base import Float64, InputStatistics, Method, MethodResult, output_square, required, required_gram
from .rtn import METHOD as ROUNDING
from .search import find_searched, importance

_POWERS = tuple(step / 20 for step in range(20))


def find_factors(
    weights: Sequence[NDArray[Any]],
    grids: Sequence[CodeGrid],
    inputs: InputStatistics,
    *,
    sharing: NDArray[np.int64] | None = None,
) -> tuple[Float64, dict[str, float]]:
    """Find factors [columns] for matrices [rows, columns] that have the same inputs.

    Args:
        weights: the matrices.
        grids: their grids.
        inputs: statistics of the inputs.
        sharing: int64 [columns], the index of the factor that each column uses. With grouped-query attention, one head
            of values feeds several groups of columns, which cannot be scaled separately. None = one factor per column.

    Returns:
        The factors, and notes for the report.

    Raises:
        QuantizationError: the statistics are missing or do not match.
    """
    columns = weights[0].shape[1]
    required_gram(inputs, "awq", columns)
    squares = required(inputs, "awq", columns).squares
    if sharing is not None:
        squares = (np.bincount(sharing, squares) / np.bincount(sharing))[sharing]
    size = np.sqrt(squares)
    size = np.maximum(size, max(float(size.max()), 1e-30) * 1e-4)
    totals = [output_square(weight, inputs) or 1.0 for weight in weights]
    best: Float64 = np.ones(columns)
    least, chosen, first = np.inf, 0.0, 0.0
    for power in _POWERS:
        factors = size**power
        factors /= np.sqrt(factors.max() * factors.min())
        error = sum(
            _scaled_error(weight, grid, inputs, factors) / total
            for weight, grid, total in zip(weights, grids, totals, strict=True)
        )
        if power == 0:
            first = error
        if error < least:
            best, least, chosen = factors, error, float(power)
    return best, {"power": chosen, "error": least / len(weights), "error_unscaled": first / len(weights)}


def _scaled_error(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics, factors: Float64) -> float:
    scaled = np.asarray(weight, np.float32) * factors.astype(np.float32)
    stored = ROUNDING.quantize(scaled, grid, None).values
    stored /= factors.astype(np.float32)
    return output_square(weight - stored, inputs)


def rounded(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
    """Quantise the scaled matrix with a scale search that is weighted by the scaled inputs (AWQ's clipping).

    Raises:
        QuantizationError: the statistics are missing.
    """
    return importance(weight, grid, inputs)


METHOD = Method(
    "awq",
    "gram",
    rounded,
    find_searched,
    "scales up columns with large inputs, and scales down their inputs",
    folds=True,
)
