"""Two-level formats as grids: the scale of a block is an integer times a float of the block's group.

The formats are the k-quants (256 columns share floats, and blocks of 16 or 32 columns have integers of 4 to 8 bits) and
formats with one float per row, 8 bits per block and a non-uniform grid. When a grid is bound to a matrix, the largest
scale found in each group determines the group's float. Each block then has as many possible scales as its integer has
values, and a method chooses among them as it does for other formats.

Grids that are specific to a matrix are trained when they are bound, by k-means over the weights in units of their
block's scale (Lloyd 1982). Training starts from a grid for normally distributed weights.
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

# Below this magnitude, float16 has fewer than four bits. Above it, the integers compensate for the rounding of floats.
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-21, 65504.0
# The number of weights that a grid is trained on, and the number of training iterations.
_TRAINED_ON, _ROUNDS = 1 << 18, 12
# Trained grids are whole numbers up to this magnitude, which kernels represent exactly.
_LARGEST = 127


@dataclass(frozen=True)
class TwoLevelGrid:
    """A grid for a two-level format.

    Args:
        format: the stored format; if it has offsets, blocks have zeros of any value.
        inner: the points and the search for codes: a UniformGrid or a CodebookGrid.
        half_scales: True if floats of groups are rounded to float16.
        trains: True if the points are trained on the matrix.
        floats, offset_floats: float32 [rows, blocks], the floats of each block's group; None = not yet bound to a
            matrix, so any scale is allowed.
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
        else:  # offsets are only subtracted, never added
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
        """Return the multipliers of scales [rows, blocks].

        The multiplier of a scale other than 0 is at least 1, so that no block becomes zero.
        """
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
        # Offsets are based on the multipliers that will be stored.
        offsets = zeros * (bound._integers(scales) * floats)
        return replace(bound, offset_floats=self._group_floats(offsets, (1 << self.format.offset_bits) - 1))

    def _group_floats(self, numbers: Float32, most: int) -> Float32:
        """Return the float of each block's group [rows, blocks], such that the group's largest number can be stored."""
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
        """Convert [rows, blocks] to [rows, groups]."""
        per_group = self.format.group_size // self.format.block_size if self.format.group_size else floats.shape[1]
        return np.ascontiguousarray(floats[:, ::per_group])

    def _filled(self, integers: Float32, columns: int) -> Float32:
        """Pad integers with zeros for the blocks that complete the last group."""
        more = self.format.blocks(columns) - integers.shape[1]
        return np.pad(integers, ((0, 0), (0, more)))


def _half(scales: Float32) -> Float32:
    """Round to float16, except values that float16 represents with few bits or cannot represent."""
    magnitudes = np.abs(scales)
    inside = (magnitudes == 0) | ((magnitudes >= _SMALLEST_HALF) & (magnitudes <= _LARGEST_HALF))
    with np.errstate(over="ignore"):
        return np.where(inside, scales.astype(np.float16).astype(np.float32), scales)


def _rounded(numbers: Float32, floats: Float32, most: int) -> Float32:
    """Return the integers from 0 to `most` whose products with the floats are closest to the numbers."""
    result: Float32 = np.clip(np.rint(numbers * reciprocal(floats)), 0, most)
    return result


def _trained(weight: NDArray[Any], scales: Float32, grid: TwoLevelGrid) -> CodebookGrid:
    """Train points for a matrix, given the scales of its blocks."""
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
    if len(np.unique(whole)) < len(whole):  # too few distinct values, so the initial grid is equally good
        return inner
    return CodebookGrid(whole, grid.block_size)
