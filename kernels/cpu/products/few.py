"""Products of few rows: decoding, where the time is that of reading the weights once.

Weights are read as four streams of tiles side by side: with fewer the memory is not kept busy, and each stream asks for
its cache lines some records ahead. More rows reuse what was read: then fewer tiles are worked on at once, so that sums
stay in registers. A row's result is the same however many rows there are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...block_matrix import TILES_TOGETHER
from ...formats import TILE_ROWS
from ..emit import FLOAT_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import load_first, load_float32, store_first, word
from ..rowwise.unary import UNARY
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


# Arguments of the operators.
(
    ROWS_WORD, WEIGHTS, GATED_WEIGHTS, TILE_STRIDE, RECORDS, X, X_STRIDE, SCALES, CORRECTIONS, OUT, OUT_STRIDE, WIDTH,
    BIAS, GATED_BIAS, ADDEND, ADDEND_STRIDE,
) = range(16)  # fmt: skip


def _micro_kernel(kind: Kind, rows: int, tiles: int) -> Any:
    """Sums of `tiles` tiles with `rows` rows, over all steps, to scratch [rows][STREAMS] vectors.

    Its arguments: the addresses of the tiles; records; the address of the first row's activations, its stride; offsets
    of scales and corrections in a row; the address of the results.
    """
    per_record = kind.steps_per_record
    lines = -(-kind.record_bytes // (_LINE * per_record))

    def emit(e: Emitter, *values: Any) -> None:
        b = e.builder
        streams, (records, x, stride, scales, corrections, out) = values[:tiles], values[tiles:]
        row_at = [e.at(x, b.mul(stride, INT64(m))) for m in range(rows)]
        steps = b.mul(records, INT64(per_record))
        with e.loop(steps, [constant(FLOAT_VECTOR, 0.0)] * (rows * tiles)) as (index, sums, following):
            part = b.and_(index, INT64(per_record - 1))  # a power of two
            offset = b.mul(b.lshr(index, INT64(per_record.bit_length() - 1)), INT64(kind.record_bytes))
            at = [e.at(stream, offset) for stream in streams]
            ahead = b.mul(part, INT64(kind.record_bytes // per_record // _LINE * _LINE))
            for address in at:
                for line in range(lines):
                    e.prefetch(e.at(e.at(address, ahead), _LINE * line + _PREFETCH_BYTES))
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


@cache
def few_op(kind: Kind, gate: str) -> NativeOp:
    """The operator for a kind of product: items are groups of STREAMS tiles. A gate is a key of UNARY, or ""."""
    one, two, four, eight = (_micro_kernel(kind, rows, tiles) for rows, tiles in _SHAPES.items())
    write = _gated_writer(UNARY[gate].function) if gate else _write

    def few(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        rows = word(context, word(arguments, ROWS_WORD))
        stride, records = word(arguments, X_STRIDE), word(arguments, RECORDS)
        scales, corrections = word(arguments, SCALES), word(arguments, CORRECTIONS)
        tile = word(arguments, TILE_STRIDE)
        for group in range(begin, end):
            if gate:
                a = word(arguments, WEIGHTS) + 2 * group * tile
                c = word(arguments, GATED_WEIGHTS) + 2 * group * tile
            else:
                a = word(arguments, WEIGHTS) + STREAMS * group * tile
                c = a + 2 * tile
            b, d = a + tile, c + tile
            row = 0
            while row < rows:
                x = word(arguments, X) + row * stride
                if rows - row >= 8:
                    count = 8
                    eight((a, records, x, stride, scales, corrections, scratch))
                    eight((b, records, x, stride, scales, corrections, scratch + _VECTOR_BYTES))
                    eight((c, records, x, stride, scales, corrections, scratch + 2 * _VECTOR_BYTES))
                    eight((d, records, x, stride, scales, corrections, scratch + 3 * _VECTOR_BYTES))
                elif rows - row >= 4:
                    count = 4
                    four((a, b, records, x, stride, scales, corrections, scratch))
                    four((c, d, records, x, stride, scales, corrections, scratch + 2 * _VECTOR_BYTES))
                elif rows - row >= 2:
                    count = 2
                    two((a, b, c, d, records, x, stride, scales, corrections, scratch))
                else:
                    count = 1
                    one((a, b, c, d, records, x, stride, scales, corrections, scratch))
                write(arguments, scratch, group, row, count)
                row += count
        return 0

    few.__name__ = f"few_{kind.name}{'_' * bool(gate)}{gate}"
    return native_op(few)
