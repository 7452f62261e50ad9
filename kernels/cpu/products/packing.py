"""Weights of com.microsoft::MatMulNBits laid out for the kernels (see `block_matrix`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...block_matrix import BLOCKS_PER_RECORD, GROUP_BYTES, BlockMatrix, RecordLayout, num_records, num_tiles
from ...formats import TILE_ROWS, FormatError
from ..functions import inline
from ..jit import native_op
from ..large import huge_array
from ..memory import read_float32, read_int32, read_uint16, word, write_float32, write_half, write_int32
from ..tape.context import ContextTable
from ..tape.program import Call, Items, TapeWriter
from ..tape.walkers import Walkers

# Arguments of the operator.
(SOURCE, SCALES, POINTS, ROWS, BLOCKS, BITS, BLOCK_SIZE, SUB_BLOCK, WIDE, TARGET, RECORDS, RECORD_BYTES, SCALE_OFFSET,
 POINT_OFFSET) = range(14)  # fmt: skip


@inline
def _spread(nibbles: int) -> Any:
    """Four nibbles of a 16-bit number, each to a byte of its own."""
    x = np.int64(nibbles)
    return (x & 0x000F) | (x & 0x00F0) << 4 | (x & 0x0F00) << 8 | (x & 0xF000) << 12


@inline
def _pack_nibbles(source: int, size: int, out: int) -> None:
    """A sub-block of one row: columns 2i and 2i + 1 share byte i of the source; here its two halves share bytes."""
    half = size // 2
    for group in range(size // 4):
        low, high = read_uint16(source + 2 * group), read_uint16(source + half + 2 * group)
        write_int32(out + group * GROUP_BYTES, np.int32(_spread(low) | _spread(high) << 4))


@inline
def _write_factor(address: int, value: float, wide: int) -> None:
    if wide:
        write_float32(address, value)
    else:
        write_half(address, value)


@native_op
def pack_tiles(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Tiles [begin, end): sixteen rows of bytes as they lie in the model, with their scales and zero points."""
    source, scales, points = word(arguments, SOURCE), word(arguments, SCALES), word(arguments, POINTS)
    rows, blocks, bits = word(arguments, ROWS), word(arguments, BLOCKS), word(arguments, BITS)
    block_size, sub_block, wide = word(arguments, BLOCK_SIZE), word(arguments, SUB_BLOCK), word(arguments, WIDE)
    target, records, record_bytes = word(arguments, TARGET), word(arguments, RECORDS), word(arguments, RECORD_BYTES)
    scale_offset, point_offset = word(arguments, SCALE_OFFSET), word(arguments, POINT_OFFSET)
    block_bytes, sub_bytes = block_size * bits // 8, sub_block * bits // 8
    factor_bytes = 4 if wide else 2
    for tile in range(begin, end):
        for lane in range(min(TILE_ROWS, rows - tile * TILE_ROWS)):
            row = tile * TILE_ROWS + lane
            for block in range(blocks):
                number = row * blocks + block
                record = target + (tile * records + block // BLOCKS_PER_RECORD) * record_bytes
                within = block % BLOCKS_PER_RECORD
                out = record + within * block_bytes * TILE_ROWS + lane * 4
                for first in range(source + number * block_bytes, source + (number + 1) * block_bytes, sub_bytes):
                    if bits == 4:
                        _pack_nibbles(first, sub_bytes, out)
                    else:
                        for group in range(sub_bytes // 4):
                            write_int32(out + group * GROUP_BYTES, read_int32(first + 4 * group))
                    out += sub_bytes * TILE_ROWS
                place = (within * TILE_ROWS + lane) * factor_bytes
                _write_factor(record + scale_offset + place, read_float32(scales + 4 * number), wide)
                if points != 0:
                    _write_factor(record + point_offset + place, read_float32(points + 4 * number), wide)
    return 0


def pack_matrix(
    weight: NDArray[np.uint8],
    scales: NDArray[Any],
    zero_points: NDArray[Any] | None = None,
    *,
    n: int,
    k: int,
    bits: int,
    block_size: int,
    walkers: Walkers | None = None,
) -> BlockMatrix:
    """Pack the constants of com.microsoft::MatMulNBits (or of a GatherBlockQuantized table: the same bytes).

    Args:
        weight: uint8, n * blocks * block_size * bits / 8 bytes in any shape; with 4 bits the low nibble comes first.
        scales: n * blocks numbers of any float type, in any shape.
        zero_points: None, uint8 packed along blocks as [n, ceil(blocks * bits / 8)], or floats [n, blocks].
        n: rows (outputs). k: columns (inputs). bits: 4 or 8. block_size: a multiple of 16 from 16 to 256.
        walkers: who shares the work; None = this thread.

    Raises:
        FormatError: a size does not fit.
    """
    blocks = -(-k // block_size)
    _check(weight, scales, n * blocks, block_size * bits // 8)
    factors = np.ascontiguousarray(np.asarray(scales).reshape(-1), np.float32)
    points = _zero_points(zero_points, n, blocks, bits)
    exact = _fits_half(factors) and (points is None or _fits_half(points))
    layout = RecordLayout(bits, block_size, wide=not exact, zero_points=points is not None)
    tiles, records = num_tiles(n), num_records(k, block_size)
    data = huge_array((tiles, records, layout.nbytes), np.uint8)
    source = np.ascontiguousarray(weight)
    arguments = (
        source.ctypes.data, factors.ctypes.data, 0 if points is None else points.ctypes.data, n, blocks, bits,
        block_size, layout.sub_block, int(layout.wide), data.ctypes.data, records, layout.nbytes, layout.scales,
        layout.points,
    )  # fmt: skip
    tape = TapeWriter()
    tape.add(Call(pack_tiles, arguments, Items(factor=tiles), held=(source, factors, points, data)))
    (walkers or Walkers(1)).walk(tape.finish(), ContextTable())
    return BlockMatrix(n, k, layout, data)


def _check(weight: NDArray[Any], scales: NDArray[Any], blocks: int, block_bytes: int) -> None:
    if weight.dtype != np.uint8:
        raise FormatError(f"weight has type {weight.dtype}, expected uint8")
    for name, array, expected in (("weight", weight, blocks * block_bytes), ("scales", scales, blocks)):
        if array.size != expected:
            raise FormatError(f"{name} has {array.size} entries in shape {list(array.shape)}, expected {expected}")


def _fits_half(values: NDArray[np.float32]) -> bool:
    """Whether float16 holds these numbers exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16), values, equal_nan=True))


def _zero_points(points: NDArray[Any] | None, rows: int, blocks: int, bits: int) -> NDArray[np.float32] | None:
    """Zero points as float32 [rows * blocks]; None if all are the default."""
    if points is None:
        return None
    if points.dtype == np.uint8 and bits == 4:
        packed_blocks = (blocks + 1) // 2
        _check_points(points, rows * packed_blocks)
        packed = points.reshape(rows, packed_blocks)
        points = np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, -1)[:, :blocks]
    _check_points(points, rows * blocks)
    unpacked = np.ascontiguousarray(points.reshape(-1), np.float32)
    return None if np.all(unpacked == 1 << (bits - 1)) else unpacked


def _check_points(points: NDArray[Any], expected: int) -> None:
    if points.size != expected:
        raise FormatError(f"zero_points has {points.size} entries in shape {list(points.shape)}, expected {expected}")
