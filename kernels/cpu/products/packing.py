"""Block-quantised weights as models store them, laid out for the kernels (see `formats`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ... import formats
from ...large import Arena, new_array
from ..arguments import Address, Arguments
from ..emit import INT8, INT16, INT32, Emitter, constant, micro_kernel
from ..jit import native_op
from ..lazy import inline
from ..memory import load_first, read_float32, read_int32, write_float32, write_half, write_int32, write_int64
from ..program.calls import Call, Items, program_of
from ..program.pool import Threads
from ..vector import LANES, maximum, reduce_add, round_to_half, splat_float32


class LayoutArguments(Arguments):
    """See formats.RecordLayout."""

    bits: int
    block_size: int
    sub_block: int
    wide: int
    zero_points: int
    nbytes: int
    scales: int
    points: int


def layout_arguments(layout: formats.RecordLayout) -> LayoutArguments:
    """A layout as operators see it."""
    return LayoutArguments(**{field.name: int(getattr(layout, field.name)) for field in fields(LayoutArguments)})


class PackArguments(Arguments):
    """`rows` of `blocks` blocks as they lie in the model, and the records that they become.

    `row_step`: 1, or 2 if every other row of the model belongs to another matrix.
    """

    source: Address
    scales: Address
    points: Address
    rows: int
    row_step: int
    blocks: int
    layout: LayoutArguments
    target: Address
    records: int


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
            e.store(b.extract_element(groups, INT32(group)), e.at(out, group * formats.GROUP_BYTES))

    return micro_kernel(emit)


_pack_32, _pack_16 = _nibble_packer(32), _nibble_packer(16)


@inline
def _write_factor(address: int, value: float, wide: int) -> None:
    if wide:
        write_float32(address, value)
    else:
        write_half(address, value)


@native_op(PackArguments)
def pack_tiles(arguments: PackArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Tiles [begin, end): sixteen rows of bytes as they lie in the model, with their scales and zero points."""
    source, scales, points = arguments.source, arguments.scales, arguments.points
    rows, blocks, row_step = arguments.rows, arguments.blocks, arguments.row_step
    layout, target, records = arguments.layout, arguments.target, arguments.records
    bits, block_size, sub_block, wide = layout.bits, layout.block_size, layout.sub_block, layout.wide
    block_bytes, sub_bytes = block_size * bits // 8, sub_block * bits // 8
    factor_bytes = 4 if wide else 2
    for tile in range(begin, end):
        for lane in range(min(formats.TILE_ROWS, rows - tile * formats.TILE_ROWS)):
            row = tile * formats.TILE_ROWS + lane
            for block in range(blocks):
                number = row * row_step * blocks + block
                record = target + (tile * records + block // formats.BLOCKS_PER_RECORD) * layout.nbytes
                within = block % formats.BLOCKS_PER_RECORD
                out = record + within * block_bytes * formats.TILE_ROWS + lane * 4
                for first in range(source + number * block_bytes, source + (number + 1) * block_bytes, sub_bytes):
                    if bits == 4 and sub_block == 32:
                        _pack_32((first, out))
                    elif bits == 4:
                        _pack_16((first, out))
                    else:
                        for group in range(sub_bytes // 4):
                            write_int32(out + group * formats.GROUP_BYTES, read_int32(first + 4 * group))
                    out += sub_bytes * formats.TILE_ROWS
                place = (within * formats.TILE_ROWS + lane) * factor_bytes
                _write_factor(record + layout.scales + place, read_float32(scales + 4 * number), wide)
                if points != 0:
                    _write_factor(record + layout.points + place, read_float32(points + 4 * number), wide)
    return 0


class ScanArguments(Arguments):
    """Numbers that float16 may not hold, and the int64 that becomes 1 if there are some."""

    values: Address
    count: int
    differs: Address


_PIECE = 1 << 14
# Rough cost on one thread.
NANOSECONDS_PER_WEIGHT = 0.2


@native_op(ScanArguments)
def find_difference(arguments: ScanArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Write 1 to `differs` if a number in pieces [begin, end) changes when it is rounded to float16."""
    values, count = arguments.values, arguments.count
    last = min(count, end * _PIECE)
    total = splat_float32(0.0)
    for first in range(begin * _PIECE, last, LANES):
        value = load_first(values + 4 * first, last - first)
        difference = value - round_to_half(value)
        total = total + maximum(difference, 0.0 - difference)
    if reduce_add(total) != 0.0:  # also where infinities and NaNs made it NaN
        write_int64(arguments.differs, 1)
    return 0


def pack_matrix(
    weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None = None, *, n: int, k: int,
    bits: int, block_size: int, threads: Threads | None = None, arena: Arena | None = None,
) -> formats.BlockMatrix:  # fmt: skip
    """Pack the constants of a block-quantised product, or of a table: the same bytes.

    Args:
        weight: uint8, n * blocks * block_size * bits / 8 bytes in any shape; with 4 bits the low nibble comes first.
        scales: n * blocks numbers of any float type, in any shape.
        zero_points: None, uint8 packed along blocks as [n, ceil(blocks * bits / 8)], or floats [n, blocks].
        n: rows (outputs). k: columns (inputs). bits: 2 (kept as 4), 4 or 8.
        block_size: a multiple of 16 from 16 to 256.
        threads: who shares the work; None = this thread.
        arena: where the matrix gets its memory; None = on its own.

    Raises:
        formats.FormatError: a size does not fit.
    """
    if bits == 2:
        blocks = -(-k // block_size)
        _check(weight, scales, n * blocks, block_size // 4)
        default = np.full((n, blocks), 2, np.float32)
        zero_points = default if zero_points is None else _unpacked_points(zero_points, n, blocks, 2)
        weight, bits = _nibbles_of_pairs(weight), 4
    formats.check_block_format(bits, block_size)
    blocks = -(-k // block_size)
    threads = threads or Threads(1)
    stored = stored_blocks(weight, scales, zero_points, n=n, blocks=blocks, bits=bits, block_size=block_size)
    layout = layout_of([stored], bits, block_size, threads)
    data = new_array(arena, (formats.num_tiles(n), formats.num_records(k, block_size), layout.nbytes), np.uint8)
    threads.run(program_of([[pack_call(stored, layout, data)]]), nanoseconds=n * k * NANOSECONDS_PER_WEIGHT)
    return formats.BlockMatrix(n, k, layout, data)


@dataclass(frozen=True)
class StoredBlocks:
    """Rows as they lie in the model; scales and zero points (None: all are the default) are float32 [rows, blocks]."""

    source: NDArray[np.uint8]
    scales: NDArray[np.float32]
    points: NDArray[np.float32] | None


def stored_blocks(
    weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None, *, n: int, blocks: int,
    bits: int, block_size: int,
) -> StoredBlocks:  # fmt: skip
    """Constants as `pack_matrix` takes them."""
    _check(weight, scales, n * blocks, block_size * bits // 8)
    factors = np.ascontiguousarray(np.asarray(scales).reshape(n, blocks), np.float32)
    return StoredBlocks(np.ascontiguousarray(weight), factors, _zero_points(zero_points, n, blocks, bits))


def layout_of(parts: Iterable[StoredBlocks], bits: int, block_size: int, threads: Threads) -> formats.RecordLayout:
    """The layout that holds all of these: with zero points where any are needed, wide where float16 is too small."""
    wide = points = False
    for stored in parts:
        points = points or stored.points is not None
        wide = wide or not _fits_half(stored.scales, threads)
        wide = wide or (stored.points is not None and not _fits_half(stored.points, threads))
    return formats.RecordLayout(bits, block_size, wide=wide, zero_points=points)


def pack_call(
    stored: StoredBlocks, layout: formats.RecordLayout, data: NDArray[np.uint8], *, first: int = 0, step: int = 1
) -> Call:
    """Write rows first, first + step, ... as records.

    Args:
        data: zeros [tiles, records, layout.nbytes].
    """
    n, blocks = stored.scales.shape
    tiles, records = data.shape[:2]
    points = stored.points
    if points is None and layout.zero_points:
        points = np.full((n, blocks), 1 << (layout.bits - 1), np.float32)
    source = stored.source.reshape(n, -1)
    arguments = PackArguments(
        source=source[first:], scales=stored.scales[first:], points=None if points is None else points[first:],
        rows=len(range(first, n, step)), row_step=step, blocks=blocks, layout=layout_arguments(layout), target=data,
        records=records,
    )  # fmt: skip
    return Call(pack_tiles, arguments, Items(factor=tiles))


def _nibbles_of_pairs(weight: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Four numbers of 2 bits to a byte, the lowest first, as two of 4 bits to a byte: the same numbers."""
    flat = weight.reshape(-1)
    wide = np.empty((flat.size, 2), np.uint8)
    for half in (0, 1):
        pair = flat >> np.uint8(4 * half)
        wide[:, half] = (pair & 3) | ((pair >> 2) & 3) << np.uint8(4)
    return wide.reshape(-1)


def _check(weight: NDArray[Any], scales: NDArray[Any], blocks: int, block_bytes: int) -> None:
    if weight.dtype != np.uint8:
        raise formats.FormatError(f"weight has type {weight.dtype}, expected uint8")
    for name, array, expected in (("weight", weight, blocks * block_bytes), ("scales", scales, blocks)):
        if array.size != expected:
            raise formats.FormatError(
                f"{name} has {array.size} entries in shape {list(array.shape)}, expected {expected}"
            )


def _fits_half(values: NDArray[np.float32], threads: Threads) -> bool:
    """Whether float16 holds these numbers exactly (and none is infinite or NaN)."""
    differs = np.zeros(1, np.int64)
    pieces = -(-values.size // _PIECE)
    arguments = ScanArguments(values=values, count=values.size, differs=differs)
    call = Call(find_difference, arguments, Items(factor=pieces))
    threads.run(program_of([[call]]), nanoseconds=values.size * NANOSECONDS_PER_WEIGHT)
    return not differs[0]


def _zero_points(points: NDArray[Any] | None, rows: int, blocks: int, bits: int) -> NDArray[np.float32] | None:
    """Zero points as float32 [rows, blocks]; None if all are the default."""
    unpacked = None if points is None else _unpacked_points(points, rows, blocks, bits)
    return None if unpacked is None or np.all(unpacked == 1 << (bits - 1)) else unpacked


def _unpacked_points(points: NDArray[Any], rows: int, blocks: int, bits: int) -> NDArray[np.float32]:
    """Zero points, packed along blocks if they are bytes, as float32 [rows, blocks]."""
    if points.dtype == np.uint8:
        packed_blocks = -(-blocks * bits // 8)
        _check_points(points, rows * packed_blocks)
        spread = points.reshape(rows, packed_blocks, 1) >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)
        points = spread.reshape(rows, -1)[:, :blocks]
    _check_points(points, rows * blocks)
    return np.ascontiguousarray(points.reshape(rows, blocks), np.float32)


def _check_points(points: NDArray[Any], expected: int) -> None:
    if points.size != expected:
        raise formats.FormatError(
            f"zero_points has {points.size} entries in shape {list(points.shape)}, expected {expected}"
        )
