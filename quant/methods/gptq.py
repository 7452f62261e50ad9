"""GPTQ: columns are rounded one after the other, and the remaining columns compensate for each error.

Frantar et al. 2022 (arXiv 2210.17323). Let H be the mean of outer(x, x) over the inputs, and U the upper triangular
matrix with inv(H) = U.T @ U. Column j has the error e = (w - q) / U[j, j], and every later column l is changed by
-e U[j, l]. Columns are ordered by the squares of their inputs (act-order), but block by block, so that blocks are
stored unchanged. The scales of a block are searched when its first column is reached, for the values that the columns
have after the compensation for earlier columns. Each error is weighted by its cost, 1 / U[j, j] ** 2.

H is damped by a hundredth of its mean diagonal. If its Cholesky factorisation in float64 still fails, the damping is
multiplied by ten, and the notes report this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError

from ..grids import CodedBlocks, CodeGrid, Float32, coded, empty_blocks, reciprocal
from .base import Float64, Floats, InputStatistics, Method, MethodResult, by_rows, required_gram
from .search import BlockSearch, find_searched

DAMPING = 0.01
_MOST_DAMPING = 10.0
# The number of columns after which one matmul propagates the errors to the rest of the matrix.
_PANEL = 128
# The number of rows or columns that are factorised at a time.
_FACTORED = 512
# The number of floats for which scales are searched at a time.
_SEARCH_FLOATS = 1 << 17


def gptq(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
    """Quantise a matrix as described in the module docstring.

    Raises:
        QuantizationError: the Gram matrix of the inputs is missing or cannot be factorised.
    """
    rounding = Rounding(required_gram(inputs, "gptq", weight.shape[1]), grid.block_size)
    blocks = by_rows(weight, grid, lambda part, own: rounding.run(np.asarray(part, np.float32), own))
    return MethodResult(blocks, grid, rounding.notes)


class Rounding:
    """The part of GPTQ that all rows share: the order of the columns and the compensation factors.

    Args:
        gram: the Gram matrix of the inputs.
        block_size: columns per block.

    Attributes:
        notes: remarks for the report.

    Raises:
        QuantizationError: the matrix cannot be factorised.
    """

    def __init__(self, gram: Floats, block_size: int) -> None:
        self._size = block_size
        self._order = block_order(np.diag(gram), block_size)
        upper, damping = inverse_factor(gram, DAMPING, self._order)
        self._costs = (1 / np.diag(upper) ** 2).astype(np.float32)
        self._upper = upper.astype(np.float32)
        self.notes = {"damping": damping} if damping != DAMPING else {}

    def run(self, weight: Float32, grid: CodeGrid) -> CodedBlocks:
        """Round some rows, given their grid."""
        rows, columns = weight.shape
        size, order, upper = self._size, self._order, self._upper
        left = np.ascontiguousarray(weight.T[order])  # [columns, rows], in the order of rounding
        result = empty_blocks(rows, columns, size)
        scales, zeros, codes = result.scales, result.zeros, result.codes.reshape(rows, -1)
        for first, last in panels(order, size):
            lost = np.empty((last - first, rows), np.float32)
            for j in range(first, last):
                block = order[j] // size
                if j == 0 or order[j - 1] // size != block:
                    inside = slice(j, j + np.count_nonzero(order[j:] // size == block))
                    own = grid.part(slice(None), slice(block, block + 1))
                    scales[:, block], zeros[:, block] = _block_scales(left[inside], self._costs[inside], own)
                    inverse = reciprocal(scales[:, block])
                scaled = left[j] * inverse + zeros[:, block]
                found = grid.codes(scaled)
                codes[:, order[j]] = found
                stored = (grid.points[found] - zeros[:, block]) * scales[:, block]
                lost[j - first] = (left[j] - stored) / upper[j, j]
                left[j + 1 : last] -= upper[j, j + 1 : last, None] * lost[j - first]
            left[last:] -= upper[first:last, last:].T @ lost
        if columns < codes.shape[1]:
            padding = np.zeros((rows, 1, 1), np.float32)
            codes[:, columns:] = coded(padding, scales[:, -1:], zeros[:, -1:], grid)[:, 0]
        return result


def block_order(squares: NDArray[Any], block_size: int) -> NDArray[np.int64]:
    """Return the columns block by block, with the largest mean square first, and within each block largest first."""
    columns = len(squares)
    starts = np.arange(0, columns, block_size)
    means = np.add.reduceat(squares, starts) / np.diff(np.append(starts, columns))
    order = [
        start + np.argsort(-squares[start : start + block_size], kind="stable")
        for start in starts[np.argsort(-means, kind="stable")]
    ]
    return np.concatenate(order)


def panels(order: NDArray[np.int64], block_size: int) -> list[tuple[int, int]]:
    """Return the panels as [first, last) positions: about _PANEL columns, in whole blocks or inside one block."""
    changes = np.flatnonzero(np.diff(order // block_size)) + 1
    result, first = [], 0
    for end in [*changes.tolist(), len(order)]:
        if end - first >= _PANEL or end == len(order):
            result += [(start, min(start + 2 * _PANEL, end)) for start in range(first, end, 2 * _PANEL)]
            first = end
    return result


def mean_square(gram: Floats) -> float:
    """Return the mean of the inputs' squares; 1 if all inputs are 0, so that the damped matrix can be inverted."""
    return float(np.diag(gram).mean()) or 1.0


def inverse_factor(gram: Floats, damping: float, order: NDArray[np.int64]) -> tuple[Float64, float]:
    """Compute the upper triangular matrix U with inv(G + damping * mean(diag) * I) = U.T @ U.

    G is `gram` with rows and columns reordered. Inputs that are always 0 are treated as independent of all others. The
    computation needs memory for one additional matrix of the size of `gram`.

    Returns:
        U, and the damping that was used.

    Raises:
        QuantizationError: the matrix contains NaN or infinity, or is not positive definite even with strong damping.
    """
    if not np.isfinite(gram).all():
        raise QuantizationError("the Gram matrix of the inputs contains NaN or infinity")
    mean = mean_square(gram)
    # In reverse order, G = L @ L.T with lower L becomes G = R @ R.T with upper R, so U = inv(R).
    last_first = order[::-1]
    while damping <= _MOST_DAMPING:
        work = gram[last_first[:, None], last_first].astype(np.float64)
        work.reshape(-1)[:: len(work) + 1] += damping * mean
        try:
            _factorise(work)
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        _invert(work)
        return work[::-1, ::-1], damping
    raise QuantizationError(
        f"the Gram matrix of the inputs cannot be factorised, even with a damping of {_MOST_DAMPING}"
    )


def _factorise(work: Float64) -> None:
    """Replace a positive definite matrix with its lower Cholesky factor, in place, one panel of columns at a time."""
    size = len(work)
    for first in range(0, size, _FACTORED):
        last = min(first + _FACTORED, size)
        corner = np.linalg.cholesky(work[first:last, first:last])
        work[first:last, first:last] = corner
        work[first:last, last:] = 0
        work[last:, first:last] = work[last:, first:last] @ np.linalg.inv(corner).T
        for row in range(last, size, _FACTORED):
            end = min(row + _FACTORED, size)
            work[row:end, last:end] -= work[row:end, first:last] @ work[last:end, first:last].T


def _invert(work: Float64) -> None:
    """Invert a lower triangular matrix in place, one panel of rows at a time."""
    for first in range(0, len(work), _FACTORED):
        last = min(first + _FACTORED, len(work))
        corner = np.tril(np.linalg.inv(work[first:last, first:last]))
        work[first:last, first:last] = corner
        for column in range(0, first, _FACTORED):  # above its diagonal, the inverse is 0
            end = min(column + _FACTORED, first)
            work[first:last, column:end] = work[first:last, column:first] @ work[column:first, column:end]
        work[first:last, :first] = -corner @ work[first:last, :first]


def _block_scales(columns: Float32, costs: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
    """Return scales and zeros [rows] for a block's columns [up to block_size, rows], which may be in any order."""
    rows = columns.shape[1]
    scales, zeros = np.empty((2, rows), np.float32)
    weights = costs / costs.mean()
    step = max(1, _SEARCH_FLOATS // len(columns))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        own = grid.part(part, slice(None))
        found = BlockSearch(np.ascontiguousarray(columns[:, part].T)[:, None], weights[None], own).run()
        scales[part], zeros[part] = (one[:, 0] for one in found)
    return scales, zeros


METHOD = Method("gptq", "gram", gptq, find_searched, "later columns compensate for the rounding error of each column")
