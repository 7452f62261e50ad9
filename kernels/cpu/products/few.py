"""Products of few rows: decoding, where the time is that of reading the weights once.

Weights are read as four streams of tiles side by side: with fewer the memory is not kept busy, and each stream asks for
its cache lines some records ahead. More rows reuse what was read: then fewer tiles are worked on at once, so that sums
stay in registers; or, where the machine has AMX, up to sixteen rows meet them in tiles (see `few_tiles`). A row's
result is the same however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...block_matrix import BLOCKS_PER_RECORD, TILES_TOGETHER, RecordLayout
from ...formats import TILE_ROWS
from ..emit import FLOAT_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import load_first, load_float32, store_first, word
from ..rowwise.unary import UNARY
from ..tiles import configure_tiles, release_tiles
from .few_tiles import (
    CONFIGURATION_BYTES,
    MIN_ROWS,
    SHAPES,
    configurations,
    scratch_bytes,
    supported,
    tiles_kernel,
    turn_kernel,
    turned_bytes,
)
from .integer_kernel import IntegerBlocks
from .steps import Kind, Step

# Streams of tiles that a call works on: four of a matrix, or two each of a gate and what it gates.
STREAMS = TILES_TOGETHER
# Rows at once -> tiles at once.
_SHAPES = {1: 4, 2: 4, 4: 2, 8: 1}
_PREFETCH_BYTES = 2048
_LINE = 64
_VECTOR_BYTES = 4 * LANES
# Results of the micro-kernels: [row][stream] vectors.
_ROW_BYTES = STREAMS * _VECTOR_BYTES
SCRATCH_BYTES = max(_SHAPES) * _ROW_BYTES
# Sums of a group of STREAMS tiles with sixteen rows. Groups that several blocks of rows meet one after the other.
_GROUP_BYTES = TILE_ROWS * _ROW_BYTES
_BYTES_TOGETHER = 1 << 20
# Groups that tiles multiply at once, before their sums are written.
_RUN_GROUPS = 8

# Arguments of the operators.
(
    ROWS_WORD, WEIGHTS, GATED_WEIGHTS, TILE_STRIDE, RECORDS, X, X_STRIDE, SCALES, CORRECTIONS, OUT, OUT_STRIDE, WIDTH,
    BIAS, GATED_BIAS, ADDEND, ADDEND_STRIDE, CONFIGURATIONS, TILE_SCRATCH, TURNED_BYTES, TOGETHER,
) = range(20)  # fmt: skip


def _micro_kernel(kind: Kind, rows: int, tiles: int) -> Any:
    """Sums of `tiles` tiles with `rows` rows, over all steps, to scratch [rows][STREAMS] vectors.

    Its arguments: the addresses of the tiles; records; the address of the first row's activations, its stride; the last
    row, which stands in for those behind it; offsets of scales and corrections in a row; the address of the results;
    the bytes from the end of a tile to the one that its stream goes on with.
    """
    per_record = kind.steps_per_record
    lines = -(-kind.record_bytes // (_LINE * per_record))
    records_ahead = -(-_PREFETCH_BYTES // kind.record_bytes)

    def emit(e: Emitter, *values: Any) -> None:
        b = e.builder
        streams, (records, x, stride, last, scales, corrections, out, to_next) = values[:tiles], values[tiles:]
        row_at = [e.at(x, b.mul(stride, INT64(m))) for m in range(rows - 1)]
        row_at.append(e.at(x, b.mul(stride, last)))
        steps = b.mul(records, INT64(per_record))
        with e.loop(steps, [constant(FLOAT_VECTOR, 0.0)] * (rows * tiles)) as (index, sums, following):
            part = b.and_(index, INT64(per_record - 1))  # a power of two
            record = b.lshr(index, INT64(per_record.bit_length() - 1))
            offset = b.mul(record, INT64(kind.record_bytes))
            at = [e.at(stream, offset) for stream in streams]
            asked = e.at(record, records_ahead)
            moved = b.select(b.icmp_signed("<", asked, records), INT64(0), to_next)
            ahead = e.at(moved, b.mul(part, INT64(kind.record_bytes // per_record // _LINE * _LINE)))
            for address in at:
                for line in range(lines):
                    e.prefetch(e.at(e.at(address, ahead), _LINE * line + records_ahead * kind.record_bytes))
            sums = kind.step(e, Step(index, part, at, row_at, scales, corrections), sums)
            following(*sums)
        for m in range(rows):
            for t in range(tiles):
                e.store(sums[m * tiles + t], e.at(out, m * _ROW_BYTES + t * _VECTOR_BYTES))

    return micro_kernel(emit)


@inline
def _with_bias(sums: Any, bias: int, column: int, left: int) -> Any:
    return sums + load_first(bias + 4 * column, left) if bias != 0 else sums


@inline
def _write(arguments: int, scratch: int, group: int, row: int, count: int) -> None:
    """out = sums + bias + addend, for columns that exist."""
    width, bias, addend = word(arguments, WIDTH), word(arguments, BIAS), word(arguments, ADDEND)
    for m in range(count):
        out = word(arguments, OUT) + (row + m) * word(arguments, OUT_STRIDE)
        for stream in range(STREAMS):
            column = (group * STREAMS + stream) * TILE_ROWS
            left = width - column
            if left > 0:
                value = load_float32(scratch + m * _ROW_BYTES + stream * _VECTOR_BYTES)
                value = _with_bias(value, bias, column, left)
                if addend != 0:
                    there = addend + (row + m) * word(arguments, ADDEND_STRIDE)
                    value = value + load_first(there + 4 * column, left)
                store_first(out + 4 * column, value, left)


def _gated_writer(activate: Any) -> Any:
    @inline
    def write(arguments: int, scratch: int, group: int, row: int, count: int) -> None:
        """out = activation(gate) * gated: the first two streams are the gate's."""
        width, half = word(arguments, WIDTH), STREAMS // 2
        for m in range(count):
            out = word(arguments, OUT) + (row + m) * word(arguments, OUT_STRIDE)
            for stream in range(half):
                column = (group * half + stream) * TILE_ROWS
                left = width - column
                if left > 0:
                    place = scratch + m * _ROW_BYTES + stream * _VECTOR_BYTES
                    gate = _with_bias(load_float32(place), word(arguments, BIAS), column, left)
                    gated = load_float32(place + half * _VECTOR_BYTES)
                    gated = _with_bias(gated, word(arguments, GATED_BIAS), column, left)
                    store_first(out + 4 * column, activate(gate, 0.0, 0.0) * gated, left)

    return write


def _by_vectors(kind: Kind, gate: str, largest: int) -> Any:
    """Products of a group's tiles a, b, c, d with the first rows, `largest` (4 or 8) or fewer.

    Returns how many rows it took.
    """
    beside = (STREAMS // 2 if gate else STREAMS) - 1  # tiles of the group behind one of them, before the next group
    one, two = (_micro_kernel(kind, rows, _SHAPES[rows]) for rows in (1, 2))

    @inline
    def up_to_two(
        a: int, b: int, c: int, d: int, records: int, x: int, rows: int, stride: int, scales: int, corrections: int,
        out: int, tile: int,
    ) -> int:  # fmt: skip
        to_next = beside * tile
        if rows >= 2:
            two((a, b, c, d, records, x, stride, 1, scales, corrections, out, to_next))
            return 2
        one((a, b, c, d, records, x, stride, 0, scales, corrections, out, to_next))
        return 1

    four = _micro_kernel(kind, 4, _SHAPES[4])

    @inline
    def up_to_four(
        a: int, b: int, c: int, d: int, records: int, x: int, rows: int, stride: int, scales: int, corrections: int,
        out: int, tile: int,
    ) -> Any:  # fmt: skip
        if rows >= 3:  # the last of three is taken twice
            last = min(rows, 4) - 1
            four((a, b, records, x, stride, last, scales, corrections, out, tile))
            four((c, d, records, x, stride, last, scales, corrections, out + 2 * _VECTOR_BYTES, tile))
            return last + 1
        return up_to_two(a, b, c, d, records, x, rows, stride, scales, corrections, out, tile)

    if largest == 4:
        return up_to_four
    eight = _micro_kernel(kind, 8, _SHAPES[8])

    @inline
    def up_to_eight(
        a: int, b: int, c: int, d: int, records: int, x: int, rows: int, stride: int, scales: int, corrections: int,
        out: int, tile: int,
    ) -> Any:  # fmt: skip
        if rows >= 8:
            eight((a, records, x, stride, 7, scales, corrections, out, 0))
            eight((b, records, x, stride, 7, scales, corrections, out + _VECTOR_BYTES, 0))
            eight((c, records, x, stride, 7, scales, corrections, out + 2 * _VECTOR_BYTES, 0))
            eight((d, records, x, stride, 7, scales, corrections, out + 3 * _VECTOR_BYTES, 0))
            return 8
        return up_to_four(a, b, c, d, records, x, rows, stride, scales, corrections, out, tile)

    return up_to_eight


def _by_tiles(layout: RecordLayout, gate: str, write: Any) -> Any:
    """Products with whole blocks of sixteen rows, and with the rows behind them unless they are very few.

    Returns how many rows it took. Weights that several blocks of rows need come in parts that stay in the cache.
    """
    half, whole, turn = tiles_kernel(layout, SHAPES[0]), tiles_kernel(layout, SHAPES[1]), turn_kernel()
    side_by_side = STREAMS // 2 if gate else STREAMS
    points = layout.zero_points

    @inline
    def multiply(count: int, values: Any) -> None:
        if count <= SHAPES[0]:
            half(values)
        else:
            whole(values)

    @inline
    def by_tiles(arguments: int, all_rows: int, begin: int, end: int, scratch: int) -> int:
        left = all_rows % TILE_ROWS
        rows = all_rows - left if left < MIN_ROWS else all_rows
        records, tile, stride = word(arguments, RECORDS), word(arguments, TILE_STRIDE), word(arguments, X_STRIDE)
        scales = scratch + word(arguments, TILE_SCRATCH)
        corrections = scales + word(arguments, TURNED_BYTES)
        sums = corrections + word(arguments, TURNED_BYTES)
        for first in range(begin, end, word(arguments, TOGETHER)):
            last = min(first + word(arguments, TOGETHER), end)
            for row in range(0, rows, TILE_ROWS):
                count = min(TILE_ROWS, rows - row)
                configure_tiles(word(arguments, CONFIGURATIONS) + CONFIGURATION_BYTES * count)
                x = word(arguments, X) + row * stride
                blocks = BLOCKS_PER_RECORD * records
                turn((x + word(arguments, SCALES), stride, count, blocks, scales))
                if points:
                    turn((x + word(arguments, CORRECTIONS), stride, count, blocks, corrections))
                for run in range(first, last, _RUN_GROUPS):
                    groups = min(_RUN_GROUPS, last - run)
                    tiles, offset = groups * side_by_side, run * side_by_side * tile
                    weights = word(arguments, WEIGHTS) + offset
                    multiply(count, (weights, tiles, records, x, stride, scales, corrections, scratch, sums,
                                     side_by_side, _ROW_BYTES, _GROUP_BYTES))  # fmt: skip
                    if gate:
                        gated = word(arguments, GATED_WEIGHTS) + offset
                        multiply(count, (gated, tiles, records, x, stride, scales, corrections, scratch,
                                         sums + side_by_side * _VECTOR_BYTES, side_by_side, _ROW_BYTES,
                                         _GROUP_BYTES))  # fmt: skip
                    for m in range(count):
                        for group in range(groups):
                            write(arguments, sums + group * _GROUP_BYTES + m * _ROW_BYTES, run + group, row + m, 1)
        if rows > 0:
            release_tiles()
        return rows

    return by_tiles


@inline
def _no_tiles(arguments: int, all_rows: int, begin: int, end: int, scratch: int) -> int:
    return 0


def _has_tiles(kind: Kind) -> bool:
    return isinstance(kind, IntegerBlocks) and kind.isa == "amx" and supported(kind.layout)


@dataclass(frozen=True)
class TileMemory:
    """What `few_op` needs of a product whose rows meet tiles: its last arguments, what they point to, and scratch."""

    arguments: tuple[int, ...]
    held: NDArray[np.uint8] | None
    scratch: int


def tile_memory(kind: Kind, records: int) -> TileMemory:
    """For tiles of so many records; where there are no tiles, nothing but the scratch memory of vectors."""
    if not _has_tiles(kind):
        return TileMemory((0, 0, 0, 0), None, SCRATCH_BYTES)
    assert isinstance(kind, IntegerBlocks)
    table = configurations(kind.layout)
    first = max(SCRATCH_BYTES, scratch_bytes(kind.layout))
    turned = turned_bytes(BLOCKS_PER_RECORD * records)
    together = max(1, _BYTES_TOGETHER // (STREAMS * records * kind.record_bytes))
    arguments = (table.ctypes.data, first, turned, together)
    return TileMemory(arguments, table, first + 2 * turned + _RUN_GROUPS * _GROUP_BYTES)


@cache
def few_op(kind: Kind, gate: str) -> NativeOp:
    """The operator for a kind of product: items are groups of STREAMS tiles. A gate is a key of UNARY, or ""."""
    write = _gated_writer(UNARY[gate].function) if gate else _write
    if _has_tiles(kind):
        assert isinstance(kind, IntegerBlocks)
        by_tiles, by_vectors = _by_tiles(kind.layout, gate, write), _by_vectors(kind, gate, 4)
    else:
        by_tiles, by_vectors = _no_tiles, _by_vectors(kind, gate, 8)

    def few(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        rows = word(context, word(arguments, ROWS_WORD))
        stride, records = word(arguments, X_STRIDE), word(arguments, RECORDS)
        scales, corrections = word(arguments, SCALES), word(arguments, CORRECTIONS)
        tile = word(arguments, TILE_STRIDE)
        done = by_tiles(arguments, rows, begin, end, scratch)
        for group in range(begin, end if done < rows else begin):
            if gate:
                a = word(arguments, WEIGHTS) + 2 * group * tile
                c = word(arguments, GATED_WEIGHTS) + 2 * group * tile
            else:
                a = word(arguments, WEIGHTS) + STREAMS * group * tile
                c = a + 2 * tile
            b, d = a + tile, c + tile
            row = done
            while row < rows:
                x = word(arguments, X) + row * stride
                count = by_vectors(a, b, c, d, records, x, rows - row, stride, scales, corrections, scratch, tile)
                write(arguments, scratch, group, row, count)
                row += count
        return 0

    few.__name__ = f"few_{kind.name}{'_' * bool(gate)}{gate}"
    return native_op(few)
