"""Formats of two levels, as methods see them: blocks have scales that are integers times a float of their group.

What k-quants are (256 columns share floats, blocks of 16 or 32 have integers of 4 to 8 bits), and the formats with one
float per row, 8 bits per block and a grid of its own. Bound to a matrix, the floats of groups are settled by the
largest scale that is found in each; of a block there are then as many scales as its integer has values, and a method
chooses among them as it does among those of other formats.

The grids of formats that have one per matrix are trained when they are bound: k-means over weights in units of their
block's scale (Lloyd 1982), from a grid that suits weights which are normally distributed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.rounding import Points
from genai.kernels.weights import ROW, QuantizedWeight, WeightFormat, repeated, uniform_grid

from .grids import (
    Bytes,
    CodebookGrid,
    CodedBlocks,
    FindScales,
    Float32,
    UniformGrid,
    count_below,
    in_blocks,
    reciprocal,
)

# Below, float16 has fewer than four bits. What is lost above is made up for by the integers that follow.
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-21, 65504.0
# Weights that a grid is trained on, and how often its points move.
_TRAINED_ON, _ROUNDS = 1 << 18, 12
# Trained grids are whole numbers of this range, which kernels hold exactly.
_LARGEST = 127


@dataclass(frozen=True)
class TwoLevelGrid:
    """One of these formats.

    Args:
        format: what is stored; with offsets, blocks have zeros of any size.
        inner: points, by which codes are found. UniformGrid or CodebookGrid.
        trains: the points are trained on the matrix.
        floats, offset_floats: float32 [rows, blocks], those of the blocks' groups; None = not bound to a matrix yet:
            scales of any size are found.
    """

    format: WeightFormat
    inner: UniformGrid | CodebookGrid
    half_scales: bool = True
    trains: bool = False
    floats: Float32 | None = None
    offset_floats: Float32 | None = None

    def __repr__(self) -> str:
        return f"TwoLevelGrid({self.format})"

    @property
    def block_size(self) -> int:
        return self.format.block_size

    @property
    def points(self) -> Float32:
        return self.inner.points

    @property
    def rounding(self) -> Points:
        return self.inner.rounding

    @property
    def has_zeros(self) -> bool:
        return bool(self.format.offset_bits)

    @property
    def centre(self) -> float:
        return self.inner.centre

    def codes(self, scaled: Float32) -> Bytes:
        return self.inner.codes(scaled)

    def nearest(self, scaled: Float32) -> Float32:
        return self.inner.nearest(scaled)

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        scales = np.asarray(scales, np.float32)
        if not self.has_zeros:
            zeros = np.full_like(scales, self.centre)
        else:  # offsets take away, and never add
            zeros = np.clip(zeros, 0, self.points[-1]).astype(np.float32)
        if self.floats is None:
            return scales, zeros
        multiples = self._integers(scales)
        stored = multiples * self.floats
        if self.offset_floats is not None:
            offsets = _rounded(zeros * stored, self.offset_floats, (1 << self.format.offset_bits) - 1)
            zeros = offsets * self.offset_floats * reciprocal(stored)
        return stored, zeros

    def _integers(self, scales: Float32) -> Float32:
        """The multipliers of scales [rows, blocks]; 0 only where a scale is: the nearest one would make a block 0."""
        assert self.floats is not None
        most = (1 << self.format.multiplier_bits) - 1 - self.format.multiplier_zero
        found = np.rint(scales * reciprocal(self.floats))
        sign = np.sign(scales) if self.format.signed else np.float32(1)
        least = np.where((scales != 0) & (self.floats != 0), np.float32(1), np.float32(0))
        result: Float32 = sign * np.clip(np.abs(found), least, most)
        return result

    def bound(self, weight: NDArray[Any], find_scales: FindScales) -> TwoLevelGrid:
        scales, zeros = find_scales(weight, self)
        if self.trains:
            trained = replace(self, inner=_trained(weight, scales, self), trains=False)
            return trained.bound(weight, find_scales)
        floats = self._group_floats(scales, (1 << self.format.multiplier_bits) - 1 - self.format.multiplier_zero)
        bound = replace(self, floats=floats)
        if not self.has_zeros:
            return bound
        # With the multipliers that there are now.
        offsets = zeros * (bound._integers(scales) * floats)
        return replace(bound, offset_floats=self._group_floats(offsets, (1 << self.format.offset_bits) - 1))

    def _group_floats(self, numbers: Float32, most: int) -> Float32:
        """Per block [rows, blocks] the float of its group, that reaches the largest number of the group."""
        blocks = numbers.shape[1]
        per_group = self.format.group_size // self.format.block_size if self.format.group_size else blocks
        starts = np.arange(0, blocks, per_group)
        largest: Float32 = np.maximum.reduceat(np.abs(numbers), starts, axis=1)
        floats = largest / np.float32(most)
        if self.half_scales and self.format.group_size != ROW:
            floats = _half(floats)
        return np.repeat(floats, np.diff(np.append(starts, blocks)), axis=1)

    def part(self, rows: slice, blocks: slice) -> TwoLevelGrid:
        floats, offsets = (None if one is None else one[rows, blocks] for one in (self.floats, self.offset_floats))
        return replace(self, floats=floats, offset_floats=offsets)

    def packed(self, blocks: CodedBlocks) -> QuantizedWeight:
        assert self.floats is not None
        format, columns = self.format, blocks.columns
        codes, values = blocks.matrix, uniform_grid(format.bits, centred=not format.offset_bits)
        if isinstance(self.inner, CodebookGrid):
            codes, values = self.inner.stored(codes), self.inner.values
        multipliers = self._filled(self._integers(blocks.scales), columns).astype(np.int16)
        if self.offset_floats is None:
            return QuantizedWeight.from_codes(format, codes, values, self._by_group(self.floats, columns), multipliers)
        offsets = _rounded(blocks.zeros * blocks.scales, self.offset_floats, (1 << format.offset_bits) - 1)
        return QuantizedWeight.from_codes(
            format, codes, values, self._by_group(self.floats, columns), multipliers,
            self._by_group(self.offset_floats, columns), self._filled(offsets, columns).astype(np.uint8),
        )  # fmt: skip

    def _by_group(self, floats: Float32, columns: int) -> Float32:
        """[rows, groups] of [rows, blocks]."""
        per_group = self.format.group_size // self.format.block_size if self.format.group_size else floats.shape[1]
        return np.ascontiguousarray(floats[:, ::per_group])

    def _filled(self, integers: Float32, columns: int) -> Float32:
        """With those of blocks that fill the last group up."""
        more = self.format.blocks(columns) - integers.shape[1]
        return np.pad(integers, ((0, 0), (0, more)))


def _half(scales: Float32) -> Float32:
    """Rounded to float16, but for those that it holds with few bits or not at all."""
    magnitudes = np.abs(scales)
    inside = (magnitudes == 0) | ((magnitudes >= _SMALLEST_HALF) & (magnitudes <= _LARGEST_HALF))
    with np.errstate(over="ignore"):
        return np.where(inside, scales.astype(np.float16).astype(np.float32), scales)


def _rounded(numbers: Float32, floats: Float32, most: int) -> Float32:
    """The integers from 0 to `most` that times the floats come closest."""
    result: Float32 = np.clip(np.rint(numbers * reciprocal(floats)), 0, most)
    return result


def _trained(weight: NDArray[Any], scales: Float32, grid: TwoLevelGrid) -> CodebookGrid:
    """Points that suit a matrix, given scales of its blocks."""
    rows, columns = weight.shape
    chosen = np.linspace(0, rows - 1, min(rows, max(1, _TRAINED_ON // columns))).astype(np.int64)
    blocks = in_blocks(np.asarray(weight[chosen]), grid.block_size)
    scale = scales[chosen]
    scaled = (blocks * reciprocal(scale)[..., None]).reshape(len(chosen), -1)[:, :columns].reshape(-1)
    weighs = repeated(scale**2, blocks.shape[1] * blocks.shape[2])[:, :columns].reshape(-1).astype(np.float64)
    points, exact = grid.points.astype(np.float64), scaled.astype(np.float64)
    for _ in range(_ROUNDS):
        codes = count_below((points[1:] + points[:-1]) / 2, exact)
        total = np.bincount(codes, weighs, len(points))
        means = np.bincount(codes, weighs * scaled, len(points)) / np.where(total > 0, total, 1)
        points = np.sort(np.where(total > 0, means, points))
    whole = np.rint(points * (_LARGEST / np.abs(points).max())).astype(np.float32)
    inner = grid.inner
    assert isinstance(inner, CodebookGrid)
    if len(np.unique(whole)) < len(whole):  # few values: the grid it begins with does as well
        return inner
    return CodebookGrid(whole, grid.block_size)
