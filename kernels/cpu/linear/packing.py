"""Functions that convert block-quantised weights from the model's format to kernel records (see `weight_layout`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from genai.common.host_memory import Arena, new_array

from ... import weight_layout
from ...checks import FormatError
from ...weights import packed_bytes, unpack_bits
from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.emit import INT8, INT16, INT32, INT64, Emitter, constant, micro_kernel
from ..jit.memory import load_first, read_float32, write_float32, write_half, write_int64
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, maximum, reduce_add, round_to_half, splat_float32
from ..program.calls import Call, Items, program_of
from ..program.thread_pool import Threads


class PackArguments(Arguments):
    """Rows of quantised blocks in the model's format, and the records that they are packed into.

    Attributes:
        source: integers of the first row.
        scales, points: float32 [rows, blocks]; 0 if there are none, or if they are written separately.
        rows: number of rows.
        row_step: 1, or 2 if every other row of the model belongs to another matrix.
        blocks: number of blocks in a row.
        block_bytes: bytes of a block of one row in the model.
        record_blocks, nbytes, scale_at, point_at, wide: see `weight_layout.RecordLayout`.
        target: zeros [tiles, records, nbytes].
        records: number of records per tile.
    """

    source: Address
    scales: Address
    points: Address
    rows: int
    row_step: int
    blocks: int
    record_blocks: int
    block_bytes: int
    nbytes: int
    scale_at: int
    point_at: int
    wide: int
    target: Address
    records: int


def _sub_block_packer(bits: int, columns: int) -> Any:
    """Return a micro-kernel that packs a sub-block of one row, a row of bits, into the planes of a record.

    For the planes, see `weight_layout.RecordLayout`. Arguments: the addresses of the source and of the sub-block in the
    record; the row's index in its tile.
    """
    size, groups = columns * bits // 8, columns // weight_layout.GROUP_COLUMNS
    codes_type, wide = ir.VectorType(INT8, columns), ir.VectorType(INT16, columns)

    def lane_numbers(numbers: Iterable[int]) -> Any:
        found = list(numbers)
        return ir.Constant(ir.VectorType(INT32, len(found)), found)

    def codes_of(e: Emitter, source: Any) -> Any:
        """Return the codes as bytes."""
        b, raw = e.builder, e.load(source, ir.VectorType(INT8, size))
        if bits == 8:
            return raw
        first = [i * bits // 8 for i in range(columns)]
        low, high = (
            b.zext(b.shuffle_vector(raw, raw, lane_numbers(min(at + more, size - 1) for at in first)), wide)
            for more in (0, 1)
        )
        words = b.or_(low, b.shl(high, constant(wide, 8)))
        words = b.lshr(words, ir.Constant(wide, [i * bits % 8 for i in range(columns)]))
        return b.trunc(b.and_(words, constant(wide, (1 << bits) - 1)), codes_type)

    def emit(e: Emitter, source: Any, out: Any, lane: Any) -> None:
        b, codes, low = e.builder, codes_of(e, source), 0
        for width in weight_layout.planes(bits):
            part = b.lshr(codes, constant(codes_type, low)) if low else codes
            part = b.and_(part, constant(codes_type, (1 << width) - 1)) if width < 8 else part
            vectors = max(1, groups * width // 8)
            together = None
            for shift, first in enumerate(range(0, groups, vectors)):
                beside = lane_numbers(
                    range(weight_layout.GROUP_COLUMNS * first, weight_layout.GROUP_COLUMNS * (first + vectors))
                )
                some = b.shuffle_vector(part, part, beside)
                some = b.shl(some, constant(some.type, width * shift)) if shift else some
                together = some if together is None else b.or_(together, some)
            words = b.bitcast(together, ir.VectorType(INT32, vectors))
            if groups * width < 8:  # half a vector: rows 8 to 15 use the high nibbles
                address = e.at(out, b.shl(b.and_(lane, INT64(7)), INT64(2)))
                moved = b.shl(
                    b.extract_element(words, INT32(0)), b.trunc(b.shl(b.lshr(lane, INT64(3)), INT64(2)), INT32)
                )
                e.store(b.or_(e.load(address, INT32), moved), address)
            else:
                address = e.at(out, b.shl(lane, INT64(2)))
                for vector in range(vectors):
                    e.store(b.extract_element(words, INT32(vector)), e.at(address, vector * weight_layout.GROUP_BYTES))
            out, low = e.at(out, weight_layout.GROUP_BYTES * groups * width // 8), low + width

    return micro_kernel(emit)


@inline
def _write_factor(address: int, value: float, wide: int) -> None:
    if wide:
        write_float32(address, value)
    else:
        write_half(address, value)


@once
def pack_op(bits: int, sub_block: int) -> NativeOp:
    """Return the operator that packs codes of `bits` bits. Items are tiles: sixteen rows of the model's matrix."""
    pack = _sub_block_packer(bits, sub_block)
    sub_bytes = sub_block * bits // 8

    def pack_tiles(arguments: PackArguments, context: int, begin: int, end: int, scratch: int) -> int:
        source, scales, points = arguments.source, arguments.scales, arguments.points
        rows, blocks, row_step = arguments.rows, arguments.blocks, arguments.row_step
        target, records, record_blocks = arguments.target, arguments.records, arguments.record_blocks
        block_bytes, wide = arguments.block_bytes, arguments.wide
        factor_bytes = 4 if wide else 2
        for tile in range(begin, end):
            for lane in range(min(weight_layout.TILE_ROWS, rows - tile * weight_layout.TILE_ROWS)):
                row = tile * weight_layout.TILE_ROWS + lane
                for block in range(blocks):
                    number = row * row_step * blocks + block
                    record = target + (tile * records + block // record_blocks) * arguments.nbytes
                    within = block % record_blocks
                    out = record + within * block_bytes * weight_layout.TILE_ROWS
                    for first in range(source + number * block_bytes, source + (number + 1) * block_bytes, sub_bytes):
                        pack((first, out, lane))
                        out += sub_bytes * weight_layout.TILE_ROWS
                    offset = (within * weight_layout.TILE_ROWS + lane) * factor_bytes
                    if scales != 0:
                        _write_factor(record + arguments.scale_at + offset, read_float32(scales + 4 * number), wide)
                    if points != 0:
                        _write_factor(record + arguments.point_at + offset, read_float32(points + 4 * number), wide)
        return 0

    return native_op(PackArguments, name=f"pack_tiles_{bits}_{sub_block}")(pack_tiles)


class ScanArguments(Arguments):
    """Float32 numbers, and an int64 that is set to 1 if float16 cannot represent all of them exactly."""

    values: Address
    count: int
    differs: Address


_PIECE = 1 << 14
# Approximate cost on one thread.
NANOSECONDS_PER_WEIGHT = 0.2


@native_op(ScanArguments)
def find_difference(arguments: ScanArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Write 1 to `differs` if rounding to float16 changes a number in pieces [begin, end)."""
    values, count = arguments.values, arguments.count
    last = min(count, end * _PIECE)
    total = splat_float32(0.0)
    for first in range(begin * _PIECE, last, LANES):
        value = load_first(values + 4 * first, last - first)
        difference = value - round_to_half(value)
        total = total + maximum(difference, 0.0 - difference)
    if reduce_add(total) != 0.0:  # also true if infinities or NaNs made the total NaN
        write_int64(arguments.differs, 1)
    return 0


def pack_matrix(
    weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None = None, *, n: int, k: int,
    bits: int, block_size: int, threads: Threads | None = None, arena: Arena | None = None,
) -> weight_layout.BlockMatrix:  # fmt: skip
    """Pack the weights of a block-quantised matmul or of an embedding table. Both use the same bytes.

    Args:
        weight: uint8, n * blocks * block_size * bits / 8 bytes in any shape; the lowest bits come first.
        scales: n * blocks numbers of any float type, in any shape.
        zero_points: None, uint8 packed along blocks as [n, ceil(blocks * bits / 8)], or floats [n, blocks].
        n: rows (outputs).
        k: columns (inputs).
        bits: 2, 3, 4, 5, 6 or 8.
        block_size: a multiple of 16 from 16 to 256.
        threads: threads that share the work; None = the calling thread.
        arena: memory to allocate the matrix from; None = a separate allocation.

    Raises:
        FormatError: an array has a wrong dtype or size, or there is no layout for these bits and this block size.
    """
    weight_layout.check_block_format(bits, block_size)
    blocks = -(-k // block_size)
    threads = threads or Threads(1)
    stored = stored_blocks(weight, scales, zero_points, n=n, blocks=blocks, bits=bits, block_size=block_size)
    layout = layout_of([stored], bits, block_size, partial(fits_half_on, threads))
    data = new_array(arena, (weight_layout.num_tiles(n), weight_layout.num_records(k, layout), layout.nbytes), np.uint8)
    threads.run(program_of([[pack_call(stored, layout, data)]]), nanoseconds=n * k * NANOSECONDS_PER_WEIGHT)
    return weight_layout.BlockMatrix(n, k, layout, data)


@dataclass(frozen=True)
class StoredBlocks:
    """Rows in the model's format.

    Attributes:
        source: the packed integers.
        scales: float32 [rows, blocks].
        points: zero points, float32 [rows, blocks]; None if all are the default.
    """

    source: NDArray[np.uint8]
    scales: NDArray[np.float32]
    points: NDArray[np.float32] | None


def stored_blocks(
    weight: NDArray[np.uint8], scales: NDArray[Any], zero_points: NDArray[Any] | None, *, n: int, blocks: int,
    bits: int, block_size: int,
) -> StoredBlocks:  # fmt: skip
    """Check the arrays that `pack_matrix` accepts, and convert their factors to float32."""
    _check(weight, scales, n * blocks, block_size * bits // 8)
    factors = np.ascontiguousarray(np.asarray(scales).reshape(n, blocks), np.float32)
    return StoredBlocks(np.ascontiguousarray(weight), factors, _zero_points(zero_points, n, blocks, bits))


def layout_of(
    parts: Iterable[StoredBlocks], bits: int, block_size: int, fits: Callable[[NDArray[np.float32]], bool]
) -> weight_layout.RecordLayout:
    """Return the layout that holds all of these parts.

    The layout has zero points if any part needs them, and float32 factors if float16 cannot represent all of them.

    Args:
        fits: function that returns True if float16 represents all numbers exactly: `fits_half`, or its compiled form.
    """
    wide, points, whole = False, False, bits not in (4, 8)
    for stored in parts:
        wide = wide or not fits(stored.scales)
        if stored.points is not None:
            points = True
            whole = whole and _fit_bytes(stored.points)
            wide = wide or not fits(stored.points)
    return weight_layout.layout_with(bits, block_size, "float" if wide else "half", points, whole_points=whole)


def _fit_bytes(values: NDArray[np.float32]) -> bool:
    return bool(np.all((values == np.rint(values)) & (values >= 0) & (values <= np.iinfo(np.uint8).max)))


def pack_call(
    stored: StoredBlocks, layout: weight_layout.RecordLayout, data: NDArray[np.uint8], *, first: int = 0, step: int = 1
) -> Call:
    """Return a call that packs rows first, first + step, ... into records.

    Args:
        data: zeros [tiles, records, layout.nbytes].
    """
    n, blocks = stored.scales.shape
    tiles, records = data.shape[:2]
    points = stored.points
    if points is None and layout.zero_points:
        points = np.full((n, blocks), 1 << (layout.bits - 1), np.float32)
    in_floats = layout.offsets == layout.factors
    if points is not None and not in_floats:
        write_factors(data, layout.points, layout.blocks, points[first::step].astype(np.uint8))
    source = stored.source.reshape(n, -1)
    arguments = PackArguments(
        source=source[first:], scales=stored.scales[first:],
        points=points[first:] if points is not None and in_floats else None, rows=len(range(first, n, step)),
        row_step=step, blocks=blocks, record_blocks=layout.blocks, block_bytes=layout.block_size * layout.bits // 8,
        nbytes=layout.nbytes, scale_at=layout.scales, point_at=layout.points, wide=int(layout.wide), target=data,
        records=records,
    )  # fmt: skip
    return Call(pack_op(layout.bits, layout.sub_block), arguments, Items(factor=tiles))


def codes_call(
    codes: NDArray[np.uint8], layout: weight_layout.RecordLayout, data: NDArray[np.uint8], blocks: int
) -> Call:
    """Return a call that packs codes without factors.

    Args:
        codes: uint8 [rows, blocks * block_bytes / 16].
        data: zeros [tiles, records, layout.nbytes].
    """
    arguments = PackArguments(
        source=codes, scales=None, points=None, rows=len(codes), row_step=1, blocks=blocks, record_blocks=layout.blocks,
        block_bytes=layout.block_size * layout.bits // 8, nbytes=layout.nbytes, scale_at=0, point_at=0, wide=0,
        target=data, records=data.shape[1],
    )  # fmt: skip
    return Call(pack_op(layout.bits, layout.sub_block), arguments, Items(factor=data.shape[0]))


def write_factors(data: NDArray[np.uint8], offset: int, per_record: int, factors: NDArray[Any]) -> None:
    """Write factors [rows, count] into records [tiles, records, nbytes], starting at byte `offset` of each record.

    A record gets `per_record` factors of each row. The factors keep their dtype. Padding rows and blocks get zeros.
    """
    tiles, records = data.shape[:2]
    whole = np.zeros((tiles * weight_layout.TILE_ROWS, records * per_record), factors.dtype)
    whole[: len(factors), : factors.shape[1]] = factors
    transposed = whole.reshape(tiles, weight_layout.TILE_ROWS, records, per_record).transpose(0, 2, 3, 1)
    size = per_record * weight_layout.TILE_ROWS * factors.itemsize
    data[:, :, offset : offset + size] = np.ascontiguousarray(transposed).view(np.uint8).reshape(tiles, records, size)


def _check(weight: NDArray[Any], scales: NDArray[Any], blocks: int, block_bytes: int) -> None:
    if weight.dtype != np.uint8:
        raise FormatError(f"weight has type {weight.dtype}, expected uint8")
    for name, array, expected in (("weight", weight, blocks * block_bytes), ("scales", scales, blocks)):
        if array.size != expected:
            raise FormatError(f"{name} has {array.size} entries in shape {list(array.shape)}, expected {expected}")


def fits_half(values: NDArray[np.float32]) -> bool:
    """Return True if float16 represents these numbers exactly and none is infinite or NaN. Needs no kernel."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values).all() and np.array_equal(values.astype(np.float16).astype(np.float32), values))


def fits_half_on(threads: Threads, values: NDArray[np.float32]) -> bool:
    """Return the same as `fits_half`, computed by several threads."""
    differs = np.zeros(1, np.int64)
    pieces = -(-values.size // _PIECE)
    arguments = ScanArguments(values=values, count=values.size, differs=differs)
    call = Call(find_difference, arguments, Items(factor=pieces))
    threads.run(program_of([[call]]), nanoseconds=values.size * NANOSECONDS_PER_WEIGHT)
    return not differs[0]


def _zero_points(points: NDArray[Any] | None, rows: int, blocks: int, bits: int) -> NDArray[np.float32] | None:
    """Return the zero points as float32 [rows, blocks], or None if all are the default."""
    unpacked = None if points is None else _unpacked_points(points, rows, blocks, bits)
    return None if unpacked is None or np.all(unpacked == 1 << (bits - 1)) else unpacked


def _unpacked_points(points: NDArray[Any], rows: int, blocks: int, bits: int) -> NDArray[np.float32]:
    """Convert zero points to float32 [rows, blocks]. Bytes are packed along the blocks."""
    if points.dtype == np.uint8:
        packed_blocks = packed_bytes(blocks, bits)
        _check_points(points, rows * packed_blocks)
        points = unpack_bits(points.reshape(rows, packed_blocks), bits, blocks)
    _check_points(points, rows * blocks)
    return np.ascontiguousarray(points.reshape(rows, blocks), np.float32)


def _check_points(points: NDArray[Any], expected: int) -> None:
    if points.size != expected:
        raise FormatError(f"zero_points has {points.size} entries in shape {list(points.shape)}, expected {expected}")
