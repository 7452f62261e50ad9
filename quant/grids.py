"""What a block may hold: the abstract form of a packed format, in which every method of quantisation works.

A weight in a block is (point - zero) * scale, where `point` is one of a few values that the format knows (the integers
0 to 2 ** bits - 1, or a table), and scale and zero belong to the block. A method chooses scales, zeros and points; the
grid says which of them can be stored, and packs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .blocks import (
    QuantizationError,
    QuantizedBlocks,
    _half,
    check_format,
    num_blocks,
    pack_nibbles,
)
from .threads import worker_count

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class CodeGrid(Protocol):
    """A packed format, as methods see it.

    Attributes:
        block_size: columns that share a scale and a zero.
        points: float32 [L], ascending: the values that a code stands for.
        has_zeros: whether zeros are stored; otherwise every zero is `centre`.
        centre: the zero of a block that stores none.
        bits_per_weight: what a weight takes, with its share of the scale and the zero.
    """

    @property
    def block_size(self) -> int: ...
    @property
    def points(self) -> Float32: ...
    @property
    def has_zeros(self) -> bool: ...
    @property
    def centre(self) -> float: ...
    @property
    def bits_per_weight(self) -> float: ...

    def codes(self, places: Float32) -> Bytes:
        """Per number, counted in scales with the zero added, the index of the closest point. Any shape."""

    def nearest(self, places: Float32) -> Float32:
        """Per number the closest point itself; may be computed in place."""

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        """Scales and zeros [..., blocks] as they can be stored: the closest ones."""

    def packed(self, blocks: CodedBlocks) -> QuantizedBlocks:
        """The bytes that a model stores."""


@dataclass(frozen=True)
class UniformGrid:
    """Whole numbers of 4 or 8 bits, as MatMulNBits stores them; see `blocks.QuantizedBlocks`.

    Args:
        bits, block_size: see there.
        symmetric: False stores a whole zero point per block.
        half_scales: scales are numbers of float16, unless one is outside its range.

    Raises:
        QuantizationError: a format that the operators cannot store.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    half_scales: bool = True

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)

    @property
    def points(self) -> Float32:
        return np.arange(1 << self.bits, dtype=np.float32)

    @property
    def has_zeros(self) -> bool:
        return not self.symmetric

    @property
    def centre(self) -> float:
        return float(1 << (self.bits - 1))

    @property
    def bits_per_weight(self) -> float:
        zero = 0 if self.symmetric else self.bits
        return self.bits + ((16 if self.half_scales else 32) + zero) / self.block_size

    def codes(self, places: Float32) -> Bytes:
        rounded = places + np.float32(0.5)
        np.clip(rounded, 0, (1 << self.bits) - 1, out=rounded)
        result: Bytes = rounded.astype(np.uint8)
        return result

    def nearest(self, places: Float32) -> Float32:
        places += np.float32(0.5)
        np.clip(places, 0, (1 << self.bits) - 1, out=places)
        return np.floor(places, out=places)

    def settled(self, scales: Float32, zeros: Float32) -> tuple[Float32, Float32]:
        scales = np.asarray(scales, np.float32)
        if self.symmetric:
            zeros = np.full_like(scales, self.centre)
        else:
            zeros = np.floor(np.clip(zeros, 0, (1 << self.bits) - 1) + np.float32(0.5)).astype(np.float32)
        return (_half(scales) if self.half_scales else scales), zeros

    def packed(self, blocks: CodedBlocks) -> QuantizedBlocks:
        rows, count, size = blocks.codes.shape
        points = None if self.symmetric else blocks.zeros.astype(np.uint8)
        if self.bits == 4:
            data = pack_nibbles(blocks.codes)
            points = None if points is None else pack_nibbles(points)
        else:
            data = blocks.codes
        return QuantizedBlocks(
            np.ascontiguousarray(data.reshape(rows, count, size * self.bits // 8)),
            np.ascontiguousarray(blocks.scales),
            points,
            self.bits,
            size,
            rows,
            blocks.columns,
        )


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

    def values(self, grid: CodeGrid) -> Float32:
        """The matrix that is stored, float32 [rows, columns]."""
        values = grid.points[self.codes]
        values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        rows, blocks, size = values.shape
        return values.reshape(rows, blocks * size)[:, : self.columns]


def coded(values: Float32, scales: Float32, zeros: Float32, grid: CodeGrid) -> Bytes:
    """The closest codes of values [..., block_size], given scales and zeros [...] of their blocks."""
    places = values * reciprocal(scales)[..., None]
    places += zeros[..., None]
    return grid.codes(places)


def reciprocal(scales: Float32) -> Float32:
    """1 / scale; 0 where that is not finite, so that every weight of the block becomes the zero."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def in_blocks(matrix: NDArray[Any], block_size: int, *, first_row: int = 0) -> Float32:
    """Rows as float32 [rows, blocks, block_size], the last block filled up with zeros.

    Raises:
        QuantizationError: NaN or infinity; the message names the row (`first_row` is added) and the block.
    """
    rows, columns = matrix.shape
    blocks = num_blocks(columns, block_size)
    padded = np.zeros((rows, blocks * block_size), np.float32)
    padded[:, :columns] = matrix
    values = padded.reshape(rows, blocks, block_size)
    bad = ~np.isfinite(values).all(axis=2)
    if bad.any():
        row, block = np.argwhere(bad)[0].tolist()
        raise QuantizationError(f"weight has NaN or infinite values in row {first_row + row}, block {block}")
    return values


def spread(vector: NDArray[Any], block_size: int) -> Float32:
    """A number per column as float32 [blocks, block_size]; 0 past the last column."""
    padded = np.zeros(num_blocks(len(vector), block_size) * block_size, np.float32)
    padded[: len(vector)] = vector
    return padded.reshape(-1, block_size)


# Floats of a chunk: it and its temporaries stay inside a core's cache.
_CHUNK_FLOATS = 1 << 15


def row_slices(rows: int, columns: int) -> list[slice]:
    """Rows in pieces that a core's cache holds."""
    step = max(1, _CHUNK_FLOATS // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def in_parallel(work: Any, parts: list[Any]) -> Iterator[Any]:
    """work(part) of every part, in order, on all processors; NumPy lets go of Python's lock meanwhile."""
    with ThreadPoolExecutor(worker_count()) as pool:
        yield from pool.map(work, parts)


def empty_blocks(rows: int, columns: int, block_size: int) -> CodedBlocks:
    """Room for the blocks of a matrix."""
    blocks = num_blocks(columns, block_size)
    scales, zeros = np.empty((2, rows, blocks), np.float32)
    return CodedBlocks(np.empty((rows, blocks, block_size), np.uint8), scales, zeros, columns)
