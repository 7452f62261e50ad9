"""Weights in blocks as com.microsoft::MatMulNBits stores them, made by rounding to nearest: each block gets the scale
of its extreme values, each weight its closest integer.

Rounding is that of onnxruntime's default block quantiser, integer for integer, except that scales are numbers of
float16 unless told otherwise: products then read a ninth less.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.rounding import rounded_to_half

BITS = (4, 8)
# The operator wants a power of two; above 256 an int8 dot product of one block no longer fits 24 bits.
BLOCK_SIZES = (16, 32, 64, 128, 256)


class QuantizationError(ValueError):
    """A matrix or an option that cannot be quantised; the message names the values."""


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix [n, k] as unsigned integers: value = (integer - zero point) * scale, per row and block of columns.

    Attributes:
        data: uint8 [n, blocks, block_size * bits / 8]. With 4 bits the low nibble is the even element.
            The last block is padded if k does not fill it; padding has the value 0.
        scales: float32 [n, blocks]; may be negative.
        zero_points: None (every zero point is 2 ** (bits - 1)), or uint8 [n, ceil(blocks * bits / 8)]; with 4 bits
            the low nibble is the even block.
        bits: 4 or 8. block_size: 16, 32, 64, 128 or 256.
        n: rows (outputs). k: columns (inputs).
    """

    data: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None
    bits: int
    block_size: int
    n: int
    k: int

    def __post_init__(self) -> None:
        check_format(self.bits, self.block_size)
        blocks = num_blocks(self.k, self.block_size)
        _check("data", self.data, (self.n, blocks, self.block_size * self.bits // 8), "B")
        _check("scales", self.scales, (self.n, blocks), "f")
        if self.zero_points is not None:
            _check("zero_points", self.zero_points, (self.n, -(-blocks * self.bits // 8)), "B")


def num_blocks(k: int, block_size: int) -> int:
    """Blocks in a row of k elements, the last one perhaps padded."""
    return -(-k // block_size)


def check_format(bits: int, block_size: int) -> None:
    """Raise QuantizationError unless the operators can store this format."""
    if bits not in BITS:
        raise QuantizationError(f"bits is {bits}, expected one of {list(BITS)}")
    if block_size not in BLOCK_SIZES:
        raise QuantizationError(f"block_size is {block_size}, expected one of {list(BLOCK_SIZES)}")


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Values below 16 [..., m] to bytes [..., ceil(m / 2)], the even element in the low nibble."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], axis=-1)
    return values[..., 0::2] | (values[..., 1::2] << np.uint8(4))


def _check(name: str, array: NDArray[Any], shape: tuple[int, ...], kind: str) -> None:
    if array.shape != shape or array.dtype.char != kind:
        raise QuantizationError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(kind)} {list(shape)}")


# Floats per chunk of rows: a chunk and its temporaries (about five times as much) stay inside a core's cache.
_CHUNK_FLOATS = 1 << 16


def quantize_blocks(
    weight: NDArray[Any], *, bits: int = 4, block_size: int = 32, symmetric: bool = True, half_scales: bool = True
) -> QuantizedBlocks:
    """Quantise a matrix [n, k] along its columns.

    Symmetric: the value of largest magnitude becomes the lowest integer, so scale = value / -2 ** (bits - 1), with
    the value's sign, and every zero point is 2 ** (bits - 1). Asymmetric: the block's range, widened to hold 0, is
    spread over all integers, with a zero point per block.

    Args:
        weight: any float type, [n, k]; rows are read once, a few at a time.
        bits: 4 or 8.
        block_size: 16, 32, 64, 128 or 256.
        symmetric: False adds zero points.
        half_scales: scales are rounded to float16 before the weights are, unless a scale is outside its range.

    Raises:
        QuantizationError: a format that the operators cannot store, not a matrix, or NaN or infinity in it.
    """
    check_format(bits, block_size)
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError(f"weight has shape {list(weight.shape)}, expected a matrix with at least one element")
    rows, columns = weight.shape
    blocks = num_blocks(columns, block_size)
    data = np.empty((rows, blocks, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    points = None if symmetric else np.empty((rows, -(-blocks * bits // 8)), np.uint8)

    def quantize_rows(first: int) -> None:
        part = slice(first, first + step)
        values = _padded_blocks(weight[part], block_size)
        find_scales = _symmetric_scales if symmetric else _ranged_scales
        scales[part], zeros = find_scales(values, bits, half_scales)
        _require_finite(scales[part], first)
        integers = _rounded(values, scales[part], zeros, bits)
        data[part] = pack_nibbles(integers) if bits == 4 else integers
        if points is not None:
            zero_integers = zeros[:, :, 0].astype(np.uint8)
            points[part] = pack_nibbles(zero_integers) if bits == 4 else zero_integers

    step = max(1, _CHUNK_FLOATS // (blocks * block_size))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(quantize_rows, range(0, rows, step)):
            pass
    return QuantizedBlocks(data, scales, points, bits, block_size, rows, columns)


def _padded_blocks(rows: NDArray[Any], block_size: int) -> NDArray[np.float32]:
    """Rows as float32 [rows, blocks, block_size], the last block filled up with zeros."""
    count, columns = rows.shape
    blocks = num_blocks(columns, block_size)
    if columns == blocks * block_size:
        return rows.astype(np.float32).reshape(count, blocks, block_size)
    padded = np.zeros((count, blocks * block_size), np.float32)
    padded[:, :columns] = rows
    return padded.reshape(count, blocks, block_size)


def _symmetric_scales(
    values: NDArray[np.float32], bits: int, half_scales: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales [rows, blocks] and the constant zero point [1, 1, 1]."""
    high, low = values.max(axis=2), values.min(axis=2)
    extreme = np.where(np.abs(high) > np.abs(low), high, low)
    half = np.float32(1 << (bits - 1))
    scales = extreme / -half
    return rounded_to_half(scales) if half_scales else scales, np.full((1, 1, 1), half, np.float32)


def _ranged_scales(
    values: NDArray[np.float32], bits: int, half_scales: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales [rows, blocks] and whole zero points [rows, blocks, 1] for ranges that hold 0."""
    largest = np.float32((1 << bits) - 1)
    low = np.minimum(values.min(axis=2), np.float32(0))
    high = np.maximum(values.max(axis=2), np.float32(0))
    # In a finite block a range that overflows is refused with the other infinities.
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (high - low) / largest
        if half_scales:
            scales = rounded_to_half(scales)
        exact = np.divide(-low, scales, out=low.copy(), where=scales != 0)
        zeros = np.floor(np.clip(exact, 0, largest) + np.float32(0.5))
    return scales, zeros[:, :, None]


def _require_finite(scales: NDArray[np.float32], first_row: int) -> None:
    """A block with NaN or infinity has such a scale too."""
    bad = ~np.isfinite(scales)
    if bad.any():
        row, block = np.argwhere(bad)[0]
        raise QuantizationError(f"weight has NaN or infinite values in row {first_row + row}, block {block}")


def _rounded(
    values: NDArray[np.float32], scales: NDArray[np.float32], zeros: NDArray[np.float32], bits: int
) -> NDArray[np.uint8]:
    """clip(round(value / scale) + zero point), halves away from zero. Overwrites `values`."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    inverse[~np.isfinite(inverse)] = 0  # all zero, or too small for a scale: every weight becomes the zero point
    values *= inverse[:, :, None]
    values += zeros
    values += np.float32(0.5)
    np.clip(values, 0, (1 << bits) - 1, out=values)
    return values.astype(np.uint8)


def dequantize_blocks(blocks: QuantizedBlocks, rows: slice = slice(None)) -> NDArray[np.float32]:
    """What some rows stand for, float32 [rows, k]."""
    data = blocks.data[rows]
    zeros: NDArray[Any] = np.full((1, 1), 1 << (blocks.bits - 1))
    if blocks.bits == 4:
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:2], blocks.block_size)
    if blocks.zero_points is not None:
        zeros = blocks.zero_points[rows]
        if blocks.bits == 4:
            zeros = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(len(zeros), -1)[:, : data.shape[1]]
    values = data.astype(np.float32)
    values -= zeros[:, :, None].astype(np.float32)
    values *= blocks.scales[rows][:, :, None]
    return values.reshape(len(values), -1)[:, : blocks.k]
