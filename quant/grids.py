"""What a block may hold: the abstract format of a packed format, in which every method of quantisation works.

A weight in a block is (point - zero) * scale, where `point` is one of a few values that the format knows (the integers
0 to 2 ** bits - 1, or a table), and scale and zero belong to the block. A method chooses scales, zeros and points; the
grid says which of them can be stored, and packs them.

Where blocks share something (`quant.two_levels`: their scales are integers times a float of a group of blocks), a grid
is bound to a matrix first, which settles what they share; it then says of each block which scales there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
    """A packed format, as methods see it.

    Attributes:
        block_size: columns that share a scale and a zero.
        points: float32 [L], ascending: the values that a code stands for. rounding: the same for kernels.
        has_zeros: whether zeros are stored; otherwise every zero is `centre`.
        centre: the zero of a block that stores none.
        format: what is stored.
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
        """Per number, counted in scales with the zero added, the index of the closest point. Any shape."""

    def nearest(self, scaled: Float32) -> Float32:
        """Per number the closest point itself; may be computed in place."""

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        """Scales and zeros [..., blocks] as they can be stored: the closest ones."""

    def bound(self, weight: NDArray[Any], find_scales: FindScales) -> CodeGrid:
        """The grid for one matrix [rows, columns]: what its blocks share is settled, from the scales that are found."""

    def part(self, rows: slice, blocks: slice) -> CodeGrid:
        """The grid of some rows and blocks of the matrix that it is bound to."""

    def packed(self, blocks: CodedBlocks) -> QuantizedWeight:
        """A whole matrix as a model stores it."""


# Given a matrix and a grid, the scales and zeros [rows, blocks] that a method begins with.
FindScales = Callable[[NDArray[Any], CodeGrid], tuple[Float32, Float32]]


def _is_one_of(value: object, known: Sequence[int]) -> bool:
    """Whether it is one of these numbers, as a whole number: they become shifts and extents."""
    return isinstance(value, int | np.integer) and value is not True and value in known


@dataclass(frozen=True)
class UniformGrid:
    """Whole numbers, a scale per block of columns or per row.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        block_size: 16, 32, 64, 128 or 256; with `by_row` the columns of the matrix.
        symmetric: False stores a whole zero point per block.
        half_scales: scales are numbers of float16, unless one is outside its range.
        by_row: one scale per row, of float32.

    Raises:
        QuantizationError: a format that there is not.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    half_scales: bool = True
    by_row: bool = False

    def __post_init__(self) -> None:
        if not _is_one_of(self.bits, CODE_BITS):
            raise QuantizationError(f"bits is {self.bits!r}, expected one of {list(CODE_BITS)}")
        if not self.by_row and not _is_one_of(self.block_size, BLOCKS):
            raise QuantizationError(f"block_size is {self.block_size!r}, expected one of {list(BLOCKS)}")

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
    """Any few numbers, a scale per block.

    Args:
        values: float32 [2 ** bits], what codes stand for, in any order.
        block_size: columns that share a scale.
        half_scales: as for UniformGrid.
        powers_of_two: scales are powers of two, as MXFP4 has them.
    """

    has_zeros, centre = False, 0.0

    def __init__(
        self, values: Float32, block_size: int, *, half_scales: bool = True, powers_of_two: bool = False
    ) -> None:
        self.values = np.asarray(values, np.float32)
        self.format = WeightFormat(len(self.values).bit_length() - 1, block_size, block_size)
        self.block_size, self.half_scales, self._powers = block_size, half_scales, powers_of_two
        # FP4 has 0 twice; the order of equal values does not matter.
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
            with np.errstate(divide="ignore"):  # 2 ** -24 is the smallest number of float16
                scales = np.where(scales == 0, 0, np.exp2(np.clip(np.rint(np.log2(np.abs(scales))), -24, 15)))
        scales = scales.astype(np.float32)
        return (rounded_to_half(scales) if self.half_scales else scales), np.zeros_like(scales)

    def bound(self, weight: NDArray[Any], find_scales: FindScales) -> CodebookGrid:
        return self

    def part(self, rows: slice, blocks: slice) -> CodebookGrid:
        return self

    def stored(self, codes: Bytes) -> Bytes:
        """Codes as the format counts them, from positions among the ascending points."""
        return self._order[codes]

    def packed(self, blocks: CodedBlocks) -> QuantizedWeight:
        codes = self.stored(blocks.matrix)
        return QuantizedWeight.from_codes(self.format, codes, self.values, np.ascontiguousarray(blocks.scales))


@dataclass(frozen=True)
class CodedBlocks:
    """A matrix [rows, columns] in the terms of a grid.

    Attributes:
        codes: uint8 [rows, blocks, block_size], indices of points; past the last column that of the closest to 0.
        scales, zeros: float32 [rows, blocks].
        columns: of the matrix; the last block may be longer.
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
        """The codes with the padding of a format, which stands for 0, where blocks are those of the format."""
        codes = self.codes.reshape(len(self.codes), -1)
        return codes if codes.shape[1] == format.padded(self.columns) else self.matrix

    def values(self, grid: CodeGrid) -> Float32:
        """The matrix that is stored, float32 [rows, columns]."""
        values = grid.points.take(self.codes)
        values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        rows, blocks, size = values.shape
        return values.reshape(rows, blocks * size)[:, : self.columns]


def count_below(bounds: NDArray[np.floating[Any]], values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """How many of a few ascending bounds lie below each value: what searchsorted gives, in a tenth of its time."""
    result = np.zeros(values.shape, np.uint8)
    is_above = np.empty(values.shape, np.bool_)
    for bound in bounds:
        np.greater(values, bound, out=is_above)
        result += is_above.view(np.uint8)
    return result


def coded(values: Float32, scales: Float32, zeros: Float32, grid: CodeGrid) -> Bytes:
    """The closest codes of values [..., block_size], given scales and zeros [...] of their blocks."""
    return closest_codes(values, scales, zeros, grid.rounding)


def reciprocal(scales: Float32) -> Float32:
    """1 / scale; 0 where that is not finite, so that every weight of the block becomes the zero."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def in_blocks(matrix: NDArray[Any], block_size: int, *, first_row: int = 0) -> Float32:
    """Rows as float32 [rows, blocks, block_size], the last block filled up with zeros; perhaps a view.

    Raises:
        QuantizationError: NaN or infinity; the message names the row (`first_row` is added) and the block.
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
    """A number per column as float32 [blocks, block_size]; 0 past the last column."""
    padded = np.zeros(num_blocks(len(vector), block_size) * block_size, np.float32)
    padded[: len(vector)] = vector
    return padded.reshape(-1, block_size)


# Floats of a chunk: a core's second-level cache holds it, and it is worth the calls from Python.
_CHUNK_FLOATS = 1 << 17


def row_slices(rows: int, columns: int) -> list[slice]:
    """Rows in pieces that a core's cache holds."""
    step = max(1, _CHUNK_FLOATS // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def in_parallel(work: Any, parts: list[Any]) -> Iterator[Any]:
    """work(part) of every part, in order, on all processors; NumPy lets go of Python's lock meanwhile."""
    with ThreadPoolExecutor(len(allowed_processors())) as pool:
        yield from pool.map(work, parts)


def empty_blocks(rows: int, columns: int, block_size: int) -> CodedBlocks:
    """Room for the blocks of a matrix."""
    blocks = num_blocks(columns, block_size)
    scales, zeros = np.empty((2, rows, blocks), np.float32)
    return CodedBlocks(np.empty((rows, blocks, block_size), np.uint8), scales, zeros, columns)
