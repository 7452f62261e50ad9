"""The block-quantised matrix as com.microsoft::MatMulNBits stores it, and the way back to floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def unpack_nibbles(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """The first `count` values of each row of bytes, the low nibble first."""
    values = np.stack([packed & 15, packed >> 4], axis=-1)
    return values.reshape(*packed.shape[:-1], -1)[..., :count]


def dequantize_blocks(matrix: QuantizedBlocks) -> NDArray[np.float32]:
    """The matrix as float32 [n, k]."""
    blocks = num_blocks(matrix.k, matrix.block_size)
    elements, points = matrix.data, matrix.zero_points
    if matrix.bits == 4:
        elements = unpack_nibbles(elements, matrix.block_size)
        points = None if points is None else unpack_nibbles(points, blocks)
    zeros = 1 << (matrix.bits - 1) if points is None else points[:, :, None].astype(np.float32)
    values = (elements.astype(np.float32) - zeros) * matrix.scales[:, :, None]
    return np.ascontiguousarray(values.reshape(matrix.n, blocks * matrix.block_size)[:, : matrix.k])


def _check(name: str, array: NDArray[Any], shape: tuple[int, ...], kind: str) -> None:
    if array.shape != shape or array.dtype.char != kind:
        raise QuantizationError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(kind)} {list(shape)}")
