"""Grids: an abstraction of packed formats on which all quantisation methods work.

A weight in a block is (point - zero) * scale. `point` is one of the few values of the format (the integers 0 to 2 **
bits - 1, or a table); scale and zero belong to the block. A method chooses scales, zeros and points; the grid
determines which of them can be stored, and packs them.

If blocks share data (in `quant.two_levels`, scales are integers times a float of a group of blocks), a grid is first
bound to a matrix. Binding determines the shared data, and thereby the possible scales of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genai.common.blas import one_blas_thread
from genai.common.cores import allowed_processors
from genai.kernels.cpu.arrays.rounding import Points, closest_codes, rounded_to_half as rounded_to_half
from genai.kernels.weights import (
    BLOCKS,
    CODE_BITS,
    ROW,
    QuantizationError,
    QuantizedWeight,
    WeightFormat,
    num_blocks,
    uniform_format,
    uniform_grid,
)

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class CodeGrid(Protocol):
    """A packed format, in the form that methods use.

    Attributes:
        block_size: columns that share a scale and a zero.
        points: float32 [L], ascending: the values of codes.
        rounding: the points in the form that kernels accept.
        has_zeros: True if zeros are stored; otherwise every zero is `centre`.
        centre: the zero of blocks without a stored zero.
        format: the stored format.
    """

    @property
    def block_size(self) -> int: ...
    @property
    def points(self) -> Float32: ...
    @property
    def rounding(self) -> Points: ...
    @property
    def has_zeros(self) -> bool: ...
    @property
    def centre(self) -> float: ...
    @property
    def format(self) -> WeightFormat: ...

    def codes(self, scaled: Float32) -> Bytes:
        """Return the index of the closest point for each number, in any shape.

        The numbers are in units of the scale, with the zero added.
        """

    def nearest(self, scaled: Float32) -> Float32:
        """Return the closest point for each number; may overwrite the input."""

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        """Return the closest scales and zeros [..., blocks] that can be stored."""

    def bound(self, weight: NDArray[Any], find_scales: FindScales) -> CodeGrid:
        """Return the grid for a matrix [rows, columns].

        The grid includes the data that the blocks share, which is determined from the scales that `find_scales` finds.
        """

    def part(self, rows: slice, blocks: slice) -> CodeGrid:
        """Return the grid for some rows and blocks of the bound matrix."""

    def packed(self, blocks: CodedBlocks) -> QuantizedWeight:
        """Return an entire matrix in the stored format."""


# A function that returns the initial scales and zeros [rows, blocks] for a matrix and a grid.
FindScales = Callable[[NDArray[Any], CodeGrid], tuple[Float32, Float32]]


def _is_one_of(value: object, known: Sequence[int]) -> bool:
    """Return True if the value is one of these integers. Refuse other types, because it is used in shapes."""
    return isinstance(value, int | np.integer) and value is not True and value in known


@dataclass(frozen=True)
class UniformGrid:
    """Whole numbers with one scale per block of columns or per row.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        block_size: 16, 32, 64, 128 or 256; with `by_row`, the number of columns of the matrix.
        symmetric: False stores a whole-number zero point for each block.
        half_scales: True if scales are rounded to float16, unless a scale is outside float16's range.
        by_row: True for one float32 scale per row.

    Raises:
        QuantizationError: there is no such format.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    half_scales: bool = True
    by_row: bool = False

    def __post_init__(self) -> None:
        if not _is_one_of(self.bits, CODE_BITS):
            raise QuantizationError(f"bits is {self.bits!r}, but must be one of {list(CODE_BITS)}")
        if not self.by_row and not _is_one_of(self.block_size, BLOCKS):
            raise QuantizationError(f"block_size is {self.block_size!r}, but must be one of {list(BLOCKS)}")

    @property
    def format(self) -> WeightFormat:
        return uniform_format(self.bits, ROW if self.by_row else self.block_size, zero_points=not self.symmetric)

    @property
    def points(self) -> Float32:
        return np.arange(1 << self.bits, dtype=np.float32)

    @property
    def rounding(self) -> Points:
        return Points(self.points, whole=True)

    @property
    def has_zeros(self) -> bool:
        return not self.symmetric

    @property
    def centre(self) -> float:
        return float(1 << (self.bits - 1))

    def codes(self, scaled: Float32) -> Bytes:
        rounded = scaled + np.float32(0.5)
        np.clip(rounded, 0, (1 << self.bits) - 1, out=rounded)
        result: Bytes = rounded.astype(np.uint8)
        return result

    def nearest(self, scaled: Float32) -> Float32:
        scaled += np.float32(0.5)
        np.clip(scaled, 0, (1 << self.bits) - 1, out=scaled)
        return np.floor(scaled, out=scaled)

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        scales = np.asarray(scales, np.float32)
        if self.symmetric:
            zeros = np.full_like(scales, self.centre)
        else:
            zeros = np.floor(np.clip(zeros, 0, (1 << self.bits) - 1) + np.float32(0.5)).astype(np.float32)
        return (rounded_to_half(scales) if self.half_scales and not self.by_row else scales), zeros

    def bound(self, weight: NDArray[Any], find_scales: FindScales) -> UniformGrid:
        return self

    def part(self, rows: slice, blocks: slice) -> UniformGrid:
        return self

    def packed(self, blocks: CodedBlocks) -> QuantizedWeight:
        scales, values = np.ascontiguousarray(blocks.scales), uniform_grid(self.bits, centred=self.symmetric)
        offsets = None if self.symmetric else blocks.zeros.astype(np.uint8)
        return QuantizedWeight.from_codes(
            self.format,
            blocks.padded_to(self.format),
            values,
            scales,
            None,
            None if offsets is None else scales,
            offsets,
            columns=blocks.columns,
        )


class CodebookGrid:
    """A few arbitrary values with one scale per block.

    Args:
        values: float32 [2 ** bits], the values of the codes, in any order.
        block_size: number of columns that share a scale.
        half_scales: see UniformGrid.
        powers_of_two: True if scales are powers of two, as in MXFP4.
    """

    has_zeros, centre = False, 0.0

    def __init__(
        self, values: Float32, block_size: int, *, half_scales: bool = True, powers_of_two: bool = False
    ) -> None:
        self.values = np.asarray(values, np.float32)
        self.format = WeightFormat(len(self.values).bit_length() - 1, block_size, block_size)
        self.block_size, self.half_scales, self._powers = block_size, half_scales, powers_of_two
        # FP4 has two zeros; the order of equal values does not matter.
        order = np.argsort(self.values, kind="stable")
        self.points, self._order = self.values[order], order.astype(np.uint8)
        self._middles = (self.points[1:] + self.points[:-1]) / 2
        self.rounding = Points(self.points, whole=False)

    def __repr__(self) -> str:
        return f"CodebookGrid({self.format})"

    def codes(self, scaled: Float32) -> Bytes:
        return count_below(self._middles, scaled)

    def nearest(self, scaled: Float32) -> Float32:
        return np.take(self.points, count_below(self._middles, scaled))

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        scales = np.asarray(scales, np.float32)
        if self._powers:
            with np.errstate(divide="ignore"):  # 2 ** -24 is the smallest positive float16
                scales = np.where(scales == 0, 0, np.exp2(np.clip(np.rint(np.log2(np.abs(scales))), -24, 15)))
        scales = scales.astype(np.float32)
        return (rounded_to_half(scales) if self.half_scales else scales), np.zeros_like(scales)

    def bound(self, weight: NDArray[Any], find_scales: FindScales) -> CodebookGrid:
        return self

    def part(self, rows: slice, blocks: slice) -> CodebookGrid:
        return self

    def stored(self, codes: Bytes) -> Bytes:
        """Convert indices of ascending points to codes of the format."""
        return self._order[codes]

    def packed(self, blocks: CodedBlocks) -> QuantizedWeight:
        codes = self.stored(blocks.matrix)
        return QuantizedWeight.from_codes(self.format, codes, self.values, np.ascontiguousarray(blocks.scales))


@dataclass(frozen=True)
class CodedBlocks:
    """A matrix [rows, columns], expressed in a grid.

    Attributes:
        codes: uint8 [rows, blocks, block_size], indices of points. After the last column, the index of the point that
            is closest to 0.
        scales, zeros: float32 [rows, blocks].
        columns: number of columns in the matrix; the last block may extend beyond this number.
    """

    codes: Bytes
    scales: Float32
    zeros: Float32
    columns: int

    @property
    def matrix(self) -> Bytes:
        """The codes [rows, columns]."""
        return self.codes.reshape(len(self.codes), -1)[:, : self.columns]

    def padded_to(self, format: WeightFormat) -> Bytes:
        """Return the codes, with the format's padding, which represents 0, if the blocks have the format's size."""
        codes = self.codes.reshape(len(self.codes), -1)
        return codes if codes.shape[1] == format.padded(self.columns) else self.matrix

    def values(self, grid: CodeGrid) -> Float32:
        """Return the quantised matrix as float32 [rows, columns]."""
        values = grid.points.take(self.codes)
        values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        rows, blocks, size = values.shape
        return values.reshape(rows, blocks * size)[:, : self.columns]


def count_below(bounds: NDArray[np.floating[Any]], values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Count, for each value, the bounds (few, ascending) that are below it. Ten times as fast as searchsorted."""
    result = np.zeros(values.shape, np.uint8)
    is_above = np.empty(values.shape, np.bool_)
    for bound in bounds:
        np.greater(values, bound, out=is_above)
        result += is_above.view(np.uint8)
    return result


def coded(values: Float32, scales: Float32, zeros: Float32, grid: CodeGrid) -> Bytes:
    """Return the closest codes for values [..., block_size], given the scales and zeros [...] of their blocks."""
    return closest_codes(values, scales, zeros, grid.rounding)


def reciprocal(scales: Float32) -> Float32:
    """Return 1 / scale, or 0 if the result is not finite; every weight of the block then becomes the zero."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def in_blocks(matrix: NDArray[Any], block_size: int, *, first_row: int = 0) -> Float32:
    """Return rows as float32 [rows, blocks, block_size], with the last block padded with zeros. May return a view.

    Raises:
        QuantizationError: a value is NaN or infinite; the message names the block and the row (plus `first_row`).
    """
    rows, columns = matrix.shape
    blocks = num_blocks(columns, block_size)
    if columns % block_size:
        padded = np.zeros((rows, blocks * block_size), np.float32)
        padded[:, :columns] = matrix
    else:
        padded = np.ascontiguousarray(matrix, np.float32)
    values = padded.reshape(rows, blocks, block_size)
    if not np.isfinite(values).all():
        row, block = np.argwhere(~np.isfinite(values).all(axis=2))[0].tolist()
        raise QuantizationError(f"weight has NaN or infinite values in row {first_row + row}, block {block}")
    return values


def spread(vector: NDArray[Any], block_size: int) -> Float32:
    """Return a vector of one number per column as float32 [blocks, block_size], with 0 after the last column."""
    padded = np.zeros(num_blocks(len(vector), block_size) * block_size, np.float32)
    padded[: len(vector)] = vector
    return padded.reshape(-1, block_size)


# The number of floats in a chunk. A chunk fits a core's level-2 cache and amortises the overhead of Python calls.
_CHUNK_FLOATS = 1 << 17


def row_slices(rows: int, columns: int) -> list[slice]:
    """Split rows into slices that fit a core's cache."""
    step = max(1, _CHUNK_FLOATS // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def in_parallel(work: Any, parts: list[Any]) -> Iterator[Any]:
    """Yield work(part) for every part, in order, computed on all processors. NumPy releases the GIL meanwhile."""
    processors = len(allowed_processors())
    if processors == 1 or len(parts) == 1:
        yield from map(work, parts)
        return
    with one_blas_thread(), ThreadPoolExecutor(processors) as pool:
        yield from pool.map(work, parts)


def empty_blocks(rows: int, columns: int, block_size: int) -> CodedBlocks:
    """Allocate the coded blocks of a matrix."""
    blocks = num_blocks(columns, block_size)
    scales, zeros = np.empty((2, rows, blocks), np.float32)
    return CodedBlocks(np.empty((rows, blocks, block_size), np.uint8), scales, zeros, columns)
