"""Scale search: chooses, from many candidate scales, the scale whose rounded block is closest to the float block.

For each block, the search tries a range of scales around the scale that the extreme values determine. For each
candidate, it also tries the least-squares scale for the candidate's codes, s = sum(w x q) / sum(w q ** 2). It then
tries the neighbours of the best candidate, with codes rounded again. Errors are weighted by w, which is 1 without
calibration (`search`), and otherwise the mean square of the input (`importance`). llama.cpp's k-quants do the same
(ggml-quants.c, make_qx_quants and make_qkx2_quants), with or without an importance matrix; zeros are whole numbers
here.

In the weighted error that the search minimises, a block is never worse than with round to nearest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.rounding import WeighedBlocks, ranges

from ..grids import CodeGrid, FindScales, Float32, reciprocal, spread
from .base import InputStatistics, Method, MethodResult, block_by_block, required
from .rtn import extreme_scales

# The amounts by which a block's range is stretched beyond the grid's points, in tenths of the distance between points.
# Negative amounts clip the extreme values.
_STRETCHES = tuple(range(-9, 10, 2))
_RANGE_STRETCHES = tuple(range(-8, 17, 4))
_ZERO_SHIFTS = (0, -1, 1)
# The distance of the best candidate's neighbours, relative to a point at the end of the grid. It is halved in the
# second round.
_NEIGHBOURS, _ROUNDS = 0.2, 2


class BlockSearch:
    """The search for the scales of some rows.

    Args:
        values: float32 [rows, blocks, block_size].
        weights: float32 [blocks, block_size], the same for every row; None = equal weights.
        grid: the grid for these rows.
    """

    def __init__(self, values: Float32, weights: Float32 | None, grid: CodeGrid) -> None:
        self._grid = grid
        self._blocks = WeighedBlocks(values, weights, grid.rounding)
        points = grid.points
        self._step = float(points[-1] - points[0]) / (len(points) - 1)  # mean distance between points
        self._reach = np.float32(_NEIGHBOURS * self._step / max(abs(points - grid.centre)))

    def run(self) -> tuple[Float32, Float32]:
        """Try all candidates. Return the best scales and zeros [rows, blocks]."""
        best = self._blocks
        scales, zeros = extreme_scales(best.values, self._grid)
        best.keep_better(scales, zeros)
        if self._grid.has_zeros:
            self._try_ranges()
        else:
            self._try_signs(scales, zeros)
        for round_ in range(_ROUNDS):
            for step in (0, -1, 1):
                factor = np.float32(1 + step * self._reach / (round_ + 1))
                self._try(best.scales * factor, best.zeros)
        return best.scales, best.zeros

    def _try_signs(self, start: Float32, zeros: Float32) -> None:
        ends = self._grid.points[[0, -1]] - np.float32(self._grid.centre)
        for end in ends:  # the extreme value is mapped to either the lowest or the highest point
            for stretch in _STRETCHES:
                factor = ends[0] / (end + np.sign(end) * np.float32(0.1 * stretch * self._step))
                self._try(start * factor, zeros)

    def _try_ranges(self) -> None:
        """Try narrower and wider ranges around the middle of each block, and several zeros near the closest one."""
        low, high = ranges(self._blocks.values)
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        points = self._grid.points
        span, middle = points[-1] - points[0], (points[-1] + points[0]) / 2
        for stretch in _RANGE_STRETCHES:
            scales = (high - low) / np.float32(span + 0.1 * stretch * self._step)
            centre = middle - (high + low) / 2 * reciprocal(scales)
            for shift in _ZERO_SHIFTS:
                self._try(scales, centre + np.float32(shift * self._step))

    def _try(self, scales: Float32, zeros: Float32) -> None:
        """Try a candidate, and the least-squares scale for its codes."""
        scales, zeros = self._grid.settled(scales, zeros)
        scales, zeros = self._grid.settled(self._blocks.fitted(scales, zeros), zeros)
        # The codes of the first scale may differ from those of the fitted scale, so both are evaluated as stored.
        self._blocks.keep_better(scales, zeros)


def searched(weight: NDArray[Any], grid: CodeGrid, weights: NDArray[Any] | None) -> MethodResult:
    """Quantise a matrix with searched scales. Errors are weighted by `weights` [columns]; None = equal weights."""
    spreaded = None if weights is None else _normed(spread(weights, grid.block_size))

    def best(values: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
        return BlockSearch(values, spreaded, grid).run()

    return block_by_block(weight, grid, best)


def find_searched(inputs: InputStatistics | None) -> FindScales:
    """Return a scale search that weights columns by their inputs, if the inputs are known."""

    def find(weight: NDArray[Any], grid: CodeGrid) -> tuple[Float32, Float32]:
        blocks = searched(weight, grid, None if inputs is None else inputs.squares).blocks
        return blocks.scales, blocks.zeros

    return find


def find_alike(inputs: InputStatistics | None) -> FindScales:
    """Return a scale search that weights all columns equally."""
    return find_searched(None)


def _normed(weights: Float32) -> Float32:
    """Normalise weights to a mean of 1.

    Blocks with zero inputs get a small weight, so that they are still rounded well.
    """
    mean = weights.mean(dtype=np.float64)
    if not mean > 0:
        return np.ones_like(weights)
    result: Float32 = np.maximum(weights / np.float32(mean), np.float32(1e-6))
    return result


def search(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None = None) -> MethodResult:
    """Quantise with searched scales and equal weights. No calibration data is needed."""
    return searched(weight, grid, None)


def importance(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
    """Quantise with searched scales, and with columns weighted by the mean square of their inputs.

    Raises:
        QuantizationError: the statistics are missing.
    """
    return searched(weight, grid, required(inputs, "importance", weight.shape[1]).squares)


SEARCH = Method(
    "search", "nothing", search, find_alike, "round to nearest, with scales searched for the smallest squared error"
)
IMPORTANCE = Method(
    "importance", "squares", importance, find_searched, "searched scales, with errors weighted by the inputs' squares"
)
