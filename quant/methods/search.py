"""Scales that are searched: the one of many whose rounded block lies closest to the float one.

Per block, a row of scales around the one of the extreme values is tried. Each is followed by the scale of least
squares for the codes that it gives, s = sum(w x q) / sum(w q ** 2), and the winner by its neighbours and by codes that
are rounded anew. Errors are weighted by w: 1 without calibration (`search`), the mean square of the input otherwise
(`importance`). That is what llama.cpp's k-quants do (ggml-quants.c, make_qx_quants and make_qkx2_quants), with an
importance matrix or without; zeros are whole numbers here.

A block is never worse than rounded to nearest, in the weighted error that is searched for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.rounding import WeighedBlocks, ranges

from ..grids import CodeGrid, FindScales, Float32, reciprocal, spread
from .base import InputStatistics, Method, MethodResult, block_by_block, required
from .rtn import extreme_scales

# How far beyond its points a grid is stretched, in tenths of a point: below 0 the extreme values are clipped.
_STRETCHES = tuple(range(-9, 10, 2))
_RANGE_STRETCHES = tuple(range(-8, 17, 4))
_ZERO_SHIFTS = (0, -1, 1)
# Neighbours of the winner, as parts of a point at the end of the grid; halved from round to round.
_NEIGHBOURS, _ROUNDS = 0.2, 2


class BlockSearch:
    """The search in some rows.

    Args:
        values: float32 [rows, blocks, block_size].
        weights: float32 [blocks, block_size], for every row; None = all weigh the same.
    """

    def __init__(self, values: Float32, weights: Float32 | None, grid: CodeGrid) -> None:
        self._grid = grid
        self._blocks = WeighedBlocks(values, weights, grid.rounding)
        points = grid.points
        self._step = float(points[-1] - points[0]) / (len(points) - 1)  # from point to point, in the mean
        self._reach = np.float32(_NEIGHBOURS * self._step / max(abs(points - grid.centre)))

    def run(self) -> tuple[Float32, Float32]:
        """Try all candidates; the best scales and zeros [rows, blocks]."""
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
        for end in ends:  # the extreme value at the lowest point, or at the highest
            for stretch in _STRETCHES:
                factor = ends[0] / (end + np.sign(end) * np.float32(0.1 * stretch * self._step))
                self._try(start * factor, zeros)

    def _try_ranges(self) -> None:
        """Ranges around the middle of each block, narrower and wider, and zeros beside the closest."""
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
        """A candidate, with the scale of least squares for its codes."""
        scales, zeros = self._grid.settled(scales, zeros)
        scales, zeros = self._grid.settled(self._blocks.fitted(scales, zeros), zeros)
        # The codes of the first scale are not those that the fitted one would round to: both must be known as stored.
        self._blocks.keep_better(scales, zeros)


def searched(weight: NDArray[Any], grid: CodeGrid, weights: NDArray[Any] | None) -> MethodResult:
    """The matrix with searched scales; `weights` [columns] of the errors, None = all alike."""
    spreaded = None if weights is None else _normed(spread(weights, grid.block_size))

    def best(values: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
        return BlockSearch(values, spreaded, grid).run()

    return block_by_block(weight, grid, best)


def find_searched(inputs: InputStatistics | None) -> FindScales:
    """Searched scales; columns weigh as much as their inputs, where those are known."""

    def find(weight: NDArray[Any], grid: CodeGrid) -> tuple[Float32, Float32]:
        blocks = searched(weight, grid, None if inputs is None else inputs.squares).blocks
        return blocks.scales, blocks.zeros

    return find


def find_alike(inputs: InputStatistics | None) -> FindScales:
    """Searched scales, all columns alike."""
    return find_searched(None)


def _normed(weights: Float32) -> Float32:
    """Weights whose mean is 1; a block whose inputs are all zero weighs a little, so that it is still rounded well."""
    mean = weights.mean(dtype=np.float64)
    if not mean > 0:
        return np.ones_like(weights)
    result: Float32 = np.maximum(weights / np.float32(mean), np.float32(1e-6))
    return result


def search(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None = None) -> MethodResult:
    """Searched scales, without data: all columns weigh the same."""
    return searched(weight, grid, None)


def importance(weight: NDArray[Any], grid: CodeGrid, inputs: InputStatistics | None) -> MethodResult:
    """Searched scales; columns weigh as much as the mean square of their inputs.

    Raises:
        QuantizationError: no statistics.
    """
    return searched(weight, grid, required(inputs, "importance", weight.shape[1]).squares)


SEARCH = Method(
    "search", "nothing", search, find_alike, "round to nearest, scales searched for the least squared error"
)
IMPORTANCE = Method(
    "importance", "squares", importance, find_searched, "searched scales, errors weighed by the inputs' squares"
)
