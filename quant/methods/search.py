"""Scales that are searched: the one of many whose rounded block lies closest to the float one.

Per block, a row of scales around the one of the extreme values is tried. Each is followed by the scale of least
squares for the codes that it gives, s = sum(w x q) / sum(w q ** 2), and the winner by its neighbours and by codes that
are rounded anew. Errors are weighted by w: 1 without calibration (`search`), the mean square of the input otherwise
(`importance`). That is what llama.cpp's k-quants do (ggml-quants.c, make_qx_quants and make_qkx2_quants), with an
importance matrix or without; zeros are whole numbers here.

A block is never worse than rounded to nearest, in the weighted error that is searched for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..grids import CodeGrid, FindScales, Float32, reciprocal, spread
from .base import InputStatistics, Method, MethodResult, block_by_block, required
from .rtn import extreme_scales

# How far beyond its points a grid is stretched, in tenths of a point: below 0 the extreme values are clipped.
_STRETCHES = tuple(range(-9, 10, 2))
_RANGE_STRETCHES = tuple(range(-8, 17, 4))
_ZERO_SHIFTS = (0, -1, 1)
# Neighbours of the winner, as parts of a point at the end of the grid; halved from round to round.
_NEIGHBOURS, _ROUNDS = 0.2, 2


@dataclass
class Best:
    """The best scales and zeros so far [rows, blocks], and their errors."""

    scales: Float32
    zeros: Float32
    errors: Float32


class BlockSearch:
    """The search in some rows.

    Args:
        values: float32 [rows, blocks, block_size].
        weights: float32 that broadcast to them, or None.
    """

    def __init__(self, values: Float32, weights: Float32 | None, grid: CodeGrid) -> None:
        self._values, self._grid = values, grid
        self._weights = None if weights is None else np.broadcast_to(weights, values.shape)
        self._weighted = values if weights is None else values * weights
        points = grid.points
        self._step = float(points[-1] - points[0]) / (len(points) - 1)  # from point to point, in the mean
        scales, zeros = extreme_scales(values, grid)
        self.best = Best(scales, zeros, self._errors_with(self._points(scales, zeros), scales))

    def run(self) -> Best:
        """Try all candidates."""
        start, zeros = self.best.scales.copy(), self.best.zeros.copy()
        if self._grid.has_zeros:
            self._try_ranges()
        else:
            self._try_signs(start, zeros)
        reach = np.float32(_NEIGHBOURS * self._step / max(abs(self._grid.points - self._grid.centre)))
        for round_ in range(_ROUNDS):
            for step in (0, -1, 1):
                factor = np.float32(1 + step * reach / (round_ + 1))
                self._try(self.best.scales * factor, self.best.zeros)
        return self.best

    def _try_signs(self, start: Float32, zeros: Float32) -> None:
        ends = self._grid.points[[0, -1]] - np.float32(self._grid.centre)
        for end in ends:  # the extreme value at the lowest point, or at the highest
            for stretch in _STRETCHES:
                factor = ends[0] / (end + np.sign(end) * np.float32(0.1 * stretch * self._step))
                self._try(start * factor, zeros)

    def _try_ranges(self) -> None:
        """Ranges around the middle of each block, narrower and wider, and zeros beside the closest."""
        low = np.minimum(self._values.min(axis=2), np.float32(0))
        high = np.maximum(self._values.max(axis=2), np.float32(0))
        points = self._grid.points
        span, middle = points[-1] - points[0], (points[-1] + points[0]) / 2
        for stretch in _RANGE_STRETCHES:
            scales = (high - low) / np.float32(span + 0.1 * stretch * self._step)
            centre = middle - (high + low) / 2 * reciprocal(scales)
            for shift in _ZERO_SHIFTS:
                self._try(scales, centre + np.float32(shift * self._step))

    def _points(self, scales: Float32, zeros: Float32) -> Float32:
        """The closest points, less the zeros."""
        places = self._values * reciprocal(scales)[..., None]
        places += zeros[..., None]
        found = self._grid.nearest(places)
        found -= zeros[..., None]
        return found

    def _try(self, scales: Float32, zeros: Float32) -> None:
        """A candidate, with the scale of least squares for its codes."""
        scales, zeros = self._grid.settled(scales, zeros)
        points = self._points(scales, zeros)
        weighted = points if self._weights is None else points * self._weights
        along, across = self._along(points), np.einsum("rbi,rbi->rb", weighted, points)
        fitted = np.divide(along, across, out=scales.copy(), where=across > 0)
        fitted, zeros = self._grid.settled(fitted, zeros)
        # The codes of the first scale are not those that the fitted one would round to: both must be known as stored.
        self._keep(fitted, zeros, self._errors_with(self._points(fitted, zeros), fitted))

    def _along(self, points: Float32) -> Float32:
        result: Float32 = np.einsum("rbi,rbi->rb", self._weighted, points)
        return result

    def _errors_with(self, points: Float32, scales: Float32) -> Float32:
        """sum(w (x - s q) ** 2)."""
        difference = self._values - points * scales[..., None]
        weighted = difference if self._weights is None else difference * self._weights
        result: Float32 = np.einsum("rbi,rbi->rb", weighted, difference)
        return result

    def _keep(self, scales: Float32, zeros: Float32, errors: Float32) -> None:
        better = errors < self.best.errors
        np.copyto(self.best.scales, scales, where=better)
        np.copyto(self.best.zeros, zeros, where=better)
        np.copyto(self.best.errors, errors, where=better)


def searched(weight: NDArray[Any], grid: CodeGrid, weights: NDArray[Any] | None) -> MethodResult:
    """The matrix with searched scales; `weights` [columns] of the errors, None = all alike."""
    spreaded = None if weights is None else _normed(spread(weights, grid.block_size))

    def best(values: Float32, grid: CodeGrid) -> tuple[Float32, Float32]:
        found = BlockSearch(values, spreaded, grid).run()
        return found.scales, found.zeros

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
