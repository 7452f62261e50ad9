"""Packed memory layouts, defined once: block-quantised weight matrices, and keys and values in pages.

Everything that reads or writes these layouts (kernels, quantisers, caches) takes its constants from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Rows of a weight matrix that lie side by side in memory. A kernel keeps one output row per SIMD lane, so no sum ever
# crosses lanes: nothing is shuffled, and results do not depend on the width of the machine's vectors.
TILE_ROWS = 16
# A block above 256 could not be summed exactly in float32 (256 * 255 * 127 < 2**24), one that is no multiple of 16
# would end in the middle of the eight bytes that the INT4 kernel sums in 16-bit lanes.
BLOCK_SIZES = range(16, 257, 16)

# Tokens in a page of keys and values: two vectors of scores, one step of a product of tiles.
PAGE_TOKENS = 32

_PACK_CHUNK_BYTES = 1 << 24


class FormatError(ValueError):
    """Arrays that do not fit the layout asked for; the message names the shapes."""


@dataclass(frozen=True)
class BlockQuantizedMatrix:
    """A weight matrix [rows, columns] as small integers: value = (integer - zero point) * scale, per row and block.

    Attributes:
        rows, columns: shape of the matrix (outputs N, inputs K).
        bits: 4 or 8, unsigned.
        block_size: consecutive columns that share a scale; the last block is padded if columns do not fill it.
        data: uint8 [tiles, blocks, block_size * bits / 8, TILE_ROWS]; entry [t, b, i, r] is byte i of block b of row
            t * TILE_ROWS + r. With 8 bits byte i is element i. With 4 bits byte i holds element i in its low nibble
            and element i + block_size / 2 in its high nibble, so that both nibbles of a run of bytes meet runs of
            consecutive activations.
        scales: float32 [tiles, blocks, TILE_ROWS].
        zero_points: None (all are 2 ** (bits - 1)), or float32 [tiles, blocks, TILE_ROWS]: some quantisers (HQQ) make
            fractional ones.
    """

    rows: int
    columns: int
    bits: int
    block_size: int
    data: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        _check_block_format(self.bits, self.block_size)
        shape = (-(-self.rows // TILE_ROWS), -(-self.columns // self.block_size), TILE_ROWS)
        _check_array("scales", self.scales, shape, np.float32)
        _check_array("data", self.data, (*shape[:2], self.block_size * self.bits // 8, TILE_ROWS), np.uint8)
        if self.zero_points is not None:
            _check_array("zero_points", self.zero_points, shape, np.float32)

    @property
    def blocks(self) -> int:
        """Blocks per row."""
        return int(self.data.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        zero_points = 0 if self.zero_points is None else self.zero_points.nbytes
        return self.data.nbytes + self.scales.nbytes + zero_points


def pack_matmul_nbits(
    weight: NDArray[np.uint8],
    scales: NDArray[Any],
    zero_points: NDArray[Any] | None = None,
    *,
    n: int,
    k: int,
    bits: int,
    block_size: int,
) -> BlockQuantizedMatrix:
    """Pack the constants of com.microsoft::MatMulNBits (or a GatherBlockQuantized table: the same bytes).

    Args:
        weight: uint8, n * blocks * block_size * bits / 8 bytes in any shape; with 4 bits the low nibble comes first.
        scales: n * blocks numbers of any float type, in any shape.
        zero_points: None, uint8 packed along blocks as [n, ceil(blocks * bits / 8)], or floats [n, blocks].
        n: rows (outputs). k: columns (inputs). bits: 4 or 8. block_size: a multiple of 16 from 16 to 256.

    Raises:
        FormatError: a size does not fit.
    """
    _check_block_format(bits, block_size)
    blocks = -(-k // block_size)
    block_bytes = block_size * bits // 8
    if weight.dtype != np.uint8:
        raise FormatError(f"weight has type {weight.dtype}, expected uint8")
    _check_size("weight", weight, n * blocks * block_bytes)
    _check_size("scales", scales, n * blocks)
    points = _zero_points(zero_points, n, blocks, bits)
    return BlockQuantizedMatrix(
        rows=n,
        columns=k,
        bits=bits,
        block_size=block_size,
        data=_pack_bytes(weight.reshape(n, blocks, block_bytes), bits),
        scales=_tiled(np.asarray(scales).reshape(n, blocks, 1).astype(np.float32, copy=False))[:, :, 0],
        zero_points=None if points is None else _tiled(points[:, :, None])[:, :, 0],
    )


def dequantize(matrix: BlockQuantizedMatrix) -> NDArray[np.float32]:
    """The matrix as float32 [rows, columns]."""
    elements = matrix.data
    if matrix.bits == 4:
        elements = np.concatenate([matrix.data & 15, matrix.data >> 4], axis=2)
    zero_points = 1 << (matrix.bits - 1) if matrix.zero_points is None else matrix.zero_points[:, :, None]
    values = (elements.astype(np.float32) - np.asarray(zero_points, np.float32)) * matrix.scales[:, :, None]
    rows = values.transpose(0, 3, 1, 2).reshape(-1, matrix.blocks * matrix.block_size)
    return np.ascontiguousarray(rows[: matrix.rows, : matrix.columns])


@dataclass(frozen=True)
class PagedLayer:
    """Keys and values of one attention layer, in pages of PAGE_TOKENS tokens.

    Attributes:
        keys: float32 or float16 [num_blocks, kv_heads, head_size, PAGE_TOKENS]. Tokens are innermost, so that the
            scores of neighbouring tokens are one vector and no sum crosses its lanes.
        values: the same type, [num_blocks, kv_heads, PAGE_TOKENS, v_head_size].

    A token's place is its slot, block * PAGE_TOKENS + offset.
    """

    keys: NDArray[Any]
    values: NDArray[Any]

    def __post_init__(self) -> None:
        for name, array in (("keys", self.keys), ("values", self.values)):
            if array.ndim != 4 or array.dtype not in (np.float32, np.float16) or not array.flags.c_contiguous:
                raise FormatError(
                    f"{name} must be a contiguous float32 or float16 array of 4 dimensions, "
                    f"got {array.dtype} {list(array.shape)}"
                )
        tokens = self.keys.shape[3], self.values.shape[2]
        if self.keys.shape[:2] != self.values.shape[:2] or self.keys.dtype != self.values.dtype:
            raise FormatError(
                f"keys {self.keys.dtype} {list(self.keys.shape)} and values {self.values.dtype} "
                f"{list(self.values.shape)} must agree in type, blocks and heads"
            )
        if tokens != (PAGE_TOKENS, PAGE_TOKENS):
            raise FormatError(f"pages of keys and values hold {tokens[0]} and {tokens[1]} tokens, not {PAGE_TOKENS}")

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[2])

    @property
    def v_head_size(self) -> int:
        return int(self.values.shape[3])


def _check_block_format(bits: int, block_size: int) -> None:
    if bits not in (4, 8):
        raise FormatError(f"bits is {bits}, expected 4 or 8")
    if block_size not in BLOCK_SIZES:
        raise FormatError(f"block_size is {block_size}, expected a multiple of 16 from 16 to 256")


def _check_size(name: str, array: NDArray[Any], expected: int) -> None:
    if array.size != expected:
        raise FormatError(f"{name} has {array.size} entries in shape {list(array.shape)}, expected {expected}")


def _check_array(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise FormatError(
            f"{name} is {array.dtype} {list(array.shape)}, expected contiguous {np.dtype(dtype)} {list(shape)}"
        )


def _zero_points(points: NDArray[Any] | None, rows: int, blocks: int, bits: int) -> NDArray[np.float32] | None:
    """Zero points as float32 [rows, blocks]; None if all are the default."""
    if points is None:
        return None
    if points.dtype == np.uint8 and bits == 4:
        packed_blocks = (blocks + 1) // 2
        _check_size("zero_points", points, rows * packed_blocks)
        packed = points.reshape(rows, packed_blocks)
        points = np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, -1)[:, :blocks]
    _check_size("zero_points", points, rows * blocks)
    unpacked = points.reshape(rows, blocks).astype(np.float32)
    return None if np.all(unpacked == 1 << (bits - 1)) else unpacked


def _pack_bytes(weight: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Bytes [rows, blocks, block_bytes] to tiles, a few tiles at a time so that temporaries stay small."""
    rows, blocks, block_bytes = weight.shape
    packed = np.empty((-(-rows // TILE_ROWS), blocks, block_bytes, TILE_ROWS), np.uint8)
    step = TILE_ROWS * max(1, _PACK_CHUNK_BYTES // max(1, TILE_ROWS * blocks * block_bytes))
    for first in range(0, rows, step):
        part = weight[first : first + step]
        if bits == 4:
            part = _split_halves(part)
        packed[first // TILE_ROWS : (first + step) // TILE_ROWS] = _tiled(part)
    return packed


def _split_halves(weight: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Neighbours in a byte (elements 2i, 2i + 1) to halves of a block in a byte (elements i, i + block_size / 2)."""
    half = weight.shape[2] // 2
    first, second = weight[:, :, :half], weight[:, :, half:]
    packed = np.empty_like(weight)
    packed[:, :, 0::2] = (first & 15) | (second << 4)
    packed[:, :, 1::2] = (first >> 4) | (second & 0xF0)
    return packed


def _tiled(rows: NDArray[Any]) -> NDArray[Any]:
    """[rows, blocks, items] to [tiles, blocks, items, TILE_ROWS], the last tile padded with zeros."""
    count, blocks, items = rows.shape
    tiles = -(-count // TILE_ROWS)
    if count != tiles * TILE_ROWS:
        rows = np.concatenate([rows, np.zeros((tiles * TILE_ROWS - count, blocks, items), rows.dtype)])
    return np.ascontiguousarray(rows.reshape(tiles, TILE_ROWS, blocks, items).transpose(0, 2, 3, 1))
