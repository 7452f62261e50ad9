"""GPTQ: columns are rounded one after the other, and what each loses is made good by those not rounded yet.

Frantar et al. 2022 (arXiv 2210.17323). With H the mean of outer(x, x) over the inputs and U upper triangular with
inv(H) = U.T @ U, column j loses e = (w - q) / U[j, j], and every later column l is changed by -e U[j, l]. Columns come
in the order of their inputs' squares (act-order), block by block, so that blocks stay as they are stored; a block's
scales are searched when its turn comes, in what the columns before have made of it, each error weighed by
1 / U[j, j] ** 2, which is what it costs.

H is damped by a hundredth of its mean diagonal; where its Cholesky factorisation in float64 fails even so, ten times
as much is tried, and said in the notes.
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
# Columns whose losses reach the rest of the matrix by one product.
_PANEL = 128
# Rows or columns that are factorised at a time.
_FACTORED = 512
# Floats whose scales are searched at once.
_SEARCH_FLOATS = 1 << 17


def gptq(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
    """See the module.

    Raises:
        QuantizationError: no products of the inputs, or they cannot be factorised.
    """
    rounding = Rounding(required_gram(inputs, "gptq", weight.shape[1]), grid.block_size)
    blocks = by_rows(weight, grid, lambda part, own: rounding.run(np.asarray(part, np.float32), own))
    return MethodResult(blocks, grid, rounding.notes)


class Rounding:
    """What all rows share: the order of the columns, and what each loses to those behind it.

    Args:
        gram: the inputs' products with each other.

    Attributes:
        notes: for reports.

    Raises:
        QuantizationError: they cannot be factorised.
    """

    def __init__(self, gram: Floats, block_size: int) -> None:
        self._size = block_size
        self._order = block_order(np.diag(gram), block_size)
        upper, damping = inverse_factor(gram, DAMPING, self._order)
        self._costs = (1 / np.diag(upper) ** 2).astype(np.float32)
        self._upper = upper.astype(np.float32)
        self.notes = {"damping": damping} if damping != DAMPING else {}

    def run(self, weight: Float32, grid: CodeGrid) -> CodedBlocks:
        """Round some rows, with the grid of these."""
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
    """Columns block by block, the block with the largest mean square first, and inside it the largest first."""
    columns = len(squares)
    starts = np.arange(0, columns, block_size)
    means = np.add.reduceat(squares, starts) / np.diff(np.append(starts, columns))
    order = [
        start + np.argsort(-squares[start : start + block_size], kind="stable")
        for start in starts[np.argsort(-means, kind="stable")]
    ]
    return np.concatenate(order)


def panels(order: NDArray[np.int64], block_size: int) -> list[tuple[int, int]]:
    """First and last positions of panels in the order: about _PANEL columns, of whole blocks or of one block."""
    changes = np.flatnonzero(np.diff(order // block_size)) + 1
    result, first = [], 0
    for end in [*changes.tolist(), len(order)]:
        if end - first >= _PANEL or end == len(order):
            result += [(start, min(start + 2 * _PANEL, end)) for start in range(first, end, 2 * _PANEL)]
            first = end
    return result


def mean_square(gram: Floats) -> float:
    """The mean of the inputs' squares; 1 where all inputs are 0, so that what is damped by it can be inverted."""
    return float(np.diag(gram).mean()) or 1.0


def inverse_factor(gram: Floats, damping: float, order: NDArray[np.int64]) -> tuple[Float64, float]:
    """U upper triangular with inv(G + damping * mean(diag) * I) = U.T @ U, and the damping that it took.

    G is `gram` with rows and columns in an order. Inputs that were never seen count as independent of all others.
    Beside `gram` there is one more matrix of its size in memory.

    Raises:
        QuantizationError: the matrix holds NaN or infinity, or is not positive even when damped much.
    """
    if not np.isfinite(gram).all():
        raise QuantizationError("the inputs' products with each other hold NaN or infinity")
    mean = mean_square(gram)
    # From the last row to the first: there G = L @ L.T with L lower is G = R @ R.T with R upper, so U = inv(R).
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
        f"the inputs' products with each other cannot be factorised, even damped by {_MOST_DAMPING}"
    )


def _factorise(work: Float64) -> None:
    """A positive matrix becomes its lower Cholesky factor, in place, a panel of columns at a time."""
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
    """A lower triangular matrix becomes its inverse, in place, a panel of rows at a time."""
    for first in range(0, len(work), _FACTORED):
        last = min(first + _FACTORED, len(work))
        corner = np.tril(np.linalg.inv(work[first:last, first:last]))
        work[first:last, first:last] = corner
        for column in range(0, first, _FACTORED):  # what is right of the inverse's diagonal is 0
            end = min(column + _FACTORED, first)
            work[first:last, column:end] = work[first:last, column:first] @ work[column:first, column:end]
        work[first:last, :first] = -corner @ work[first:last, :first]


def _block_scales(columns: Float32, costs: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
    """Scales and zeros [rows] for columns [up to block_size, rows] that make a block, in any order."""
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


METHOD = Method("gptq", "gram", gptq, find_searched, "what a column loses is made good by the columns after it")
