"""Weights of com.microsoft::MatMulNBits laid out for the kernels (see `block_matrix`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ...block_matrix import (
    BLOCKS_PER_RECORD,
    GROUP_BYTES,
    BlockMatrix,
    RecordLayout,
    check_block_format,
    num_records,
    num_tiles,
)
from ...formats import TILE_ROWS, FormatError
from ..emit import INT8, INT16, INT32, Emitter, constant, micro_kernel
from ..jit import native_op
from ..large import Arena, new_array
from ..lazy import inline
from ..memory import load_first, read_float32, read_int32, word, write_float32, write_half, write_int32, write_int64
from ..rowwise.functions import as_float16
from ..tape.context import ContextTable
from ..tape.program import Call, Items, TapeWriter
from ..tape.walkers import Walkers
from ..vector import LANES, maximum, reduce_add, splat_float32

# Arguments of the operator.
(SOURCE, SCALES, POINTS, ROWS, BLOCKS, BITS, BLOCK_SIZE, SUB_BLOCK, WIDE, TARGET, RECORDS, RECORD_BYTES, SCALE_OFFSET,
 POINT_OFFSET) = range(14)  # fmt: skip


def _nibble_packer(sub_block: int) -> Any:
    """A sub-block of one row: columns 2i and 2i + 1 share byte i of the source; here its two halves share bytes.

    Its arguments: addresses of the source and of the row's place in the first group.
    """
    lanes = sub_block // 4  # of 16 bits, for half a sub-block
    bytes_, shorts, words = (ir.VectorType(t, n) for t, n in ((INT8, lanes), (INT16, lanes), (INT32, lanes // 2)))

    def emit(e: Emitter, source: Any, out: Any) -> None:
        b = e.builder

        def spread(address: Any) -> Any:
            """Nibbles to bytes of their own, in order."""
            pairs = b.zext(e.load(address, bytes_), shorts)
            high = b.and_(b.shl(pairs, constant(shorts, 4)), constant(shorts, 0x0F00))
            return b.or_(b.and_(pairs, constant(shorts, 0x000F)), high)

        packed = b.or_(spread(source), b.shl(spread(e.at(source, lanes)), constant(shorts, 4)))
        groups = b.bitcast(packed, words)
        for group in range(lanes // 2):
            e.store(b.extract_element(groups, INT32(group)), e.at(out, group * GROUP_BYTES))

    return micro_kernel(emit)


_pack_32, _pack_16 = _nibble_packer(32), _nibble_packer(16)


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
                    if bits == 4 and sub_block == 32:
                        _pack_32((first, out))
                    elif bits == 4:
                        _pack_16((first, out))
                    else:
                        for group in range(sub_bytes // 4):
                            write_int32(out + group * GROUP_BYTES, read_int32(first + 4 * group))
                    out += sub_bytes * TILE_ROWS
                place = (within * TILE_ROWS + lane) * factor_bytes
                _write_factor(record + scale_offset + place, read_float32(scales + 4 * number), wide)
                if points != 0:
                    _write_factor(record + point_offset + place, read_float32(points + 4 * number), wide)
    return 0


# Arguments of the operator that looks for numbers which float16 does not hold.
VALUES, COUNT, DIFFERS = range(3)
_PIECE = 1 << 14


@native_op
def find_difference(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Write 1 to DIFFERS if a number in pieces [begin, end) changes when it is rounded to float16."""
    values, count = word(arguments, VALUES), word(arguments, COUNT)
    last = min(count, end * _PIECE)
    total = splat_float32(0.0)
    for first in range(begin * _PIECE, last, LANES):
        value = load_first(values + 4 * first, last - first)
        difference = value - as_float16(value, 0.0, 0.0)
        total = total + maximum(difference, 0.0 - difference)
    if reduce_add(total) != 0.0:  # also where infinities and NaNs made it NaN
        write_int64(word(arguments, DIFFERS), 1)
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
    arena: Arena | None = None,
) -> BlockMatrix:
    """Pack the constants of com.microsoft::MatMulNBits (or of a GatherBlockQuantized table: the same bytes).

    Args:
        weight: uint8, n * blocks * block_size * bits / 8 bytes in any shape; with 4 bits the low nibble comes first.
        scales: n * blocks numbers of any float type, in any shape.
        zero_points: None, uint8 packed along blocks as [n, ceil(blocks * bits / 8)], or floats [n, blocks].
        n: rows (outputs). k: columns (inputs). bits: 4 or 8. block_size: a multiple of 16 from 16 to 256.
        walkers: who shares the work; None = this thread.
        arena: where the matrix gets its memory; None = on its own.

    Raises:
        FormatError: a size does not fit.
    """
    check_block_format(bits, block_size)
    blocks = -(-k // block_size)
    _check(weight, scales, n * blocks, block_size * bits // 8)
    factors = np.ascontiguousarray(np.asarray(scales).reshape(-1), np.float32)
    points = _zero_points(zero_points, n, blocks, bits)
    team = walkers or Walkers(1)
    exact = _fits_half(factors, team) and (points is None or _fits_half(points, team))
    layout = RecordLayout(bits, block_size, wide=not exact, zero_points=points is not None)
    tiles, records = num_tiles(n), num_records(k, block_size)
    data = new_array(arena, (tiles, records, layout.nbytes), np.uint8)
    source = np.ascontiguousarray(weight)
    arguments = (
        source.ctypes.data, factors.ctypes.data, 0 if points is None else points.ctypes.data, n, blocks, bits,
        block_size, layout.sub_block, int(layout.wide), data.ctypes.data, records, layout.nbytes, layout.scales,
        layout.points,
    )  # fmt: skip
    tape = TapeWriter()
    tape.add(Call(pack_tiles, arguments, Items(factor=tiles), held=(source, factors, points, data)))
    team.walk(tape.finish(), ContextTable())
    return BlockMatrix(n, k, layout, data)


def _check(weight: NDArray[Any], scales: NDArray[Any], blocks: int, block_bytes: int) -> None:
    if weight.dtype != np.uint8:
        raise FormatError(f"weight has type {weight.dtype}, expected uint8")
    for name, array, expected in (("weight", weight, blocks * block_bytes), ("scales", scales, blocks)):
        if array.size != expected:
            raise FormatError(f"{name} has {array.size} entries in shape {list(array.shape)}, expected {expected}")


def _fits_half(values: NDArray[np.float32], walkers: Walkers) -> bool:
    """Whether float16 holds these numbers exactly (and none is infinite or NaN)."""
    differs = np.zeros(1, np.int64)
    pieces = -(-values.size // _PIECE)
    tape = TapeWriter()
    arguments = (values.ctypes.data, values.size, differs.ctypes.data)
    tape.add(Call(find_difference, arguments, Items(factor=pieces), held=(values, differs)))
    walkers.walk(tape.finish(), ContextTable())
    return not differs[0]


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
